"""A run's folder: what is in it, who may write it, and opening it for training or for use.

config.json       the exact configuration        tokenizer.json   the tokenizer; beside it
corpus.json       fingerprints of both texts                      what tokenizer_files.py lists
metrics.jsonl     every step's figures           checkpoints/     see checkpoint.py
curves.png        drawn at the end               events/          the figures for TensorBoard
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from transformer_jax.architecture import DType
from transformer_jax.config import RunConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Model, Params, build, cast_matrices, param_shapes
from transformer_jax.settings import differences, from_json, to_json
from transformer_jax.sharding import Mesh, on_first_device, on_mesh
from transformer_jax.text.corpus import MARK_OF_A_RUN, Split, fingerprint, read_corpus, split
from transformer_jax.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from transformer_jax.text.tokenizer_files import NAMES, digest_of, files_of, read_tokenizer_files
from transformer_jax.training.checkpoint import restore_params

MAY_CHANGE = (
    "mesh.",
    "decoding.",
    "data.workers",
    # The text itself is known by its fingerprint.
    "data.paths",
    *(
        f"training.{name}"
        for name in ("eval_every", "checkpoint_every", "keep_checkpoints", "sample_prompt", "sample_tokens")
    ),
)
"""Settings that decide what is shown, kept or computed where, but not what is learnt: a run may go on with others."""


class Run(NamedTuple):
    """What a run trains with."""

    config: RunConfig
    tokenizer: Tokenizer
    split: Split
    skipped: list[str]
    """Files of the corpus that are not text."""
    fingerprint: str
    """Of the whole text."""


class Trained(NamedTuple):
    """A trained model, ready to decode."""

    config: RunConfig
    model: Model
    params: Params
    """Matrices in the compute dtype."""
    tokenizer: Tokenizer
    step: int


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if there is none, and keep other training processes out of it.

    Raises `UserError` when another process is at work there.
    """
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"the folder's name {str(folder)!a} is not UTF-8 text; choose another --run") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / MARK_OF_A_RUN).open("a")
    except OSError as error:
        raise UserError(f"{folder} cannot hold a run ({error.strerror}); choose another --run") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is training in {folder}; wait for it, or choose another --run") from None
        yield


def open_run(folder: Path, requested: RunConfig, own_tokenizer: Callable[[], Tokenizer] | None = None) -> Run:
    """Read the text and the tokenizer that a run trains with; nothing is written yet.

    `own_tokenizer` gives that of the model which the run starts from.

    Raises `UserError` when the folder holds another configuration or was trained on another text.
    """
    recorded = _recorded_config(folder)
    corpus = read_corpus(requested.data.paths, requested.data.jsonl_field)
    documents = split(corpus.documents, requested.data.holdout)
    tokenizer = read_tokenizer_files(folder) if recorded else _make_tokenizer(requested, documents, own_tokenizer)
    run = Run(
        _with_vocabulary(requested, tokenizer), tokenizer, documents, corpus.skipped, fingerprint(corpus.documents)
    )
    if recorded is not None:
        _check_same(folder, recorded, run)
    return run


def record_run(folder: Path, run: Run) -> None:
    """Write down what the run is. Called once everything about it is known to be right."""
    files = files_of(run.tokenizer)
    for name in NAMES:
        if name in files:
            write_atomically(folder / name, files[name])
        else:
            # A first try with another tokenizer, killed before it was recorded, may have left its template.
            (folder / name).unlink(missing_ok=True)
    write_atomically(folder / "corpus.json", json.dumps(_fingerprints(run)) + "\n")
    write_atomically(folder / "config.json", to_json(run.config))


def is_run(folder: Path) -> bool:
    """Whether a folder is, or is to be read as, one of a run: its config.json, if any, is no published model's."""
    try:
        tree = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        return folder.is_dir() and not any(folder.glob("*.safetensors*"))
    except (OSError, ValueError, RecursionError):
        return folder.is_dir()
    return not (isinstance(tree, dict) and "model_type" in tree)


def recorded_config(folder: Path) -> RunConfig:
    """Read the configuration of a run. Raises `UserError` when the folder is none."""
    config = _recorded_config(folder) if folder.is_dir() else None
    if config is None:
        raise UserError(
            f"{folder} holds no model, neither a run nor a published one: it has no config.json; train one with"
            f" train.py --run {folder}"
        )
    return config


def open_trained(folder: Path, dtype: DType | None = None, mesh: Mesh | None = None) -> Trained:
    """Load the newest whole checkpoint of a run, onto the mesh or else the first device.

    Of a run that keeps a running mean of its parameters it is the mean. Raises `UserError` when there is none.
    """
    config = recorded_config(folder)
    if dtype is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    model = build(config.model)
    shapes = param_shapes(config.model)
    places = on_first_device(shapes) if mesh is None else on_mesh(mesh, model.logical_axes(), shapes)
    item = "params" if config.training.ema_decay is None else "ema"
    params, step = restore_params(folder / "checkpoints", places, item)
    tokenizer = read_tokenizer_files(folder)
    _check_tokenizer(folder, tokenizer)
    return Trained(config, model, cast_matrices(params, config.model.dtype), tokenizer, step)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader, or a kill at any moment, finds the old text or the new."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); make room, or choose another --run") from None


def _recorded_config(folder: Path) -> RunConfig | None:
    path = folder / "config.json"
    if path.exists():
        text = _read_text(path)
        try:
            return from_json(RunConfig, text)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    # A run that was killed while it made its folder leaves these.
    ours = {MARK_OF_A_RUN, "corpus.json", *NAMES}
    others = sorted(
        {file.name for file in folder.iterdir()} - ours - {f"{name}.tmp" for name in (*ours, "config.json")}
    )
    if others:
        raise UserError(
            f"{folder} holds {others[0]!r} and no config.json, so it is not the folder of a run; choose another"
        )
    return None


def _make_tokenizer(config: RunConfig, documents: Split, own_tokenizer: Callable[[], Tokenizer] | None) -> Tokenizer:
    if own_tokenizer is not None:
        return own_tokenizer()
    if config.data.tokenizer == "bytes":
        return byte_tokenizer()
    if config.data.tokenizer == "bpe":
        return train_bpe([document.text for document in documents.train], config.data.bpe_vocab_size)
    return load_tokenizer(config.data.tokenizer)


def _with_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """Fill in the model's vocabulary from the tokenizer's; a larger one of the config's own stays."""
    size = config.model.vocab_size
    if size is not None and size < tokenizer.vocab_size:
        raise UserError(
            f"ModelConfig.vocab_size is {size}, but the tokenizer has {tokenizer.vocab_size} ids;"
            " raise it, or leave it null to take the tokenizer's"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size or tokenizer.vocab_size))


def _check_same(folder: Path, recorded: RunConfig, run: Run) -> None:
    changed = [line for line in differences(recorded, run.config) if not line.startswith(MAY_CHANGE)]
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise UserError(
            f"{folder} holds a run of another configuration (recorded | requested):\n{listed}\n"
            "give the recorded settings to go on with it, or choose another --run"
        )
    recorded_prints, ours = _recorded_fingerprints(folder), _fingerprints(run)
    if recorded_prints["fingerprint"] != ours["fingerprint"]:
        raise UserError(
            f"the corpus has changed since the run in {folder} began; restore the text, or choose another --run"
        )
    _check_tokenizer(folder, run.tokenizer)


def _fingerprints(run: Run) -> dict[str, str]:
    return {"fingerprint": run.fingerprint, "tokenizer": digest_of(run.tokenizer)}


def _recorded_fingerprints(folder: Path) -> dict[str, str]:
    path = folder / "corpus.json"
    try:
        recorded = json.loads(_read_text(path))
        return {name: recorded[name] for name in ("fingerprint", "tokenizer")}
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged; restore it, or choose another --run") from None


def _check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Refuse another tokenizer than the run began with: its ids would mean other texts."""
    if _recorded_fingerprints(folder)["tokenizer"] != digest_of(tokenizer):
        raise UserError(
            f"{folder / NAMES[0]}, or a file beside it, has changed since the run began: it is not the tokenizer that"
            " the model was trained with; restore it, or choose another --run"
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it, or choose another folder") from None
