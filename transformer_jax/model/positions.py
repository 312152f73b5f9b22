"""Where a token stands: rotary positions on queries and keys.

Learned positions are an embedding table and live with the embeddings. Angles are float32 whatever the compute dtype: in
bfloat16, position 257 would be position 256.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Rotation(NamedTuple):
    """The cosines and sines of every token's angles, float32: the same for all heads and layers."""

    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]


def rotation(positions: Int[Array, "B T"], H: int, theta: float) -> Rotation:
    """Turn positions into the angles of the rotary embedding, one for each pair of a head's entries.

        angle[b, t, i] = positions[b, t] * theta^(-2i / H),    i = 0 ... H/2 - 1

    Reference: Su et al. 2021, "RoFormer", section 3.2.2.
    """
    frequencies = theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    # Without the barrier XLA computes them anew for every head of every layer, forward and backward.
    return Rotation(*jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles))))


def rotate(x: Float[Array, "B T heads H"], by: Rotation) -> Float[Array, "B T heads H"]:
    """Rotate each pair (x[i], x[i + H/2]) of every head by its angle.

        y[i]       = x[i] cos a[i] - x[i + H/2] sin a[i]
        y[i + H/2] = x[i + H/2] cos a[i] + x[i] sin a[i]

    The product of two rotated vectors depends on their positions' difference alone. The pairing of halves is the one of
    Llama's published weights as transformers stores them.
    """
    first, second = (half.astype(jnp.float32) for half in jnp.split(x, 2, axis=-1))
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([half.astype(x.dtype) for half in turned], axis=-1)
