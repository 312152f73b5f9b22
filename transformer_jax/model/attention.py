"""The one place where tokens mix.

`attend_plainly` is the definition. On CPU many queries at once go through `attend_transposed`, the same mathematics in
an order that XLA's CPU backend is fast at; `attend` chooses.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from transformer_jax.model.layers import dropout, row_major

HIDDEN = -1e38
"""The score of a key that may not be seen. Finite, so that a row of nothing else is no NaN."""

FEWEST_TRANSPOSED = 16
"""Queries from which on transposing the values costs less than it gains."""

QUERY_BLOCKS = 4
"""Of a triangular square: keys that no query of a block may see are left out of its products."""


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    may: Bool[Array, "B T S"],
    scale: float,
    *,
    triangular: bool = False,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "B T N H"]:
    """Mix values by the similarity of queries and keys.

        y = softmax(q k^T scale, over the keys that may be seen) v

    Query head n reads key/value head n // G. The softmax is float32; products have the compute dtype. A query that may
    see nothing yields zeros. With a `softcap` scores are bent before they are masked, cap tanh(score / cap); with a key
    weights are dropped. `triangular` promises that may[b, t, s] is false wherever s > t, so that about half of the work
    can be left out.

    Reference: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Ainslie et al. 2023, "GQA"; Gemma Team
    2024, "Gemma 2", section 2 (softcap).
    """
    T, N = q.shape[1:3]
    if jax.default_backend() == "cpu" and T == 1 and k.shape[1] == N and k.dtype == jnp.bfloat16:
        return attend_twice(q, k, v, may, scale, softcap)
    drops = dropout_key is not None and dropout_rate > 0
    if jax.default_backend() != "cpu" or T < FEWEST_TRANSPOSED or softcap is not None or drops:
        return attend_plainly(q, k, v, may, scale, softcap, dropout_rate, dropout_key)
    return attend_transposed(q, k, v, may, scale, min(QUERY_BLOCKS, T // FEWEST_TRANSPOSED) if triangular else 1)


def attend_plainly(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    may: Bool[Array, "B T S"],
    scale: float,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "B T N H"]:
    """`attend` as its equation says."""
    B, T, N, H = q.shape
    K = k.shape[1]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BKSH->BKGTS", grouped, k).astype(jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    may = may[:, None, None]
    scores = jnp.where(may, scores, HIDDEN)
    weights = jnp.where(may, jax.nn.softmax(scores, axis=-1), 0).astype(v.dtype)
    weights = dropout(weights, dropout_rate, dropout_key)
    # In the order of the result's own dimensions XLA would copy v, which may be a whole cache, to transpose it.
    return jnp.einsum("BKGTS,BKSH->BKGTH", weights, v).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def attend_twice(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B N S H"],
    v: Float[Array, "B N S H"],
    may: Bool[Array, "B 1 S"],
    scale: float,
    softcap: float | None,
) -> Float[Array, "B 1 N H"]:
    """`attend` for one query a head, asked twice.

    In bfloat16 the product of keys with a single vector makes XLA's CPU backend write the whole cache out as float32.
    """
    q, may = jnp.concatenate([q, q], axis=1), jnp.concatenate([may, may], axis=1)
    return attend_plainly(q, k, v, may, scale, softcap)[:, :1]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend_transposed(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    may: Bool[Array, "B T S"],
    scale: float,
    blocks: int,
) -> Float[Array, "B T N H"]:
    """`attend` with the square of weights held as keys x queries.

        p = softmax(k q^T scale, over keys)         y^T = v^T p
        dv = p dy      dp = v dy^T      ds = p (dp - sum_H dy y) scale      dk = ds q      dq^T = k^T ds

    So every product that touches a square has it in the layout in which it lies, and only arrays of H columns are
    ever transposed. The weights are kept for the backward pass in the dtype of v.

    More than one block of queries is for a triangular square, of which they leave out what lies beyond the diagonal:

        4 blocks     queries ->
          keys       1 1 1 1
            |        . 1 1 1
            v        . . 1 1
                     . . . 1
    """
    return _transposed_forward(q, k, v, may, scale, blocks)[0]


_Residuals = tuple[list[tuple[Array, Array]], Array, Array, Array]


def _blocks(T: int, S: int, count: int) -> list[tuple[slice, slice]]:
    """The queries of each block and the keys they may see."""
    ends = [T * (i + 1) // count for i in range(count)]
    return [
        (slice(start, end), slice(0, S if count == 1 else end)) for start, end in zip([0, *ends], ends, strict=False)
    ]


def _transposed_forward(
    q: Array, k: Array, v: Array, may: Array, scale: float, blocks: int
) -> tuple[Array, _Residuals]:
    ys, kept = [], []
    v_t = row_major(v.swapaxes(2, 3))
    for queries, keys in _blocks(q.shape[1], k.shape[2], blocks):
        y, q_t, p = _block_forward(q[:, queries], k[:, :, keys], v_t[..., keys], may[:, queries, keys], scale)
        ys.append(y)
        kept.append((q_t, p))
    y = jax.lax.optimization_barrier(jnp.concatenate(ys, axis=1))
    return y, (kept, k, v, y)


def _transposed_backward(
    scale: float, blocks: int, residuals: _Residuals, dy: Array
) -> tuple[Array, Array, Array, None]:
    kept, k, v, y = residuals
    dy = jax.lax.optimization_barrier(dy)
    k_t = row_major(k.swapaxes(2, 3))
    dqs, dks, dvs = [], [], []
    for (queries, keys), (q_t, p) in zip(_blocks(dy.shape[1], k.shape[2], blocks), kept, strict=True):
        dq, dk, dv = _block_backward(q_t, k_t[..., keys], v[:, :, keys], p, y[:, queries], dy[:, queries], scale)
        dqs.append(dq)
        dks.append(dk)
        dvs.append(dv)
    return jnp.concatenate(dqs, axis=1), _sum_of_prefixes(dks), _sum_of_prefixes(dvs), None


attend_transposed.defvjp(_transposed_forward, _transposed_backward)


def _block_forward(q: Array, k: Array, v_t: Array, may: Array, scale: float) -> tuple[Array, Array, Array]:
    B, T, N = q.shape[:3]
    K, S = k.shape[1:3]
    q_t = _heads_by_tokens(q, K)
    scores = jnp.matmul(k, q_t).reshape(B, K, S, N // K, T).astype(jnp.float32) * scale
    may = row_major(may.swapaxes(1, 2))[:, None, :, None]
    scores = jnp.where(may, scores, HIDDEN)
    # The bound is below any real score: a query that sees nothing gets weights of zero, and not of one.
    weights = jnp.exp(scores - jnp.maximum(scores.max(axis=2, keepdims=True), HIDDEN / 2))
    p = weights / jnp.maximum(weights.sum(axis=2, keepdims=True), 1)
    p = p.astype(v_t.dtype).reshape(B, K, S, -1)
    return _tokens_by_heads(jnp.matmul(v_t, p), T), q_t, p


def _block_backward(
    q_t: Array, k_t: Array, v: Array, p: Array, y: Array, dy: Array, scale: float
) -> tuple[Array, Array, Array]:
    T = dy.shape[1]
    dy_t = _heads_by_tokens(dy, v.shape[1])
    along_y = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1, keepdims=True)
    dv = jnp.matmul(p, row_major(dy_t.swapaxes(2, 3)))
    dp = jax.lax.optimization_barrier(jnp.matmul(v, dy_t)).astype(jnp.float32)
    ds = p.astype(jnp.float32) * (dp - _heads_by_tokens(along_y, v.shape[1])) * scale
    ds = jax.lax.optimization_barrier(ds.astype(dy.dtype))
    dk = jnp.matmul(ds, row_major(q_t.swapaxes(2, 3)))
    dq = _tokens_by_heads(jnp.matmul(k_t, ds), T)
    return dq, dk, dv


def _sum_of_prefixes(parts: list[Array]) -> Array:
    """Add in float32 what several blocks say of the keys; each block knows as many keys as its last query may see."""
    S = parts[-1].shape[2]
    padded = [jnp.pad(part.astype(jnp.float32), ((0, 0), (0, 0), (0, S - part.shape[2]), (0, 0))) for part in parts]
    return jax.lax.optimization_barrier(sum(padded[1:], padded[0]).astype(parts[-1].dtype))


def _heads_by_tokens(x: Float[Array, "B T N H"], K: int) -> Float[Array, "B K H GT"]:
    B, T, N, H = x.shape
    return row_major(x.reshape(B, T, K, N // K, H).transpose(0, 2, 4, 3, 1).reshape(B, K, H, -1))


def _tokens_by_heads(x: Float[Array, "B K H GT"], T: int) -> Float[Array, "B T N H"]:
    B, K, H, GT = x.shape
    return x.reshape(B, K, H, GT // T, T).transpose(0, 4, 1, 3, 2).reshape(B, T, -1, H)
