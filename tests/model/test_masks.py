"""Masks as pictures: x where a query, a line, may see a key, a column."""

import jax.numpy as jnp
import pytest

from transformer_jax.model.masks import MaskSpec, may_attend

CAUSAL, BOTH, WINDOW = MaskSpec(causal=True), MaskSpec(causal=False), MaskSpec(causal=True, window=2)


@pytest.mark.parametrize(
    ("spec", "positions", "segments", "prefixes", "picture"),
    [
        (CAUSAL, [0, 1, 2, 3], None, None, "x... xx.. xxx. xxxx"),
        (BOTH, [0, 1, -1, -1], None, None, "xx.. xx.. .... ...."),
        (WINDOW, [0, 1, 2, 3], None, None, "x... xx.. .xx. ..xx"),
        (CAUSAL, [-1, 0, 1, 2], None, None, ".... .x.. .xx. .xxx"),
        (CAUSAL, [0, 1, 0, 1], [1, 1, 2, 2], None, "x... xx.. ..x. ..xx"),
        (BOTH, [0, 1, 0, 1], [1, 1, 2, 2], None, "xx.. xx.. ..xx ..xx"),
        (CAUSAL, [0, 1, 2, 3], None, [2] * 4, "xx.. xx.. xxx. xxxx"),
        (CAUSAL, [0, 1, 0, 1], [1, 1, 2, 2], [2, 2, 0, 0], "xx.. xx.. ..x. ..xx"),
        (WINDOW, [0, 1, 2, 3], None, [2] * 4, "xx.. xx.. .xx. ..xx"),
        (CAUSAL, [2, 0, 3, 1], None, None, "xx.x .x.. xxxx .x.x"),
    ],
)
def test_a_mask_is_its_picture(spec, positions, segments, prefixes, picture):
    at = jnp.asarray([positions])
    of, prefix = (None if values is None else jnp.asarray([values]) for values in (segments, prefixes))
    may = may_attend(spec, at, at, of, of, prefix)
    assert " ".join("".join("x" if seen else "." for seen in row) for row in may[0].tolist()) == picture
