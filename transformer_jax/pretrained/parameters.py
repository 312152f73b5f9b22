"""From the tensors of a published file to the parameter tree: all checked first, then each read to where it belongs."""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.architecture import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.machine import num_cores
from transformer_jax.model.transformer import Params, build, param_shapes
from transformer_jax.pretrained.layouts import Layout
from transformer_jax.pretrained.names import Row, expand
from transformer_jax.pretrained.stored import Stored, alike, empty, fill, fill_beside
from transformer_jax.sharding import Mesh, on_first_device, on_mesh

DERIVED = re.compile(
    r"rotary_emb\.inv_freq$|embeddings\.position_ids$|\.(attn|attention)\.(masked_)?bias$|^cls\.seq_relationship\."
)
"""Tensors of older files that follow from the config, and BERT's guess whether two sentences follow one another."""

TIED = ("lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight", "lm_head.decoder.weight")
"""Output layers, which a file may hold although they are the embedding table."""

BIASES = ("cls.predictions.bias", "lm_head.bias")
TIED_BIASES = ("cls.predictions.decoder.bias", "lm_head.decoder.bias")

Report = Callable[[int, int], None]
"""Takes how many of how many numbers have been read."""


def no_report(done: int, total: int) -> None:
    """Tell nobody."""


class Matched(NamedTuple):
    """A file whose tensors are those that its config asks for."""

    config: ModelConfig
    rows: list[Row]
    shapes: Params
    tensors: Mapping[str, Stored]


def match(table: tuple[Row, ...], c: ModelConfig, tensors: Mapping[str, Stored], where: Path) -> Matched:
    """Find each parameter's tensors by the table. Raises `UserError` unless those are what the file has."""
    if len(tensors) < c.L:
        raise UserError(f"{where}: it has {len(tensors)} tensors, too few for {c.L} layers")
    shapes = param_shapes(c)
    leaves = by_path(shapes)
    rows = expand(table, c, set(leaves))
    _check_tensors(rows, c, leaves, tensors, where)
    return Matched(c, rows, shapes, tensors)


def read_params(found: Matched, mesh: Mesh | None = None, report: Report = no_report) -> Params:
    """Make the parameter tree: of each row one after the other, each array split over the mesh as soon as it is made.

    Without a mesh all is on the first device.
    """
    c, shapes = found.config, found.shapes
    places = on_first_device(shapes) if mesh is None else on_mesh(mesh, build(c).logical_axes(), shapes)
    leaves = by_path(places)
    total = sum(math.prod(found.tensors[name].shape) for row in found.rows for name in row.theirs)
    done = 0
    params: dict[str, jax.Array] = {}

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report(done, total)

    with ThreadPoolExecutor(num_cores()) as pool:
        for row in found.rows:
            dtypes = [c.dtype if len(leaves[name].shape) >= 2 else "float32" for name in row.ours]
            host = [empty(leaves[name].shape, jnp.dtype(dtype)) for name, dtype in zip(row.ours, dtypes, strict=True)]
            _read_row(row.layout, c, [found.tensors[name] for name in row.theirs], host, pool, advance)
            for name, array in zip(row.ours, host, strict=True):
                # Each device is given its part alone.
                params[name] = jax.make_array_from_callback(array.shape, leaves[name].sharding, array.__getitem__)
    return jax.tree.unflatten(jax.tree.structure(shapes), [params[name] for name in leaves])


def _read_row(
    layout: Layout,
    c: ModelConfig,
    tensors: list[Stored],
    host: list[np.ndarray],
    pool: Executor,
    advance: Callable[[int], None],
) -> None:
    """Set our arrays of a row to what their tensors hold."""
    for tensor, views in zip(tensors, layout.into(c, host), strict=True):
        for count in fill_beside(views, tensor, pool) if layout.beside else fill(views, tensor, pool):
            advance(count)
    if layout.added:
        for array in host:
            array -= layout.added


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a parameter tree by their paths, as `layers_0/attn/q/weight`."""
    return {jax.tree_util.keystr(at, simple=True, separator="/"): x for at, x in jax.tree.leaves_with_path(tree)}


def _check_tensors(
    rows: list[Row],
    c: ModelConfig,
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Mapping[str, Stored],
    folder: Path,
) -> None:
    """Refuse a file unless it holds exactly the tensors of the table, in their shapes."""
    expected: dict[str, tuple[int, ...]] = {}

    @cache
    def shapes_of(layout: Layout, ours: tuple[jax.ShapeDtypeStruct, ...]) -> list[tuple[int, ...]]:
        return [theirs.shape for theirs in jax.eval_shape(lambda ours: layout.write(c, ours), list(ours))]

    for row in rows:
        theirs = shapes_of(row.layout, tuple(leaves[name] for name in row.ours))
        expected |= dict(zip(row.theirs, theirs, strict=True))
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
        if name in tensors and used is not None and not alike(tensors[name], tensors[used]):
            raise UserError(f"{folder}: the tensors {name!r} and {used!r} are not alike, and the model has one of them")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{tensors[name].path}: the tensor {name!r} has shape {list(tensors[name].shape)}; expected"
                f" {list(shape)} by config.json"
            )


def _warn_of_untied(tensors: Mapping[str, Stored], table: str) -> None:
    for name in TIED:
        if name in tensors and not alike(tensors[name], tensors[table]):
            warnings.warn(
                f"{tensors[name].path}: {name!r} is not the embedding table, but config.json ties them: it is not used",
                stacklevel=2,
            )
