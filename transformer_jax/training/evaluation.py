"""How well a model predicts text that it was not trained on."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from transformer_jax.model.transformer import Model, Params
from transformer_jax.text.pipeline import Batch
from transformer_jax.training.masking import Hide
from transformer_jax.training.step import batch_losses

EvalStep = Callable[[Params, Batch, PRNGKeyArray], tuple[jax.Array, jax.Array]]


class Heldout(NamedTuple):
    """How well a text is predicted."""

    loss: float
    """Nats per target."""
    bits_per_byte: float | None
    """None where not all of the text is predicted."""


def make_eval_step(model: Model, hide: Hide | None = None) -> EvalStep:
    """Return the pure (params, batch, key) -> (sum of nats, number of targets); `hide` draws what is predicted."""

    def eval_step(params: Params, batch: Batch, key: PRNGKeyArray) -> tuple[jax.Array, jax.Array]:
        if hide is not None:
            batch = hide(jax.tree.map(jnp.asarray, batch), key)
        losses, _ = batch_losses(model, params, batch)
        weights = jnp.asarray(batch.loss_weights)
        return jnp.sum(losses.nll * weights), jnp.sum(weights)

    return eval_step


def evaluate(eval_step: EvalStep, params: Params, batches: Iterable[Batch], num_bytes: int | None) -> Heldout:
    """Divide what the model needs for a text by the text's targets, and by its bytes unless that is None.

        sum_t -ln p(target_t) / targets,    sum_t -log2 p(target_t) / bytes

    Bits per byte, unlike a loss per token, can be compared between tokenizers, and with compressors. What is hidden, if
    anything, is the same each time.
    """
    nats = targets = 0.0
    for number, batch in enumerate(batches):
        sums = eval_step(params, batch, jax.random.fold_in(jax.random.key(0), number))
        nats, targets = nats + float(sums[0]), targets + float(sums[1])
    return Heldout(nats / max(targets, 1), None if num_bytes is None else nats / math.log(2) / num_bytes)
