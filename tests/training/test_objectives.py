import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.experts import observe, route
from transformer_jax.training.objectives import load_balancing_loss, next_token_loss, router_z_loss


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    total, weight = next_token_loss(jnp.zeros((2, 3, 4)), jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3)))
    assert total == pytest.approx(6 * np.log(4))
    assert weight == 6


def test_sum_is_weighted_and_agrees_with_numpy():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(5, 7)).astype(np.float32), rng.integers(0, 7, 5)
    weights = np.array([1, 0, 0.5, 2, 1], np.float32)
    nll = np.log(np.exp(logits.astype(np.float64)).sum(-1)) - logits[np.arange(5), targets]
    total, weight = next_token_loss(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weights))
    assert total == pytest.approx(nll @ weights, rel=1e-6)
    assert weight == 4.5


def test_gradient_is_probabilities_less_the_target():
    logits, targets, weights = jnp.asarray([[1.0, 2.0, 3.0]]), jnp.asarray([2]), jnp.asarray([0.5])
    gradient = jax.grad(lambda x: next_token_loss(x, targets, weights)[0])(logits)
    np.testing.assert_allclose(gradient, 0.5 * (np.exp(logits) / np.exp(logits).sum() - [[0, 0, 1]]), atol=1e-6)


def test_what_weighs_nothing_adds_nothing_even_where_logits_are_large():
    logits = jnp.asarray([[1e4, -1e4, 0.0], [1.0, 1.0, 1.0]])
    total, weight = next_token_loss(logits, jnp.asarray([1, 0]), jnp.asarray([0.0, 0.0]))
    assert (total, weight) == (0, 0)


def test_losses_of_a_router_agree_with_their_equations_and_leave_padding_out():
    """Two experts of four for each of five tokens; the last two are padding."""
    logits = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    _, ids = route(jnp.asarray(logits), 2, True)
    routing = jax.tree.map(lambda x: x[None], observe(jnp.asarray(logits), ids, jnp.arange(5) < 3))
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.zeros(4)
    for row in probabilities[:3]:
        chosen[np.argsort(-row)[:2]] += 1 / 3
    balance = 4 * (chosen * probabilities[:3].mean(0)).sum()
    assert float(load_balancing_loss(routing)) == pytest.approx(balance, rel=1e-5)
    assert float(router_z_loss(routing)) == pytest.approx((np.log(np.exp(logits[:3]).sum(-1)) ** 2).mean(), rel=1e-5)


def test_an_even_router_has_the_least_balance_loss():
    even = jnp.zeros((8, 4))
    ids = jnp.asarray([[i % 4, (i + 1) % 4] for i in range(8)])
    routing = jax.tree.map(lambda x: x[None], observe(even, ids, jnp.ones(8, bool)))
    assert float(load_balancing_loss(routing)) == pytest.approx(2)
