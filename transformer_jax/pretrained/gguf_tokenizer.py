"""The tokenizer that a GGUF file describes, written as the `tokenizer.json` that says the same.

A file holds the words, merges or scores, and the name of a way to split text beforehand, which llama.cpp knows by
heart. The regular expressions below are those of the published tokenizers. A name that is not known is refused: another
way to split gives other tokens.
"""

import json
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

STOPS = ("eos", "eot", "eom")
"""Tokens that end a text, a turn and a message; any of them ends a continuation."""

SPACE = "▁"
"""Stands for a space in sentence pieces, and before what begins a word in the vocabulary of a BERT."""

CONTINUED = "##"
"""Stands before what goes on with a word in a tokenizer.json of BERT."""

LONGEST_BERT_WORD = 100
"""Letters; what is longer is unknown."""

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

LLAMA_3 = "llama-bpe"
ROBERTA = "roberta-bpe"
"""As GPT-2, with a mask that takes the spaces before it."""


def _split(pattern: str) -> Tree:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


SPLITS: Mapping[str, list[Tree]] = {
    "gpt-2": [BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
    LLAMA_3: [_split(WORDS_OF_LLAMA_3), BYTES_ALONE],
    "qwen2": [_split(WORDS_OF_QWEN_2), BYTES_ALONE],
    ROBERTA: [BYTE_LEVEL],
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
    elif model == "bert":
        words = [spelled(word) for word in words]
        tree = _word_pieces(settings, words, path)
    else:
        raise UserError(f"{path}: tokenizer.ggml.model is {model!r}; expected gpt2, llama or bert")
    if len(set(words)) < len(words):
        doubled = next(word for i, word in enumerate(words) if word in words[:i])
        raise UserError(f"{path}: the token {doubled!r} stands twice in tokenizer.ggml.tokens")
    stripping = settings.get("tokenizer.ggml.mask_token_id") if _split_of(settings) == ROBERTA else None
    added = [
        {
            "id": i,
            "content": word,
            "single_word": False,
            "lstrip": i == stripping,
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
    if model == "bert" and "bos_token" in special:
        special["cls_token"] = special.pop("bos_token")
    template = settings.get(CHAT_TEMPLATE)
    if template is not None and not isinstance(template, str):
        raise UserError(f"{path}: {CHAT_TEMPLATE} is not a text")
    return read_tokenizer(json.dumps(tree), str(path), stop_ids, special, template)


def _setting(settings: Mapping[str, Any], name: str, kind: type, path: Path) -> Any:
    value = settings.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, kind):
        raise UserError(f"{path}: the setting tokenizer.ggml.{name} is missing, or not a {kind.__name__}")
    return value


def _split_of(settings: Mapping[str, Any]) -> Any:
    return settings.get("tokenizer.ggml.pre", "gpt-2")


def _stop_ids(settings: Mapping[str, Any], words: list[str]) -> list[int]:
    found = [settings.get(f"tokenizer.ggml.{name}_token_id") for name in STOPS]
    if found == [None, None, None] and settings.get("tokenizer.ggml.model") == "bert":
        # No text is written, but one has an end.
        found = [settings.get("tokenizer.ggml.seperator_token_id")]
    return list(dict.fromkeys(i for i in found if isinstance(i, int) and 0 <= i < len(words)))


def _template(settings: Mapping[str, Any], words: list[str], path: Path) -> Tree | None:
    """What stands around every text: the tokens that begin and end one, where the file says so."""
    model = settings.get("tokenizer.ggml.model")
    # llama.cpp adds the first to sentence pieces and Llama 3's bytes unless it is told not to, the last when told to.
    begins = model == "llama" or (model == "gpt2" and _split_of(settings) == LLAMA_3)
    around = [("bos", "add_bos_token", begins), ("eos", "add_eos_token", False)]
    if model == "bert":
        around = [(_beginning(settings), "", True), ("seperator", "", True)]
    before, behind = (
        [_token(settings, name, words, path)] if settings.get(f"tokenizer.ggml.{asked}", default) else []
        for name, asked, default in around
    )
    if not before and not behind:
        return None
    steps = {i: {"SpecialToken": {"id": words[i], "type_id": 0}} for i in (*before, *behind)}
    return {
        "type": "TemplateProcessing",
        "single": [*(steps[i] for i in before), {"Sequence": {"id": "A", "type_id": 0}}, *(steps[i] for i in behind)],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {words[i]: {"id": words[i], "ids": [i], "tokens": [words[i]]} for i in steps},
    }


def _beginning(settings: Mapping[str, Any]) -> str:
    """By which name llama.cpp finds the first token of a text for BERT; older files have the other."""
    return "bos" if "tokenizer.ggml.bos_token_id" in settings else "cls"


def _token(settings: Mapping[str, Any], name: str, words: list[str], path: Path) -> int:
    """The id of the token that is there for something."""
    found = _setting(settings, f"{name}_token_id", int, path)
    if not 0 <= found < len(words):
        raise UserError(f"{path}: tokenizer.ggml.{name}_token_id is {found}; there are {len(words)} tokens")
    return found


def _byte_level(settings: Mapping[str, Any], words: list[str], path: Path) -> Tree:
    split = _split_of(settings)
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
            "ignore_merges": split == LLAMA_3,
        },
    }


def _sentence_pieces(settings: Mapping[str, Any], words: list[str], kinds: list[int], path: Path) -> Tree:
    scores = _setting(settings, "scores", list, path)
    if len(scores) != len(words):
        raise UserError(f"{path}: there are {len(words)} tokens and {len(scores)} scores")
    space, prefixed = SPACE, settings.get("tokenizer.ggml.add_space_prefix", True)
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


def spelled(word: str) -> str:
    """A word of a BERT's vocabulary as its tokenizer spells it, of one in a GGUF file."""
    if word.startswith("[") and word.endswith("]"):
        return word
    return word[1:] if word.startswith(SPACE) else CONTINUED + word


def _word_pieces(settings: Mapping[str, Any], words: list[str], path: Path) -> Tree:
    lowercase = settings.get("tokenizer.ggml.normalizer.lowercase", True)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": settings.get("tokenizer.ggml.normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": CONTINUED, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": words[_token(settings, "unknown", words, path)],
            "continuing_subword_prefix": CONTINUED,
            "max_input_chars_per_word": LONGEST_BERT_WORD,
            "vocab": {word: i for i, word in enumerate(words)},
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
