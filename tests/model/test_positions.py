"""Angles against float64 and against figures computed by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.architecture import ModelConfig, RopeScaling
from transformer_jax.model.positions import (
    attention_factor,
    last_positions,
    rope_frequencies,
    rotate,
    rotation,
    sinusoids,
)

EIGHT = ModelConfig(vocab_size=2, d_model=8, num_heads=1, rope_theta=100.0)


def turn(c, positions, local=False):
    positions = jnp.asarray([positions])
    return rotation(c, positions, last_positions(positions, positions, None), local)


def test_rotation_depends_on_the_distance_alone():
    q, k = (jax.random.normal(jax.random.key(seed), (1, 1, 1, 8)) for seed in (0, 1))

    def score(q_position, k_position):
        return float(jnp.vdot(*(rotate(x, turn(EIGHT, [p])) for x, p in ((q, q_position), (k, k_position)))))

    assert score(5, 2) == pytest.approx(score(905, 902), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_angles_are_exact_at_large_positions_in_any_compute_dtype(theta):
    positions = [0, 255, 256, 257, 4094, 4095, 8191, 131_071, 10_000_019]
    c = dataclasses.replace(EIGHT, d_model=64, rope_theta=theta, dtype="bfloat16")
    expected = np.asarray(positions)[:, None] * theta ** (-np.arange(0, 64, 2) / 64)
    turned = turn(c, positions)
    assert turned.cos.dtype == jnp.float32
    np.testing.assert_allclose(turned.cos[0], np.cos(expected), atol=1e-6)
    np.testing.assert_allclose(turned.sin[0], np.sin(expected), atol=1e-6)


def test_what_is_not_rotated_passes_bit_for_bit():
    c = dataclasses.replace(EIGHT, d_model=16, rope_fraction=0.25)
    x = jax.random.normal(jax.random.key(0), (1, 3, 1, 16))
    y = rotate(x, turn(c, [3, 4, 5]))
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    angles = np.array([3, 4, 5])[:, None] * 100.0 ** (-np.array([0, 2]) / 4)
    expected = (x[0, :, 0, :2] + 1j * x[0, :, 0, 2:4]) * np.exp(1j * angles)
    np.testing.assert_allclose(y[0, :, 0, :4], np.concatenate([expected.real, expected.imag], -1), atol=1e-6)


def test_interleaved_pairs_are_halves_in_another_order():
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
    by = turn(EIGHT, [3, 4, 5])
    halves = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    expected = rotate(halves, by)
    actual = rotate(x, by, interleaved=True)
    np.testing.assert_array_equal(jnp.concatenate([actual[..., 0::2], actual[..., 1::2]], axis=-1), expected)


def test_llama3_scaling_is_the_published_one():
    """Head width 16, theta 5e5, factor 8, ramp from 1 to 4 turns over 8192: factors computed by hand."""
    scaling = RopeScaling("llama3", factor=8.0, original_max_len=8192)
    factors = rope_frequencies(5e5, 16, scaling) / rope_frequencies(5e5, 16, RopeScaling())
    np.testing.assert_allclose(factors, [1, 1, 1, 1, 0.3711, 0.125, 0.125, 0.125], atol=5e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"factor": 64.0}, 1.41589),
        ({"factor": 64.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 64.0, "attention_factor": 1.2}, 1.2),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 128.0}, 1.4852),
    ],
)
def test_yarn_attention_factor_is_derived_once_or_taken_as_given(settings, expected):
    scaling = RopeScaling("yarn", original_max_len=64, **settings)
    assert attention_factor(scaling) == pytest.approx(expected, abs=5e-5)
    c = dataclasses.replace(EIGHT, rope_scaling=scaling)
    np.testing.assert_allclose(jnp.hypot(*turn(c, [7])), expected, atol=5e-5)


def test_local_layers_have_a_base_of_their_own_and_no_scaling():
    linear = RopeScaling("linear", factor=4.0)
    c = dataclasses.replace(
        EIGHT, layer_pattern=("local",), window=2, local_rope_theta=10.0, rope_theta=1e6, rope_scaling=linear
    )
    local = dataclasses.replace(EIGHT, rope_theta=10.0)
    np.testing.assert_array_equal(turn(c, [3], local=True).cos, turn(local, [3]).cos)
    np.testing.assert_allclose(turn(c, [8]).cos, turn(dataclasses.replace(EIGHT, rope_theta=1e6), [2]).cos, atol=1e-6)


def test_a_dynamic_base_is_plain_within_the_first_context_and_grows_beyond_it():
    c = dataclasses.replace(EIGHT, rope_scaling=RopeScaling("dynamic", factor=2.0, original_max_len=8))
    np.testing.assert_allclose(turn(c, [3, 7]).cos, turn(EIGHT, [3, 7]).cos, atol=1e-6)
    # 16 tokens: the base is multiplied by (2 * 16 / 8 - 1)^(8 / 6).
    grown = dataclasses.replace(EIGHT, rope_theta=100 * 3 ** (8 / 6))
    np.testing.assert_allclose(turn(c, [3, 15]).cos, turn(grown, [3, 15]).cos, atol=1e-5)


def test_sinusoids_are_those_of_the_paper():
    expected = [np.sin(5), np.cos(5), np.sin(5 / 100), np.cos(5 / 100)]
    np.testing.assert_allclose(sinusoids(jnp.asarray([[5]]), 4)[0, 0], expected, atol=1e-6)
    assert sinusoids(jnp.asarray([[5]]), 3).shape == (1, 1, 3)


def test_bfloat16_vectors_are_rotated_in_float32_and_rounded_once():
    positions = jnp.arange(3000, 3064)[None]
    x = jax.random.normal(jax.random.key(0), (1, 64, 2, 8)).astype("bfloat16")
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    angles = np.asarray(positions, np.float64)[..., None, None] * 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    cos, sin = np.cos(angles), np.sin(angles)
    exact = jnp.asarray(np.concatenate([first * cos - second * sin, second * cos + first * sin], -1), "bfloat16")
    c = dataclasses.replace(EIGHT, d_model=8, num_heads=1, rope_theta=10_000.0, dtype="bfloat16")
    found = rotate(x, rotation(c, positions, positions))
    assert np.mean(np.asarray(found == exact)) > 0.99
