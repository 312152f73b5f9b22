"""Text to token ids and back: bytes, a BPE trained here, or any Hugging Face `tokenizer.json`.

Every tokenizer is one `tokenizer.json`, so a run folder stores all kinds alike, and other programs can read them. The
byte tokenizer is a fixed one of these files, known by its content, and needs no package.

This file knows nothing of corpora, windows or models. It never adds a control token to a text: who wants an end-of-text
token puts it there.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32

from transformer_jax.errors import UserError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
"""The name of the end-of-text token in the tokenizers that are made here."""

END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "<eos>",
    "</s>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
)
"""The names by which an end-of-text token is known; of several in one tokenizer, the first in this order is taken."""


@dataclass(frozen=True)
class Tokenizer:
    """Turns text into token ids and back; two tokenizers are equal when their `tokenizer.json` is."""

    json: str = field(repr=False)
    """The content of its `tokenizer.json`."""
    vocab_size: int
    """One more than the largest token id."""
    end_of_text: int
    """The id of the control token that stands before each document and after the last; no text is encoded to it."""
    end_of_text_name: str
    """The text of that token in the tokenizer.json."""
    prefix: tuple[int, ...]
    """Control tokens that stand before a text that a model is to go on with."""
    suffix: tuple[int, ...]
    """Control tokens that stand behind a whole text, for an encoder."""
    stop_ids: tuple[int, ...]
    """The tokens that end a continuation; end-of-text is one of them."""
    encode_fn: Callable[[Sequence[str]], list[Int32[np.ndarray, "tokens"]]] = field(repr=False, compare=False)
    decode_fn: Callable[[list[int]], str] = field(repr=False, compare=False)

    def encode(self, text: str) -> list[int]:
        """Encode one text, without any control token; what reads like one is encoded as ordinary text."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "tokens"]]:
        """Encode each text as `encode` does, on all cores."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"the text has a lone surrogate {text[error.start]!r} at character {error.start},"
                    " which is half of a character; remove it"
                ) from None
        return self.encode_fn(texts)

    def begin(self, text: str) -> list[int]:
        """Encode the beginning of a text that a model is to go on with, control tokens before it."""
        return [*self.prefix, *self.encode(text)]

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Decode ids that follow others: some tokenizers drop a space at the beginning of what they decode."""
        return self.decode([*before, *ids]).removeprefix(self.decode(before)) if before else self.decode(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text: control tokens vanish and bytes that are not UTF-8 become U+FFFD.

        Raises `UserError` on an id that is not in the vocabulary.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(f"token id {i} is not in the vocabulary, which has the ids 0 to {self.vocab_size - 1}")
        return self.decode_fn([i for i in ids if i != self.end_of_text])

    def save(self, path: str | Path) -> None:
        """Write the `tokenizer.json`; `load_tokenizer` reads it back equal."""
        Path(path).write_text(self.json, encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """Make the tokenizer whose ids are the UTF-8 bytes, and 256 for end-of-text."""

    def encode(texts: Sequence[str]) -> list[Int32[np.ndarray, "tokens"]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    return Tokenizer(_byte_json(), 257, 256, END_OF_TEXT, (256,), (), (256,), encode, decode)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE: the 256 bytes, end-of-text, and then the commonest pairs, merged over and over.

    The same texts in any order give the same tokenizer. A corpus in which no pair is left to merge gives fewer tokens
    than `vocab_size`.

    Reference: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units", section 3.2; over
    bytes as in Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
    """
    if vocab_size < 257:
        raise UserError(f"a BPE of {vocab_size} tokens was asked for; the 256 bytes and end-of-text alone are 257")
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    )
    return read_tokenizer(tokenizer.to_str(pretty=True), "the trained BPE")


def load_tokenizer(path: str | Path, stop_ids: Sequence[int] = ()) -> Tokenizer:
    """Read a Hugging Face `tokenizer.json`, whoever wrote it.

    The first of the `stop_ids` is its end-of-text token; without them it is found by name (`END_OF_TEXT_NAMES`).
    Truncation and padding that the file may ask for are dropped: they would lose text, or add what is not text.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected the tokenizer.json file itself")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read the tokenizer {path}: {error.strerror}; expected bytes, bpe, or a tokenizer.json file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); expected a tokenizer.json file"
        ) from None
    return read_tokenizer(text, str(path), stop_ids)


def read_tokenizer(text: str, where: str, stop_ids: Sequence[int] = ()) -> Tokenizer:
    """Make a tokenizer from the content of a `tokenizer.json`; see `load_tokenizer`."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); expected a tokenizer.json file") from None
    if not isinstance(tree, dict) or "model" not in tree:
        raise UserError(f'{where} has no "model"; expected a Hugging Face tokenizer.json file')
    if tree == json.loads(_byte_json()):
        return byte_tokenizer()
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # The package raises nothing narrower.
        raise UserError(f"{where} is not a tokenizer that the tokenizers package can read: {error}") from None
    return _wrap(tokenizer, where, stop_ids)


def _wrap(tokenizer: "tokenizers.Tokenizer", where: str, stop_ids: Sequence[int]) -> Tokenizer:
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if not stop_ids:
        stop_ids = [added[name] for name in END_OF_TEXT_NAMES if name in added][:1]
    name = tokenizer.id_to_token(stop_ids[0]) if stop_ids else None
    if name is None:
        raise UserError(
            f"{where} has no end-of-text token; expected one of {', '.join(END_OF_TEXT_NAMES)} among its added_tokens,"
            f" found {', '.join(sorted(added)[:10]) or 'none'}"
        )
    prefix, suffix = _around(tokenizer)
    return Tokenizer(
        json=tokenizer.to_str(pretty=True),
        vocab_size=1 + max(tokenizer.get_vocab(with_added_tokens=True).values()),
        end_of_text=stop_ids[0],
        end_of_text_name=name,
        prefix=prefix,
        suffix=suffix,
        stop_ids=tuple(stop_ids),
        encode_fn=functools.partial(_encode, tokenizer, name, stop_ids[0]),
        decode_fn=tokenizer.decode,
    )


def _around(tokenizer: "tokenizers.Tokenizer") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The control tokens that a tokenizer puts before and behind a text."""
    text = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    for start in range(len(whole) - len(text) + 1):
        if whole[start : start + len(text)] == text:
            return tuple(whole[:start]), tuple(whole[start + len(text) :])
    return (), ()


def _encode(
    tokenizer: "tokenizers.Tokenizer", name: str, end_of_text: int, texts: Sequence[str]
) -> list[Int32[np.ndarray, "tokens"]]:
    def encode(pieces: Sequence[str]) -> list[Int32[np.ndarray, "tokens"]]:
        encodings = tokenizer.encode_batch_fast(list(pieces), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    encoded = encode(texts)
    for row, (text, ids) in enumerate(zip(texts, encoded, strict=True)):
        # `encode_special_tokens` does not hold back a token that the file fails to mark as special, nor one that is
        # also a word of the model.
        if end_of_text in ids:
            inside_name = f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})"
            encoded[row] = np.concatenate(encode(re.split(inside_name, text)))
            if end_of_text in encoded[row]:
                raise UserError(f"the tokenizer encodes ordinary text to its end-of-text token {name}: {text[:80]!r}")
    return encoded


@functools.cache
def _byte_json() -> str:
    """Write the byte tokenizer as a BPE without merges.

    Its words are the printable stand-ins that byte-level `tokenizer.json` files have for the bytes.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    control = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tree: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256, "content": END_OF_TEXT, **control}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [256], "tokens": [END_OF_TEXT]}},
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
