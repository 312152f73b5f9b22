"""Who may attend to whom: one formula for training, packing, padding, prefill and decoding.

A mask is a small spec. It becomes booleans by comparing the positions of queries with the positions of keys, so nothing
here depends on where in an array, or in a cache, a token happens to lie. This file knows nothing of scores or heads.
"""

from dataclasses import dataclass

from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class MaskSpec:
    """What a layer's mask is made of, besides padding and segments.

    causal                  bidirectional
      k: 0 1 2 3              k: 0 1 2 3
    q 0  x . . .            q 0  x x x x
      1  x x . .              1  x x x x
      2  x x x .              2  x x x x
      3  x x x x              3  x x x x
    """

    causal: bool


def may_attend(
    spec: MaskSpec,
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"] | None = None,
    k_segments: Int[Array, "B S"] | None = None,
) -> Bool[Array, "B T S"]:
    """Compare positions, and segments where there are any: True where query t may see key s.

    A position of -1 is padding, or an empty slot of a cache: it sees nothing and is seen by nothing.

        packed [a b | c d e], causal       left-padded [- a b], causal
          a  x . . . .                       -  . . .
          b  x x . . .                       a  . x .
          c  . . x . .                       b  . x x
          d  . . x x .
          e  . . x x x
    """
    q, k = q_positions[:, :, None], k_positions[:, None, :]
    may = (q >= 0) & (k >= 0)
    if spec.causal:
        may &= k <= q
    if q_segments is not None and k_segments is not None:
        may &= q_segments[:, :, None] == k_segments[:, None, :]
    return may
