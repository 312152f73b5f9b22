"""The optimizer as one optax chain, and its learning-rate schedule, from config."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from transformer_jax.config import OptimizerConfig
from transformer_jax.training.parameter_groups import multipliers


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Rise linearly over the warm-up, then fall as the schedule says; a function of the updates made before.

        update t = 1 ... steps:    peak t / warmup    up to t = warmup; after it, x = (t - warmup) / (steps - warmup)
        constant                   peak
        linear                     peak (1 - (1 - f) x)
        cosine                     peak (f + (1 - f) (1 + cos(pi x)) / 2)
        wsd                        peak until the last share d of the steps, then linearly to f peak
        inverse_sqrt               peak sqrt(warmup / t)

    So no update is lost to a rate of 0, and the last one has the final fraction f of the peak where it has one.

    Reference: Loshchilov and Hutter 2017, "SGDR", equation 5; Hu et al. 2024, "MiniCPM", section 4.2 (wsd: warm-up,
    stable, decay); Vaswani et al. 2017, "Attention Is All You Need", section 5.3.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, steps)
    rest, end = max(steps - warmup, 1), peak * config.final_fraction
    if config.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, rest)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, config.final_fraction)
    elif config.schedule == "wsd":
        decay = min(max(round(steps * config.decay_fraction), 1), rest)
        after = optax.linear_schedule(peak, end, decay, transition_begin=rest - decay)
    else:
        first = max(warmup, 1)
        return lambda count: peak * jnp.minimum((count + 1) / first, jnp.sqrt(first / (count + 1)))
    schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, max(warmup, 1)), after], [warmup])
    return lambda count: schedule(count + 1)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Chain gradient clipping, the optimizer's own direction, decoupled weight decay and the learning rate.

        g <- g min(1, clip / |g|)       u <- direction(g)       p <- p - lr rate_p (u + decay decay_p p)

    adamw      m^ / (sqrt(v^) + eps), m and v running means of g and g^2, divided by 1 - b1^t and 1 - b2^t
    adafactor  g / sqrt of a running mean of g^2 that is kept by rows and columns, times the root mean square of p
    lion       sign(b1 m + (1 - b1) g), m a running mean of g with b2
    muon       of a matrix: the nearest orthogonal matrix to a momentum, times 0.2 sqrt(its longer side), so that it
               moves as far as AdamW would; of all else, and of tables and the output layer, adamw
    sgd        a momentum, m <- b1 m + g

    rate_p and decay_p are those of the parameter's group.

    Reference: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2; Shazeer and Stern 2018,
    "Adafactor", algorithm 4; Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2; Liu et al.
    2025, "Muon is Scalable for LLM Training", equation 4.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        _direction(config),
        _decay(config),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
    )


def _direction(config: OptimizerConfig) -> optax.GradientTransformation:
    b1, b2, kept = config.beta1, config.beta2, config.first_moment
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=config.eps, mu_dtype=kept)
    if config.kind == "adamw":
        return adam
    if config.kind == "adafactor":
        return optax.chain(
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
        )
    if config.kind == "lion":
        return optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=kept)
    if config.kind == "sgd":
        return optax.trace(decay=b1, accumulator_dtype=kept)
    muon = optax.chain(
        contrib.scale_by_muon(beta=b1, mu_dtype=kept, weight_dimension_numbers=_sides),
        optax.stateless(lambda updates, _: jax.tree.map(_as_far_as_adamw, updates)),
    )
    return optax.partition({"matrix": muon, "other": adam}, _kinds_for_muon)


def _decay(config: OptimizerConfig) -> optax.GradientTransformation:
    """Add the decay of each parameter to its direction, and multiply by what its group says."""

    def one(u: jax.Array, p: jax.Array, rate: float, decay: float) -> jax.Array:
        if not rate:
            # Also where the direction is not finite.
            return jnp.zeros_like(u)
        u = u + config.weight_decay * decay * p if config.weight_decay * decay else u
        return u if rate == 1 else rate * u

    def update(updates: Any, params: Any) -> Any:
        assert params is not None
        return jax.tree.map(one, updates, params, *multipliers(config.groups, params))

    return optax.stateless(update)


def _kinds_for_muon(params: Any) -> Any:
    """A matrix inside a layer, or one for each of its experts, but not the router, which is a classifier."""

    def kind(path: tuple[Any, ...], param: Any) -> str:
        names = [str(entry.key) for entry in path]
        inside = names[0].startswith("layers_") and "router" not in names
        return "matrix" if inside and param.ndim >= 2 else "other"

    return jax.tree_util.tree_map_with_path(kind, params)


def _sides(params: Any) -> Any:
    """The last two dimensions are a matrix's; those before them count its experts."""
    return jax.tree.map(lambda p: contrib.MuonDimensionNumbers(p.ndim - 2, p.ndim - 1), params)


def _as_far_as_adamw(update: jax.Array) -> jax.Array:
    return 0.2 * max(update.shape[-2:]) ** 0.5 * update
