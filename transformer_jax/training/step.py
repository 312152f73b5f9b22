"""The training state and the pure step that turns one state into the next."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from transformer_jax.architecture import DType
from transformer_jax.config import ObjectiveConfig
from transformer_jax.machine import training_options
from transformer_jax.model.experts import Routing
from transformer_jax.model.transformer import Model, Params
from transformer_jax.text.pipeline import Batch
from transformer_jax.training.masking import Hide
from transformer_jax.training.objectives import (
    Sums,
    load_balancing_loss,
    objective_sums,
    router_z_loss,
    token_costs,
)
from transformer_jax.training.risk import domain_ratios, risk_ratios
from transformer_jax.training.token_losses import TokenLosses, token_losses

Metrics = dict[str, Array]
TrainStep = Callable[["TrainState", Batch], tuple["TrainState", Metrics]]


class TrainState(NamedTuple):
    """All that a run needs to go on, apart from the place in the data."""

    params: Params
    opt_state: Any
    step: Int[Array, ""]
    """Batches that have been taken."""
    updates: Int[Array, ""]
    """Batches that changed the parameters: all but those without a target, and those that were skipped."""
    usual_norm: Float[Array, ""]
    """A running mean of the gradient's norm over the updates, not yet divided by what its weights sum to."""
    key: PRNGKeyArray
    """Never changes; a step's randomness is fold_in(key, step)."""
    ema: Params | None = None
    """A running mean of the parameters; None where none is kept."""
    beliefs: Float[Array, " G"] | None = None
    """How much each domain counts, where that follows its losses."""


class StepConfig(NamedTuple):
    """What the step does with a batch, apart from the model and the optimizer."""

    objective: ObjectiveConfig = ObjectiveConfig()
    balance: float = 0.0
    """Weight of the routers' load-balancing loss."""
    router_z: float = 0.0
    """Weight of the routers' z-loss."""
    accumulate: int = 1
    """Parts that a batch is taken in, one after the other."""
    ema_decay: float | None = None
    """What the running mean of the parameters keeps of itself at each update."""
    skip_nonfinite: bool = False
    """Whether a step with a gradient that is not finite changes nothing."""
    skip_spikes: float | None = None
    """How many times its usual norm a gradient may have; a longer one changes nothing."""
    domains: int = 1
    """Corpora that the text is from."""


PLAIN = StepConfig()

USUAL_DECAY = 0.99
"""Of the running mean of the gradient's norm."""
FIRST_SPIKE = 20
"""Updates after which there is a usual norm."""


def init_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    config: StepConfig = PLAIN,
) -> TrainState:
    """Make the state before the first step."""
    init_key, step_key = jax.random.split(key)
    params = model.init(init_key)
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.zeros((), jnp.int32),
        updates=jnp.zeros((), jnp.int32),
        usual_norm=jnp.zeros((), jnp.float32),
        key=step_key,
        ema=None if config.ema_decay is None else jax.tree.map(jnp.copy, params),
        beliefs=jnp.full(config.domains, 1 / config.domains) if config.objective.risk == "dro" else None,
    )


def batch_losses(
    model: Model, params: Params, batch: Batch, dropout_key: PRNGKeyArray | None = None
) -> tuple[TokenLosses, Routing | None]:
    """Predict all targets of the batch at once (teacher forcing); also tells what the routers did."""
    hidden, _, routing = model.trunk(
        params,
        batch.tokens,
        batch.positions,
        segment_ids=batch.segment_ids,
        prefix_lengths=batch.prefix_lengths,
        dropout_key=dropout_key,
        in_order=True,
    )
    return token_losses(model, params, hidden, jnp.asarray(batch.targets)), routing


class _Known(NamedTuple):
    """What a part of a batch has to know of the whole batch."""

    weight: Float[Array, ""]
    """Of all targets."""
    ratios: Float[Array, "*rows"] | None = None
    """By how much more than in the mean each token counts; None: the part is the whole, which tells."""
    routing: Routing | None = None
    """What the routers did; None: the same."""


def make_train_step(
    model: Model, optimizer: optax.GradientTransformation, config: StepConfig = PLAIN, hide: Hide | None = None
) -> TrainStep:
    """Return the pure step; `hide` hides what of a batch is to be predicted, where that is not every next token.

    A batch that is taken in parts gives the gradient of the whole: sums are divided once, by the weight of all. Where
    the whole has to be known before any part can be, because of a risk or of routers, each part is computed twice.
    """
    take = _at_once if config.accumulate == 1 else _in_parts

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        batch = jax.tree.map(jnp.asarray, batch)
        key = jax.random.fold_in(state.key, state.step)
        if hide is not None:
            key, hide_key = jax.random.split(key)
            batch = hide(batch, hide_key)
        taken = take(model, config, state, batch, key)
        norm = optax.tree.norm(taken.grads)

        def change(state: TrainState) -> TrainState:
            updates, opt_state = optimizer.update(taken.grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return state._replace(
                params=params,
                opt_state=opt_state,
                updates=state.updates + 1,
                usual_norm=USUAL_DECAY * state.usual_norm + (1 - USUAL_DECAY) * norm,
                ema=None if state.ema is None else _moved(state.ema, params, config.ema_decay),
                beliefs=taken.beliefs,
            )

        # A choice between branches: one between arrays would read and write all of them once more.
        state = jax.lax.cond(_is_usual(config, state, norm, taken.sums), change, lambda state: state, state)
        metrics = _figures(config.objective, taken) | {"grad_norm": norm, "updates": state.updates}
        return state._replace(step=state.step + 1), metrics

    return train_step


class _Taken(NamedTuple):
    """What a batch gives."""

    grads: Params
    sums: Sums
    router: Metrics
    """The losses of the routers."""
    beliefs: Array | None
    """How much domains count from now on."""


def _ratios(config: StepConfig, state: TrainState, costs: Array, batch: Batch) -> tuple[Array, Array | None]:
    """By how much more than in the mean each token counts, and how much domains do from now on."""
    costs, weights = jax.lax.stop_gradient(costs), jnp.asarray(batch.loss_weights)
    if state.beliefs is None:
        return risk_ratios(config.objective, costs, weights, jnp.asarray(batch.segment_ids)), None
    return domain_ratios(config.objective.dro_rate, state.beliefs, costs, weights, jnp.asarray(batch.domains))


def _value(
    params: Params,
    model: Model,
    config: StepConfig,
    state: TrainState,
    batch: Batch,
    key: PRNGKeyArray,
    known: _Known,
) -> tuple[Array, tuple[Sums, Metrics, Array | None]]:
    """What is made small: a part's share of the objective, and of the routers' losses."""
    losses, routing = batch_losses(model, params, batch, key)
    costs = token_costs(config.objective, losses)
    ratios, beliefs = _ratios(config, state, costs, batch) if known.ratios is None else (known.ratios, None)
    sums = objective_sums(config.objective, losses, costs, jnp.asarray(batch.loss_weights), ratios)
    # A batch without a target has no gradient.
    total = sums.objective / jnp.where(known.weight > 0, known.weight, 1)
    if routing is None:
        return total, (sums, {}, beliefs)
    balance, z = load_balancing_loss(routing, known.routing), router_z_loss(routing, known.routing)
    total += config.balance * balance + config.router_z * z
    return total, (sums, {"router_balance": balance, "router_z": z}, beliefs)


_gradient = jax.grad(_value, has_aux=True)


def _at_once(model: Model, config: StepConfig, state: TrainState, batch: Batch, key: PRNGKeyArray) -> _Taken:
    known = _Known(jnp.sum(batch.loss_weights))
    grads, aside = _gradient(state.params, model, config, state, batch, key, known)
    return _Taken(grads, *aside)


def _in_parts(model: Model, config: StepConfig, state: TrainState, batch: Batch, key: PRNGKeyArray) -> _Taken:
    parts = jax.tree.map(lambda x: _cut(x, config.accumulate), batch)
    keys = jax.random.split(key, config.accumulate)
    ratios, beliefs, routing = jnp.ones(batch.tokens.shape), None, None
    if config.balance or config.router_z or not config.objective.is_mean:

        def look(part_and_key: tuple[Batch, PRNGKeyArray]) -> tuple[Array, Routing | None]:
            losses, routing = batch_losses(model, state.params, *part_and_key)
            return token_costs(config.objective, losses), routing

        costs, routing = jax.lax.map(look, (parts, keys))
        ratios, beliefs = _ratios(config, state, _joined(costs), batch)
        routing = jax.tree.map(lambda x: x.sum(axis=0), routing)
    known = _Known(jnp.sum(batch.loss_weights), routing=routing)

    def one(part: tuple[Batch, Array, PRNGKeyArray]) -> tuple[Params, Sums, Metrics]:
        batch, ratios, key = part
        grads, aside = _gradient(state.params, model, config, state, batch, key, known._replace(ratios=ratios))
        return grads, *aside[:2]

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, one(part)), None

    each = (parts, _cut(ratios, config.accumulate), keys)
    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], each))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (grads, sums, router), _ = jax.lax.scan(add, zeros, each)
    return _Taken(grads, sums, router, beliefs)


def _is_usual(config: StepConfig, state: TrainState, norm: Array, sums: Sums) -> Bool[Array, ""]:
    """Whether a batch is to change anything."""
    usual = sums.weight > 0
    if config.skip_nonfinite or config.skip_spikes is not None:
        usual &= jnp.isfinite(norm) & jnp.isfinite(sums.objective)
    if config.skip_spikes is not None:
        mean = state.usual_norm / (1 - USUAL_DECAY ** jnp.maximum(state.updates, 1))
        usual &= (state.updates < FIRST_SPIKE) | (norm <= config.skip_spikes * mean)
    return usual


def _figures(objective: ObjectiveConfig, taken: _Taken) -> Metrics:
    """The means of a batch, for whoever watches."""
    sums = taken.sums
    divisor = jnp.where(sums.weight > 0, sums.weight, 1)
    figures = {"loss": sums.nll / divisor, "tokens": sums.weight, **taken.router}
    if objective != ObjectiveConfig():
        figures |= {"objective": sums.objective / divisor}
    return figures | ({"z_loss": sums.z / divisor} if objective.z_loss else {})


def _moved(mean: Params, params: Params, decay: float | None) -> Params:
    """Move a running mean towards the parameters."""
    assert decay is not None
    return jax.tree.map(lambda mean, new: decay * mean + (1 - decay) * new, mean, params)


def _cut(x: Array, parts: int) -> Array:
    """Cut a batch (B ...) into parts (parts B/parts ...), each with rows from all over it: no row leaves its device."""
    return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)


def _joined(x: Array) -> Array:
    """The other way round."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def compile_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    dtype: DType,
    config: StepConfig = PLAIN,
    hide: Hide | None = None,
) -> TrainStep:
    """Return the step under jit, for a model that computes in `dtype`. It donates the state: the old one is gone."""
    step = make_train_step(model, optimizer, config, hide)
    return jax.jit(step, donate_argnums=0, compiler_options=training_options(dtype))
