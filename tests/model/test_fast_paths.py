"""Each form that is there for speed equals the plain one, in value and in gradient."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.attention import attend, attend_plainly, attend_transposed
from transformer_jax.model.layers import (
    ACTIVATIONS,
    dropout,
    gated,
    layer_norm,
    product,
    product_with_table,
    rms_norm,
    row_major,
)
from transformer_jax.model.masks import MaskSpec, may_attend

every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def normal(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def value_and_slopes(function, inputs, cotangent):
    @jax.jit
    def both(cotangent, *inputs):
        value, vjp = jax.vjp(function, *inputs)
        return value, *vjp(cotangent.astype(value.dtype))

    return both(cotangent, *inputs)


def assert_same(fast, plain, inputs):
    """Compare values and vector-Jacobian products; in bfloat16 both may be off by a few roundings of 2^-8."""
    tolerance = 1e-5 if inputs[0].dtype == jnp.float32 else 3e-2
    exact = [x.astype(jnp.float32) for x in inputs]
    cotangent = normal(9, *jax.eval_shape(plain, *exact).shape)
    for ours, theirs in zip(
        value_and_slopes(fast, inputs, cotangent), value_and_slopes(plain, exact, cotangent), strict=True
    ):
        scale = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=tolerance * scale)


@every_dtype
@pytest.mark.parametrize("columns", [6, 11], ids=["narrower", "wider"])
def test_product(columns, dtype):
    assert_same(product, lambda x, w: x @ w, (normal(0, 3, 5, 8, dtype=dtype), normal(1, 8, columns, dtype=dtype)))


@every_dtype
@pytest.mark.parametrize("rows", [3, 300], ids=["few rows", "many rows"])
def test_product_with_table(rows, dtype):
    inputs = (normal(0, rows, 8, dtype=dtype), normal(1, 21, 8, dtype=dtype))
    assert_same(product_with_table, lambda x, table: x @ table.T, inputs)


@every_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(activation, dtype):
    inputs = (normal(0, 4, 16, dtype=dtype), normal(1, 4, 16, dtype=dtype))
    assert_same(lambda g, u: gated(g, u, activation), lambda g, u: ACTIVATIONS[activation](g) * u, inputs)


@every_dtype
def test_rms_norm(dtype):
    def plain(x, scale):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * scale

    inputs = (0.1 * normal(0, 3, 5, 8, dtype=dtype), 1 + 0.5 * normal(1, 8))
    assert_same(lambda x, scale: rms_norm(x, scale, 1e-2), plain, inputs)


QUICK = {(2, 24, "float32")}


@pytest.mark.parametrize(
    ("K", "S", "dtype"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in itertools.product([1, 2, 4], [16, 24], ["float32", "bfloat16"])
    ],
)
def test_attention(K, S, dtype):
    """With packed documents, padding on both sides, and rows that may see nothing at all."""
    B, T, N, H = 2, 16, 4, 6
    q_positions = jnp.asarray([[*range(10), *range(4), -1, -1], [-1] * 3 + [*range(13)]])
    q_segments = jnp.asarray([[1] * 10 + [2] * 4 + [0, 0], [0] * 3 + [1] * 13])
    k_positions = jnp.pad(q_positions, ((0, 0), (0, S - T)), constant_values=-1)
    k_segments = jnp.pad(q_segments, ((0, 0), (0, S - T)))
    may = may_attend(MaskSpec(causal=True), q_positions, k_positions, q_segments, k_segments)
    inputs = (
        normal(0, B, T, N, H, dtype=dtype),
        normal(1, B, K, S, H, dtype=dtype),
        normal(2, B, K, S, H, dtype=dtype),
    )

    def plain(q, k, v):
        return attend_plainly(q, k, v, may, 0.3)

    # Padding and packing keep the mask triangular: no token sees a later slot.
    for blocks in (1, 3) if S == T else (1,):
        assert_same(lambda q, k, v, blocks=blocks: attend_transposed(q, k, v, may, 0.3, blocks), plain, inputs)
    y = jax.jit(attend, static_argnums=4)(*inputs, may, 0.3)
    np.testing.assert_array_equal(jax.jit(attend_transposed, static_argnums=(4, 5))(*inputs, may, 0.3, 1), y)
    assert (y[0, 14:] == 0).all()
    assert (y[1, :3] == 0).all()


def test_attention_survives_large_scores_and_ties():
    q = jnp.full((1, 16, 1, 4), 1e4)
    v = normal(3, 1, 1, 16, 4)
    may = may_attend(MaskSpec(causal=False), jnp.arange(16)[None], jnp.arange(16)[None])
    y = attend_transposed(q, q.swapaxes(1, 2), v, may, 0.5, 1)
    np.testing.assert_allclose(y[0, :, 0], jnp.broadcast_to(v[0, 0].mean(0), (16, 4)), atol=1e-5)


def test_row_major_moves_numbers_and_changes_none():
    x = normal(0, 3, 5)
    np.testing.assert_array_equal(jax.jit(lambda x: row_major(x.T))(x), np.asarray(x).T)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms_are_computed_in_float32(norm):
    """A bfloat16 sum of 4096 squares would stop growing long before its end, and a mean of 100 swallow the rest."""
    x = normal(0, 3, 4096).at[0, 7].set(3000.0).at[1].add(100.0).astype("bfloat16")
    exact = np.asarray(x, np.float64)
    ones, zeros = jnp.ones(4096), jnp.zeros(4096)
    if norm == "rms":
        y, expected = rms_norm(x, ones, 1e-6), exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    else:
        centred = exact - exact.mean(-1, keepdims=True)
        y, expected = layer_norm(x, ones, zeros, 1e-6), centred / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=1e-6)


def test_dropout_keeps_the_mean():
    x = jnp.full((200, 200), 3.0)
    y = dropout(x, 0.2, jax.random.key(0))
    assert set(np.unique(y)) == {0.0, np.float32(3.0 / 0.8)}
    assert float(y.mean()) == pytest.approx(3, rel=0.01)


def test_attention_drops_weights_and_caps_scores():
    q = k = v = jnp.eye(4)[None, :, None] * 3
    may = jnp.ones((1, 4, 4), bool)
    capped = attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), may, 1.0, softcap=2.0)
    scores = 2 * np.tanh(9 * np.eye(4) / 2)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(capped[0, :, 0], weights * 3, atol=1e-5)
    kept = [
        attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), may, 0.0, dropout_rate=0.5, dropout_key=jax.random.key(seed))
        for seed in range(40)
    ]
    # Each weight is a quarter; dropped, or doubled.
    assert set(np.unique(np.stack(kept))) == {0.0, 1.5}
    assert float(np.mean(kept)) == pytest.approx(0.75, rel=0.1)
