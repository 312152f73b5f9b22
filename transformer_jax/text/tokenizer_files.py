"""The files of a folder that make a tokenizer, as transformers names and reads them.

tokenizer.json            how text becomes ids
tokenizer_config.json     which control token is for what
generation_config.json    which tokens end a continuation
chat_template.jinja       how a conversation becomes text, where there is one
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.settings import parse_object
from transformer_jax.text.tokenizer import Tokenizer, load_tokenizer

NAMES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def files_of(tokenizer: Tokenizer) -> dict[str, str]:
    """The content of a tokenizer's files by their names; `read_tokenizer_files` reads them back equal."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    template = {} if tokenizer.chat_template is None else {"chat_template.jinja": tokenizer.chat_template}
    return {
        "tokenizer.json": tokenizer.json,
        "tokenizer_config.json": _to_json(config),
        "generation_config.json": _to_json(control_ids(tokenizer)),
        **template,
    }


def control_ids(tokenizer: Tokenizer) -> dict[str, int | list[int]]:
    """The ids of control tokens as config.json and generation_config.json name them."""
    stops = list(tokenizer.stop_ids)
    known = {what: tokenizer.control_tokens[name] for what, name in tokenizer.special_tokens.items()}
    ids = {f"{what}_id": known[what] for what in ("bos_token", "pad_token") if what in known}
    return {**ids, "eos_token_id": stops if len(stops) > 1 else stops[0]}


def digest_of(tokenizer: Tokenizer) -> str:
    """Tell one tokenizer from another: a hash of its files."""
    return hashlib.sha256(json.dumps(files_of(tokenizer), sort_keys=True).encode()).hexdigest()


def read_tokenizer_files(folder: Path, end: Any = None) -> Tokenizer:
    """Read the tokenizer of a folder; `end` is what config.json says of the tokens that end a continuation.

    Raises `UserError` naming the file, and the setting, that cannot be honoured.
    """
    config, generation = (_read_object(folder / name) for name in NAMES[1:3])
    end = generation.get("eos_token_id", end)
    stop_ids = end if isinstance(end, list) else [] if end is None else [end]
    if not all(type(i) is int for i in stop_ids):
        raise UserError(f"{folder}: eos_token_id is {end!r}; expected a token id, or a list of them")
    special = _special_tokens(_read_object(folder / "special_tokens_map.json") | config, folder)
    return load_tokenizer(folder / NAMES[0], stop_ids, special, _chat_template(folder, config))


def _special_tokens(config: dict[str, Any], folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for what in SPECIAL_TOKENS:
        token = config.get(what)
        # Some write how the token is matched beside its name.
        name = token.get("content") if isinstance(token, dict) else token
        if name is not None and not isinstance(name, str):
            raise UserError(f"{folder / NAMES[1]}: {what} is {token!r}; expected the name of a token")
        if name is not None:
            found[what] = name
    return found


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / NAMES[3]
    if path.exists():
        try:
            # Not as text, whose ends of lines Python would change.
            return path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read ({error}); fetch it again, or remove it") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        # Several by name, of which one is for ordinary conversations.
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise UserError(f"{folder / NAMES[1]}: chat_template is {template!r}; expected a template")
    return template


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_bytes(), str(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _to_json(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
