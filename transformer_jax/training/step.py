"""The training state and the pure step that turns one state into the next."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PRNGKeyArray

from transformer_jax.architecture import DType
from transformer_jax.machine import training_options
from transformer_jax.model.experts import Routing
from transformer_jax.model.transformer import Model, Params
from transformer_jax.text.pipeline import Batch
from transformer_jax.training.objectives import load_balancing_loss, next_token_loss, router_z_loss

Metrics = dict[str, Array]
TrainStep = Callable[["TrainState", Batch], tuple["TrainState", Metrics]]


class TrainState(NamedTuple):
    """All that a run needs to go on, apart from the place in the data."""

    params: Params
    opt_state: Any
    step: Int[Array, ""]
    """Updates that have been made."""
    key: PRNGKeyArray
    """Never changes; a step's randomness is fold_in(key, step)."""


def init_state(model: Model, optimizer: optax.GradientTransformation, key: PRNGKeyArray) -> TrainState:
    """Make the state before the first step."""
    init_key, step_key = jax.random.split(key)
    params = model.init(init_key)
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), step_key)


class RouterWeights(NamedTuple):
    """How much the losses of a model's routers count beside its own."""

    balance: float = 0.0
    z: float = 0.0


UNWEIGHTED = RouterWeights()


def batch_loss(
    model: Model, params: Params, batch: Batch, dropout_key: PRNGKeyArray | None = None
) -> tuple[Array, Array, Routing | None]:
    """Predict every next token of the batch at once (teacher forcing).

    Returns the sums of the loss and the weights, and what the routers did.
    """
    hidden, _, routing = model.trunk(
        params,
        batch.tokens,
        batch.positions,
        segment_ids=batch.segment_ids,
        dropout_key=dropout_key,
        in_order=True,
    )
    logits = model.unembed(params, hidden)
    return *next_token_loss(logits, jnp.asarray(batch.targets), jnp.asarray(batch.loss_weights)), routing


def make_train_step(
    model: Model, optimizer: optax.GradientTransformation, router: RouterWeights = UNWEIGHTED
) -> TrainStep:
    """Return the pure step."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def objective(params: Params) -> tuple[Array, Metrics]:
            total, weight, routing = batch_loss(model, params, batch, jax.random.fold_in(state.key, state.step))
            # A batch without a target has no gradient.
            loss = jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), 0)
            metrics = {"loss": loss, "tokens": weight}
            if routing is None:
                return loss, metrics
            balance, z = load_balancing_loss(routing), router_z_loss(routing)
            return loss + router.balance * balance + router.z * z, metrics | {"router_balance": balance, "router_z": z}

        (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics |= {"grad_norm": optax.tree.norm(grads)}
        return TrainState(params, opt_state, state.step + 1, state.key), metrics

    return train_step


def compile_train_step(
    model: Model, optimizer: optax.GradientTransformation, dtype: DType, router: RouterWeights = UNWEIGHTED
) -> TrainStep:
    """Return the step under jit, for a model that computes in `dtype`. It donates the state: the old one is gone."""
    step = make_train_step(model, optimizer, router)
    return jax.jit(step, donate_argnums=0, compiler_options=training_options(dtype))
