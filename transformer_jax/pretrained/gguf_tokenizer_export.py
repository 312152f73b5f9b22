"""A tokenizer described by the settings of a GGUF file, as gguf_tokenizer.py reads them back."""

import json
import re
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.pretrained.gguf_tokenizer import (
    CHAT_TEMPLATE,
    CONTINUED,
    CONTROL,
    LONGEST_BERT_WORD,
    NO_MERGE,
    ROBERTA,
    SPACE,
    SPECIAL_TOKENS,
    SPLITS,
    STOPS,
    USER_DEFINED,
    spelled,
)
from transformer_jax.text.tokenizer import Tokenizer

Tree = dict[str, Any]

UNUSED, NORMAL, BYTE = 5, 1, 6
BYTE_WORD = re.compile(r"<0x[0-9A-F]{2}>")


def describe_tokenizer(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """The settings of a GGUF file for a tokenizer; ids that it lacks, up to the rows of the table, are unused.

    Raises `UserError` for a tokenizer that llama.cpp would not split text like.
    """
    tree = json.loads(tokenizer.json)
    model = tree["model"]
    if model.get("type") not in ("BPE", "WordPiece"):
        raise UserError(f"the tokenizer is a {model.get('type')}; this version writes BPE and WordPiece to GGUF files")
    mask = tokenizer.special_tokens.get("mask_token")
    roberta = any(token["lstrip"] and token["content"] == mask for token in tree["added_tokens"])
    words = {i: word for word, i in model["vocab"].items()}
    kinds = dict.fromkeys(words, NORMAL)
    if model.get("byte_fallback"):
        kinds |= {i: BYTE for i, word in words.items() if BYTE_WORD.fullmatch(word)}
    for token in tree["added_tokens"]:
        if (token["lstrip"] and token["content"] != mask) or token["rstrip"] or token["single_word"]:
            raise UserError(f"llama.cpp cannot strip what stands beside the added token {token['content']!r}")
        words[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    tokens = _named(words, rows)
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
        "add_eos_token": bool(tokenizer.suffix),
    }
    if tokenizer.prefix:
        settings["bos_token_id"] = tokenizer.prefix[0]
    if model["type"] == "WordPiece":
        settings |= _describe_words(tree, tokens, tokenizer)
    elif len(tokenizer.prefix) > 1 or tokenizer.suffix not in ((), tokenizer.stop_ids[:1]):
        raise UserError(
            "the tokenizer puts more around a text than a GGUF file can say: one token before, its end behind"
        )
    elif model.get("byte_fallback"):
        settings |= _describe_pieces(tree, tokens)
    else:
        settings |= _describe_bytes(tree, roberta)
    template = {} if tokenizer.chat_template is None else {CHAT_TEMPLATE: tokenizer.chat_template}
    return {f"tokenizer.ggml.{name}": value for name, value in settings.items()} | template


def _named(words: dict[int, str], rows: int) -> list[str]:
    """A word for each row; an id that has none is called unused, in as many brackets as make it a new word."""
    known, tokens = set(words.values()), []
    for i in range(rows):
        word = words.get(i, f"[unused{i}]")
        while i not in words and word in known:
            word = f"[{word}]"
        tokens.append(word)
    return tokens


def _describe_words(tree: Tree, tokens: list[str], tokenizer: Tokenizer) -> Tree:
    model, normalizer = tree["model"], tree["normalizer"] or {}
    kept = {name: value for name, value in normalizer.items() if name not in ("lowercase", "strip_accents")}
    plain = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    if kept != plain or tree["pre_tokenizer"] != {"type": "BertPreTokenizer"}:
        raise UserError(
            "llama.cpp splits text into words as BERT does alone, and the tokenizer does otherwise:"
            f" {normalizer}, {tree['pre_tokenizer']}"
        )
    respelt = [respelled(token) for token in tokens]
    if model["continuing_subword_prefix"] != CONTINUED or [spelled(token) for token in respelt] != tokens:
        raise UserError("the tokenizer has words that a GGUF file cannot tell from those that go on with a word")
    matched = [token["content"] for token in tree["added_tokens"] if not token["special"] or token["normalized"]]
    if matched:
        raise UserError(f"llama.cpp does not look for the added token {matched[0]!r} as this tokenizer does")
    if model["max_input_chars_per_word"] != LONGEST_BERT_WORD:
        raise UserError(
            f"a word of more than {model['max_input_chars_per_word']} letters is unknown to the tokenizer, and a GGUF"
            f" file cannot say so; expected {LONGEST_BERT_WORD}"
        )
    if (len(tokenizer.prefix), len(tokenizer.suffix)) != (1, 1):
        raise UserError("llama.cpp puts one token before a text and one behind it, and the tokenizer does not")
    accents = normalizer["strip_accents"]
    return {
        "model": "bert",
        "tokens": respelt,
        "cls_token_id": tokenizer.prefix[0],
        "seperator_token_id": tokenizer.suffix[0],
        "unknown_token_id": model["vocab"][model["unk_token"]],
        "normalizer.lowercase": normalizer["lowercase"],
        "normalizer.strip_accents": normalizer["lowercase"] if accents is None else accents,
    }


def _describe_bytes(tree: Tree, roberta: bool) -> Tree:
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tree["model"]["merges"]]
    normalizer = tree["normalizer"]
    found = tree["pre_tokenizer"] or {}
    steps = found.get("pretokenizers", [found])
    # Without merges every way to split gives the same bytes.
    for name, split in SPLITS.items():
        known = normalizer == ({"type": "NFC"} if name == "qwen2" else None) and roberta == (name == ROBERTA)
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


def respelled(word: str) -> str:
    """The other way round: with a space before what begins a word, and nothing before what goes on with one."""
    if word.startswith("[") and word.endswith("]"):
        return word
    return word.removeprefix(CONTINUED) if word.startswith(CONTINUED) else SPACE + word
