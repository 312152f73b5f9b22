"""The command line: every setting an option, every mistake of the user's one message and exit code 2.

    train      train a model, or go on with a run
    generate   continue a prompt
    batch      continue every prompt of a file
    bench      measure rates beside the limits of this machine

Nothing here needs JAX until a command runs, so help is quick.
"""

import dataclasses
import errno
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer_jax.config import DecodingConfig, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.presets import preset

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
        from rich.console import Console

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

    model: Path
    """The folder of a run."""
    prompt: str
    """The beginning of a document."""
    decoding: Annotated[DecodingConfig, Flat] = dataclasses.field(default_factory=DecodingConfig)

    def __call__(self) -> int:
        from transformer_jax.decoding.text import stream_text
        from transformer_jax.training.folder import open_trained

        trained = open_trained(self.model)
        pieces = stream_text(trained.model, trained.params, trained.tokenizer, self.prompt, self.decoding)
        print(self.prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        return 0


@dataclass(frozen=True)
class Batch:
    """Continue every prompt of a JSONL file; killed and run again, it completes the output file."""

    model: Path
    """The folder of a run."""
    input: Path
    """One request a line: {"prompt": ..., "id", "max_tokens", "temperature", "top_k", "top_p", "seed"}."""
    output: Path
    """One answer a line, in the same order."""
    batch_size: int = 16
    """Prompts that are decoded together; answers do not depend on it."""
    decoding: Annotated[DecodingConfig, Flat] = dataclasses.field(default_factory=DecodingConfig)

    def __call__(self) -> int:
        raise NotImplementedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for a mistake of the user's, 128 + n after signal n."""
    try:
        return _parse(sys.argv[1:] if arguments is None else arguments)()
    except UserError as error:
        return _fail(str(error))
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        return _fail(f"{error.strerror}: {error.filename or 'while writing'}")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _parse(arguments: Sequence[str]) -> Train | Generate | Batch:
    named = _preset_name(arguments)
    train = tyro.conf.subcommand("train", default=Train(preset(named), named))
    generate, batch = tyro.conf.subcommand("generate"), tyro.conf.subcommand("batch")
    commands = Annotated[Train, train] | Annotated[Generate, generate] | Annotated[Batch, batch]
    return tyro.cli(commands, prog="transformer-jax", args=arguments)


def _preset_name(arguments: Sequence[str]) -> str:
    """Find the preset before all else is parsed: it gives every other option its default."""
    for index, argument in enumerate(arguments):
        if argument == "--preset" and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith("--preset="):
            return argument.removeprefix("--preset=")
    return "tiny"
