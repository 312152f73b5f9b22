"""Folders of safetensors and config.json, as Hugging Face's hub holds them: in, and out."""

import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.architecture import DType, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Params, build
from transformer_jax.pretrained.extra import load_extra
from transformer_jax.pretrained.families import Family, family_of, read_config, write_config
from transformer_jax.pretrained.names import Row, expand
from transformer_jax.pretrained.safetensors import StoredTensor, open_folder
from transformer_jax.settings import parse_object
from transformer_jax.text.tokenizer import Tokenizer
from transformer_jax.text.tokenizer_files import control_ids, files_of, read_tokenizer_files

DERIVED = re.compile(r"rotary_emb\.inv_freq$|embeddings\.position_ids$|\.(attn|attention)\.(masked_)?bias$")
"""Tensors of older files that follow from the config."""

TIED = ("lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight", "lm_head.decoder.weight")
"""Output layers, which a file may hold although they are the embedding table."""

BIASES = ("cls.predictions.bias", "lm_head.bias")
TIED_BIASES = ("cls.predictions.decoder.bias", "lm_head.decoder.bias")


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


def load_folder(folder: Path, dtype: DType | None = None) -> Pretrained:
    """Read a folder: its config.json and all its tensors, each once.

    Matrices are kept in the precision that the model computes in: `dtype`, or else bfloat16 where the file's config
    says so, and float32. Raises `UserError` naming the file, and the tensor or the setting, that cannot be honoured.
    """
    tree, tensors, family, config = _describe(folder)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    params = read_params(family.rows, config, tensors, folder)
    tokenizer = read_tokenizer_files(folder, tree.get("eos_token_id")) if (folder / "tokenizer.json").exists() else None
    return Pretrained(config, params, family.model_type, tokenizer)


def config_of_folder(folder: Path) -> ModelConfig:
    """Read the shape of a folder's model, without its parameters."""
    return _describe(folder)[3]


def _describe(folder: Path) -> tuple[dict[str, Any], dict[str, StoredTensor], Family, ModelConfig]:
    path = folder / "config.json"
    tree = read_json(path)
    tensors = open_folder(folder)
    family = family_of(tree, str(path), tensors)
    return tree, tensors, family, read_config(family, tree, str(path), tensors)


def read_params(table: tuple[Row, ...], c: ModelConfig, tensors: Mapping[str, Any], where: Path) -> Params:
    """Make the parameter tree from the tensors of a file, row by row of the table."""
    if len(tensors) < c.L:
        raise UserError(f"{where}: it has {len(tensors)} tensors, too few for {c.L} layers")
    shapes = jax.eval_shape(build(c).init, jax.random.key(0))
    leaves = by_path(shapes)
    rows = expand(table, c, set(leaves))
    _check_tensors(rows, c, leaves, tensors, where)
    arrays: dict[str, Any] = {}
    for row in rows:
        made = row.layout.read(c, [jnp.asarray(tensors[name].read()) for name in row.theirs])
        for name, array in zip(row.ours, made, strict=True):
            arrays[name] = array.astype(c.dtype if array.ndim >= 2 else jnp.float32)
    return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in leaves])


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a parameter tree by their paths, as `layers_0/attn/q/weight`."""
    return {jax.tree_util.keystr(at, simple=True, separator="/"): x for at, x in jax.tree.leaves_with_path(tree)}


def _check_tensors(
    rows: list[Row],
    c: ModelConfig,
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Mapping[str, StoredTensor],
    folder: Path,
) -> None:
    """Refuse a file unless it holds exactly the tensors of the table, in their shapes."""
    expected: dict[str, tuple[int, ...]] = {}
    for row in rows:
        ours = [leaves[name] for name in row.ours]
        theirs = jax.eval_shape(lambda ours, row=row: row.layout.write(c, ours), ours)
        expected |= {name: shape.shape for name, shape in zip(row.theirs, theirs, strict=True)}
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if c.tie_embeddings:
        _warn_of_untied(tensors, next(row.theirs[0] for row in rows if row.ours == ("embed",)))
        extra = [name for name in extra if name not in TIED]
    extra = [name for name in extra if not DERIVED.search(name) and name not in TIED_BIASES]
    if missing or extra:
        listed = [f"{name!r} is missing" for name in missing[:3]] + [f"{name!r} is not known" for name in extra[:3]]
        more = len(missing) + len(extra) - len(listed)
        raise UserError(
            f"{folder}: its tensors are not those of its config.json: {', '.join(listed)}"
            + (f", and {more} more" if more else "")
        )
    used = next((name for name in expected if name in BIASES), None)
    for name in TIED_BIASES:
        if name in tensors and used is not None and not np.array_equal(tensors[name].read(), tensors[used].read()):
            raise UserError(f"{folder}: the tensors {name!r} and {used!r} are not alike, and the model has one of them")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{tensors[name].path}: the tensor {name!r} has shape {list(tensors[name].shape)}; expected"
                f" {list(shape)} by config.json"
            )


def _warn_of_untied(tensors: Mapping[str, StoredTensor], table: str) -> None:
    for name in TIED:
        if name in tensors and not np.array_equal(tensors[name].read(), tensors[table].read()):
            warnings.warn(
                f"{tensors[name].path}: {name!r} is not the embedding table, but config.json ties them: it is not used",
                stacklevel=2,
            )


def save_folder(
    folder: Path,
    c: ModelConfig,
    params: Params,
    tokenizer: Tokenizer | None = None,
    *,
    prefer: str | None = None,
    dtype: str = "float32",
) -> None:
    """Write a model, with its tokenizer, as a new folder that transformers loads.

    `dtype` is the precision that the parameters given have. Of several families that compute the model exactly, the one
    called `prefer` is taken. Raises `UserError` when there is none, or when the folder exists already.
    """
    family, settings = write_config(c, prefer)
    if folder.exists():
        raise UserError(f"{folder} exists already; name a folder to make")
    temporary = folder.with_name(f".{folder.name}.partial")
    # What a killed run has left.
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write_tensors(temporary, tensors_of(family.rows, c, params))
        files, control = ({}, {}) if tokenizer is None else (files_of(tokenizer), control_ids(tokenizer))
        # A family may count positions by the id of its padding, which is then among its settings.
        write_json(temporary / "config.json", {**UNSET_TOKENS, **control, **settings, "dtype": dtype})
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
