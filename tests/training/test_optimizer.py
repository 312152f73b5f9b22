import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.config import OptimizerConfig
from transformer_jax.training.optimizer import decays, learning_rate, make_optimizer


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    schedule = learning_rate(OptimizerConfig(learning_rate=0.1, warmup_steps=10, final_fraction=0.2), steps=110)
    expected = {1: 0.01, 5: 0.05, 10: 0.1, 60: 0.06, 110: 0.02}
    for update, rate in expected.items():
        assert schedule(update - 1) == pytest.approx(rate, rel=1e-5), update


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_a_run_shorter_than_its_warm_up_still_learns(steps):
    schedule = learning_rate(OptimizerConfig(learning_rate=0.1, warmup_steps=20), steps)
    assert [np.asarray(schedule(count)).item() for count in range(steps)] == pytest.approx(
        [0.1 * (count + 1) / steps for count in range(steps)]
    )


def test_two_updates_agree_with_the_paper_in_numpy():
    config = OptimizerConfig(
        learning_rate=0.1, warmup_steps=0, final_fraction=1.0, clip_norm=0.5, weight_decay=0.3, beta1=0.8, beta2=0.9
    )
    optimizer = make_optimizer(config, steps=10)
    params = {"embed": jnp.full((2, 2), 2.0), "q": {"weight": jnp.full((2, 2), 1.0)}, "norm": {"scale": jnp.ones(2)}}
    decay = {"embed": 0, "q": {"weight": 0.3}, "norm": {"scale": 0}}
    state, gradients = optimizer.init(params), []
    expected = jax.tree.map(np.asarray, params)
    for step in (1, 2):
        scale = 0.1 * step
        gradients.append(
            jax.tree.map(lambda p, s=scale: s * np.arange(p.size, dtype=np.float32).reshape(p.shape), params)
        )
        updates, state = optimizer.update(gradients[-1], state, params)
        params = optax.apply_updates(params, updates)
    expected = jax.tree.map(by_hand, expected, decay, *map(clipped, gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, expected)


def test_vectors_and_tables_do_not_decay():
    params = {"embed": jnp.ones((2, 2)), "position_embed": jnp.ones((2, 2)), "o": {"weight": jnp.ones((2, 2))}}
    params |= {"norm": {"scale": jnp.ones(2), "bias": jnp.ones(2)}}
    assert decays(params) == {
        "embed": False,
        "position_embed": False,
        "o": {"weight": True},
        "norm": {"scale": False, "bias": False},
    }


def clipped(gradient):
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda g: g * min(1, 0.5 / norm), gradient)


def by_hand(p, decay, *gradients):
    m = v = 0
    for step, g in enumerate(gradients, 1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        p = p - 0.1 * (m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.9**step)) + 1e-8) + decay * p)
    return p
