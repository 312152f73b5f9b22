"""The optimizer as one optax chain, and its learning-rate schedule, from config."""

from typing import Any

import jax
import optax

from transformer_jax.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Rise linearly over the warm-up, then fall along half a cosine; a function of the updates made before.

        update t = 1 ... steps:   peak t / warmup                                          up to t = warmup
                                  peak (f + (1 - f) (1 + cos(pi (t - warmup) / (steps - warmup))) / 2)    after it

    So no update is lost to a rate of 0, and the last one has the final fraction f of the peak.

    Reference: Loshchilov and Hutter 2017, "SGDR", equation 5.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, steps)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, max(steps, warmup + 1), peak * config.final_fraction
    )
    return lambda count: schedule(count + 1)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Chain gradient clipping and AdamW.

        g <- g min(1, clip / |g|)       m <- b1 m + (1 - b1) g       v <- b2 v + (1 - b2) g^2
        p <- p - lr (m^ / (sqrt(v^) + eps) + decay p)      m^, v^: divided by 1 - b1^t, 1 - b2^t

    Reference: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )


def decays(params: Any) -> Any:
    """True for each parameter that weight decay applies to: matrices that act on activations, not vectors or tables."""

    def is_matrix(path: tuple[Any, ...], param: jax.Array) -> bool:
        return param.ndim >= 2 and not str(path[-1].key).endswith("embed")

    return jax.tree_util.tree_map_with_path(is_matrix, params)
