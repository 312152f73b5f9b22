"""What part of the distribution of losses is optimised: not the mean alone, but a quantile, a tail, the worst domain.

Everything is said by ratios: by how much more than in the mean a token counts. They depend on the losses, and are held
fast while the gradient is taken, which makes it the gradient of the risk: each of these risks changes with a loss just
by what the loss counts in it (Danskin's theorem). Ratios, weighted as the tokens are, have mean 1.

    mean       1
    quantile   only what lies at inf {l : P(L <= l) >= q}
    cvar       only the worst alpha of them, alike (Rockafellar and Uryasev 2000, "Optimization of Conditional
               Value-at-Risk", equation 3); with alpha = 1 the mean
    entropic   e^(beta l) / mean of e^(beta l), the gradient of log(mean of e^(beta l)) / beta (Foellmer and Schied
               2002, "Convex measures of risk and trading constraints", section 5)
    dro        by domain, q_g / share of g's tokens, with q_g <- q_g e^(rate l_g), normalised, after each batch (Sagawa
               et al. 2020, "Distributionally Robust Neural Networks for Group Shifts", algorithm 1)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.config import ObjectiveConfig, RiskLevel


class Units(NamedTuple):
    """What a risk is of: tokens, or rows or documents with the mean of their tokens' losses."""

    losses: Float[Array, " U"]
    weights: Float[Array, " U"]
    """Of a unit's tokens together; 0 for a unit without targets, whose loss says nothing."""
    of_token: Int[Array, "B T"]
    """Which unit a token belongs to."""


def units_of(
    losses: Float[Array, "B T"], weights: Float[Array, "B T"], segment_ids: Int[Array, "B T"], level: RiskLevel
) -> Units:
    """Gather the tokens of each unit. A document that goes on in another row is another unit there."""
    B, T = losses.shape
    if level == "token":
        return Units(losses.ravel(), weights.ravel(), jnp.arange(B * T).reshape(B, T))
    rows = jnp.broadcast_to(jnp.arange(B)[:, None], (B, T))
    of_token, count = (rows, B) if level == "sequence" else (rows * (T + 1) + segment_ids, B * (T + 1))
    total = jax.ops.segment_sum((losses * weights).ravel(), of_token.ravel(), count)
    weight = jax.ops.segment_sum(weights.ravel(), of_token.ravel(), count)
    return Units(total / jnp.where(weight > 0, weight, 1), weight, of_token)


def risk_ratios(
    config: ObjectiveConfig,
    losses: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """Tell by how much more than in the mean each token counts, for all risks but that over domains."""
    if config.is_mean:
        return jnp.ones_like(losses)
    units = units_of(losses, weights, segment_ids, config.level)
    counts = units.weights > 0
    if config.risk == "entropic":
        largest = jnp.max(jnp.where(counts, units.losses, -jnp.inf))
        ratios = jnp.exp(config.beta * jnp.where(counts, units.losses - largest, -jnp.inf))
    elif config.risk == "quantile":
        ratios = units.losses == _reaching(units.losses, units.weights, config.quantile)
    else:
        ratios = _tail(units, config.alpha)
    ratios = jnp.where(counts, ratios, 0)
    return (ratios * _over(units.weights.sum(), jnp.sum(ratios * units.weights)))[units.of_token]


def _reaching(losses: Float[Array, " U"], weights: Float[Array, " U"], share: float) -> Float[Array, ""]:
    """The first loss, from the least up, with which their weights come to `share` of all."""
    order = jnp.argsort(jnp.where(weights > 0, losses, jnp.inf))
    below = jnp.cumsum(weights[order]) < share * weights.sum()
    # By rounding, none might reach the whole.
    return losses[order][jnp.minimum(below.sum(), jnp.maximum((weights > 0).sum() - 1, 0))]


def _tail(units: Units, alpha: float) -> Float[Array, " U"]:
    """1 for what is worse than the tail's border, and for what lies on it the part that alpha still has room for."""
    border = -_reaching(-units.losses, units.weights, alpha)
    worse, on_it = units.losses > border, units.losses == border
    room = alpha * units.weights.sum() - jnp.sum(units.weights * worse)
    return worse + on_it * jnp.clip(_over(room, jnp.sum(units.weights * on_it)), 0, 1)


def domain_ratios(
    rate: float,
    beliefs: Float[Array, " G"],
    losses: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    domains: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, " G"]]:
    """The ratios by domain, and the beliefs q after this batch; a domain that it lacks keeps its own."""
    G = len(beliefs)
    weight = jax.ops.segment_sum(weights.ravel(), domains.ravel(), G)
    mean = _over(jax.ops.segment_sum((losses * weights).ravel(), domains.ravel(), G), weight)
    log_beliefs = jnp.log(beliefs) + jnp.where(weight > 0, rate * mean, 0)
    beliefs = jax.nn.softmax(log_beliefs)
    here = jnp.where(weight > 0, beliefs, 0)
    ratios = _over(here, here.sum()) * _over(weight.sum(), weight)
    return ratios[domains], beliefs


def _over(x: Array, y: Array) -> Array:
    """x / y, and 0 where there is nothing to divide by."""
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)
