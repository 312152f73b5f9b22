"""How well a model predicts text that it was not trained on."""

import math
from collections.abc import Callable, Iterable

import jax

from transformer_jax.model.transformer import Model, Params
from transformer_jax.text.pipeline import Batch
from transformer_jax.training.step import batch_loss

EvalStep = Callable[[Params, Batch], tuple[jax.Array, jax.Array]]


def make_eval_step(model: Model) -> EvalStep:
    """Return the pure (params, batch) -> (sum of nats, number of targets)."""

    def eval_step(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        total, weight, _ = batch_loss(model, params, batch)
        return total, weight

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
