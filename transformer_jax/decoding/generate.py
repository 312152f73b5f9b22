"""From prompts to completions: prefill, then `lax.scan(decode_step)` over an immutable cache.

    prefill      [B T] tokens of the prompts, a chunk at a time   -> cache, hidden state of each row's last token
    next_token   hidden -> logits -> one token a row, chosen by a key that depends on the request and the position alone
    decode_step  one token a row through the trunk, then next_token; (state, _) -> (state, sampled)

Rows are independent: padding and finished rows have position -1, which the model neither writes nor sees. So prompts of
any lengths share a batch, padded on either side. This file takes any `Model`; it knows nothing of text or files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.prefill import check_prompt, prefill
from transformer_jax.decoding.sampling import SamplingParams, limit_vocabulary, sample, sampling_params
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Model, Params

SMALLEST_CACHE = 256
"""Slots of the smallest cache; a full one doubles. Below this, CPU kernels round differently from length to length."""


class DecodeState(NamedTuple):
    """B requests under way; a row whose position is -1 has finished, or never was."""

    cache: Any
    """Every token of each row but its last."""
    tokens: Int[Array, "B"]
    """The last token of each row, which is not in the cache yet."""
    positions: Int[Array, "B"]
    """Where that token stands."""
    last_positions: Int[Array, "B"]
    """The last position at which a row may hold a token: the token chosen there finishes the row."""
    keys: Key[Array, "B"]
    """A request's own key: its token at position p is drawn with fold_in(key, p)."""
    sampling: SamplingParams


class Sampled(NamedTuple):
    """What one step chose: a token a row, -1 where the row had finished before, and its log probability."""

    tokens: Int[Array, "*steps B"]
    logprobs: Float[Array, "*steps B"]


class Completion(NamedTuple):
    """The answer to a prompt, or a piece of it."""

    tokens: list[int]
    """Without the prompt, and without the stop token."""
    logprobs: list[float]
    """Of each of these tokens under the model's own distribution."""
    finish_reason: Literal["stop", "length"] | None
    """stop: the stop token was chosen; length: max_tokens or the context is exhausted; None: more is to come."""

    def extended(self, piece: "Completion") -> "Completion":
        """Join the next piece to this one."""
        return Completion(
            self.tokens + piece.tokens, self.logprobs + piece.logprobs, piece.finish_reason or self.finish_reason
        )


def next_token(
    model: Model,
    params: Params,
    state: DecodeState,
    hidden: Float[Array, "B D"],
    *,
    stop_ids: tuple[int, ...],
    vocab_limit: int | None,
) -> tuple[DecodeState, Sampled]:
    """Choose each live row's next token from the hidden state of its last one, and finish the rows that it ends."""
    logits = model.unembed(params, hidden)
    if vocab_limit is not None:
        logits = limit_vocabulary(logits, vocab_limit)
    live = state.positions >= 0
    positions = state.positions + 1
    tokens, logprobs = sample(logits, jax.vmap(jax.random.fold_in)(state.keys, positions), state.sampling)
    ended = positions >= state.last_positions
    if stop_ids:
        ended |= jnp.isin(tokens, jnp.asarray(stop_ids))
    # A finished row goes on with a token that exists, at a position that is neither written nor seen.
    state = state._replace(
        tokens=jnp.where(live, tokens, state.tokens), positions=jnp.where(live & ~ended, positions, -1)
    )
    return state, Sampled(jnp.where(live, tokens, -1), logprobs)


def decode_step(
    model: Model, params: Params, state: DecodeState, *, stop_ids: tuple[int, ...] = (), vocab_limit: int | None = None
) -> tuple[DecodeState, Sampled]:
    """Put each live row's last token into the cache and choose the one after it."""
    hidden, cache, _ = model.trunk(params, state.tokens[:, None], state.positions[:, None], cache=state.cache)
    state = state._replace(cache=cache)
    return next_token(model, params, state, hidden[:, 0], stop_ids=stop_ids, vocab_limit=vocab_limit)


@partial(jax.jit, static_argnames=("model", "steps", "stop_ids", "vocab_limit"), donate_argnames="state")
def decode(
    model: Model,
    params: Params,
    state: DecodeState,
    *,
    steps: int,
    stop_ids: tuple[int, ...] = (),
    vocab_limit: int | None = None,
) -> tuple[DecodeState, Sampled]:
    """Scan `decode_step`. The state given is used up: its cache becomes the result's, in place."""

    def step(state: DecodeState, _: None) -> tuple[DecodeState, Sampled]:
        return decode_step(model, params, state, stop_ids=stop_ids, vocab_limit=vocab_limit)

    return lax.scan(step, state, length=steps)


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    settings: DecodingConfig | Sequence[DecodingConfig],
    *,
    stop_ids: tuple[int, ...] = (),
    vocab_limit: int | None = None,
    rows: int | None = None,
    block: int = 16,
) -> list[Completion]:
    """Continue each prompt; the whole of what `stream` yields in pieces."""
    pieces = stream(
        model, params, prompts, settings, stop_ids=stop_ids, vocab_limit=vocab_limit, rows=rows, block=block
    )
    whole = [Completion([], [], None) for _ in prompts]
    for piece in pieces:
        whole = [done.extended(new) for done, new in zip(whole, piece, strict=True)]
    return whole


def stream(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    settings: DecodingConfig | Sequence[DecodingConfig],
    *,
    stop_ids: tuple[int, ...] = (),
    vocab_limit: int | None = None,
    rows: int | None = None,
    block: int = 16,
) -> Iterator[list[Completion]]:
    """Continue all prompts in one batch, yielding after the first token and then after every `block` the new pieces.

    `settings` are one for all or one a prompt. Nothing but the prompt and its own settings decides an answer: at one
    batch size and length of the cache bit for bit, else up to the rounding of sums. A completion that would pass the
    end of the context ends there, with finish_reason "length".

    Ids from `vocab_limit` on are refused in a prompt and never chosen. `rows` is the batch that is compiled, at least
    the number of prompts. Raises `UserError` for a prompt that cannot be continued, before anything is computed.
    """
    if block < 1:
        raise ValueError(f"block is {block}; expected at least 1")
    requests = _check_requests(model, prompts, settings, vocab_limit)
    choice: dict[str, Any] = {"stop_ids": stop_ids, "vocab_limit": vocab_limit}
    if requests:
        # Few sizes are ever compiled when they are powers of two.
        rows = max(_bucket(len(requests), 1) if rows is None else rows, _least_rows(model))
        if rows < len(requests):
            raise ValueError(f"{len(requests)} prompts do not fit into a batch of {rows} rows")
        yield from _stream(model, params, requests, rows, block, choice)


@dataclass(frozen=True)
class _Request:
    """A prompt that the model can continue."""

    prompt: Sequence[int]
    settings: DecodingConfig
    last_position: int


def _check_requests(
    model: Model,
    prompts: Sequence[Sequence[int]],
    settings: DecodingConfig | Sequence[DecodingConfig],
    vocab_limit: int | None,
) -> list[_Request]:
    each = [settings] * len(prompts) if isinstance(settings, DecodingConfig) else list(settings)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but settings for {len(each)}")
    requests = []
    for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        try:
            check_prompt(model, prompt, vocab_limit)
        except UserError as error:
            raise UserError(f"prompt {index}: {error}") from None
        requests.append(_Request(prompt, one, min(len(prompt) + one.max_tokens, model.max_seq_len) - 1))
    return requests


def _stream(
    model: Model, params: Params, requests: list[_Request], rows: int, block: int, choice: dict[str, Any]
) -> Iterator[list[Completion]]:
    needed = max(request.last_position for request in requests) + 1
    block = min(block, _bucket(needed - min(len(request.prompt) for request in requests), 1))
    filled = np.array([len(request.prompt) for request in requests])
    length = _cache_length(model, min(int(filled.max()) + block, needed))
    state, sampled = _start(model, params, requests, rows, length, choice)
    while True:
        piece = _pieces(requests, filled, sampled, choice["stop_ids"])
        yield piece
        filled += [len(new.tokens) for new in piece]
        filled[[new.finish_reason is not None for new in piece]] = 0
        if not filled.any():
            return
        length, previous = _cache_length(model, min(int(filled.max()) + block, needed)), length
        if length > previous:
            state = state._replace(cache=_lengthen(state.cache, _empty_cache(model, rows, length)))
        state, sampled = decode(model, params, state, steps=block, **choice)


def _start(
    model: Model, params: Params, requests: list[_Request], rows: int, length: int, choice: dict[str, Any]
) -> tuple[DecodeState, Sampled]:
    """Prefill the prompts, padded on the right and below, and choose each one's first token."""
    absent = rows - len(requests)
    width = max(len(request.prompt) for request in requests)
    tokens = np.zeros((rows, width), np.int32)
    positions = np.full((rows, width), -1, np.int32)
    for row, request in enumerate(requests):
        tokens[row, : len(request.prompt)] = request.prompt
        positions[row, : len(request.prompt)] = np.arange(len(request.prompt))
    cache, hidden = prefill(model, params, _empty_cache(model, rows, length), tokens, positions)
    seeds = np.array([request.settings.seed for request in requests] + [0] * absent, np.uint32)
    state = DecodeState(
        cache=cache,
        tokens=jnp.zeros(rows, jnp.int32),
        positions=jnp.asarray(positions.max(axis=1)),
        last_positions=jnp.asarray([request.last_position for request in requests] + [-1] * absent, jnp.int32),
        keys=jax.vmap(jax.random.key)(seeds),
        sampling=sampling_params(
            [request.settings for request in requests] + [DecodingConfig(temperature=0.0)] * absent
        ),
    )
    return _first_token(model, params, state, hidden, **choice)


@partial(jax.jit, static_argnames=("model", "stop_ids", "vocab_limit"), donate_argnames="state")
def _first_token(
    model: Model,
    params: Params,
    state: DecodeState,
    hidden: Array,
    *,
    stop_ids: tuple[int, ...],
    vocab_limit: int | None,
) -> tuple[DecodeState, Sampled]:
    state, sampled = next_token(model, params, state, hidden, stop_ids=stop_ids, vocab_limit=vocab_limit)
    return state, Sampled(sampled.tokens[None], sampled.logprobs[None])


def _pieces(
    requests: list[_Request], filled: np.ndarray, sampled: Sampled, stop_ids: tuple[int, ...]
) -> list[Completion]:
    """Cut what a block chose into one piece a request; `filled` is the length of each row so far, 0 once finished."""
    tokens, logprobs = np.asarray(sampled.tokens), np.asarray(sampled.logprobs)
    pieces = []
    for row, request in enumerate(requests):
        chosen = tokens[tokens[:, row] >= 0, row].tolist()
        probabilities = logprobs[: len(chosen), row].tolist()
        if np.isnan(probabilities).any():
            raise UserError(
                f"the model's logits for prompt {row} are not numbers; its parameters are damaged or have diverged"
            )
        reason: Literal["stop", "length"] | None = None
        if chosen and chosen[-1] in stop_ids:
            chosen, probabilities, reason = chosen[:-1], probabilities[:-1], "stop"
        elif chosen and filled[row] + len(chosen) > request.last_position:
            reason = "length"
        pieces.append(Completion(chosen, probabilities, reason))
    return pieces


@partial(jax.jit, static_argnums=(0, 1, 2))
def _empty_cache(model: Model, rows: int, length: int) -> Any:
    return model.init_cache(rows, length)


@jax.jit
def _lengthen(cache: Any, empty: Any) -> Any:
    """Copy a cache into the first slots of a longer one."""
    return jax.tree.map(lambda old, new: lax.dynamic_update_slice(new, old, (0,) * new.ndim), cache, empty)


def _cache_length(model: Model, filled: int) -> int:
    """Choose the slots for rows of up to `filled` tokens: a power of two, or the whole context."""
    return min(_bucket(filled, SMALLEST_CACHE), model.max_seq_len)


def _least_rows(model: Model) -> int:
    """Tell how small a batch may be."""
    # One row in bfloat16 takes other kernels, which round differently, and on CPU are ten times slower than two rows.
    cache = jax.eval_shape(partial(model.init_cache, 1, 1))
    return 2 if any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(cache)) else 1


def _bucket(size: int, smallest: int) -> int:
    return max(smallest, 1 << (size - 1).bit_length())
