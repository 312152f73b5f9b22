"""What acts on each token alone: matrix products, norms, the feed-forward layer, dropout.

Everything here is a free function on arrays. Tokens mix in attention.py and nowhere else. Gradients that are written
out are for reverse mode alone: `jax.jvp` cannot pass through them.
"""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

ACTIVATIONS: MappingProxyType[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
        "relu": jax.nn.relu,
    }
)


FEWEST_TRANSPOSED_ROWS = 256
"""Rows of activations from which on transposing a weight costs less than it gains."""


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(
    x: Float[Array, "*rows I"], w: Float[Array, "I O"], out: jax.typing.DTypeLike | None = None
) -> Float[Array, "*rows O"]:
    """The one matrix product of the model, y = x w in the dtype of x; sums are rounded to `out`, else to that dtype.

    Its gradient is written out, dx = dy w^T and dw = x^T dy, because XLA otherwise fuses elementwise work into the
    operands of both, which on CPU costs more than the products themselves.
    """
    return jnp.matmul(x, w.astype(x.dtype), preferred_element_type=out)


def _product_forward(x: Array, w: Array, out: jax.typing.DTypeLike | None) -> tuple[Array, tuple[Array, Array]]:
    return product(x, w, out), (x, w)


def _product_backward(
    out: jax.typing.DTypeLike | None, residuals: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    x, w = residuals
    dy = dy.astype(x.dtype)
    # One barrier each: products that share x then share its transposition.
    x, dy = jax.lax.optimization_barrier(x), jax.lax.optimization_barrier(dy)
    dx = dy @ _transposed(w.astype(dy.dtype))
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    if x.shape[1] <= dy.shape[1]:
        dw = _transposed(x) @ dy
    else:
        dw = _transposed(jax.lax.optimization_barrier(_transposed(dy) @ x))
    return dx, dw.astype(w.dtype)


product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def product_with_table(
    x: Float[Array, "*rows D"], table: Float[Array, "V D"], out: jax.typing.DTypeLike | None = None
) -> Float[Array, "*rows V"]:
    """`product` with a transposed embedding table, y = x table^T, which decoding reads where it lies."""
    if x.size // x.shape[-1] < FEWEST_TRANSPOSED_ROWS:
        return jnp.einsum("...D,VD->...V", x, table.astype(x.dtype), preferred_element_type=out)
    return jnp.matmul(x, _transposed(table.astype(x.dtype)), preferred_element_type=out)


def _table_forward(x: Array, table: Array, out: jax.typing.DTypeLike | None) -> tuple[Array, tuple[Array, Array]]:
    return product_with_table(x, table, out), (x, table)


def _table_backward(out: jax.typing.DTypeLike | None, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, table = residuals
    dx, dw = _product_backward(out, (x, table.T), dy)
    return dx, dw.T


product_with_table.defvjp(_table_forward, _table_backward)


def _transposed(x: Float[Array, "I O"]) -> Float[Array, "O I"]:
    # XLA's CPU backend multiplies an operand that lies transposed at down to a fifth of its rate.
    return row_major(x.T) if jax.default_backend() == "cpu" else x.T


def row_major(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Lay the numbers out in the order of the dimensions.

    XLA folds a transposition into the product that reads it, which on CPU makes the product slow; demanding a layout
    makes it move the numbers instead, once.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def gated(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], activation: str) -> Float[Array, "*rows F"]:
    """activation(gate) * up, in float32 so that it is rounded once.

    The backward pass computes the activation again from its inputs: reading what it would otherwise keep costs more.

    Reference: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """
    return (ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(up.dtype)


def _gated_forward(gate: Array, up: Array, activation: str) -> tuple[Array, tuple[Array, Array]]:
    return gated(gate, up, activation), (gate, up)


def _gated_backward(activation: str, inputs: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    # The barriers keep XLA from storing in float32 what the three passes over these arrays have in common.
    gate, dy = jax.lax.optimization_barrier((inputs[0], dy))
    dup = (dy.astype(jnp.float32) * ACTIVATIONS[activation](gate.astype(jnp.float32))).astype(dy.dtype)
    gate, up, dy, dup = jax.lax.optimization_barrier((gate, inputs[1], dy, dup))
    _, slope = jax.jvp(ACTIVATIONS[activation], (gate.astype(jnp.float32),), (jnp.ones(gate.shape, jnp.float32),))
    return (dy.astype(jnp.float32) * up.astype(jnp.float32) * slope).astype(dy.dtype), dup


gated.defvjp(_gated_forward, _gated_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "*rows D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """Divide by the root mean square and scale, in float32: y = x / sqrt(mean(x^2) + eps) * scale.

    The backward pass keeps x and one number a row; XLA would keep a normalised x in float32 besides.

    Reference: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """
    return _rms_norm_forward(x, scale, eps)[0]


def _rms_norm_forward(x: Array, scale: Array, eps: float) -> tuple[Array, tuple[Array, Array, Array]]:
    x = jax.lax.optimization_barrier(x)
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.optimization_barrier(jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps))
    return jax.lax.optimization_barrier((x32 * inverse * scale).astype(x.dtype)), (x, scale, inverse)


def _rms_norm_backward(eps: float, residuals: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array]:
    x, scale, inverse = residuals
    dy = jax.lax.optimization_barrier(dy)
    x32, dy32 = x.astype(jnp.float32), dy.astype(jnp.float32)
    along = jax.lax.optimization_barrier(jnp.mean(dy32 * scale * x32, axis=-1, keepdims=True) * inverse**3)
    dscale = jnp.sum(dy32 * x32 * inverse, axis=tuple(range(x.ndim - 1)))
    return (dy32 * scale * inverse - x32 * along).astype(x.dtype), dscale


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def layer_norm(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], bias: Float[Array, " D"] | None, eps: float
) -> Float[Array, "*rows D"]:
    """Subtract the mean, divide by the deviation, scale and shift, in float32.

        y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias

    Reference: Ba et al. 2016, "Layer Normalization", equation 4.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    y = centred * inverse * scale
    return (y if bias is None else y + bias).astype(x.dtype)


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | None) -> Float[Array, "..."]:
    """Zero each entry with probability `rate` and divide the others by 1 - rate; without a key, do nothing.

    Reference: Srivastava et al. 2014, "Dropout", section 4, with the division moved to training.
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
