"""How well a model predicts text that it was not trained on."""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from transformer_jax.model.transformer import Model, Params
from transformer_jax.text.pipeline import Batch
from transformer_jax.training.step import batch_losses

EvalStep = Callable[[Params, Batch], tuple[jax.Array, jax.Array]]


def make_eval_step(model: Model) -> EvalStep:
    """Return the pure (params, batch) -> (sum of nats, number of targets)."""

    def eval_step(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        losses, _ = batch_losses(model, params, batch)
        weights = jnp.asarray(batch.loss_weights)
        return jnp.sum(losses.nll * weights), jnp.sum(weights)

    return eval_step


def bits_per_byte(
    eval_step: EvalStep,
    params: Params,
    batches: Iterable[Batch],
    num_bytes: int,
) -> float:
    """Divide the bits that the model needs for a text by the text's bytes.

        sum_t -log2 p(target_t) / bytes

    Unlike a loss per token, it can be compared between tokenizers, and with compressors.
    """
    nats = sum(float(eval_step(params, batch)[0]) for batch in batches)
    return nats / math.log(2) / num_bytes
