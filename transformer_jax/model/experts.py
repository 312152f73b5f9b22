"""A feed-forward layer of many experts, of which a router gives each token a few.

Tokens are sorted by expert and each expert multiplies the rows that came to it, so no token is ever dropped and an
expert may take all of them. This file knows nothing of parameters' names or of layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.layers import gated, row_major


class Routing(NamedTuple):
    """What the routers did, as sums over the tokens that are no padding; their losses follow from it."""

    chosen: Float[Array, "*L E"]
    """How often each expert was chosen."""
    probabilities: Float[Array, "*L E"]
    """Sum of the probability that the router gave each expert."""
    squared_normalizers: Float[Array, "*L"]
    """Sum of (log sum_e exp(logit_e))^2."""
    tokens: Float[Array, "*L"]
    """Tokens that were routed."""


def route(
    logits: Float[Array, "M E"], count: int, renormalize: bool
) -> tuple[Float[Array, "M count"], Int[Array, "M count"]]:
    """Choose each token's `count` most probable experts; returns their weights and ids.

        w = softmax(logits)[chosen],  divided by its sum where `renormalize`

    Of equals the expert with the lowest number comes first. Logits are float32.

    Reference: Jiang et al. 2024, "Mixtral of Experts", section 2.1.
    """
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), count)
    return (weights / weights.sum(axis=-1, keepdims=True) if renormalize else weights), ids


def pass_through_experts(
    x: Float[Array, "M D"],
    weights: Float[Array, "M count"],
    ids: Int[Array, "M count"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    activation: str,
) -> Float[Array, "M D"]:
    """Sum what the chosen experts make of each token, y = sum_c w_c down_c(activation(gate_c(x)) * up_c(x))."""
    M, count = ids.shape
    order = jnp.argsort(ids.reshape(-1), stable=True)
    rows_of = jnp.bincount(ids.reshape(-1), length=len(gate))

    sorted_x = x[order // count]
    hidden = gated(grouped_product(sorted_x, gate, rows_of), grouped_product(sorted_x, up, rows_of), activation)
    y = grouped_product(hidden, down, rows_of)
    # Back in the order of the tokens, so that the sum over a token's experts has one order too.
    y = jnp.zeros_like(y).at[order].set(y).reshape(M, count, -1)
    return jnp.einsum("mcd,mc->md", y.astype(jnp.float32), weights).astype(x.dtype)


def observe(logits: Float[Array, "M E"], ids: Int[Array, "M count"], real: Bool[Array, " M"]) -> Routing:
    """Add up what a router did with the tokens that are `real`."""
    one_hot = jax.nn.one_hot(ids, logits.shape[-1]).sum(axis=1)
    return Routing(
        chosen=jnp.sum(one_hot * real[:, None], axis=0),
        probabilities=jnp.sum(jax.nn.softmax(logits, axis=-1) * real[:, None], axis=0),
        squared_normalizers=jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2 * real),
        tokens=jnp.sum(real.astype(jnp.float32)),
    )


def grouped_product(x: Float[Array, "R I"], w: Float[Array, "E I O"], rows_of: Int[Array, " E"]) -> Float[Array, "R O"]:
    """Multiply rows that are sorted by expert: the first rows_of[0] by w[0], the next rows_of[1] by w[1], and so on."""
    by_backend = product_by_blocks if jax.default_backend() == "cpu" else lax.ragged_dot
    return by_backend(x, w.astype(x.dtype), rows_of)


LARGEST_BLOCK = 64
"""Rows from which on a block of more would be filled with other experts' rows, and not be faster."""


class Blocks(NamedTuple):
    """The rows of each expert in blocks of `size`, of which an expert's last may reach into the next one's rows."""

    size: int
    number: Int[Array, ""]
    """Of blocks; the arrays have room for the most that there can be."""
    expert: Int[Array, " blocks"]
    first: Int[Array, " blocks"]
    """The row at which a block begins."""
    filled: Int[Array, " blocks"]
    """How many of a block's rows are its expert's."""


def cut_into_blocks(R: int, rows_of: Int[Array, " E"]) -> Blocks:
    """Cut R rows that are sorted by expert, at sizes that few compiled programs have."""
    E = len(rows_of)
    size = min(LARGEST_BLOCK, 1 << max(R // E, 1).bit_length() - 1)
    blocks_of = -(-rows_of // size)
    ends = jnp.cumsum(blocks_of)
    block = jnp.arange(-(-R // size) + E)
    expert = jnp.minimum(jnp.searchsorted(ends, block, side="right"), E - 1)
    begun = (block - (ends - blocks_of)[expert]) * size
    first = (jnp.cumsum(rows_of) - rows_of)[expert] + begun
    return Blocks(size, ends[-1], expert, first, jnp.clip(rows_of[expert] - begun, 0, size))


@jax.custom_vjp
def product_by_blocks(
    x: Float[Array, "R I"], w: Float[Array, "E I O"], rows_of: Int[Array, " E"]
) -> Float[Array, "R O"]:
    """`lax.ragged_dot` for CPU, where XLA would multiply every row by every expert: block by block instead.

    What a block computes for rows beyond its own is overwritten by the block that they belong to, which comes later.
    """
    return _by_blocks(x, rows_of, w.shape[2], lambda rows, expert: rows @ w[expert])


def _by_blocks(x: Array, rows_of: Array, width: int, multiply: Callable[[Array, Array], Array]) -> Array:
    blocks = cut_into_blocks(len(x), rows_of)
    padded = jnp.pad(x, ((0, blocks.size), (0, 0)))

    def step(i: Array, y: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(padded, blocks.first[i], blocks.size)
        return lax.dynamic_update_slice_in_dim(y, multiply(rows, blocks.expert[i]), blocks.first[i], 0)

    y = jnp.zeros((len(padded), width), x.dtype)
    return lax.fori_loop(0, blocks.number, step, y)[: len(x)]


def _blocks_forward(x: Array, w: Array, rows_of: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return product_by_blocks(x, w, rows_of), (x, w, rows_of)


def _blocks_backward(residuals: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, Any]:
    x, w, rows_of = residuals
    dx = _by_blocks(dy, rows_of, x.shape[1], lambda rows, expert: rows @ row_major(w[expert].T))
    blocks = cut_into_blocks(len(x), rows_of)
    padded = [jnp.pad(array, ((0, blocks.size), (0, 0))) for array in (x, dy)]

    def step(i: Array, dw: Array) -> Array:
        x, dy = (lax.dynamic_slice_in_dim(array, blocks.first[i], blocks.size) for array in padded)
        own = jnp.where(jnp.arange(blocks.size)[:, None] < blocks.filled[i], x, 0)
        return dw.at[blocks.expert[i]].add(jnp.matmul(own.T, dy, preferred_element_type=jnp.float32))

    dw = lax.fori_loop(0, blocks.number, step, jnp.zeros(w.shape, jnp.float32))
    return dx, dw.astype(w.dtype), None


product_by_blocks.defvjp(_blocks_forward, _blocks_backward)
