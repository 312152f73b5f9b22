"""A run's folder: what is in it, who may write it, and opening it for training or for use.

config.json       the exact configuration        tokenizer.json   the tokenizer; beside it
corpus.json       fingerprints of both texts                      what tokenizer_files.py lists
metrics.jsonl     every step's figures           checkpoints/     see checkpoint.py
curves.png        drawn at the end               events/          the figures for TensorBoard
tokens/           the tokenized text, where the user has no folder for what can be made anew
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
from transformer_jax.machine import cache_folder
from transformer_jax.model.transformer import Model, Params, build, cast_matrices, param_shapes
from transformer_jax.report import reading_progress
from transformer_jax.settings import differences, from_json, to_json
from transformer_jax.sharding import Mesh, on_first_device, on_mesh
from transformer_jax.text.corpus import MARK_OF_A_RUN, Corpus, Survey, find_corpus, split
from transformer_jax.text.records import Fields
from transformer_jax.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from transformer_jax.text.tokenizer_files import NAMES, digest_of, files_of, read_tokenizer_files
from transformer_jax.text.tokens import Text, known_survey, known_text
from transformer_jax.training.checkpoint import restore_params

MAY_CHANGE = (
    "mesh.",
    "decoding.",
    "data.workers",
    "data.cache",
    # The text itself is known by its fingerprint.
    "data.paths",
    *(
        f"training.{name}"
        for name in ("eval_every", "checkpoint_every", "keep_checkpoints", "sample_prompt", "sample_tokens")
    ),
)
"""Settings that decide what is shown, kept or computed where, but not what is learnt: a run may go on with others."""


TOKENS = "tokens"


class Run(NamedTuple):
    """What a run trains with."""

    config: RunConfig
    tokenizer: Tokenizer
    survey: Survey
    """Of the whole corpus."""
    text: Text


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
    _check_model_fits(requested)
    recorded, data = _recorded_config(folder), requested.data
    cache = Path(data.cache).expanduser() if data.cache else cache_folder("tokens") or folder / TOKENS
    corpus = find_corpus(data.paths, Fields(data.jsonl_field, data.weight_field))
    with reading_progress(unit="bytes") as report:
        survey = known_survey(corpus, cache, report)
    if recorded is None:
        tokenizer = _make_tokenizer(requested, corpus, survey, own_tokenizer)
    else:
        tokenizer = read_tokenizer_files(folder)
    config = _with_vocabulary(requested, tokenizer)
    if recorded is not None:
        _check_same(folder, recorded, config, _fingerprints(survey, tokenizer))
    _check_text_fits(config, survey, tokenizer)
    with reading_progress(unit="characters") as report:
        text = known_text(corpus, survey, tokenizer, data.holdout, cache, report)
    return Run(config, tokenizer, survey, text)


def _check_model_fits(config: RunConfig) -> None:
    """Refuse a model that cannot predict what it is to predict."""
    attention, predict = config.model.attention, config.objective.predict
    if (attention == "bidirectional") != (predict == "masked"):
        raise UserError(
            f"ModelConfig.attention is {attention!r} and ObjectiveConfig.predict is {predict!r}; an encoder, which is"
            " 'bidirectional', predicts what is 'masked', and every other model is 'causal'"
        )


def _check_text_fits(config: RunConfig, survey: Survey, tokenizer: Tokenizer) -> None:
    """Refuse conversations for what does not know them."""
    if survey.conversations and config.objective.predict != "next":
        raise UserError(
            f"the corpus has {survey.conversations:,} conversations, of which every next token is predicted; found"
            f" ObjectiveConfig.predict = {config.objective.predict!r}"
        )
    if survey.conversations and tokenizer.chat_template is None:
        raise UserError(
            f"the corpus has {survey.conversations:,} conversations, and the tokenizer no chat template; start from a"
            " model that has one (--from), or name the tokenizer.json of such a model, beside its other files, with"
            " DataConfig.tokenizer"
        )


def record_run(folder: Path, run: Run) -> None:
    """Write down what the run is. Called once everything about it is known to be right."""
    files = files_of(run.tokenizer)
    for name in NAMES:
        if name in files:
            write_atomically(folder / name, files[name])
        else:
            # A first try with another tokenizer, killed before it was recorded, may have left its template.
            (folder / name).unlink(missing_ok=True)
    write_atomically(folder / "corpus.json", json.dumps(_fingerprints(run.survey, run.tokenizer)) + "\n")
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
    _check_tokenizer(folder, digest_of(tokenizer))
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
    ours = {MARK_OF_A_RUN, "corpus.json", TOKENS, *NAMES}
    others = sorted(
        {file.name for file in folder.iterdir()} - ours - {f"{name}.tmp" for name in (*ours, "config.json")}
    )
    if others:
        raise UserError(
            f"{folder} holds {others[0]!r} and no config.json, so it is not the folder of a run; choose another"
        )
    return None


def _make_tokenizer(
    config: RunConfig, corpus: Corpus, survey: Survey, own_tokenizer: Callable[[], Tokenizer] | None
) -> Tokenizer:
    if own_tokenizer is not None:
        return own_tokenizer()
    if config.data.tokenizer == "bytes":
        return byte_tokenizer()
    if config.data.tokenizer == "bpe":
        parts = split(corpus.documents(), survey, config.data.holdout)
        return train_bpe((part.train.text for part in parts if part.train is not None), config.data.bpe_vocab_size)
    path = Path(config.data.tokenizer)
    beside = path.name == NAMES[0] and any((path.parent / name).exists() for name in NAMES[1:])
    return read_tokenizer_files(path.parent) if beside else load_tokenizer(path)


def _with_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """Fill in the model's vocabulary from the tokenizer's; a larger one of the config's own stays."""
    size, needed = config.model.vocab_size, tokenizer.vocab_size
    if config.objective.predict == "masked":
        needed = max(needed, mask_token(tokenizer) + 1)
    if size is not None and size < needed:
        raise UserError(
            f"ModelConfig.vocab_size is {size}, but the tokenizer has {tokenizer.vocab_size} ids, and {needed} are"
            " needed; raise it, or leave it null to take as many"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size or needed))


def mask_token(tokenizer: Tokenizer) -> int:
    """The id that stands in place of a hidden token: the tokenizer's own, or else the first beyond its vocabulary."""
    name = tokenizer.special_tokens.get("mask_token")
    return tokenizer.vocab_size if name is None else tokenizer.control_tokens[name]


def _check_same(folder: Path, recorded: RunConfig, config: RunConfig, prints: dict[str, str]) -> None:
    changed = [line for line in differences(recorded, config) if not line.startswith(MAY_CHANGE)]
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise UserError(
            f"{folder} holds a run of another configuration (recorded | requested):\n{listed}\n"
            "give the recorded settings to go on with it, or choose another --run"
        )
    if _recorded_fingerprints(folder)["fingerprint"] != prints["fingerprint"]:
        raise UserError(
            f"the corpus has changed since the run in {folder} began; restore the text, or choose another --run"
        )
    _check_tokenizer(folder, prints["tokenizer"])


def _fingerprints(survey: Survey, tokenizer: Tokenizer) -> dict[str, str]:
    return {"fingerprint": survey.fingerprint, "tokenizer": digest_of(tokenizer)}


def _recorded_fingerprints(folder: Path) -> dict[str, str]:
    path = folder / "corpus.json"
    try:
        recorded = json.loads(_read_text(path))
        return {name: recorded[name] for name in ("fingerprint", "tokenizer")}
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged; restore it, or choose another --run") from None


def _check_tokenizer(folder: Path, digest: str) -> None:
    """Refuse another tokenizer than the run began with: its ids would mean other texts."""
    if _recorded_fingerprints(folder)["tokenizer"] != digest:
        raise UserError(
            f"{folder / NAMES[0]}, or a file beside it, has changed since the run began: it is not the tokenizer that"
            " the model was trained with; restore it, or choose another --run"
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it, or choose another folder") from None
