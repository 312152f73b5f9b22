"""Risks against their definitions, by sorting in float64, and their gradients against differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import ObjectiveConfig
from transformer_jax.errors import UserError
from transformer_jax.training.risk import domain_ratios, risk_ratios, units_of

RNG = np.random.default_rng(0)
LOSSES = RNG.exponential(size=(3, 7)).astype(np.float32)
WEIGHTS = RNG.choice([0.0, 1.0, 1.0, 2.5], (3, 7)).astype(np.float32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1]], np.int32)
WEIGHTS[SEGMENTS == 0] = 0

RISKS = {
    "mean": ObjectiveConfig(),
    "median": ObjectiveConfig(risk="quantile"),
    "quantile": ObjectiveConfig(risk="quantile", quantile=0.9),
    "tail": ObjectiveConfig(risk="cvar", alpha=0.3),
    "worst": ObjectiveConfig(risk="cvar", alpha=0.001),
    "all": ObjectiveConfig(risk="cvar", alpha=1.0),
    "entropic": ObjectiveConfig(risk="entropic", beta=1.5),
    "tail of rows": ObjectiveConfig(risk="cvar", alpha=0.5, level="sequence"),
    "tail of documents": ObjectiveConfig(risk="cvar", alpha=0.4, level="document"),
    "entropic of documents": ObjectiveConfig(risk="entropic", beta=0.7, level="document"),
}
every_risk = pytest.mark.parametrize("name", RISKS)


def units(losses, weights, level):
    """Losses and weights of the units that have a target."""
    if level == "token":
        keys = np.arange(losses.size).reshape(losses.shape)
    else:
        keys = np.arange(3)[:, None] * 10 + SEGMENTS * (level == "document")
    found = []
    for key in np.unique(keys):
        of_unit = keys == key
        if weights[of_unit].sum() > 0:
            found.append((np.average(losses[of_unit], weights=weights[of_unit]), weights[of_unit].sum()))
    return np.array(found, np.float64).T


def by_definition(config, losses, weights=WEIGHTS):
    values, masses = units(np.asarray(losses, np.float64), weights, config.level)
    order = np.argsort(-values)
    values, masses = values[order], masses[order] / masses.sum()
    if config.risk == "quantile":
        return next(
            v for v, share in zip(values[::-1], np.cumsum(masses[::-1]), strict=True) if share >= config.quantile
        )
    if config.risk == "entropic":
        return np.log(masses @ np.exp(config.beta * values)) / config.beta
    left, total = (config.alpha if config.risk == "cvar" else 1.0), 0.0
    whole = left
    for value, mass in zip(values, masses, strict=True):
        total += min(mass, left) * value
        left = max(left - mass, 0)
    return total / whole


def risk_value(config, losses, weights, segment_ids, ratios):
    """The risk itself, of which the ratios are the gradient."""
    if config.risk == "entropic":
        units = units_of(losses, weights, segment_ids, config.level)
        exponents = jnp.where(units.weights > 0, config.beta * units.losses, -jnp.inf)
        return jax.nn.logsumexp(exponents, b=units.weights / units.weights.sum()) / config.beta
    return jnp.sum(losses * weights * ratios) / weights.sum()


@every_risk
def test_values_are_those_of_the_definition(name):
    config = RISKS[name]
    ratios = risk_ratios(config, jnp.asarray(LOSSES), jnp.asarray(WEIGHTS), jnp.asarray(SEGMENTS))
    assert (np.asarray(ratios) >= 0).all()
    assert float((ratios * WEIGHTS).sum()) == pytest.approx(WEIGHTS.sum(), rel=1e-5)
    found = risk_value(config, jnp.asarray(LOSSES), jnp.asarray(WEIGHTS), jnp.asarray(SEGMENTS), ratios)
    assert float(found) == pytest.approx(by_definition(config, LOSSES), rel=1e-5)


@every_risk
def test_ratios_are_the_gradient_of_the_risk(name):
    """Of each loss in turn, moved by so little that none overtakes another."""
    config = RISKS[name]
    ratios = risk_ratios(config, jnp.asarray(LOSSES), jnp.asarray(WEIGHTS), jnp.asarray(SEGMENTS))
    slopes = np.zeros_like(LOSSES)
    for place in np.ndindex(*LOSSES.shape):
        step = np.zeros(LOSSES.shape)
        step[place] = 1e-5
        slopes[place] = (by_definition(config, LOSSES + step) - by_definition(config, LOSSES - step)) / 2e-5
    np.testing.assert_allclose(ratios * WEIGHTS / WEIGHTS.sum(), slopes, atol=1e-5)


def test_all_of_the_tail_is_exactly_the_mean():
    ratios = risk_ratios(RISKS["all"], jnp.asarray(LOSSES), jnp.asarray(WEIGHTS), jnp.asarray(SEGMENTS))
    np.testing.assert_array_equal(ratios, 1)


def test_losses_that_are_alike_count_alike():
    """Whatever their order: half of the mass is 2 tokens of weight 1, shared by the three at the border."""
    losses = jnp.asarray([[2.0, 1.0, 2.0, 2.0]])
    ratios = risk_ratios(ObjectiveConfig(risk="cvar", alpha=0.5), losses, jnp.ones((1, 4)), jnp.ones((1, 4), jnp.int32))
    np.testing.assert_allclose(ratios, [[4 / 3, 0, 4 / 3, 4 / 3]], rtol=1e-6)


@every_risk
def test_without_a_target_nothing_counts_and_nothing_is_nan(name):
    nothing = jnp.zeros((3, 7))
    ratios = risk_ratios(RISKS[name], jnp.asarray(LOSSES), nothing, jnp.asarray(SEGMENTS))
    assert np.isfinite(ratios).all()
    assert float(jnp.sum(ratios * nothing)) == 0


def test_domains_count_by_how_badly_they_do():
    """Two of three are in the batch: weights exp(rate times mean loss), and each domain its part whatever its size."""
    losses, weights = jnp.asarray([[1.0, 3.0, 5.0, 9.0]]), jnp.asarray([[1.0, 1.0, 1.0, 0.0]])
    domains, before = jnp.asarray([[0, 0, 2, 2]]), jnp.asarray([0.5, 0.25, 0.25])
    ratios, beliefs = domain_ratios(0.1, before, losses, weights, domains)
    moved = np.array([0.5 * np.exp(0.2), 0.25, 0.25 * np.exp(0.5)])
    np.testing.assert_allclose(beliefs, moved / moved.sum(), rtol=1e-6)
    first, last = moved[[0, 2]] / moved[[0, 2]].sum()
    np.testing.assert_allclose(ratios[0, :3], [first * 3 / 2, first * 3 / 2, last * 3], rtol=1e-6)
    assert float(jnp.sum(ratios * weights)) == pytest.approx(3)


def test_the_worst_domain_wins_in_the_end():
    beliefs = jnp.asarray([0.98, 0.01, 0.01])
    losses = jnp.asarray([[1.0, 4.0, 2.0]])
    for _ in range(400):
        _, beliefs = domain_ratios(0.05, beliefs, losses, jnp.ones((1, 3)), jnp.asarray([[0, 1, 2]]))
    assert float(beliefs[1]) > 0.999


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.5}, "alpha is 0.5; expected 1.0: ObjectiveConfig.risk is 'mean'"),
        ({"risk": "cvar", "alpha": 0.0}, "alpha is 0.0; expected more than 0 and at most 1"),
        ({"risk": "cvar", "quantile": 0.9}, "quantile is 0.9; expected 0.5"),
        ({"level": "document"}, "level is 'document'; expected 'token'"),
        ({"risk": "dro", "level": "sequence"}, "level is 'sequence'; expected 'token'"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"focal": -1.0}, "focal is -1.0; expected at least 0"),
        ({"risk": "entropic", "beta": 0.0}, "beta is 0.0; expected more than 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        ObjectiveConfig(**settings)


def test_ratios_have_no_gradient_of_their_own():
    config = RISKS["entropic"]

    def value(losses):
        ratios = jax.lax.stop_gradient(risk_ratios(config, losses, jnp.asarray(WEIGHTS), jnp.asarray(SEGMENTS)))
        return jnp.sum(ratios * WEIGHTS * losses) / WEIGHTS.sum()

    risk = jax.grad(
        lambda losses: risk_value(config, losses, jnp.asarray(WEIGHTS), jnp.asarray(SEGMENTS), jnp.ones((3, 7)))
    )
    np.testing.assert_allclose(jax.grad(value)(jnp.asarray(LOSSES)), risk(jnp.asarray(LOSSES)), rtol=1e-4, atol=1e-6)
