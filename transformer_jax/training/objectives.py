"""What is optimised, as (sum, weight) pairs: means are taken by whoever reports them, once, at the end.

An objective knows what each token costs and what it weighs, and not where a batch came from.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.config import ObjectiveConfig
from transformer_jax.model.experts import Routing
from transformer_jax.training.token_losses import TokenLosses


class Sums(NamedTuple):
    """Sums over tokens, all to be divided by the same weight."""

    weight: Float[Array, ""]
    """Of the targets."""
    objective: Float[Array, ""]
    """What is optimised."""
    nll: Float[Array, ""]
    """Nats that the targets cost: the cross-entropy, without smoothing, focus, risk or z-loss."""
    z: Float[Array, ""]
    """The z-loss, which is a part of the objective."""


def token_costs(config: ObjectiveConfig, losses: TokenLosses) -> Float[Array, "*rows"]:
    """Tell what each token costs, in nats.

        (1 - p)^gamma ((1 - s) nll + s uniform),    p = e^-nll, s: label_smoothing, gamma: focal

    Reference: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7; Lin et al. 2017, "Focal Loss for
    Dense Object Detection", equation 4.
    """
    s, cost = config.label_smoothing, losses.nll
    if s:
        cost = (1 - s) * losses.nll + s * losses.uniform
    if config.focal:
        # The root of 0 has no slope: a token that is known for certain costs nothing, and has no gradient.
        unknown = -jnp.expm1(-jnp.maximum(losses.nll, 1e-6))
        cost = unknown**config.focal * cost
    return cost


def objective_sums(
    config: ObjectiveConfig,
    losses: TokenLosses,
    costs: Float[Array, "*rows"],
    weights: Float[Array, "*rows"],
    ratios: Float[Array, "*rows"],
) -> Sums:
    """Sum what tokens cost, by their weights and by how much more than in the mean they count.

        sum_t w_t (r_t cost_t + z log-normalizer_t^2),    sum_t w_t

    Reference: Chowdhery et al. 2022, "PaLM", section 5, for the z-loss.
    """
    z = config.z_loss * jnp.sum(weights * losses.log_normalizer**2) if config.z_loss else jnp.zeros((), jnp.float32)
    counted = weights if config.is_mean else weights * ratios
    return Sums(jnp.sum(weights), jnp.sum(counted * costs) + z, jnp.sum(weights * losses.nll), z)


def load_balancing_loss(routing: Routing, total: Routing | None = None) -> Float[Array, ""]:
    """Say how unevenly tokens were sent to experts; least, at the number of experts a token passes, when evenly.

        E sum_e (times e was chosen / n) (sum of e's probabilities / n),    n: tokens times layers

    Of a part of a batch it is that part's share of the loss of the `total`. Only probabilities have a gradient.

    Reference: Fedus et al. 2022, "Switch Transformers", equation 4, over all layers together as transformers has it.
    """
    total = routing if total is None else total
    n = jnp.maximum(total.tokens.sum(), 1)
    chosen, probabilities = total.chosen.sum(axis=0) / n, routing.probabilities.sum(axis=0) / n
    return chosen.shape[0] * jnp.sum(chosen * probabilities)


def router_z_loss(routing: Routing, total: Routing | None = None) -> Float[Array, ""]:
    """The mean square of the routers' log-normalizers, which keeps their logits small; of a part, its share of it.

    Reference: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    return routing.squared_normalizers.sum() / jnp.maximum((routing if total is None else total).tokens.sum(), 1)
