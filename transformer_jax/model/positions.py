"""Where a token stands: rotary positions on queries and keys.

Learned positions are an embedding table and live with the embeddings. Angles are float32 whatever the compute dtype: in
bfloat16, position 257 would be position 256.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope_angles(positions: Int[Array, "B T"], H: int, theta: float) -> Float[Array, "B T half"]:
    """Angles of the rotary embedding, one for each pair of a head's entries.

        angle[b, t, i] = positions[b, t] * theta^(-2i / H),    i = 0 ... H/2 - 1

    Reference: Su et al. 2021, "RoFormer", section 3.2.2.
    """
    frequencies = theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
    return positions[..., None].astype(jnp.float32) * frequencies


def apply_rope(x: Float[Array, "B T heads H"], angles: Float[Array, "B T half"]) -> Float[Array, "B T heads H"]:
    """Rotate each pair (x[i], x[i + H/2]) of every head by its angle.

        y[i]       = x[i] cos a[i] - x[i + H/2] sin a[i]
        y[i + H/2] = x[i + H/2] cos a[i] + x[i] sin a[i]

    The products of two rotated vectors depend on their positions' difference alone. The pairing of halves is the one of
    Llama's published weights as transformers stores them.
    """
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
