"""Prompts into the cache, a few tokens of each at a time, before anything is decoded.

This file takes any `Model`; it knows nothing of text, sampling or requests.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Model, Params

PREFILL_WIDTHS = (16, 64, 256)
"""Prompt tokens of a row that go through the trunk at once: few widths, because each is compiled."""


@partial(jax.jit, static_argnames="model", donate_argnames="cache")
def prefill_chunk(
    model: Model, params: Params, cache: Any, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> tuple[Any, Float[Array, "B D"]]:
    """Put a piece of each prompt into the cache; returns it with the hidden state of each row's last token.

    The rows may be padded anywhere with position -1; what is returned for a row of nothing else has no meaning. The
    cache given is used up.
    """
    hidden, cache, _ = model.trunk(params, tokens, positions, cache=cache)
    last = jnp.argmax(positions, axis=1)
    return cache, jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


def prefill(
    model: Model,
    params: Params,
    cache: Any,
    tokens: Int[np.ndarray, "B T"],
    positions: Int[np.ndarray, "B T"],
    *,
    widths: Sequence[int] = PREFILL_WIDTHS,
) -> tuple[Any, Float[Array, "B D"]]:
    """Put whole prompts into the cache, a few columns at a time; returns what `prefill_chunk` does.

    A row goes through chunks of the largest width and then one that is just wide enough for its rest, while the other
    rows wait: which chunks those are depends on its own length alone, and so does how its numbers are rounded. The
    result does not depend on the side on which the rows are padded. The cache given is used up. Raises `ValueError` for
    ids and positions that the model or the cache does not have.
    """
    _check_places(model, cache, tokens, positions)
    lengths = (positions >= 0).sum(axis=1)
    # Padding goes behind.
    order = np.argsort(positions < 0, axis=1, kind="stable")
    tokens, positions = (np.take_along_axis(x, order, axis=1) for x in (tokens, positions))
    done, hidden = np.zeros_like(lengths), None
    for width in sorted(widths, reverse=True):
        while (joining := _joining(lengths - done, width, widths)).any():
            columns = done[:, None] + np.arange(width)
            real = joining[:, None] & (columns < lengths[:, None])
            columns = np.minimum(columns, tokens.shape[1] - 1)
            piece = [
                np.where(real, np.take_along_axis(x, columns, axis=1), empty)
                for x, empty in ((tokens, 0), (positions, -1))
            ]
            cache, newest = prefill_chunk(model, params, cache, *(jnp.asarray(x, jnp.int32) for x in piece))
            hidden = newest if hidden is None else jnp.where(joining[:, None], newest, hidden)
            done = done + real.sum(axis=1)
    if hidden is None:
        raise ValueError("prefill needs at least one token")
    return cache, hidden


def _joining(left: Int[np.ndarray, "B"], width: int, widths: Sequence[int]) -> Bool[np.ndarray, "B"]:
    """Rows that go through a chunk of this width next: it is the narrowest that holds their rest, or the widest."""
    narrower = max((other for other in widths if other < width), default=0)
    return (left > narrower) & ((left <= width) | (width == max(widths)))


def _check_places(model: Model, cache: Any, tokens: np.ndarray, positions: np.ndarray) -> None:
    # A write past the end of the cache would be dropped, and an id or a position past the end of a table clamped.
    real = positions >= 0
    if real.any() and not 0 <= tokens[real].min() <= tokens[real].max() < model.vocab_size:
        raise ValueError(f"there is an id outside the vocabulary, which has 0 to {model.vocab_size - 1}")
    limit = min(model.max_seq_len, getattr(cache, "length", model.max_seq_len))
    if positions.max(initial=-1) >= limit:
        raise ValueError(f"there is position {positions.max()}; the cache and the model hold 0 to {limit - 1}")


def check_prompt(model: Model, tokens: Sequence[int], vocab_limit: int | None = None) -> None:
    """Raise a `UserError` when the model cannot continue these tokens."""
    if not isinstance(tokens, (Sequence, np.ndarray)) or isinstance(tokens, str):
        raise UserError(f"a prompt is {tokens!r}; expected a list of token ids")
    limit = min(model.vocab_size, model.vocab_size if vocab_limit is None else vocab_limit)
    if not len(tokens):
        raise UserError("the prompt has no tokens; expected at least one, such as the end-of-text token")
    for index, token in enumerate(tokens):
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
            raise UserError(f"token {index} of the prompt is {token!r}; expected the id of a token")
        if not 0 <= token < limit:
            raise UserError(f"token {index} of the prompt has the id {token}; the vocabulary has 0 to {limit - 1}")
    if len(tokens) >= model.max_seq_len:
        raise UserError(
            f"the prompt has {len(tokens)} tokens; the model's context holds {model.max_seq_len}, and at least one"
            " must be left for the completion: shorten the prompt"
        )
