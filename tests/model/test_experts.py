"""The product of each row with its own expert's matrix: what is fast on CPU equals what XLA has for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.experts import pass_through_experts, product_by_blocks

GROUPS = {
    "even": [4, 4, 4],
    "one row": [0, 1, 0],
    "all to one": [0, 0, 150, 0],
    "none to the first and last": [0, 70, 3, 129, 0],
    "fewer rows than experts": [1, 0, 0, 2, 0, 0, 0, 1],
}


@pytest.mark.parametrize(
    "rows_of",
    [pytest.param(rows, id=name, marks=[] if len(rows) == 5 else pytest.mark.slow) for name, rows in GROUPS.items()],
)
def test_blocks_multiply_and_differentiate_as_ragged_dot_does(rows_of):
    R, E = sum(rows_of), len(rows_of)
    random = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((R, 5), (E, 5, 3), (R, 3)))
    rows_of = jnp.asarray(rows_of)

    def both(multiply):
        y, gradients = jax.vjp(lambda x, w: multiply(x, w, rows_of), x, w)
        return y, *gradients(dy)

    for found, expected in zip(both(product_by_blocks), both(jax.lax.ragged_dot), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_blocks_follow_numbers_that_are_known_at_run_time_alone():
    """One program for all ways in which 6 rows can go to two experts, each against numpy."""
    multiply = jax.jit(product_by_blocks)
    random = np.random.default_rng(1)
    x, w = random.normal(size=(6, 5)).astype(np.float32), random.normal(size=(2, 5, 3)).astype(np.float32)
    for first in range(7):
        expected = np.concatenate([x[:first] @ w[0], x[first:] @ w[1]])
        np.testing.assert_allclose(multiply(x, w, np.array([first, 6 - first])), expected, atol=1e-5)


def test_sums_are_float32_in_a_bfloat16_model():
    """65,536 rows of one expert, whose gradient would stop growing halfway; and 256 + 1 + 1, which would stay 256."""
    ones = jnp.ones((2**16, 1), jnp.bfloat16)
    gradient = jax.grad(lambda w: product_by_blocks(ones, w, jnp.array([2**16])).astype(jnp.float32).sum())
    assert gradient(jnp.ones((1, 1, 1), jnp.bfloat16)) == 2**16
    one = jnp.ones((3, 1, 1), jnp.bfloat16)
    up = jnp.array([256, 1, 1], jnp.bfloat16).reshape(3, 1, 1)
    x, weights, ids = jnp.ones((1, 1), jnp.bfloat16), jnp.ones((1, 3)), jnp.array([[0, 1, 2]])
    assert pass_through_experts(x, weights, ids, one, up, one, "relu") == 258
