"""Checkpoints of a training run: saved beside the training, committed by a rename, checked before they are read.

    checkpoints/
      200/                         one step: there as a whole, or not there
      300/
        about/                     JSON: the step, the data iterator's place, the shape and dtype of every array
        params/  ema/  rest/       the arrays: the parameters; their running mean, if any; whatever else there is
        checksums.json             size and CRC-32 of every file above, written before the commit
      250.damaged-1/               failed its checksums: set aside, never deleted
      400.orbax-checkpoint-tmp/    a save that was killed: removed when a run opens the folder again

Orbax writes the arrays and commits. It would restore a flipped byte and cast a dtype without a word, so checksums and
descriptions stand beside it. This file knows pytrees, files and Orbax, and nothing else knows Orbax. It does not know
models, optimizers or when to save.
"""

import functools
import itertools
import json
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from transformer_jax.errors import UserError
from transformer_jax.training.checksums import find_damage, write_checksums

S = TypeVar("S")

_ITEMS = ("about", "params", "ema", "rest")
_UNFINISHED = ".orbax-checkpoint-tmp"
_ORBAX = os.path.dirname(ocp.__file__)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    error = str(record.exc_info[1]) if record.exc_info else ""
    return not record.pathname.startswith(_ORBAX) and _UNFINISHED not in error


def _hide_late_writes(report: Callable[[Any], object], unraisable: Any) -> None:
    if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
        report(unraisable)


# A failed save arrives as one exception. Orbax also logs it from each of its threads, asyncio for each write that
# nobody waited for, and TensorStore has Python print a traceback for each write that ends later.
logging.getLogger("absl").addFilter(_is_not_orbax)
logging.getLogger("asyncio").addFilter(_is_not_orbax)
sys.unraisablehook = functools.partial(_hide_late_writes, sys.unraisablehook)


class Checkpoints:
    """The checkpoints of one run in `folder`, of which the newest `keep` stay. Use it as a context manager.

    In a run of many processes all of them open the folder and call each method together.
    """

    def __init__(self, folder: str | Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; expected at least 1")
        self._folder = Path(folder).absolute()
        self._keep = keep
        self._step: int | None = None
        # Folders are made before `save` returns, so that a refusal there does not wait for the next call.
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._writer = ocp.AsyncCheckpointer(_handler(), async_options=options)
        if jax.process_index() == 0:
            _make_ready(self._folder)

    def save(self, step: int, state: Any, place: Any) -> None:
        """Save in the background; once this returns, the arrays of `state` may be donated.

        `place` is any JSON value, the same on every process. A step that this object has saved or restored is on disk
        and is not written again. Raises `UserError` if the save before failed, if another run's checkpoints are in the
        way, or if there is no room.
        """
        self.wait()
        if step == self._step:
            return
        leaves = _flatten(state)
        if "step" in leaves and int(leaves["step"]) != step:
            raise ValueError(f"the state has made {leaves['step']} steps; it cannot be saved as step {step}")
        arrays = {name: _to_stored(name, leaf) for name, leaf in leaves.items()}
        about = {
            "step": step,
            # As text, because the iterator may change its place while the background still writes.
            "place": _to_json(place),
            "arrays": {name: _describe(leaf) for name, leaf in leaves.items()},
        }
        self._check_folder(step, sum(array.nbytes for array in arrays.values()))
        items = {item: ocp.args.PyTreeSave(part) for item, part in _by_item(arrays).items()}
        self._step = step
        with self._writing():
            self._writer.save(self._folder / str(step), args=_Items(about=ocp.args.JsonSave(about), **items))

    def restore(self, abstract_state: S) -> tuple[S, Any, int] | None:
        """Read state, place and step from the newest whole checkpoint; None if there is none at all.

        The leaves of `abstract_state` are arrays or `jax.ShapeDtypeStruct`s, and their shardings say where each array
        goes, whatever mesh it was saved from. A damaged checkpoint is set aside with a warning. Raises `UserError` if
        every one is damaged, and if the newest whole one is not of these names, shapes and dtypes.
        """
        # Nothing is pruned before it is known which checkpoints are whole.
        with self._writing():
            self._writer.wait_until_finished()
        step, damaged = _newest_whole(self._folder, _ITEMS)
        if step is None:
            return None
        for bad, reason in damaged.items():
            aside = _set_aside(self._folder / str(bad))
            message = f"{self._folder / str(bad)} is damaged ({reason}): moved to {aside.name}, using step {step}"
            warnings.warn(message, stacklevel=2)
        about = _read_about(self._folder / str(step))
        state = _read_arrays(self._folder / str(step), about["arrays"], abstract_state)
        self._step = step
        return state, json.loads(about["place"]), step

    def wait(self) -> None:
        """Wait until the last save is on disk and the oldest checkpoints are gone. Raises `UserError` if it failed."""
        with self._writing():
            self._writer.wait_until_finished()
        if jax.process_index() == 0:
            _prune(self._folder, self._keep)

    def close(self) -> None:
        """Wait as `wait` does, and let go of the threads."""
        try:
            self.wait()
        finally:
            self._writer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_folder(self, step: int, size: int) -> None:
        """Raise a `UserError` unless a checkpoint of `step` with `size` bytes can be added to the folder."""
        if not self._folder.is_dir():
            raise UserError(
                f"{self._folder} is gone; expected the folder to stay while the run saves checkpoints there"
            )
        newest = max(_steps(self._folder), default=-1)
        if step <= newest:
            raise UserError(
                f"{self._folder} holds a checkpoint of step {newest}, but this run is at step {step}; "
                "resume from that checkpoint, or give this run a folder of its own"
            )
        disk = shutil.disk_usage(self._folder)
        if disk.total > 0 and disk.free < size:
            raise UserError(
                f"the checkpoint of step {step} needs {size / 1e6:,.1f} MB and {self._folder} has "
                f"{disk.free / 1e6:,.1f} MB free; {_intact(self._folder)}. Make room and resume"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn what the operating system refuses into a `UserError`; any other exception is a bug and passes."""
        step = self._step
        try:
            yield
        except (OSError, ValueError) as error:
            self._step = None
            reason = _system_reason(error)
            if reason is None:
                raise
            if jax.process_index() == 0:
                with suppress(OSError):
                    _remove_unfinished(self._folder)
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self._folder}: {reason}; "
                f"{_intact(self._folder)}. Mend this and resume"
            ) from error


def restore_params(folder: str | Path, abstract_params: S, item: Literal["params", "ema"] = "params") -> tuple[S, int]:
    """Read the parameters alone of the newest whole checkpoint, or their mean, and its step; changes nothing on disk.

    The optimizer state is not read, and `abstract_params` may ask for any devices. Raises `UserError` if there is no
    checkpoint, if none is whole, and if its parameters are not of these names, shapes and dtypes.
    """
    folder = Path(folder).absolute()
    step, damaged = _newest_whole(folder, ("about", item))
    if step is None:
        raise UserError(f"found no checkpoint in {folder}; expected the checkpoint folder of a training run")
    for bad, reason in damaged.items():
        warnings.warn(f"{folder / str(bad)} is damaged ({reason}): using step {step}", stacklevel=2)
    described = _by_item(_read_about(folder / str(step))["arrays"]).get(item, {})
    return _read_arrays(folder / str(step), described, {item: abstract_params})[item], step


def _flatten(tree: Any) -> dict[str, Any]:
    """Name every leaf by its path, as `opt_state.0.mu.embed.table`."""
    named = [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in jax.tree.leaves_with_path(tree)]
    leaves = dict(named)
    if len(leaves) < len(named):
        raise ValueError("two leaves of the state have one name")
    return leaves


def _item(name: str) -> str:
    first = name.split(".")[0]
    return first if first in ("params", "ema") else "rest"


def _by_item(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    items: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        items.setdefault(_item(name), {})[name] = leaf
    return items


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(str(size) for size in leaf.shape)}]"


def _to_stored(name: str, leaf: Any) -> jax.Array:
    """Return the array that is written: the leaf, or the numbers in a PRNG key."""
    if not isinstance(leaf, jax.Array):
        raise TypeError(f"{name} is a {type(leaf).__name__}; a checkpoint holds jax arrays")
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _abstract_stored(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    if leaf.sharding is None:
        raise TypeError(f"{name} has no sharding; a checkpoint is read to where it is wanted")
    stored = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=leaf.sharding)


def _from_stored(array: jax.Array, leaf: Any) -> jax.Array:
    if not _is_key(leaf):
        return array
    generator = []
    # Only an array tells its generator, and inside eval_shape an abstract leaf is one.
    jax.eval_shape(lambda key: generator.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(array, impl=generator[0])


def _check_fit(folder: Path, described: dict[str, str], leaves: dict[str, Any]) -> None:
    """Raise a `UserError` that names the first array in which the checkpoint and the wanted state differ."""
    for name in [*leaves, *described]:
        found = described.get(name, "absent")
        wanted = _describe(leaves[name]) if name in leaves else "absent"
        if found != wanted:
            raise UserError(
                f"{folder} does not fit this run: {name} is {found} in the checkpoint and {wanted} here; "
                "use the settings that it was trained with, or another folder"
            )


def _to_json(place: Any) -> str:
    text = json.dumps(place)
    if json.loads(text) != place:
        raise TypeError(f"the data iterator's place {place!r} does not survive JSON")
    return text


class _Handler(ocp.CompositeCheckpointHandler):
    """One folder an item; checksums when all processes have written and before the rename that commits."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        write_checksums(Path(directory))


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Items(ocp.args.Composite, ocp.args.CheckpointArgs):
    """The arguments that Orbax passes to `_Handler`, one an item."""


def _handler() -> _Handler:
    # Trained weights do not compress: trying costs more time than it saves space.
    return _Handler(
        about=ocp.JsonCheckpointHandler(),
        params=ocp.PyTreeCheckpointHandler(use_compression=False),
        ema=ocp.PyTreeCheckpointHandler(use_compression=False),
        rest=ocp.PyTreeCheckpointHandler(use_compression=False),
    )


def _read(folder: Path, items: _Items) -> Any:
    with ocp.Checkpointer(_handler()) as reader:
        return reader.restore(folder, args=items)


def _read_about(folder: Path) -> dict[str, Any]:
    return _read(folder, _Items(about=ocp.args.JsonRestore()))["about"]


def _read_arrays(folder: Path, described: dict[str, str], abstract_state: S) -> S:
    leaves = _flatten(abstract_state)
    _check_fit(folder, described, leaves)
    items = {}
    for item, part in _by_item({name: _abstract_stored(name, leaf) for name, leaf in leaves.items()}).items():
        items[item] = ocp.args.PyTreeRestore(part, ocp.checkpoint_utils.construct_restore_args(part))
    arrays = {name: array for part in _read(folder, _Items(**items)).values() for name, array in part.items()}
    restored = [_from_stored(arrays[name], leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), restored)


def _system_reason(error: Exception) -> str | None:
    """Say what the operating system refused; None for an error that is not its doing."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else None


def _steps(folder: Path) -> list[int]:
    """List the steps that were committed, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if re.fullmatch(r"0|[1-9][0-9]*", path.name))


def _intact(folder: Path) -> str:
    steps = _steps(folder)
    return (
        f"the earlier checkpoints are intact (steps {', '.join(map(str, steps))})"
        if steps
        else "there is no earlier one"
    )


def _make_ready(folder: Path) -> None:
    """Make the folder and rid it of saves that were killed. Raises `UserError` if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise UserError(f"cannot keep checkpoints in {folder}: {error.strerror}; expected a folder") from error
    if not writable:
        raise UserError(f"cannot keep checkpoints in {folder}: it is read-only; expected a folder to write to")


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(path)


def _prune(folder: Path, keep: int) -> None:
    for step in _steps(folder)[:-keep]:
        # Renamed first: killed amid the removal, a step would otherwise look damaged.
        unwanted = folder / f"{step}{_UNFINISHED}"
        (folder / str(step)).rename(unwanted)
        shutil.rmtree(unwanted)


def _set_aside(folder: Path) -> Path:
    names = (f"{folder.name}.damaged-{count}" for count in itertools.count(1))
    aside = next(path for name in names if not (path := folder.with_name(name)).exists())
    folder.rename(aside)
    return aside


def _newest_whole(folder: Path, items: tuple[str, ...]) -> tuple[int | None, dict[int, str]]:
    """Find the newest step whose checksums hold for `items`, and what is wrong with each newer one.

    Raises `UserError` if there are checkpoints and none is whole.
    """
    damaged: dict[int, str] = {}
    found = -1
    # One process reads and all follow it, so that they cannot come to restore different steps.
    if jax.process_index() == 0:
        for step in reversed(_steps(folder)):
            reason = find_damage(folder / str(step), items)
            if reason is None:
                found = step
                break
            damaged[step] = reason
    if found == -1 and damaged:
        listed = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        raise UserError(
            f"every checkpoint in {folder} is damaged ({listed}); "
            "put back a copy of one, or start anew in another folder"
        )
    if jax.process_count() > 1:
        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    return (None if found == -1 else found), damaged
