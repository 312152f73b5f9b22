"""How tensors of a published file become arrays of ours, and back.

A layout is a pair of functions, each the other's inverse. They are traced to learn the shapes that a file must have, so
a shape is never written down twice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from transformer_jax.architecture import ModelConfig

Arrays = list[Array]


@dataclass(frozen=True)
class Layout:
    """`read` makes our arrays of a row from theirs, `write` theirs from ours."""

    read: Callable[[ModelConfig, Arrays], Arrays]
    write: Callable[[ModelConfig, Arrays], Arrays]


AS_IT_IS = Layout(read=lambda c, theirs: theirs, write=lambda c, ours: ours)

TRANSPOSED = Layout(read=lambda c, theirs: [w.T for w in theirs], write=lambda c, ours: [w.T for w in ours])
"""PyTorch's Linear stores [out in]; ours is [in out]."""


def _query_key_value(c: ModelConfig) -> list[int]:
    return [c.N * c.H, (c.N + c.K) * c.H]


JOINED_HEADS = Layout(
    read=lambda c, theirs: jnp.split(theirs[0], _query_key_value(c), axis=-1),
    write=lambda c, ours: [jnp.concatenate(ours, axis=-1)],
)
"""Queries, keys and values beside each other: [in q+k+v], or a bias of q+k+v (GPT-2)."""

JOINED_HEADS_TRANSPOSED = Layout(
    read=lambda c, theirs: jnp.split(theirs[0].T, _query_key_value(c), axis=-1),
    write=lambda c, ours: [jnp.concatenate(ours, axis=-1).T],
)
"""The same as [q+k+v in] (Phi-3)."""

JOINED_GATE = Layout(
    read=lambda c, theirs: jnp.split(theirs[0].T, 2, axis=-1),
    write=lambda c, ours: [jnp.concatenate(ours, axis=-1).T],
)
"""Gate above up, as [gate+up in] (Phi-3)."""


def _read_by_head(c: ModelConfig, theirs: Arrays) -> Arrays:
    joined = theirs[0].T
    by_head = joined.reshape(*joined.shape[:-1], c.N, 3, c.H)
    return [by_head[..., part, :].reshape(*joined.shape[:-1], -1) for part in range(3)]


def _write_by_head(c: ModelConfig, ours: Arrays) -> Arrays:
    by_head = [part.reshape(*part.shape[:-1], c.N, c.H) for part in ours]
    return [jnp.stack(by_head, axis=-2).reshape(*ours[0].shape[:-1], -1).T]


JOINED_BY_HEAD = Layout(read=_read_by_head, write=_write_by_head)
"""Query, key and value of the first head, then of the second, and so on (GPT-NeoX)."""


def _halves_from_pairs(c: ModelConfig, w: Array) -> Array:
    heads = w.reshape(-1, c.H // 2, 2, *w.shape[1:])
    return heads.swapaxes(1, 2).reshape(w.shape)


def _pairs_from_halves(c: ModelConfig, w: Array) -> Array:
    heads = w.reshape(-1, 2, c.H // 2, *w.shape[1:])
    return heads.swapaxes(1, 2).reshape(w.shape)


PAIRED = Layout(
    read=lambda c, theirs: [_halves_from_pairs(c, w).T for w in theirs],
    write=lambda c, ours: [_pairs_from_halves(c, w.T) for w in ours],
)
"""[out in], each head's rows in the order in which rotary pairs stand side by side (GGUF files of Llama)."""

PLUS_ONE = Layout(read=lambda c, theirs: [w - 1 for w in theirs], write=lambda c, ours: [w + 1 for w in ours])
"""The scale of a norm that multiplies by 1 + its parameter, with the 1 added (GGUF files of Gemma)."""

STACKED_EXPERTS = Layout(
    read=lambda c, theirs: [w.swapaxes(1, 2) for w in theirs],
    write=lambda c, ours: [w.swapaxes(1, 2) for w in ours],
)
"""[E out in]."""

EXPERTS = Layout(
    read=lambda c, theirs: [jnp.stack([w.T for w in theirs])],
    write=lambda c, ours: [w.T for w in ours[0]],
)
"""One [out in] for each expert; ours is [E in out]."""


def skipping_rows(count: int) -> Layout:
    """A table whose first rows no position ever reads (RoBERTa counts from behind its padding id)."""
    return Layout(
        read=lambda c, theirs: [theirs[0][count:]],
        write=lambda c, ours: [jnp.pad(ours[0], ((count, 0), (0, 0)))],
    )
