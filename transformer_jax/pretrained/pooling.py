"""How a published encoder makes one vector of a text, as the files beside it say: in, and out."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from transformer_jax.errors import UserError
from transformer_jax.pretrained.gguf_file import open_gguf
from transformer_jax.settings import parse_object

Pooling = Literal["mean", "first"]

MODES: Mapping[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
"""What sentence-transformers calls them."""

NUMBERS: Mapping[int, Pooling] = {0: "mean", 1: "mean", 2: "first"}
"""What GGUF calls them; 0 says that there is nothing to go by."""

PLACES = ("modules.json", "1_Pooling/config.json")
STEP = re.compile(r'"type"\s*:\s*"(?:[\w.]*\.)?(?!Transformer"|Pooling"|Normalize")(\w+)"')
"""A step other than those that every model here takes."""


def read_pooling(path: Path) -> Pooling:
    """Tell how the model of a folder or of a GGUF file does it; the mean, where nothing is said.

    Raises `UserError` for another way than the mean or the first token, and for layers behind it.
    """
    return _of_folder(path) if path.is_dir() else _of_gguf(path)


def _of_folder(folder: Path) -> Pooling:
    steps, pooling = (folder / place for place in PLACES)
    if steps.exists() and (unknown := STEP.findall(_read(steps))):
        raise UserError(f"{steps}: the vectors of this model pass through {unknown[0]}, which this version cannot")
    if not pooling.exists():
        return "mean"
    tree = parse_object(_read(pooling), str(pooling))
    chosen = [mode for mode, on in tree.items() if mode.startswith("pooling_mode_") and on is True]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise UserError(
            f"{pooling}: it asks for {', '.join(chosen) or 'no pooling'}; expected one of {', '.join(MODES)}"
        )
    return MODES[chosen[0]]


def _of_gguf(path: Path) -> Pooling:
    settings = open_gguf(path).settings
    name = f"{settings.get('general.architecture')}.pooling_type"
    number = settings.get(name, 0)
    if not isinstance(number, int) or number not in NUMBERS:
        raise UserError(f"{path}: {name} is {number!r}; expected 1, the mean, or 2, the first token")
    return NUMBERS[number]


def files_of_pooling(pooling: Pooling, width: int) -> dict[str, Any]:
    """The trees of the files that say so to sentence-transformers, by their places in a folder."""
    steps = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(steps)
    ]
    modes = {mode: found == pooling for mode, found in MODES.items()}
    return dict(zip(PLACES, (modules, {"word_embedding_dimension": width, **modes}), strict=True))


def number_of_pooling(pooling: Pooling) -> int:
    """What a GGUF file says of it."""
    return {"mean": 1, "first": 2}[pooling]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again") from None
