"""Where a token stands: rotary angles for queries and keys, sinusoids for embeddings.

Learned positions are an embedding table and live with the embeddings. Angles are exact to float32 whatever the compute
dtype and however far the position: in bfloat16, position 257 would be position 256. The scaling "dynamic" alone has
frequencies of float32, which put angles at positions in the thousands off by some ten-thousandths.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int

from transformer_jax.architecture import ModelConfig, RopeScaling


class Rotation(NamedTuple):
    """The cosines and sines of every token's angles, float32: the same for all heads, and for all layers of a kind."""

    cos: Float[Array, "B T pairs"]
    sin: Float[Array, "B T pairs"]


def rotation(c: ModelConfig, positions: Int[Array, "B T"], last: Int[Array, "B T"], local: bool = False) -> Rotation:
    """Turn positions into the angles of the rotary embedding, one for each pair of a head's rotated entries.

        angle[b, t, i] = positions[b, t] * frequency[i],    frequency[i] = theta^(-2i / R),    i = 0 ... R/2 - 1

    `c.rope_scaling` changes the frequencies. `last` is the largest position in the sequence of each token, which the
    kind "dynamic" alone depends on.

    Reference: Su et al. 2021, "RoFormer", section 3.2.2.
    """
    theta, scaling = c.rope_theta, c.rope_scaling
    if local and c.local_rope_theta is not None:
        theta, scaling = c.local_rope_theta, RopeScaling()
    if scaling.kind == "dynamic":
        angles = positions[..., None] * _dynamic_frequencies(theta, c.R, scaling, last)
    else:
        angles = _angles(positions, rope_frequencies(theta, c.R, scaling))
    factor = attention_factor(scaling)
    # Without the barrier XLA computes them anew for every head of every layer, forward and backward.
    return Rotation(*jax.lax.optimization_barrier((jnp.cos(angles) * factor, jnp.sin(angles) * factor)))


def rotate(x: Float[Array, "B T heads H"], by: Rotation, interleaved: bool = False) -> Float[Array, "B T heads H"]:
    """Rotate pairs of the first R entries of every head by their angles; the other entries stay as they are.

        y[i]       = x[i] cos a[i] - x[i + R/2] sin a[i]
        y[i + R/2] = x[i + R/2] cos a[i] + x[i] sin a[i]

    The product of two rotated vectors depends on their positions' difference alone. The pairing of halves is the one of
    Llama's published weights as transformers stores them; `interleaved` pairs x[2i] with x[2i + 1] instead.
    """
    R = 2 * by.cos.shape[-1]
    turning, rest = x[..., :R], x[..., R:]
    pair = (turning[..., 0::2], turning[..., 1::2]) if interleaved else jnp.split(turning, 2, axis=-1)
    first, second = (part.astype(jnp.float32) for part in pair)
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    turned = [part.astype(x.dtype) for part in (first * cos - second * sin, second * cos + first * sin)]
    if interleaved:
        turned = [jnp.stack(turned, axis=-1).reshape(turning.shape)]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)


def sinusoids(positions: Int[Array, "B T"], D: int) -> Float[Array, "B T D"]:
    """Sines and cosines of wavelengths from 2 pi to 10,000 * 2 pi, side by side, to be added to embeddings.

        y[p, 2i] = sin(p / 10000^(2i / D))        y[p, 2i + 1] = cos(p / 10000^(2i / D))

    Reference: Vaswani et al. 2017, "Attention Is All You Need", section 3.5.
    """
    angles = _angles(positions, 10_000.0 ** (-np.arange(0, D, 2) / D))
    both = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return both.reshape(*positions.shape, -1)[..., :D]


def last_positions(
    positions: Int[Array, "B T"], k_positions: Int[Array, "B S"], segment_ids: Int[Array, "B T"] | None
) -> Int[Array, "B T"]:
    """The largest position in the sequence that each token belongs to: its segment, or its row with what is cached."""
    if segment_ids is None:
        return jnp.broadcast_to(k_positions.max(axis=1, keepdims=True), positions.shape)
    together = segment_ids[:, :, None] == segment_ids[:, None, :]
    return jnp.where(together, positions[:, None, :], -1).max(axis=2)


def rope_frequencies(theta: float, R: int, scaling: RopeScaling) -> Float64[np.ndarray, "pairs"]:
    """Radians that each pair turns from one position to the next, for every kind of scaling but "dynamic".

    Reference: Peng et al. 2023, "YaRN", sections 3.2 and 3.4; the Llama 3.1 model card's code for llama3.
    """
    plain = theta ** (-np.arange(0, R, 2, dtype=np.float64) / R)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "yarn":
        kept = 1 - _yarn_ramp(theta, R, scaling)
    elif scaling.kind == "llama3":
        assert scaling.original_max_len is not None
        turns = scaling.original_max_len * plain / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
    else:
        return plain
    return plain * kept + plain / scaling.factor * (1 - kept)


def attention_factor(scaling: RopeScaling) -> float:
    """What YaRN multiplies rotated queries and keys by, so that attention over more keys stays as sharp.

    Reference: Peng et al. 2023, "YaRN", section 3.4: 0.1 ln(factor) + 1.
    """
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def growth(strength: float) -> float:
        return 0.1 * strength * math.log(scaling.factor) + 1

    if scaling.mscale and scaling.mscale_all_dim:
        return growth(scaling.mscale) / growth(scaling.mscale_all_dim)
    return growth(1.0)


def _yarn_ramp(theta: float, R: int, scaling: RopeScaling) -> Float64[np.ndarray, "pairs"]:
    """0 for the pairs that turn fast, 1 for those that turn slowly, a ramp between."""
    original = scaling.original_max_len
    assert original is not None

    def pair_that_turns(times: float) -> float:
        return R * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    # As in the published code: a ramp of no width becomes a step.
    last += 0.001 if first == last else 0
    return np.clip((np.arange(R // 2) - first) / (last - first), 0, 1)


def _dynamic_frequencies(
    theta: float, R: int, scaling: RopeScaling, last: Int[Array, "B T"]
) -> Float[Array, "B T pairs"]:
    """Frequencies of a base that depends on the length of the sequence.

    So beyond the original context no output is causal: a longer sequence rotates all its tokens in another way. Keys
    that are in a cache stay as they were rotated.
    """
    assert scaling.original_max_len is not None
    length = jnp.maximum(last + 1, scaling.original_max_len).astype(jnp.float32)
    grown = scaling.factor * length / scaling.original_max_len - (scaling.factor - 1)
    exponents = jnp.arange(0, R, 2, dtype=jnp.float32) / R
    return (theta * grown[..., None] ** (R / (R - 2))) ** -exponents


def _angles(positions: Int[Array, "B T"], frequencies: Float64[np.ndarray, "pairs"]) -> Float[Array, "B T pairs"]:
    """positions * frequencies less whole turns, exact to float32 at any position.

    The product of a float32 frequency and a position in the thousands is off by a thousandth. So a turn is counted in
    2^-32 parts, in integers that wrap around as an angle does; what is smaller than a part is added as a float.
    """
    parts = frequencies / (2 * np.pi) * 2.0**32
    whole = np.floor(parts)
    p = positions[..., None]
    wrapped = p.astype(jnp.uint32) * jnp.asarray(np.mod(whole, 2**32), jnp.uint32)
    below = jnp.round(p.astype(jnp.float32) * jnp.asarray(parts - whole, jnp.float32)).astype(jnp.int32)
    turned = wrapped.astype(jnp.int32) + below
    return turned.astype(jnp.float32) * jnp.float32(2 * np.pi / 2**32)
