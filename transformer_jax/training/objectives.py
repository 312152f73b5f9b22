"""What is optimised, as (sum, weight) pairs: means are taken by whoever reports them, once, at the end.

An objective knows logits and targets, and not where a batch came from.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.model.experts import Routing


def next_token_loss(
    logits: Float[Array, "*rows V"], targets: Int[Array, "*rows"], loss_weights: Float[Array, "*rows"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum the weighted negative log-likelihood of the targets, in nats, and the weights.

    sum_t w_t (log sum_v exp(logits[t, v]) - logits[t, target_t]),    sum_t w_t
    """
    # A comparison instead of a look-up: the gradient of a look-up is a scatter, which is slow on CPU and TPU.
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    target_logits = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - target_logits
    return jnp.sum(nll * loss_weights), jnp.sum(loss_weights)


def load_balancing_loss(routing: Routing) -> Float[Array, ""]:
    """Say how unevenly tokens were sent to experts; least, at the number of experts a token passes, when evenly.

        E sum_e (times e was chosen / n) (sum of e's probabilities / n),    n: tokens times layers

    Reference: Fedus et al. 2022, "Switch Transformers", equation 4, over all layers together as transformers has it.
    """
    n = jnp.maximum(routing.tokens.sum(), 1)
    chosen, probabilities = routing.chosen.sum(axis=0) / n, routing.probabilities.sum(axis=0) / n
    return chosen.shape[0] * jnp.sum(chosen * probabilities)


def router_z_loss(routing: Routing) -> Float[Array, ""]:
    """The mean square of the routers' log-normalizers, which keeps their logits small.

    Reference: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    return routing.squared_normalizers.sum() / jnp.maximum(routing.tokens.sum(), 1)
