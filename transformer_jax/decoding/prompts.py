"""A JSONL file of prompts, line by line: what a line may say, and what it means to a model.

    {"prompt": "def f", "id": "a", "max_tokens": 20, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "seed": 1}
    {"messages": [{"role": "user", "content": "Hi"}]}

Only the prompt, or a conversation for it, must be there. A line that cannot be answered is an error of its own and
harms no other. This file reads prompts; it knows nothing of outputs.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.prefill import check_prompt
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Model
from transformer_jax.settings import parse_object
from transformer_jax.text.chat import encode_chat
from transformer_jax.text.tokenizer import Tokenizer

SETTINGS = tuple(field.name for field in fields(DecodingConfig))
"""The settings of which a line may have its own."""

ASKING = ("prompt", "messages")
"""The fields of which a line has one: text to go on with, or a conversation to answer."""


class Line(NamedTuple):
    """A line as it stands in the file; blank ones are none, but they count."""

    number: int
    text: bytes
    digest: str
    """Of the line, its number, and whatever else decides the answer."""


@dataclass(frozen=True)
class Prompt:
    """A line that a model can answer."""

    id: str | int
    asked: dict[str, Any]
    """The field of the line that asks: prompt, or messages."""
    tokens: list[int]
    """Of the text behind its control tokens, or of the conversation up to the answer."""
    settings: DecodingConfig


@dataclass(frozen=True)
class Failure:
    """A line that cannot be answered, and why."""

    id: str | int
    line: int
    error: str


@contextmanager
def open_source(path: Path) -> Iterator[BinaryIO]:
    """Open a JSONL file. Raises `UserError` when it cannot be read, or not twice."""
    try:
        source = path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; expected a JSONL file") from None
    with source:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            raise UserError(f"{path} is not a regular file; it is read more than once: save it to a file")
        yield source


def read_lines(source: BinaryIO, run: str) -> Iterator[Line]:
    """Yield the lines of a file from its beginning; `run` is the digest of all that they have in common."""
    source.seek(0)
    for number, raw in enumerate(source, start=1):
        text = (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).strip()
        if text:
            yield Line(number, text, digest(run, str(number), text))


def digest(*parts: str | bytes) -> str:
    """Tell one sequence of texts from another, in 16 hexadecimal digits."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()[:16]


def parse_line(line: Line, model: Model, tokenizer: Tokenizer, defaults: DecodingConfig) -> Prompt | Failure:
    """Read one line; the settings that it does not have are the defaults.

    Its seed, if it has none, comes from the default seed and its number, so that neither the size of a batch nor an
    interruption changes it, and equal prompts on two lines are answered differently.
    """
    name: str | int = line.number
    try:
        tree = parse_object(line.text)
        name = check_id(tree.get("id", line.number))
        unknown = [field for field in tree if field not in ("id", *ASKING, *SETTINGS)]
        if unknown:
            known = ", ".join(("id", *ASKING, *SETTINGS))
            raise UserError(f"unknown field {unknown[0]!r}; expected some of {known}")
        asked = asked_by(tree)
        if len(asked) != 1:
            raise UserError("there are both a prompt and messages" if asked else "there is no prompt, nor messages")
        seed = int(np.random.SeedSequence((defaults.seed, line.number)).generate_state(1)[0])
        own = {field: tree[field] for field in SETTINGS if field in tree}
        settings = replace(defaults, **({"seed": seed} | own))
        tokens = _encode(tokenizer, asked)
        check_prompt(model, tokens, min(tokenizer.vocab_size, model.vocab_size))
    except UserError as error:
        return Failure(name, line.number, str(error).removeprefix("DecodingConfig."))
    return Prompt(name, asked, tokens, settings)


def asked_by(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line, or of its answer, that ask something."""
    return {field: tree[field] for field in ASKING if field in tree}


def _encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> list[int]:
    if "messages" in asked:
        return encode_chat(tokenizer, asked["messages"])
    text = asked["prompt"]
    if not isinstance(text, str):
        raise UserError(f"prompt is {text!r}; expected text")
    return tokenizer.begin(text)


def check_id(value: Any) -> str | int:
    """Return the id of a line. Raises `UserError` unless it is text or an integer."""
    # Half of a surrogate pair is a text in JSON, but could not be written to the output.
    if isinstance(value, str) and value.encode(errors="replace").decode() == value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise UserError(f"id is {value!r}; expected text or an integer")
