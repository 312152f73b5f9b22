"""The command line: every setting an option, every mistake of the user's one message and exit code 2.

    train      train a model, or go on with a run
    generate   continue a prompt
    batch      continue every prompt of a file
    embed      turn every text of a file into a vector
    convert    write a model for other programs
    bench      measure rates beside the limits of this machine
    --version  tell the version

What each does is in commands.py. Nothing there or here needs JAX until a command runs, so help is quick.
"""

import dataclasses
import errno
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from transformer_jax import __version__
from transformer_jax.commands import Batch, BenchDecode, BenchTrain, Convert, Embed, Generate, Train
from transformer_jax.config import RunConfig
from transformer_jax.errors import UserError
from transformer_jax.presets import preset

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
