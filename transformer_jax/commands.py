"""The commands of the command line: each is its settings, and what it does when it is called.

Nothing here needs JAX until a command runs, so help is quick.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

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

        # Before the parameters are read, which takes longer.
        pooling = self.pooling or pooling_of_model(self.model)
        found = _open(self.model, self.dtype)
        count = embed_file(
            found.model,
            found.params,
            found.tokenizer,
            self.input,
            self.output,
            pooling=pooling,
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
        from transformer_jax.training.open_model import config_of_model, pooling_of_model

        c = config_of_model(self.model)
        makes_vectors = c.attention == "bidirectional" and not c.output_transform
        pooling = pooling_of_model(self.model) if makes_vectors else None
        found = _open(self.model, "float32")
        convert(
            self.to,
            found.config,
            found.params,
            found.tokenizer,
            self.dtype,
            prefer=found.family,
            pooling=pooling,
        )
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
