"""How tensors of a published file become arrays of ours, and back.

`write` makes theirs from ours. It is traced to learn the shapes that a file must have, so a shape is never written down
twice. By `into` theirs are read straight into ours.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from transformer_jax.architecture import ModelConfig

Arrays = list[Array]
HostArrays = list[np.ndarray]


@dataclass(frozen=True)
class Layout:
    """The arrays of a row in their form and in ours."""

    write: Callable[[ModelConfig, Arrays], Arrays]
    """Makes their tensors of our arrays."""
    into: Callable[[ModelConfig, HostArrays], list[HostArrays]]
    """Gives for each of their tensors the views of ours that hold its rows, one view after the other."""
    beside: bool = False
    """Whether the views lie beside each other, each holding a part of every row."""
    added: int = 0
    """What every number of theirs is greater by."""


AS_IT_IS = Layout(write=lambda c, ours: ours, into=lambda c, ours: [[w] for w in ours])

TRANSPOSED = Layout(write=lambda c, ours: [w.T for w in ours], into=lambda c, ours: [[w.T] for w in ours])
"""PyTorch's Linear stores [out in]; ours is [in out]."""


JOINED_HEADS = Layout(
    write=lambda c, ours: [jnp.concatenate(ours, axis=-1)],
    into=lambda c, ours: [ours],
    beside=True,
)
"""Queries, keys and values beside each other: [in q+k+v], or a bias of q+k+v (GPT-2)."""

JOINED_TRANSPOSED = Layout(
    write=lambda c, ours: [jnp.concatenate(ours, axis=-1).T],
    into=lambda c, ours: [[w.T for w in ours]],
)
"""Queries, keys and values above each other, [q+k+v in], or gate above up (Phi-3)."""


def _write_by_head(c: ModelConfig, ours: Arrays) -> Arrays:
    by_head = [part.reshape(*part.shape[:-1], c.N, c.H) for part in ours]
    return [jnp.stack(by_head, axis=-2).reshape(*ours[0].shape[:-1], -1).T]


def _into_by_head(c: ModelConfig, ours: HostArrays) -> list[HostArrays]:
    return [[part.T[n * c.H : (n + 1) * c.H] for n in range(c.N) for part in ours]]


JOINED_BY_HEAD = Layout(write=_write_by_head, into=_into_by_head)
"""Query, key and value of the first head, then of the second, and so on (GPT-NeoX)."""


def _pairs_from_halves(c: ModelConfig, w: Array) -> Array:
    heads = w.reshape(-1, 2, c.H // 2, *w.shape[1:])
    return heads.swapaxes(1, 2).reshape(w.shape)


PAIRED = Layout(
    write=lambda c, ours: [_pairs_from_halves(c, w.T) for w in ours],
    into=lambda c, ours: [[w.T.reshape(-1, 2, c.H // 2, *w.shape[:-1]).swapaxes(1, 2)] for w in ours],
)
"""[out in], each head's rows in the order in which rotary pairs stand side by side (GGUF files of Llama)."""

PLUS_ONE = Layout(write=lambda c, ours: [w + 1 for w in ours], into=lambda c, ours: [[w] for w in ours], added=1)
"""The scale of a norm that multiplies by 1 + its parameter, with the 1 added (GGUF files of Gemma)."""

STACKED_EXPERTS = Layout(
    write=lambda c, ours: [w.swapaxes(1, 2) for w in ours],
    into=lambda c, ours: [[w.swapaxes(1, 2)] for w in ours],
)
"""[E out in]."""

EXPERTS = Layout(write=lambda c, ours: [w.T for w in ours[0]], into=lambda c, ours: [[w.T] for w in ours[0]])
"""One [out in] for each expert; ours is [E in out]."""


def skipping_rows(count: int) -> Layout:
    """A table whose first rows no position ever reads (RoBERTa counts from behind its padding id)."""
    return Layout(
        write=lambda c, ours: [jnp.pad(ours[0], ((count, 0), (0, 0)))],
        into=lambda c, ours: [[np.empty_like(ours[0], shape=(count, *ours[0].shape[1:])), *ours]],
    )
