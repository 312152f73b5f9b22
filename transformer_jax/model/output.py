"""What makes logits of the last hidden states, as a value that a loss can take in parts of the vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.model.layers import product, product_with_table


class OutputLayer(NamedTuple):
    """logits = cap tanh((hidden w + bias) / cap), the bias and the cap where there are any."""

    table: Float[Array, "V D"] | None = None
    """The embedding table, whose rows are w's columns; or None, and there is a weight."""
    weight: Float[Array, "D V"] | None = None
    bias: Float[Array, " V"] | None = None
    softcap: float | None = None


VOCABULARY_AXES = {"table": 0, "weight": 1, "bias": 0}
"""Which dimension of each array has one entry an id."""


def logits_of(layer: OutputLayer, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Make the logits of all ids that the layer has, in float32.

    The best of them lie so close to one another that rounding them to bfloat16 would make ties.
    """
    if layer.table is not None:
        logits = product_with_table(hidden, layer.table, jnp.float32)
    else:
        assert layer.weight is not None
        logits = product(hidden, layer.weight, jnp.float32)
    if layer.bias is not None:
        logits = logits + layer.bias
    return logits if layer.softcap is None else layer.softcap * jnp.tanh(logits / layer.softcap)


def part(layer: OutputLayer, first: Array, count: int) -> OutputLayer:
    """The layer of `count` ids from `first` on."""
    cut = {
        name: jax.lax.dynamic_slice_in_dim(array, first, count, axis)
        for name, axis in VOCABULARY_AXES.items()
        if (array := getattr(layer, name)) is not None
    }
    return layer._replace(**cut)


def add_to_part(layer: OutputLayer, first: Array, added: OutputLayer, count: int) -> OutputLayer:
    """The layer with one of `count` ids added to it from `first` on: how gradients of parts come together."""
    before = part(layer, first, count)
    sums = {
        name: jax.lax.dynamic_update_slice_in_dim(array, getattr(before, name) + getattr(added, name), first, axis)
        for name, axis in VOCABULARY_AXES.items()
        if (array := getattr(layer, name)) is not None
    }
    return layer._replace(**sums)
