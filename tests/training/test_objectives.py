import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import ObjectiveConfig
from transformer_jax.model.experts import observe, route
from transformer_jax.training.objectives import load_balancing_loss, objective_sums, router_z_loss, token_costs
from transformer_jax.training.token_losses import losses_of_logits

PLAIN = ObjectiveConfig()


LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7)), jnp.float32)
TARGETS = jnp.asarray([0, 3, 6, 2, 2])
WEIGHTS = jnp.asarray([1, 0, 0.5, 2, 1], jnp.float32)


def sums(config=PLAIN, logits=LOGITS, targets=TARGETS, weights=WEIGHTS):
    losses = losses_of_logits(logits, targets)
    return objective_sums(config, losses, token_costs(config, losses), weights, jnp.ones_like(weights))


def probabilities():
    exponentials = np.exp(np.asarray(LOGITS, np.float64))
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary_smoothed_or_not():
    """Whatever padding there is: tokens that weigh nothing."""
    for smoothing in (0.0, 0.1, 0.9):
        for padding in (0, 3):
            weights = jnp.asarray([1.0, 1.0] + [0.0] * padding)
            found = sums(
                ObjectiveConfig(label_smoothing=smoothing), jnp.zeros((2 + padding, 4)), TARGETS[: 2 + padding], weights
            )
            assert float(found.objective / found.weight) == pytest.approx(np.log(4))
            assert float(found.nll / found.weight) == pytest.approx(np.log(4))


def test_sums_are_weighted_and_agree_with_numpy():
    p = probabilities()
    weights = np.asarray(WEIGHTS)
    nll = -np.log(p[np.arange(5), np.asarray(TARGETS)])
    found = sums()
    assert float(found.objective) == pytest.approx(nll @ weights, rel=1e-6)
    assert float(found.nll) == float(found.objective)
    assert (float(found.weight), float(found.z)) == (4.5, 0)
    smoothed = sums(ObjectiveConfig(label_smoothing=0.2))
    spread = 0.8 * np.eye(7)[np.asarray(TARGETS)] + 0.2 / 7
    assert float(smoothed.objective) == pytest.approx(-(spread * np.log(p)).sum(-1) @ weights, rel=1e-6)
    assert float(smoothed.nll) == float(found.nll)
    focused = sums(ObjectiveConfig(focal=2.0))
    assert float(focused.objective) == pytest.approx(((1 - np.exp(-nll)) ** 2 * nll) @ weights, rel=1e-5)


def test_gradient_is_probabilities_less_the_target():
    gradient = jax.grad(lambda x: sums(logits=x).objective)(LOGITS)
    expected = np.asarray(WEIGHTS)[:, None] * (probabilities() - np.eye(7)[np.asarray(TARGETS)])
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_the_z_loss_is_the_squared_normalizer_and_is_told_apart():
    """(ln 4)^2 for four logits of 0; its gradient is 2 z log-normalizer p."""
    found = sums(ObjectiveConfig(z_loss=0.5), jnp.zeros((1, 4)), jnp.asarray([1]), jnp.ones(1))
    assert float(found.z) == pytest.approx(0.5 * 1.921812, rel=1e-6)
    assert float(found.objective) == pytest.approx(np.log(4) + 0.5 * 1.921812, rel=1e-6)
    assert float(found.nll) == pytest.approx(np.log(4))
    gradient = jax.grad(lambda x: sums(ObjectiveConfig(z_loss=0.5), x).z)(LOGITS)
    normalizers = np.log(np.exp(np.asarray(LOGITS, np.float64)).sum(-1))
    expected = (np.asarray(WEIGHTS) * normalizers)[:, None] * probabilities()
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [PLAIN, ObjectiveConfig(label_smoothing=0.1), ObjectiveConfig(z_loss=1e-3), ObjectiveConfig(focal=0.5)],
    ids=["plain", "smoothed", "z", "focal"],
)
def test_what_weighs_nothing_adds_nothing_even_where_logits_are_large(config):
    logits = jnp.asarray([[1e4, -1e4, 0.0], [1.0, 1.0, 1.0], [50.0, 0.0, 0.0]])

    def objective(logits):
        return sums(config, logits, jnp.asarray([1, 0, 0]), jnp.asarray([0.0, 0.0, 1e-9])).objective

    assert abs(float(objective(logits))) < 1e-5
    assert np.isfinite(jax.grad(objective)(logits)).all()


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
