"""The tokenizer that a GGUF file describes, written as the `tokenizer.json` that says the same.

A file holds the words, merges or scores, and the name of a way to split text beforehand, which llama.cpp knows by
heart. The regular expressions below are those of the published tokenizers. A name that is not known is refused: another
way to split gives other tokens.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.pretrained.config_reader import WRONG_KINDS
from transformer_jax.text.tokenizer import Tokenizer, read_tokenizer

Tree = dict[str, Any]

NO_MERGE = ""
"""What stands in the list of a tokenizer without merges: llama.cpp demands the list, and a list cannot be empty."""

CHAT_TEMPLATE = "tokenizer.chat_template"

SPECIAL_TOKENS = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}
"""What control tokens are for, and what GGUF calls it."""

LONGEST_WORD = 4096
"""Letters; a word is cut at each of them to find what it is merged of."""

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Types of tokens: one that no text is encoded to, and one that a text may hold as it is."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS_OF_LLAMA_3 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS_OF_QWEN_2 = WORDS_OF_LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES_ALONE = {**BYTE_LEVEL, "use_regex": False}


def _split(pattern: str) -> Tree:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


SPLITS: Mapping[str, list[Tree]] = {
    "gpt-2": [BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
    "llama-bpe": [_split(WORDS_OF_LLAMA_3), BYTES_ALONE],
    "qwen2": [_split(WORDS_OF_QWEN_2), BYTES_ALONE],
}
"""How a byte-level BPE splits text before it merges bytes, by llama.cpp's names."""


def read_gguf_tokenizer(settings: Mapping[str, Any], path: Path) -> Tokenizer:
    """Make the tokenizer of a file. Raises `UserError` naming what is missing, or not known."""
    try:
        return _read(settings, path)
    except WRONG_KINDS as error:
        raise UserError(f"{path}: the tokenizer has a setting of the wrong kind ({error})") from None


def _read(settings: Mapping[str, Any], path: Path) -> Tokenizer:
    words = _setting(settings, "tokens", list, path)
    kinds = _setting(settings, "token_type", list, path)
    if len(kinds) != len(words):
        raise UserError(f"{path}: there are {len(words)} tokens and {len(kinds)} token types")
    if (longest := max(map(len, words), default=0)) > LONGEST_WORD:
        raise UserError(f"{path}: a token has {longest} letters; expected at most {LONGEST_WORD}")
    model = _setting(settings, "model", str, path)
    if model == "gpt2":
        tree = _byte_level(settings, words, path)
    elif model == "llama":
        tree = _sentence_pieces(settings, words, kinds, path)
    else:
        raise UserError(f"{path}: tokenizer.ggml.model is {model!r}; expected gpt2 or llama")
    added = [
        {
            "id": i,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for i, (word, kind) in enumerate(zip(words, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    tree |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    tree["post_processor"] = _template(settings, words, path)
    stop_ids = _stop_ids(settings, words)
    if not stop_ids:
        raise UserError(f"{path}: tokenizer.ggml.eos_token_id is missing, or no token")
    special = {
        f"{ours}_token": words[i]
        for ours, theirs in SPECIAL_TOKENS.items()
        if isinstance(i := settings.get(f"tokenizer.ggml.{theirs}_token_id"), int) and 0 <= i < len(words)
    }
    template = settings.get(CHAT_TEMPLATE)
    if template is not None and not isinstance(template, str):
        raise UserError(f"{path}: {CHAT_TEMPLATE} is not a text")
    return read_tokenizer(json.dumps(tree), str(path), stop_ids, special, template)


def _setting(settings: Mapping[str, Any], name: str, kind: type, path: Path) -> Any:
    value = settings.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, kind):
        raise UserError(f"{path}: the setting tokenizer.ggml.{name} is missing, or not a {kind.__name__}")
    return value


def _stop_ids(settings: Mapping[str, Any], words: list[str]) -> list[int]:
    found = [settings.get(f"tokenizer.ggml.{name}_token_id") for name in STOPS]
    return list(dict.fromkeys(i for i in found if isinstance(i, int) and 0 <= i < len(words)))


def _template(settings: Mapping[str, Any], words: list[str], path: Path) -> Tree | None:
    """What stands before every text: the token that begins one, where the file says so."""
    # llama.cpp adds it to sentence pieces unless it is told not to, and to bytes when it is told to.
    default = settings.get("tokenizer.ggml.model") == "llama"
    if not settings.get("tokenizer.ggml.add_bos_token", default):
        return None
    begin = _setting(settings, "bos_token_id", int, path)
    if begin >= len(words):
        raise UserError(f"{path}: tokenizer.ggml.bos_token_id is {begin}; there are {len(words)} tokens")
    name = words[begin]
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [begin], "tokens": [name]}},
    }


def _byte_level(settings: Mapping[str, Any], words: list[str], path: Path) -> Tree:
    split = settings.get("tokenizer.ggml.pre", "gpt-2")
    if split not in SPLITS:
        raise UserError(f"{path}: tokenizer.ggml.pre is {split!r}; expected one of {', '.join(SPLITS)}")
    return {
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[split]},
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": [merge.split(" ", 1) for merge in _setting(settings, "merges", list, path) if merge != NO_MERGE],
            # Llama 3 takes a word that is in the vocabulary whole, however merging would have made it.
            "ignore_merges": split == "llama-bpe",
        },
    }


def _sentence_pieces(settings: Mapping[str, Any], words: list[str], kinds: list[int], path: Path) -> Tree:
    scores = _setting(settings, "scores", list, path)
    if len(scores) != len(words):
        raise UserError(f"{path}: there are {len(words)} tokens and {len(scores)} scores")
    space, prefixed = "▁", settings.get("tokenizer.ggml.add_space_prefix", True)
    unknown = settings.get("tokenizer.ggml.unknown_token_id")
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": space}
    restored = {"type": "Replace", "pattern": {"String": space}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": space}] if prefixed else []), blank],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [restored, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": _merges(words, scores, kinds),
            "unk_token": words[unknown] if isinstance(unknown, int) and unknown < len(words) else None,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(words: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """The merges that make each word of two others, the best word first, as a BPE by scores would choose them.

    No text is merged to a control token.
    """
    ids = {word: i for i, word in enumerate(words)}
    find = ids.get
    merges: list[tuple[str, str]] = []
    for i in sorted(range(len(words)), key=lambda i: (-scores[i], i)):
        word = words[i]
        known: list[tuple[int, int]] = []
        # A vocabulary has over a million places to cut: the right part is looked for only where the left one is known.
        for cut in range(1, len(word) if kinds[i] not in (UNKNOWN, CONTROL) else 0):
            left = find(word[:cut])
            if left is not None:
                right = find(word[cut:])
                if right is not None:
                    known.append((left, right))
        known.sort()
        merges += [(words[left], words[right]) for left, right in known]
    return merges


STOPS = ("eos", "eot", "eom")
"""Tokens that end a text, a turn and a message; any of them ends a continuation."""

UNUSED, NORMAL, BYTE = 5, 1, 6
BYTE_WORD = re.compile(r"<0x[0-9A-F]{2}>")


def describe_tokenizer(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """The settings of a GGUF file for a tokenizer; ids that it lacks, up to the rows of the table, are unused.

    Raises `UserError` for a tokenizer that llama.cpp would not split text like.
    """
    tree = json.loads(tokenizer.json)
    model = tree["model"]
    if model.get("type") != "BPE":
        raise UserError(f"the tokenizer is a {model.get('type')}; a GGUF file can describe a BPE alone")
    words = {i: word for word, i in model["vocab"].items()}
    kinds = dict.fromkeys(words, NORMAL)
    if model.get("byte_fallback"):
        kinds |= {i: BYTE for i, word in words.items() if BYTE_WORD.fullmatch(word)}
    for token in tree["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise UserError(f"llama.cpp cannot strip what stands beside the added token {token['content']!r}")
        words[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    tokens = [words.get(i, f"[unused{i}]") for i in range(rows)]
    if len(tokenizer.stop_ids) > len(STOPS):
        raise UserError(f"{len(tokenizer.stop_ids)} tokens end a text; a GGUF file can name {len(STOPS)} of them")
    special = {
        f"{theirs}_token_id": tokenizer.control_tokens[tokenizer.special_tokens[f"{ours}_token"]]
        for ours, theirs in SPECIAL_TOKENS.items()
        if f"{ours}_token" in tokenizer.special_tokens
    }
    settings: dict[str, Any] = {
        "tokens": tokens,
        "token_type": [kinds.get(i, UNUSED) for i in range(rows)],
        **special,
        **{f"{name}_token_id": i for name, i in zip(STOPS, tokenizer.stop_ids, strict=False)},
        "add_bos_token": bool(tokenizer.prefix),
    }
    if tokenizer.prefix:
        settings["bos_token_id"] = tokenizer.prefix[0]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    settings |= _describe_bytes(tree, merges) if not model.get("byte_fallback") else _describe_pieces(tree, tokens)
    template = {} if tokenizer.chat_template is None else {CHAT_TEMPLATE: tokenizer.chat_template}
    return {f"tokenizer.ggml.{name}": value for name, value in settings.items()} | template


def _describe_bytes(tree: Tree, merges: list[str]) -> Tree:
    normalizer = tree["normalizer"]
    found = tree["pre_tokenizer"] or {}
    steps = found.get("pretokenizers", [found])
    # Without merges every way to split gives the same bytes.
    for name, split in SPLITS.items():
        known = normalizer == ({"type": "NFC"} if name == "qwen2" else None)
        if known and (not merges or [_essence(step) for step in steps] == [_essence(step) for step in split]):
            return {"model": "gpt2", "pre": name, "merges": merges or [NO_MERGE]}
    raise UserError(
        f"llama.cpp has no name that this version knows for the tokenizer's way to split text: {normalizer}, {steps}"
    )


def _essence(step: Tree) -> Tree:
    return {name: value for name, value in step.items() if name != "trim_offsets"}


def _describe_pieces(tree: Tree, tokens: list[str]) -> Tree:
    """Scores that choose merges in the order in which they stand."""
    best: dict[str, float] = {}
    for rank, merge in enumerate(tree["model"]["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        best.setdefault(left + right, -float(rank))
    normalizer = tree["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    kinds = [step.get("type") for step in steps]
    if tree["pre_tokenizer"] is not None or kinds not in (["Replace"], ["Prepend", "Replace"]):
        raise UserError(
            f"llama.cpp has no name for the tokenizer's way to split text: {tree['pre_tokenizer']}, {steps}"
        )
    return {
        "model": "llama",
        "scores": [best.get(token, -1e9) for token in tokens],
        "add_space_prefix": any(step.get("type") == "Prepend" for step in steps),
    }
