"""The choice of a token: by hand, against sorting, against the probabilities, and row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.sampling import (
    draw,
    keep_top_k,
    keep_top_p,
    limit_vocabulary,
    sample,
    sampling_params,
    transform,
)


def settings(temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> DecodingConfig:
    return DecodingConfig(temperature=temperature, top_k=top_k, top_p=top_p)


def keys(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def kept_ids(mask: jax.Array) -> list[int]:
    return np.flatnonzero(mask).tolist()


@pytest.mark.parametrize(
    ("probabilities", "top_p", "expected"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.0, [0]),
        ([0.5, 0.3, 0.15, 0.05], 0.5, [0]),
        ([0.5, 0.3, 0.15, 0.05], 0.6, [0, 1]),
        ([0.5, 0.3, 0.15, 0.05], 0.8, [0, 1]),
        ([0.5, 0.3, 0.15, 0.05], 0.85, [0, 1, 2]),
        ([0.5, 0.3, 0.15, 0.05], 1.0, [0, 1, 2, 3]),
        ([0.3, 0.1, 0.1, 0.5], 0.8, [0, 3]),
        ([0.25, 0.25, 0.25, 0.25], 0.0, [0]),
        ([0.25, 0.25, 0.25, 0.25], 0.5, [0, 1]),
        ([0.25, 0.25, 0.25, 0.25], 0.51, [0, 1, 2]),
        ([0.2, 0.4, 0.2, 0.2], 0.7, [0, 1, 2]),
        # Sums that float32 rounds to a little less than what they are.
        ([0.35, 0.3, 0.2, 0.15], 0.85, [0, 1, 2]),
        ([0.35, 0.25, 0.2, 0.15, 0.05], 0.6, [0, 1]),
    ],
)
def test_top_p_keeps_what_the_table_says(probabilities: list[float], top_p: float, expected: list[int]):
    logits = jnp.log(jnp.asarray(probabilities)) + 5
    assert kept_ids(keep_top_p(logits, jnp.float32(top_p))) == expected


@pytest.mark.parametrize(
    ("logits", "k", "expected"),
    [
        ([1.0, 3.0, 2.0], 1, [1]),
        ([1.0, 3.0, 2.0], 2, [1, 2]),
        ([1.0, 3.0, 2.0], 9, [0, 1, 2]),
        ([2.0, 2.0, 2.0, 2.0], 2, [0, 1]),
        ([1.0, 2.0, 3.0, 2.0, 2.0], 3, [1, 2, 3]),
        ([-1.0, -3.0, 0.0, -0.0, 2.0], 2, [2, 4]),
        ([-0.0, 0.0, -5.0], 1, [0]),
        ([-np.inf, 1.0, -np.inf, 0.0], 2, [1, 3]),
    ],
)
def test_top_k_keeps_what_the_table_says(logits: list[float], k: int, expected: list[int]):
    assert kept_ids(keep_top_k(jnp.asarray(logits), jnp.int32(k))) == expected


# Few different values, so that ties are common.
tied_logits = st.lists(st.integers(-8, 8), min_size=7, max_size=7).map(lambda row: np.array(row, np.float32) / 2)


@given(tied_logits, st.integers(1, 7))
def test_top_k_is_what_a_stable_sort_says(logits: np.ndarray, k: int):
    order = np.argsort(-logits, stable=True)
    assert kept_ids(jax.jit(keep_top_k)(logits, jnp.int32(k))) == sorted(order[:k].tolist())


@given(tied_logits, st.floats(0.01, 0.99))
def test_top_p_is_what_a_stable_sort_says(logits: np.ndarray, top_p: float):
    order = np.argsort(-logits, stable=True)
    probabilities = np.exp(logits.astype(np.float64))
    sums = np.cumsum(probabilities[order] / probabilities.sum())
    assume(np.abs(sums - top_p).min() > 1e-4)
    count = 1 + int((sums < top_p).sum())
    assert kept_ids(jax.jit(keep_top_p)(logits, jnp.float32(top_p))) == sorted(order[:count].tolist())


def test_top_p_counts_what_top_k_has_left():
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]]))
    # Of all four 0.7 takes two; of the first two alone, 0.57 and 0.43, too; of the first three, 0.44, 0.33, 0.22, two.
    both = transform(logits, sampling_params([settings(top_k=2, top_p=0.55)]))
    assert kept_ids(both[0] > -jnp.inf) == [0]
    assert kept_ids(transform(logits, sampling_params([settings(top_p=0.55)]))[0] > -jnp.inf) == [0, 1]


def test_no_filter_changes_no_bit_even_beside_filtered_rows():
    logits = 5 * jax.random.normal(jax.random.key(0), (3, 97))
    alone = transform(logits, sampling_params([settings()] * 3))
    beside = transform(logits, sampling_params([settings(top_k=3), settings(), settings(top_p=0.5)]))
    np.testing.assert_array_equal(alone, logits)
    np.testing.assert_array_equal(beside[1], logits[1])
    assert (beside[0] > -jnp.inf).sum() == 3


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-10, 1e-5])
def test_no_and_tiny_temperature_take_the_first_of_the_most_likely(temperature: float):
    rows = jnp.asarray([[1.0, 7.0, 7.0, 7.0], [3e38, -3e38, 0.0, 3e38], [-np.inf, -5.0, -np.inf, -5.0]])
    tokens, logprobs = sample(jnp.tile(rows, (20, 1)), keys(60), sampling_params([settings(temperature)] * 60))
    assert tokens.tolist() == [1, 0, 1] * 20
    expected = [-np.log(3 + np.exp(-6)), -np.log(2), -np.log(2)] * 20
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e300, 3e38, 1e30])
def test_any_high_temperature_is_uniform_over_what_is_possible(temperature: float):
    logits = jnp.tile(jnp.asarray([9.0, -9.0, -np.inf, 0.0]), (300, 1))
    tokens, logprobs = sample(logits, keys(300), sampling_params([settings(temperature)] * 300))
    counts = np.bincount(tokens, minlength=4)
    assert counts[2] == 0
    assert min(counts[0], counts[1], counts[3]) > 70
    assert np.isfinite(logprobs).all()


def test_top_1_is_greedy_with_ties_too():
    logits = jnp.round(jax.random.normal(jax.random.key(3), (200, 11)))
    tokens, _ = sample(logits, keys(200), sampling_params([settings(2.0, top_k=1)] * 200))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    tokens, _ = sample(logits, keys(200), sampling_params([settings(2.0, top_p=0.0)] * 200))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))


@pytest.mark.parametrize("one", [settings(), settings(0.5), settings(2.0, top_k=5), settings(0.7, top_p=0.8)], ids=str)
def test_frequencies_are_the_probabilities(one: DecodingConfig):
    logits = np.array([0.1, 2.0, -1.0, 0.7, 0.7, 1.5, -3.0, 0.0])
    heated = np.exp(logits / one.temperature)
    order = np.argsort(-heated, stable=True)
    kept = order if one.top_k is None else order[: one.top_k]
    sums = np.cumsum(heated[kept]) / heated[kept].sum()
    kept = kept[: 1 + int((sums < one.top_p - 1e-9).sum())]
    expected = np.zeros(8)
    expected[kept] = heated[kept] / heated[kept].sum()

    draws = 20_000
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (draws, 1))
    tokens, _ = jax.jit(sample)(rows, keys(draws, seed=11), sampling_params([one] * draws))
    counts = np.bincount(tokens, minlength=8)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - draws * expected)[possible] ** 2 / (draws * expected[possible])).sum()
    # Seven degrees of freedom at most: above 24.3 once in a thousand.
    assert chi_square < 24.3


def test_a_token_of_no_weight_is_never_drawn():
    logits = jnp.full(1000, -jnp.inf).at[jnp.asarray([3, 500, 998])].set(0.0)
    drawn = jax.jit(jax.vmap(lambda key: draw(logits, key)))(keys(3000))
    assert set(np.unique(drawn).tolist()) == {3, 500, 998}


@pytest.mark.slow
def test_a_row_depends_on_nothing_but_itself():
    logits = 3 * jax.random.normal(jax.random.key(5), (6, 50))
    mix = [
        settings(0.0),
        settings(1.3),
        settings(0.8, top_p=0.9),
        settings(1.0, top_k=4),
        settings(2.0, 7, 0.5),
        settings(1.0),
    ]
    every = keys(6, seed=2)
    tokens, logprobs = sample(logits, every, sampling_params(mix))
    for row in range(6):
        one = slice(row, row + 1)
        alone, logprob = sample(logits[one], every[one], sampling_params(mix[one]))
        assert (alone[0], logprob[0]) == (tokens[row], logprobs[row])


def test_the_log_probability_is_the_models_own():
    logits = jnp.log(jnp.asarray([[0.7, 0.2, 0.1]] * 50))
    tokens, logprobs = sample(logits, keys(50), sampling_params([settings(5.0, top_k=2)] * 50))
    assert set(tokens.tolist()) == {0, 1}
    np.testing.assert_allclose(logprobs, np.log(np.array([0.7, 0.2, 0.1]))[np.asarray(tokens)], rtol=1e-5)


def test_ids_beyond_the_limit_have_no_probability():
    logits = jnp.zeros((40, 8)).at[:, 7].set(50.0)
    limited = limit_vocabulary(logits, 5)
    hot, logprobs = sample(limited, keys(40), sampling_params([settings(2.0)] * 40))
    assert set(hot.tolist()) == {0, 1, 2, 3, 4}
    np.testing.assert_allclose(logprobs, -np.log(5), rtol=1e-6)


def test_no_mix_of_settings_compiles_anything_new(caplog: pytest.LogCaptureFixture):
    logits = jnp.zeros((3, 8))
    compiled = jax.jit(sample)
    mixes = [
        [settings(0.0)] * 3,
        [settings(), settings(0.5, 3), settings(0.0, 1, 0.1)],
        [settings(1e9, 10**30, 0.5)] * 3,
    ]
    compiled(logits, keys(3), sampling_params(mixes[0]))
    with jax.log_compiles():
        for mix in mixes:
            compiled(logits, keys(3), sampling_params(mix))
    assert "Compiling" not in caplog.text
