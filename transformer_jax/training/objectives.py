"""What is optimised, as (sum, weight) pairs: means are taken by whoever reports them, once, at the end.

An objective knows logits and targets, and not where a batch came from.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
