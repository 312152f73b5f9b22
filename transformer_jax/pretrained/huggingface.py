"""Folders of safetensors and config.json, as Hugging Face's hub holds them: in, and out."""

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.architecture import DType, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Params, build
from transformer_jax.pretrained.families import Family, family_of, read_config
from transformer_jax.pretrained.names import Row, expand
from transformer_jax.pretrained.safetensors import StoredTensor, open_folder

DERIVED = re.compile(r"rotary_emb\.inv_freq$|embeddings\.position_ids$|\.(attn|attention)\.(masked_)?bias$")
"""Tensors of older files that follow from the config."""

TIED = ("lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight", "lm_head.decoder.weight")
"""Output layers, which a file may hold although they are the embedding table."""

TIED_BIASES = ("cls.predictions.decoder.bias", "lm_head.decoder.bias")


class Pretrained(NamedTuple):
    """A model that somebody else trained."""

    config: ModelConfig
    params: Params


def load_folder(folder: Path, dtype: DType | None = None) -> Pretrained:
    """Read a folder: its config.json and all its tensors, each once.

    Matrices are kept in the precision that the model computes in: `dtype`, or else bfloat16 where the file's config
    says so, and float32. Raises `UserError` naming the file, and the tensor or the setting, that cannot be honoured.
    """
    path = folder / "config.json"
    tree = read_json(path)
    tensors = open_folder(folder)
    family = family_of(tree, str(path), tensors)
    config = read_config(family, tree, str(path), tensors)
    if dtype is not None:
        config = config.__class__(**{**config.__dict__, "dtype": dtype})
    return Pretrained(config, read_params(family, config, tensors, folder))


def read_params(family: Family, c: ModelConfig, tensors: Mapping[str, StoredTensor], folder: Path) -> Params:
    """Make the parameter tree from the tensors, row by row of the family's table."""
    shapes = jax.eval_shape(build(c).init, jax.random.key(0))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(shapes)
    }
    rows = expand(family.rows, c, set(leaves))
    _check_tensors(rows, c, leaves, tensors, folder)
    arrays: dict[str, Any] = {}
    for row in rows:
        made = row.layout.read(c, [jnp.asarray(tensors[name].read()) for name in row.theirs])
        for name, array in zip(row.ours, made, strict=True):
            arrays[name] = array.astype(c.dtype if array.ndim >= 2 else jnp.float32)
    return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in leaves])


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


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `UserError` for a file that is missing or is none."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not a JSON object")
    return tree
