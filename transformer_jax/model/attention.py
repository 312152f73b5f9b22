"""The one place where tokens mix."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attend(
    q: Float[Array, "B T N H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S H"], may: Bool[Array, "B T S"]
) -> Float[Array, "B T N H"]:
    """Mix values by the similarity of queries and keys.

        y = softmax(q k^T / sqrt(H), over the keys that may be seen) v

    Query head n reads key/value head n // G. Scores and softmax are float32. A query that may see nothing yields zeros.

    Reference: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Ainslie et al. 2023, "GQA".
    """
    B, T, N, H = q.shape
    K = k.shape[1]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BKSH->BKGTS", grouped, k).astype(jnp.float32) * H**-0.5
    may = may[:, None, None]
    scores = jnp.where(may, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.where(may, jax.nn.softmax(scores, axis=-1), 0).astype(v.dtype)
    return jnp.einsum("BKGTS,BKSH->BTKGH", weights, v).reshape(B, T, N, H)
