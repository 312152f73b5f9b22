"""Folders of safetensors and config.json, as Hugging Face's hub holds them: in, and out."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.architecture import DType, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Params
from transformer_jax.pretrained.extra import load_extra
from transformer_jax.pretrained.families import Family, family_of, read_config, write_config
from transformer_jax.pretrained.names import Row, expand
from transformer_jax.pretrained.parameters import Report, by_path, match, no_report, read_params
from transformer_jax.pretrained.pooling import Pooling, files_of_pooling
from transformer_jax.pretrained.safetensors import StoredTensor, open_folder
from transformer_jax.settings import parse_object
from transformer_jax.sharding import Mesh
from transformer_jax.text.tokenizer import Tokenizer
from transformer_jax.text.tokenizer_files import control_ids, files_of, read_tokenizer_files

OLD_NORM = re.compile(r"LayerNorm\.(gamma|beta)$")

SHARD_BYTES = 4 * 2**30
"""Size from which on a folder gets several files."""


UNSET_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Said to be nothing, because transformers otherwise assumes ids that a small vocabulary may not have."""


class Pretrained(NamedTuple):
    """A model that somebody else trained."""

    config: ModelConfig
    params: Params
    family: str
    """What the model's config.json calls its kind."""
    tokenizer: Tokenizer | None
    """None where there is no tokenizer.json."""


def load_folder(
    folder: Path, dtype: DType | None = None, mesh: Mesh | None = None, report: Report = no_report
) -> Pretrained:
    """Read a folder: its config.json and all its tensors, each once, straight onto the mesh or the first device.

    Matrices are kept in the precision that the model computes in: `dtype`, or else bfloat16 where the file's config
    says so, and float32. Raises `UserError` naming the file, and the tensor or the setting, that cannot be honoured.
    """
    tree, tensors, family, config = _describe(folder)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    matched = match(family.rows, config, tensors, folder)
    # Before the parameters, which then reuse the memory that making it took.
    tokenizer = read_tokenizer_files(folder, tree.get("eos_token_id")) if (folder / "tokenizer.json").exists() else None
    return Pretrained(config, read_params(matched, mesh, report), family.model_type, tokenizer)


def _renamed(name: str) -> str:
    """The name that a tensor has today: the first BERTs call a norm's scale and bias gamma and beta."""
    return OLD_NORM.sub(lambda found: f"LayerNorm.{'weight' if found[1] == 'gamma' else 'bias'}", name)


def config_of_folder(folder: Path) -> ModelConfig:
    """Read the shape of a folder's model, without its parameters."""
    return _describe(folder)[3]


def _describe(folder: Path) -> tuple[dict[str, Any], dict[str, StoredTensor], Family, ModelConfig]:
    path = folder / "config.json"
    tree = read_json(path)
    tensors = {_renamed(name): tensor for name, tensor in open_folder(folder).items()}
    family = family_of(tree, str(path), tensors)
    return tree, tensors, family, read_config(family, tree, str(path), tensors)


def save_folder(
    folder: Path,
    c: ModelConfig,
    params: Params,
    tokenizer: Tokenizer | None = None,
    *,
    prefer: str | None = None,
    dtype: str = "float32",
    pooling: Pooling | None = None,
) -> None:
    """Write a model, with its tokenizer, as a new folder that transformers loads.

    `dtype` is the precision that the parameters given have, and `pooling` how an encoder makes one vector of a text,
    where that is known. Of several families that compute the model exactly, the one
    called `prefer` is taken. Raises `UserError` when there is none, or when the folder exists already.
    """
    family, settings = write_config(c, prefer)
    if folder.exists():
        raise UserError(f"{folder} exists already; name a folder to make")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        temporary.mkdir(parents=True)
        _write_tensors(temporary, tensors_of(family.rows, c, params))
        files, control = ({}, {}) if tokenizer is None else (files_of(tokenizer), control_ids(tokenizer))
        # A family may count positions by the id of its padding, which is then among its settings.
        write_json(temporary / "config.json", {**UNSET_TOKENS, **control, **settings, "dtype": dtype})
        for place, tree in ({} if pooling is None else files_of_pooling(pooling, c.D)).items():
            (temporary / place).parent.mkdir(exist_ok=True)
            write_json(temporary / place, tree)
        for name, content in files.items():
            (temporary / name).write_text(content, encoding="utf-8")
        temporary.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); make room, or choose another") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def tensors_of(table: tuple[Row, ...], c: ModelConfig, params: Params) -> Iterator[tuple[str, Any]]:
    """Make the tensors of a table from the parameters, one row at a time."""
    arrays = by_path(params)
    for row in expand(table, c, set(arrays)):
        theirs = row.layout.write(c, [arrays[name] for name in row.ours])
        yield from zip(row.theirs, theirs, strict=True)


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, Any]]) -> None:
    """Write files of at most SHARD_BYTES, so that no more is held twice, and an index where there are several."""
    save_file = load_extra("safetensors.numpy").save_file
    places: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    total = held = 0

    def write_shard() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        try:
            save_file(shard, folder / name, metadata={"format": "pt"})
        except Exception as error:  # The package raises nothing narrower for a full disk.
            raise UserError(f"{folder / name} cannot be written ({error}); make room, or choose another") from None
        # Written for its owner alone, unlike every other file here.
        (folder / name).chmod((folder.stat().st_mode & 0o666) | 0o600)
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        if shard and held + tensor.nbytes > SHARD_BYTES:
            write_shard()
            held = 0
        shard[name] = np.ascontiguousarray(np.asarray(tensor))
        held += tensor.nbytes
        total += tensor.nbytes
    write_shard()
    if len(set(places.values())) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `UserError` for a file that is missing or is none."""
    try:
        return parse_object(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
