"""Texts to vectors: what an encoder, or any model, makes of a whole text, as one point on the unit sphere.

mean     the mean of the hidden states of all tokens
first    the hidden state of the first token
pooler   tanh of a product of that, where the model has such a layer (BERT)
"""

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.decoding.prompts import check_id, open_source, read_lines
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Model, Params
from transformer_jax.settings import parse_object
from transformer_jax.text.tokenizer import Tokenizer

Pooling = Literal["mean", "first", "pooler"]

SMALLEST_WIDTH = 16
"""Tokens that a row is padded to at least; a longer one doubles, so that few widths are ever compiled."""


@partial(jax.jit, static_argnames=("model", "pooling"))
def pool(
    model: Model, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], pooling: Pooling
) -> Float[Array, "B D"]:
    """Make one vector of length 1 of each row; padding, which has position -1, does not count.

    Reference: Reimers and Gurevych 2019, "Sentence-BERT", section 3.
    """
    hidden = model.trunk(params, tokens, positions).hidden
    if pooling == "mean":
        real = (positions >= 0)[:, :, None]
        vectors = jnp.where(real, hidden.astype(jnp.float32), 0).sum(axis=1) / jnp.maximum(real.sum(axis=1), 1)
    else:
        first = jnp.argmax(positions == 0, axis=1)
        vectors = jnp.take_along_axis(hidden, first[:, None, None], axis=1)[:, 0].astype(jnp.float32)
        if pooling == "pooler":
            assert model.pool is not None
            vectors = model.pool(params, vectors)
    return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def embed(
    model: Model,
    params: Params,
    texts: Sequence[Sequence[int]],
    *,
    pooling: Pooling = "mean",
    batch_size: int = 32,
) -> Float[np.ndarray, "B D"]:
    """Turn texts, as token ids with their control tokens, into vectors of length 1.

    Raises `UserError` for a text without tokens, or longer than the context, and for a pooling that the model lacks.
    """
    if pooling not in get_args(Pooling):
        raise UserError(f"pooling is {pooling!r}; expected one of {', '.join(get_args(Pooling))}")
    if pooling == "pooler" and model.pool is None:
        raise UserError("the model has no pooler; take the mean, or the first token")
    for number, ids in enumerate(texts):
        if not 0 < len(ids) <= model.max_seq_len:
            raise UserError(f"text {number} has {len(ids)} tokens; expected 1 to {model.max_seq_len}, the context")
        if not 0 <= min(ids) <= max(ids) < model.vocab_size:
            raise UserError(f"text {number} has an id outside the vocabulary, which has 0 to {model.vocab_size - 1}")
    vectors = np.zeros((len(texts), 0), np.float32)
    for rows, tokens, positions in _batches(texts, model.max_seq_len, batch_size):
        made = np.asarray(pool(model, params, tokens, positions, pooling))[: len(rows)]
        if not vectors.size:
            vectors = np.zeros((len(texts), made.shape[1]), np.float32)
        vectors[rows] = made
    return vectors


def embed_file(
    model: Model,
    params: Params,
    tokenizer: Tokenizer,
    source: Path,
    target: Path,
    *,
    pooling: Pooling = "mean",
    batch_size: int = 32,
) -> int:
    """Write a vector for each line of a JSONL file; returns how many. The file appears whole, or not at all.

    Raises `UserError` naming the line of a text that cannot be embedded.
    """
    names: list[str | int] = []
    texts: list[list[int]] = []
    with open_source(source) as lines:
        if target.exists() and target.samefile(source):
            raise UserError(f"{target} is both the input and the output; choose another output")
        for line in read_lines(lines, ""):
            try:
                tree = parse_object(line.text)
                if not isinstance(tree.get("text"), str) or set(tree) - {"text", "id"}:
                    raise UserError("expected an object with a text, and perhaps an id")
                ids = [*tokenizer.begin(tree["text"]), *tokenizer.suffix]
                names.append(check_id(tree.get("id", line.number)))
                if not 0 < len(ids) <= model.max_seq_len:
                    raise UserError(f"the text has {len(ids)} tokens; expected 1 to {model.max_seq_len}, the context")
            except UserError as error:
                raise UserError(f"{source}, line {line.number}: {error}") from None
            texts.append(ids)
    vectors = embed(model, params, texts, pooling=pooling, batch_size=batch_size)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for name, vector in zip(names, vectors, strict=True):
                file.write(json.dumps({"id": name, "embedding": [round(float(x), 7) for x in vector]}) + "\n")
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; make room, or choose another output") from None
    finally:
        temporary.unlink(missing_ok=True)
    return len(texts)


def _batches(texts: Sequence[Sequence[int]], longest: int, batch_size: int) -> Iterator[tuple[list[int], Array, Array]]:
    """Rows of like lengths together, padded to a width that is a power of two, and to a whole batch."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        needed = len(texts[rows[-1]])
        width = min(max(SMALLEST_WIDTH, 1 << (needed - 1).bit_length()), longest)
        tokens, positions = np.zeros((batch_size, width), np.int32), np.full((batch_size, width), -1, np.int32)
        for place, row in enumerate(rows):
            tokens[place, : len(texts[row])] = texts[row]
            positions[place, : len(texts[row])] = np.arange(len(texts[row]))
        yield rows, jnp.asarray(tokens), jnp.asarray(positions)
