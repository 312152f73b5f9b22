"""A feed-forward layer of many experts, of which a router gives each token a few.

Tokens are sorted by expert and each expert multiplies the rows that came to it, so no token is ever dropped and an
expert may take all of them. This file knows nothing of parameters' names or of layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.layers import gated


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

    def multiply(x: Array, w: Array) -> Array:
        return jax.lax.ragged_dot(x, w.astype(x.dtype), rows_of)

    sorted_x = x[order // count]
    hidden = gated(multiply(sorted_x, gate), multiply(sorted_x, up), activation)
    y = multiply(hidden, down)
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
