"""Who may attend to whom: one formula for training, packing, padding, prefill and decoding.

A mask is a small spec. It becomes booleans by comparing the positions of queries with the positions of keys, so nothing
here depends on where in an array, or in a cache, a token happens to lie. This file knows nothing of scores or heads.
"""

from dataclasses import dataclass

from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class MaskSpec:
    """What a layer's mask is made of, besides padding, segments and prefixes.

    causal                  bidirectional           causal, window of 2
      k: 0 1 2 3              k: 0 1 2 3              k: 0 1 2 3
    q 0  x . . .            q 0  x x x x            q 0  x . . .
      1  x x . .              1  x x x x              1  x x . .
      2  x x x .              2  x x x x              2  . x x .
      3  x x x x              3  x x x x              3  . . x x
    """

    causal: bool
    window: int | None = None
    """Keys that a query may see at most, its own and those just before it."""


def may_attend(
    spec: MaskSpec,
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"] | None = None,
    k_segments: Int[Array, "B S"] | None = None,
    prefix_lengths: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B T S"]:
    """Compare positions, and segments where there are any: True where query t may see key s.

    A position of -1 is padding, or an empty slot of a cache: it sees nothing and is seen by nothing. A query whose
    sequence has a prefix sees all of that prefix, whatever lies later.

        packed [a b | c d e], causal       left-padded [- a b], causal       [a b c], causal, prefix of 2
          a  x . . . .                       -  . . .                          a  x x .
          b  x x . . .                       a  . x .                          b  x x .
          c  . . x . .                       b  . x x                          c  x x x
          d  . . x x .
          e  . . x x x

    Reference: Raffel et al. 2020, "Exploring the Limits of Transfer Learning", figure 4 (prefix); Beltagy et al. 2020,
    "Longformer", section 3.1 (window).
    """
    q, k = q_positions[:, :, None], k_positions[:, None, :]
    may = (q >= 0) & (k >= 0)
    if spec.causal:
        seen = k <= q
        may &= seen if prefix_lengths is None else seen | (k < prefix_lengths[:, :, None])
    if spec.window is not None:
        may &= q - k < spec.window
    if q_segments is not None and k_segments is not None:
        may &= q_segments[:, :, None] == k_segments[:, None, :]
    return may
