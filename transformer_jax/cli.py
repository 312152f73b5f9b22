"""The command line: every setting an option, every mistake of the user's one message and exit code 2.

    train      train a model, or go on with a run
    generate   continue a prompt
    batch      continue every prompt of a file
    embed      turn every text of a file into a vector
    convert    write a model for other programs
    bench      measure rates beside the limits of this machine
    --version  tell the version

Nothing here needs JAX until a command runs, so help is quick.
"""

import dataclasses
import errno
import io
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from transformer_jax import __version__
from transformer_jax.architecture import DType
from transformer_jax.config import DecodingConfig, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.presets import preset
from transformer_jax.settings import to_json

if TYPE_CHECKING:
    from transformer_jax.training.open_model import Opened

Flat = tyro.conf.arg(name="")
"""The options of a section without the section's name before them."""


@dataclass(frozen=True)
class Train:
    """Train a model on text, or go on with a run that was stopped or killed."""

    config: Annotated[RunConfig, Flat]
    preset: str = "tiny"
    """Where the other options' defaults come from."""
    run: Path | None = None
    """The run's folder. None: runs/ and the preset's name."""

    def __call__(self) -> int:
        from transformer_jax.report import Console
        from transformer_jax.training.loop import train

        folder = Path("runs") / self.preset if self.run is None else self.run
        stopped = train(self.config, folder, Console())
        if stopped is None:
            return 0
        print(f"Stopped by {stopped.signal.name} after step {stopped.step}, which is saved; the same command goes on.")
        # As a shell reports a process that a signal ended: a scheduler must not take the run for finished.
        return 128 + stopped.signal


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with a trained model, printing as it goes."""

    model: str
    """The folder of a run, a published folder, a GGUF file, a name on Hugging Face's hub, or smollm2."""
    prompt: str
    """The beginning of a document; with --chat, what a user says."""
    chat: bool = False
    """Answer the prompt by the model's chat template, and print the answer alone."""
    dtype: DType | None = None
    """Precision to compute in. None: the model's own."""
    decoding: Annotated[DecodingConfig, Flat] = dataclasses.field(default_factory=DecodingConfig)

    def __call__(self) -> int:
        from transformer_jax.decoding.text import stream_text
        from transformer_jax.text.chat import encode_chat

        opened = _open(self.model, self.dtype)
        tokenizer = opened.tokenizer
        tokens = (
            encode_chat(tokenizer, [{"role": "user", "content": self.prompt}])
            if self.chat
            else tokenizer.begin(self.prompt)
        )
        pieces = stream_text(opened.model, opened.params, tokenizer, tokens, self.decoding)
        # The first piece comes after the prompt has been checked.
        print(("" if self.chat else self.prompt) + next(pieces, ""), end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        return 0


@dataclass(frozen=True)
class Batch:
    """Continue every prompt of a JSONL file; killed and run again, it completes the output file."""

    model: str
    """The folder of a run, a published folder, a GGUF file, a name on Hugging Face's hub, or smollm2."""
    input: Path
    """One request a line: {"prompt": ..., "id", "max_tokens", "temperature", "top_k", "top_p", "seed"}, or in place of
    the prompt "messages", each with "role" and "content"."""
    output: Path
    """One answer a line, in the same order."""
    dtype: DType | None = None
    """Precision to compute in. None: the model's own."""
    batch_size: int = 16
    """Prompts that are decoded together; answers depend on it by the rounding of the model's products alone."""
    decoding: Annotated[DecodingConfig, Flat] = dataclasses.field(default_factory=DecodingConfig)

    def __call__(self) -> int:
        from transformer_jax.decoding.batch import complete_file

        trained = _open(self.model, self.dtype)
        summary = complete_file(
            trained.model,
            trained.params,
            trained.tokenizer,
            self.input,
            self.output,
            self.decoding,
            identity=to_json(trained.config),
            batch_size=self.batch_size,
        )
        resumed = f" ({summary.resumed} by an earlier run)" if summary.resumed else ""
        print(f"{summary.completed} completed, {summary.failed} failed{resumed}: {self.output}")
        for error in summary.first_errors:
            print(f"error: {error}", file=sys.stderr)
        return 2 if summary.failed else 0


@dataclass(frozen=True)
class Embed:
    """Turn every text of a JSONL file into a vector of length 1, with an encoder or any other model."""

    model: str
    """The folder of a run, a published folder, a GGUF file, a name on Hugging Face's hub, or minilm."""
    input: Path
    """One text a line: {"text": ..., "id"}."""
    output: Path
    """One vector a line, in the same order: {"id", "embedding"}. Written whole, or not at all."""
    pooling: Literal["mean", "first", "pooler"] | None = None
    """The mean of the hidden states, the first token's, or BERT's layer over that. None: the model's own way."""
    dtype: DType | None = None
    """Precision to compute in. None: the model's own."""
    batch_size: int = 32
    """Texts that are computed together."""

    def __post_init__(self) -> None:
        _check_sizes(batch_size=self.batch_size)

    def __call__(self) -> int:
        from transformer_jax.decoding.embedding import embed_file
        from transformer_jax.training.open_model import pooling_of_model

        found = _open(self.model, self.dtype)
        count = embed_file(
            found.model,
            found.params,
            found.tokenizer,
            self.input,
            self.output,
            pooling=self.pooling or pooling_of_model(self.model),
            batch_size=self.batch_size,
        )
        print(f"{count} texts: {self.output}")
        return 0


@dataclass(frozen=True)
class Convert:
    """Write any model as a folder that transformers loads, or as a GGUF file that llama.cpp loads."""

    model: str
    """The folder of a run, a published folder, a GGUF file, a name on Hugging Face's hub, or smollm2."""
    to: Path
    """A folder to make, or a file to make whose name ends in .gguf."""
    dtype: Literal["float32", "bfloat16", "float16", "q8_0"] = "float32"
    """How matrices are stored; q8_0, eight bits and a scale for every 32 numbers, in a GGUF file alone."""

    def __call__(self) -> int:
        from transformer_jax.pretrained.convert import convert

        found = _open(self.model, "float32")
        convert(self.to, found.config, found.params, found.tokenizer, self.dtype, prefer=found.family)
        print(f"{self.model} as {self.dtype}: {self.to}")
        return 0


@dataclass(frozen=True)
class BenchTrain:
    """Time training steps on random tokens."""

    preset: str = "small"
    """The shape of the model and of the batch."""
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    """Precisions to compute in, one after the other."""
    batch_size: int | None = None
    """Windows in a step. None: the preset's."""
    seq_len: int | None = None
    """Tokens in a window. None: the preset's."""
    steps: int = 7
    """Steps that are timed, after two to warm up; the median counts."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        _check_sizes(dtypes=len(self.dtypes), batch_size=self.batch_size, seq_len=self.seq_len, steps=self.steps)

    def __call__(self) -> int:
        from transformer_jax.analysis.bench import bench_train

        run = preset(self.preset)
        data = dataclasses.replace(
            run.data,
            batch_size=self.batch_size or run.data.batch_size,
            seq_len=self.seq_len or run.data.seq_len,
        )
        _print_rows(
            f"Training, {self.preset}",
            bench_train(dataclasses.replace(run, data=data), self.dtypes, self.steps),
            self.json,
        )
        return 0


@dataclass(frozen=True)
class BenchDecode:
    """Time greedy decoding steps of a model with random weights."""

    preset: str = "smollm2_135m"
    """The shape of the model."""
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    """Precisions to compute in, one after the other."""
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    """Rows that are decoded together."""
    context: int = 256
    """Slots of the cache."""
    steps: int = 16
    """Steps in one timed block; the median of three blocks counts."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        sizes = {"dtypes": len(self.dtypes), "batch_sizes": min(self.batch_sizes, default=0), "steps": self.steps}
        _check_sizes(**sizes, context=self.context)
        if self.steps >= self.context:
            raise UserError(f"--steps is {self.steps}; expected less than --context = {self.context}")

    def __call__(self) -> int:
        from transformer_jax.analysis.bench import bench_decode

        longest = preset(self.preset).model.max_seq_len
        if self.context > longest:
            raise UserError(f"--context is {self.context}; expected at most {longest}, the context of {self.preset}")
        rows = bench_decode(preset(self.preset).model, self.dtypes, self.batch_sizes, self.context, self.steps)
        _print_rows(f"Decoding, {self.preset}", rows, self.json)
        return 0


def _open(model: str, dtype: DType | None) -> "Opened":
    """Open a model, and show how far that is where it takes long."""
    from transformer_jax.report import reading_progress
    from transformer_jax.training.open_model import open_model

    with reading_progress() as report:
        return open_model(model, dtype, report=report)


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise UserError(f"--{name.replace('_', '-')} is {size}, or none is given; expected at least 1")


def _print_rows(title: str, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from transformer_jax.report import Console, make_table

    def show(name: str, value: Any) -> str:
        return f"{value:.0%}" if name.startswith("of_") else f"{value:,.1f}" if isinstance(value, float) else str(value)

    table = [[show(name, value) for name, value in row.items()] for row in rows]
    columns = [
        name.replace("_per_", "/").replace("_", " ").replace("read bandwidth", "peak").replace("matmul peak", "peak")
        for name in rows[0]
    ]
    Console(width=120).print(make_table(title, columns, table))


NARROWEST = 40
"""Columns of a terminal that everything is laid out for at least."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for a mistake of the user's, 128 + n after signal n."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character shows a question mark.
            stream.reconfigure(errors="replace")
    if os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) < NARROWEST:
        # On fewer columns help would never end, and tables would be empty.
        os.environ["COLUMNS"] = str(NARROWEST)
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        command = _parse(sys.argv[1:] if arguments is None else arguments)
        from transformer_jax.machine import keep_freed_memory, remember_compilations

        keep_freed_memory()
        remember_compilations()
        return command()
    except UserError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # Whoever read has enough; what is still to be flushed at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        return _fail(f"{error.strerror}: {error.filename or 'while writing'}")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _parse(arguments: Sequence[str]) -> Callable[[], int]:
    if list(arguments) == ["--version"]:
        return _print_version
    _refuse_empty(arguments)
    arguments = [re.sub(r"^--from(?==|$)", "--training.start-from", argument) for argument in arguments]
    named = _option(arguments, "--preset") or "tiny"
    folder = Path(_option(arguments, "--run") or Path("runs") / named)
    defaults = Train(_starting_from(preset(named), _option(arguments, "--training.start-from"), folder), named)
    train: Any = Annotated[Train, tyro.conf.subcommand("train", default=defaults)]
    bench: Any = Annotated[
        _named("train", BenchTrain) | _named("decode", BenchDecode),
        tyro.conf.subcommand("bench", description="Measure rates beside the limits of this machine."),
    ]
    used = _named("generate", Generate) | _named("batch", Batch) | _named("embed", Embed)
    commands = train | used | _named("convert", Convert) | bench
    return tyro.cli(commands, prog="transformer-jax", args=arguments)


def _print_version() -> int:
    print(__version__)
    return 0


def _named(name: str, command: type) -> Any:
    return Annotated[command, tyro.conf.subcommand(name)]


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse `--data.paths` with nothing after it, such as a pattern that the shell replaced by nothing."""
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        if argument == "--data.paths" and following.startswith("--"):
            raise UserError("--data.paths is empty; name a path, or leave it out for the standard library's source")


def _option(arguments: Sequence[str], option: str) -> str | None:
    """Find an option of train before all else is parsed: the other options' defaults depend on it."""
    value = None
    # As for every other option, the last one counts.
    for index, argument in enumerate(arguments if arguments[:1] == ["train"] else ()):
        if argument == option and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(f"{option}="):
            value = argument.removeprefix(f"{option}=")
    return value


def _starting_from(run: RunConfig, name: str | None, folder: Path) -> RunConfig:
    """The defaults of a run that starts from a model: its shape, which a run under way has kept, and its tokenizer."""
    if name is None:
        return run
    from transformer_jax.training.open_model import config_of_model

    model = config_of_model(folder if (folder / "config.json").exists() else name)
    return dataclasses.replace(
        run,
        model=model,
        data=dataclasses.replace(run.data, tokenizer="model", seq_len=min(run.data.seq_len, model.max_seq_len)),
        training=dataclasses.replace(run.training, start_from=name),
    )
