"""Text to token ids and back: bytes, a BPE trained here, or any Hugging Face `tokenizer.json`.

Every tokenizer is one `tokenizer.json`, with what stands beside it in tokenizer_files.py, so a run folder stores all
kinds alike, and other programs can read them. The byte tokenizer is a fixed one of these files, known by its content,
and needs no package.

This file knows nothing of conversations, corpora, windows or models. It never adds a control token to a text: who wants
an end-of-text token puts it there.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32

from transformer_jax.errors import UserError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
"""The name of the end-of-text token in the tokenizers that are made here."""

OUR_SPECIAL_TOKENS = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}

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

LARGEST_VOCABULARY = 2**24

CONTROL_MARK = "\ufdd0"
"""Stands before the name of a control token in a text whose other names of control tokens are ordinary text. No
character has this code."""


@dataclass(frozen=True)
class Tokenizer:
    """Turns text into token ids and back; two tokenizers are equal when their files are."""

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
    control_tokens: Mapping[str, int] = field(repr=False, hash=False)
    """All tokens that no text is encoded to, by name."""
    encode_fn: Callable[[Sequence[str]], list[Int32[np.ndarray, "tokens"]]] = field(repr=False, compare=False)
    encode_marked_fn: Callable[[str], list[int]] = field(repr=False, compare=False)
    decode_fn: Callable[[list[int]], str] = field(repr=False, compare=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Names of control tokens by what they are for: bos_token, eos_token, pad_token and the like."""
    chat_template: str | None = field(default=None, repr=False)
    """A Jinja template that turns a conversation into text (chat.py)."""

    def encode(self, text: str) -> list[int]:
        """Encode one text, without any control token; what reads like one is encoded as ordinary text."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "tokens"]]:
        """Encode each text as `encode` does, on all cores."""
        for text in texts:
            _check_unicode(text)
        return self.encode_fn(texts)

    def encode_marked(self, text: str) -> list[int]:
        """Encode a text in which CONTROL_MARK stands before the name of each control token that is meant."""
        _check_unicode(text)
        return self.encode_marked_fn(text)

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


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text has a lone surrogate {text[error.start]!r} at character {error.start},"
            " which is half of a character; remove it"
        ) from None


def byte_tokenizer() -> Tokenizer:
    """Make the tokenizer whose ids are the UTF-8 bytes, and 256 for end-of-text."""

    def encode(texts: Sequence[str]) -> list[Int32[np.ndarray, "tokens"]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def encode_marked(text: str) -> list[int]:
        first, *others = (list(piece.encode()) for piece in text.split(CONTROL_MARK + END_OF_TEXT))
        return first + [i for piece in others for i in (256, *piece)]

    return Tokenizer(
        json=_byte_json(),
        vocab_size=257,
        end_of_text=256,
        end_of_text_name=END_OF_TEXT,
        prefix=(256,),
        suffix=(),
        stop_ids=(256,),
        control_tokens={END_OF_TEXT: 256},
        encode_fn=encode,
        encode_marked_fn=encode_marked,
        decode_fn=decode,
        special_tokens=OUR_SPECIAL_TOKENS,
    )


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
    return read_tokenizer(tokenizer.to_str(pretty=True), "the trained BPE", special_tokens=OUR_SPECIAL_TOKENS)


def load_tokenizer(
    path: str | Path,
    stop_ids: Sequence[int] = (),
    special_tokens: Mapping[str, str] | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """Read a Hugging Face `tokenizer.json`, whoever wrote it.

    The first of the `stop_ids` is its end-of-text token; without them it is the eos_token of the `special_tokens`, or
    is found by name (`END_OF_TEXT_NAMES`). Truncation and padding that the file may ask for are dropped: they would
    lose text, or add what is not text.
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
    return read_tokenizer(text, str(path), stop_ids, special_tokens, chat_template)


def read_tokenizer(
    text: str,
    where: str,
    stop_ids: Sequence[int] = (),
    special_tokens: Mapping[str, str] | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """Make a tokenizer from the content of a `tokenizer.json`; see `load_tokenizer`."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); expected a tokenizer.json file") from None
    if not isinstance(tree, dict) or "model" not in tree:
        raise UserError(f'{where} has no "model"; expected a Hugging Face tokenizer.json file')
    _check_unicode(chat_template or "")
    if tree == json.loads(_byte_json()):
        ours = byte_tokenizer()
        return replace(ours, special_tokens=special_tokens or ours.special_tokens, chat_template=chat_template)
    import tokenizers

    _check_ids(tree, where)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
        wrapped = _wrap(tokenizer, where, stop_ids, special_tokens or {})
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # The package raises nothing narrower; its panics are no Exceptions.
        raise UserError(f"{where} is not a tokenizer that the tokenizers package can read: {error}") from None
    return replace(wrapped, chat_template=chat_template)


def _check_ids(tree: Mapping[str, Any], where: str) -> None:
    """Refuse ids that the package would make room for without asking whether there can be so many."""
    model, added = tree["model"], tree.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < LARGEST_VOCABULARY]
    if wrong:
        raise UserError(f"{where}: a token has the id {wrong[0]!r}; expected 0 to {LARGEST_VOCABULARY - 1}")


def _wrap(
    tokenizer: "tokenizers.Tokenizer", where: str, stop_ids: Sequence[int], special_tokens: Mapping[str, str]
) -> Tokenizer:
    added = [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    for what in ("bos_token", "eos_token"):
        if what in special_tokens and special_tokens[what] not in ids:
            raise UserError(f"{where}: the {what} is {special_tokens[what]!r}, which is not among its tokens")
    # Some name a token for padding, say, that their vocabulary lacks; nothing here needs one.
    special_tokens = {what: name for what, name in special_tokens.items() if name in ids}
    name = _end_of_text(tokenizer, stop_ids, special_tokens, [token.content for token in added])
    if name is None:
        raise UserError(
            f"{where} has no end-of-text token; expected one of {', '.join(END_OF_TEXT_NAMES)} among its added_tokens,"
            f" found {', '.join(sorted(token.content for token in added)[:10]) or 'none'}"
        )
    special_tokens = {"eos_token": name} | special_tokens
    control = {name: ids[name] for name in (*(t.content for t in added if t.special), *special_tokens.values())}
    prefix, suffix = _around(tokenizer)
    text = tokenizer.to_str(pretty=True)
    ends = tuple(stop_ids) or (ids[name],)
    return Tokenizer(
        json=text,
        vocab_size=1 + max(ids.values()),
        end_of_text=ids[name],
        end_of_text_name=name,
        prefix=prefix,
        suffix=suffix,
        stop_ids=ends,
        control_tokens=control,
        encode_fn=functools.partial(_encode, tokenizer, name, ids[name]),
        encode_marked_fn=_marked_encoder(text, control, frozenset(ends)),
        decode_fn=tokenizer.decode,
        special_tokens=special_tokens,
    )


def _end_of_text(
    tokenizer: "tokenizers.Tokenizer", stop_ids: Sequence[int], special_tokens: Mapping[str, str], added: Sequence[str]
) -> str | None:
    if stop_ids:
        return tokenizer.id_to_token(stop_ids[0])
    return special_tokens.get("eos_token") or next((name for name in END_OF_TEXT_NAMES if name in added), None)


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


def _marked_encoder(text: str, control: Mapping[str, int], ends: frozenset[int]) -> Callable[[str], list[int]]:
    """Encode with a second tokenizer that knows each control token by its marked name; made when it is first needed."""

    @functools.cache
    def ready() -> tuple["tokenizers.Tokenizer", dict[int, int]]:
        import tokenizers

        tree = json.loads(text)
        flags: dict[str, dict[str, bool]] = {}
        for token in tree["added_tokens"]:
            if token["content"] in control:
                # Some files fail to mark theirs, which would then be found in ordinary text.
                token["special"] = True
                flags[token["content"]] = {flag: token[flag] for flag in ("lstrip", "rstrip", "single_word")}
        second = tokenizers.Tokenizer.from_str(json.dumps(tree))
        second.encode_special_tokens = True
        marked = {name: CONTROL_MARK + name for name in control}
        second.add_tokens(
            [tokenizers.AddedToken(marked[name], normalized=False, **flags.get(name, {})) for name in control]
        )
        found = second.get_vocab(with_added_tokens=True)
        return second, {found[marked[name]]: i for name, i in control.items()}

    def encode(text: str) -> list[int]:
        second, ids = ready()
        found = second.encode(text, add_special_tokens=False).ids
        if ends.intersection(found):
            raise UserError(f"the tokenizer encodes ordinary text to a token that ends a text: {text[:80]!r}")
        return [ids.get(i, i) for i in found]

    return encode


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
