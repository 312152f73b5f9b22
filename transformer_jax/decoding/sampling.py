"""From logits to the next token: temperature, top-k, top-p, and the draw.

    logits -> / temperature -> the k most likely -> the most likely that reach top_p of what is left -> one draw

Everything that may differ from row to row is an array, so no mix of settings compiles anything new. A rule is written
for one row and mapped over the batch: a row's token depends on its own logits, settings and key, on nothing else. This
file knows nothing of models, positions or text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from transformer_jax.config import DecodingConfig

GREEDY_TEMPERATURE = 1e-4
"""Up to this temperature the most likely token is taken: a gap of 0.01 between two logits is already e^100 to 1."""

NO_TOP_K = np.iinfo(np.int32).max
"""As many tokens as any vocabulary has."""

ROUNDING = 1e-6
"""What a float32 sum of probabilities may lack and still count as having reached top_p."""


class SamplingParams(NamedTuple):
    """How each row's next token is chosen; build it with `sampling_params`."""

    temperature: Float[Array, "B"]
    """Divides the logits; up to GREEDY_TEMPERATURE the most likely token is taken, of equals the lowest id."""
    top_k: Int[Array, "B"]
    """Only so many of the most likely tokens may be drawn."""
    top_p: Float[Array, "B"]
    """Only the most likely tokens that together reach this probability may be drawn, the last of them included."""


def sampling_params(settings: Sequence[DecodingConfig]) -> SamplingParams:
    """Turn the settings of B requests into the arrays that `sample` takes."""
    # From 1e30 on the draw is uniform, and the reciprocal of a larger float32 is flushed to 0, which times -inf is NaN.
    return SamplingParams(
        jnp.asarray([min(one.temperature, 1e30) for one in settings], jnp.float32),
        jnp.asarray([NO_TOP_K if one.top_k is None else min(one.top_k, NO_TOP_K) for one in settings], jnp.int32),
        jnp.asarray([one.top_p for one in settings], jnp.float32),
    )


def limit_vocabulary(logits: Float[Array, "*rows V"], limit: int) -> Float[Array, "*rows V"]:
    """Give the ids from `limit` on, which a model has beyond its tokenizer's, probability 0."""
    below = jnp.broadcast_to(jnp.arange(logits.shape[-1]) < limit, logits.shape)
    return jnp.where(below, logits, -jnp.inf)


def sample(
    logits: Float[Array, "B V"], keys: Key[Array, "B"], params: SamplingParams
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Choose each row's token, and tell its log probability under the logits as given.

    The log probability is the model's own: no temperature, no filter. So it can be compared across settings, and it is
    not the probability with which a filtered or heated draw came up with the token.
    """
    greedy = jnp.argmax(logits, axis=-1)
    drawn = params.temperature > GREEDY_TEMPERATURE

    def with_draws() -> Int[Array, "B"]:
        return jnp.where(drawn, jax.vmap(draw)(transform(logits, params), keys), greedy)

    # The draw costs more than all the rest, and a greedy batch needs none of it.
    tokens = lax.cond(jnp.any(drawn), with_draws, lambda: greedy)
    # Against the largest, so that logits far from 0 lose no digits.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(shifted, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(shifted, axis=-1)


def transform(logits: Float[Array, "B V"], params: SamplingParams) -> Float[Array, "B V"]:
    """Scale by temperature, then give what top-k and then top-p leave out a logit of -inf.

    Top-p counts probability among what top-k has left. A row without a filter passes through a filtered batch bit for
    bit. Temperatures of greedy rows are read as 1.

    Reference: Fan et al. 2018, "Hierarchical Neural Story Generation", section 5.1 (top-k); Holtzman et al. 2020, "The
    Curious Case of Neural Text Degeneration", section 3.1 (top-p).
    """
    temperature = jnp.where(params.temperature > GREEDY_TEMPERATURE, params.temperature, 1)
    scaled = logits / temperature[:, None]
    for row_filter, limit, needed in (
        (keep_top_k, params.top_k, params.top_k < logits.shape[-1]),
        (keep_top_p, params.top_p, params.top_p < 1),
    ):
        kept = lax.cond(
            jnp.any(needed),
            lambda scaled, row_filter=row_filter, limit=limit: jax.vmap(row_filter)(scaled, limit),
            lambda scaled: jnp.ones(scaled.shape, bool),
            scaled,
        )
        scaled = jnp.where(kept | ~needed[:, None], scaled, -jnp.inf)
    return scaled


def keep_top_k(logits: Float[Array, "V"], k: Int[Array, ""]) -> Bool[Array, "V"]:
    """Mark the k most likely tokens; of equals, the lowest ids."""
    return _heaviest(logits, jnp.ones_like(logits), k.astype(jnp.float32))


def keep_top_p(logits: Float[Array, "V"], p: Float[Array, ""]) -> Bool[Array, "V"]:
    """Mark the fewest most likely tokens that together reach probability p, at least one; of equals, the lowest ids."""
    weights = jnp.exp(logits - jnp.max(logits))
    target = p * (1 - ROUNDING) * jnp.sum(weights)
    return _heaviest(logits, weights, jnp.maximum(target, jnp.finfo(jnp.float32).tiny))


def _heaviest(logits: Float[Array, "V"], weights: Float[Array, "V"], target: Float[Array, ""]) -> Bool[Array, "V"]:
    """Mark the fewest tokens, from the most likely down, whose weights add up to `target` or more.

    Sorting a vocabulary takes ten times as long on CPU as this search, bit by bit, for the last logit that is needed.
    """
    rank = _sortable(logits)

    def lower_bit(index: Array, threshold: Array) -> Array:
        higher = threshold | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        reached = jnp.sum(jnp.where(rank >= higher, weights, 0)) >= target
        return jnp.where(reached, higher, threshold)

    threshold = lax.fori_loop(0, 32, lower_bit, jnp.uint32(0))
    above, tied = rank > threshold, rank == threshold
    tied_weights = jnp.where(tied, weights, 0)
    ahead = jnp.sum(jnp.where(above, weights, 0)) + jnp.cumsum(tied_weights) - tied_weights
    return above | (tied & (ahead < target))


def _sortable(values: Float[Array, "V"]) -> UInt32[Array, "V"]:
    """Map floats to unsigned integers in the same order."""
    # The two zeros are equal as floats and must stay so.
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0, values), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def draw(logits: Float[Array, "V"], key: Key[Array, ""]) -> Int[Array, ""]:
    """Draw an id with probability softmax(logits): every id waits a random time, and the first to come is drawn.

        argmin_v  E_v / exp(logits[v]),    E_v exponentially distributed with mean 1

    One number for each id, so that logits that differ by a rounding give another id as rarely as they should; along a
    cumulative sum any rounding would move every border behind it.

    Reference: Maddison et al. 2014, "A* Sampling", section 2: the same as the largest of logits plus Gumbel noise.
    """
    # From 0 up in steps of 2^-32: a time close to 0 decides, and must not be rounded to it.
    uniform = (jax.random.bits(key, logits.shape, jnp.uint32).astype(jnp.float32) + 0.5) * 2.0**-32
    return jnp.argmin(-jnp.log1p(-uniform) / jnp.exp(logits - jnp.max(logits)))
