"""A JSONL file of prompts to a JSONL file of completions: in order, resumable, never mixing two ways of answering.

    {"id": "a", "prompt": "def f", "max_tokens": 20}  ->  {"id": "a", "prompt": "def f", "completion": "...", ...}
    {"id": "b", "prompt": 7}                          ->  {"id": "b", "line": 2, "error": "prompt is 7; ...", ...}

The output is the only state. It grows by whole batches; a line that a kill or a full disk has torn is cut off by the
next run, which goes on behind the last whole one. Each line carries the digest of everything that decides it: the model
with its parameters, the tokenizer, the default settings, its own line of input. Nothing is added to another's lines.
"""

import fcntl
import itertools
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.generate import Completion, stream
from transformer_jax.decoding.prompts import (
    Failure,
    Line,
    Prompt,
    asked_by,
    digest,
    open_source,
    parse_line,
    read_lines,
)
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Model, Params
from transformer_jax.report import SECONDS_BETWEEN_LINES
from transformer_jax.settings import parse_object
from transformer_jax.text.tokenizer import Tokenizer
from transformer_jax.text.tokenizer_files import digest_of


class Summary(NamedTuple):
    """What a complete output holds."""

    completed: int
    failed: int
    """Lines of input that could not be answered; in their places the output says why."""
    resumed: int
    """Lines, of either kind, that earlier runs had written."""
    first_errors: tuple[str, ...]
    """Up to ten of the failures, each with its line number."""


def complete_file(
    model: Model,
    params: Params,
    tokenizer: Tokenizer,
    source: Path,
    target: Path,
    defaults: DecodingConfig,
    *,
    identity: str,
    batch_size: int = 32,
) -> Summary:
    """Answer each line of `source` in `target`, in order; run again, it completes what an earlier run has left.

    A line is an object with a "prompt" or, for a model that knows conversations, "messages", and if it likes an "id"
    (else its line number) and its own max_tokens, temperature, top_k, top_p and seed. A line without a seed gets one
    from the default seed and its line number. Blank lines are skipped. The model reads each prompt, as plain text,
    behind the control tokens that its tokenizer begins a text with.

    `identity` is what decides the answers besides parameters and tokenizer: the model's config, as text. Answers do not
    depend on `batch_size`, the number of prompts that share a batch, beyond the rounding of the model's arithmetic.

    Raises `UserError` when a file cannot be read or written, when the disk is full, when another process writes the
    target, and when the target holds anything but the beginning of this very run's output.
    """
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; expected at least 1")
    run = _digest_run(params, tokenizer, defaults, identity)
    with open_source(source) as lines, _open_target(target, source) as output:
        total = sum(1 for _ in read_lines(lines, run))
        job = _Job(model, params, tokenizer, defaults, min(batch_size, max(total, 1)), target)
        resumed, failures = _check_written(target, source, read_lines(lines, run))
        output.truncate(resumed.size)
        output.seek(resumed.size)
        with _progress(total, resumed.lines) as report:
            failures += _write_missing(job, read_lines(lines, run), resumed.lines, output, report)
    return Summary(
        completed=total - len(failures),
        failed=len(failures),
        resumed=resumed.lines,
        first_errors=tuple(f"{source}, line {failure.line}: {failure.error}" for failure in failures[:10]),
    )


class _Job(NamedTuple):
    """What all lines of one run share."""

    model: Model
    params: Params
    tokenizer: Tokenizer
    defaults: DecodingConfig
    batch_size: int
    target: Path


class _Written(NamedTuple):
    """How much of the output is whole."""

    lines: int
    size: int


Report = Callable[[int, int], None]
"""Takes how many lines, and how many tokens, have been added."""


# From lines of input to lines of output.


def _write_missing(job: _Job, lines: Iterator[Line], written: int, output: BinaryIO, report: Report) -> list[Failure]:
    """Append the answers to all lines but the first `written`, a batch at a time; returns the failures among them."""
    failures: list[Failure] = []
    start = 0
    while batch := list(itertools.islice(lines, job.batch_size)):
        skipped = min(max(0, written - start), len(batch))
        start += len(batch)
        if skipped == len(batch):
            continue
        # A batch of which a part is there is computed whole once more: every row keeps its company, and so every bit.
        answers = _answer(job, batch, report)[skipped:]
        _append(output, job.target, [record for _, record in answers], start - len(answers))
        failures += [prompt for prompt, _ in answers if isinstance(prompt, Failure)]
        report(len(answers), 0)
    return failures


def _answer(job: _Job, batch: Sequence[Line], report: Report) -> list[tuple[Prompt | Failure, dict[str, Any]]]:
    """Make a line of output for each of a batch; one that cannot be answered leaves its row empty."""
    parsed = [parse_line(line, job.model, job.tokenizer, job.defaults) for line in batch]
    prompts = [prompt for prompt in parsed if isinstance(prompt, Prompt)]
    completions = [Completion([], [], None) for _ in prompts]
    pieces = stream(
        job.model,
        job.params,
        [prompt.tokens for prompt in prompts],
        [prompt.settings for prompt in prompts],
        stop_ids=job.tokenizer.stop_ids,
        vocab_limit=min(job.tokenizer.vocab_size, job.model.vocab_size),
        rows=job.batch_size,
    )
    for piece in pieces:
        completions = [done.extended(new) for done, new in zip(completions, piece, strict=True)]
        report(0, sum(len(new.tokens) for new in piece))
    rest = iter(completions)
    records = [
        _record(prompt, next(rest), job.tokenizer) if isinstance(prompt, Prompt) else asdict(prompt)
        for prompt in parsed
    ]
    return [
        (prompt, record | {"digest": line.digest}) for prompt, record, line in zip(parsed, records, batch, strict=True)
    ]


def _record(prompt: Prompt, completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "id": prompt.id,
        **prompt.asked,
        "completion": tokenizer.decode_after(prompt.tokens, completion.tokens),
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(prompt.tokens),
        "completion_tokens": len(completion.tokens),
        "logprob": sum(completion.logprobs),
        "seed": prompt.settings.seed,
    }


# The output.


@contextmanager
def _open_target(path: Path, source: Path) -> Iterator[BinaryIO]:
    """Open, or make, the output for this process alone; unbuffered, so that nothing is written behind our back."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another output") from None
    with os.fdopen(descriptor, "r+b", buffering=0) as output:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path} is not a regular file; a run could not be resumed there: choose another output")
        if path.samefile(source):
            raise UserError(f"{path} is both the input and the output; choose another output")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {path}; wait for it, or choose another output") from None
        except OSError as error:
            raise UserError(f"cannot lock {path}: {error.strerror}; choose an output on another file system") from None
        yield output


def _check_written(path: Path, source: Path, lines: Iterator[Line]) -> tuple[_Written, list[Failure]]:
    """Compare the whole lines of the output with the input; returns how many there are and the failures among them."""
    number, size, failures = 0, 0, []
    with path.open("rb") as written:
        for number, raw in enumerate(written, start=1):
            if not raw.endswith(b"\n") and _is_torn(raw):
                return _Written(number - 1, size), failures
            record = _parse_record(raw)
            line = next(lines, None)
            if record is None or line is None or record["digest"] != line.digest:
                raise UserError(_describe_mismatch(path, number, record, source, line))
            if "error" in record:
                failures.append(Failure(**{name: record[name] for name in ("id", "line", "error")}))
            size += len(raw)
    return _Written(number, size), failures


def _is_torn(raw: bytes) -> bool:
    """Whether this is the beginning of a line of ours, which a kill or a full disk tore while it was being written."""
    beginning = b'{"id": '
    if not (raw.startswith(beginning) or beginning.startswith(raw)):
        return False
    try:
        return "digest" in parse_object(raw)
    except UserError:
        return True


def _parse_record(raw: bytes) -> dict[str, Any] | None:
    """Read a line of output; None when it is not one of ours."""
    try:
        record = parse_object(raw)
    except UserError:
        return None
    return record if {"id", "digest"} < record.keys() else None


def _describe_mismatch(path: Path, number: int, record: dict[str, Any] | None, source: Path, line: Line | None) -> str:
    advice = "choose another output, or remove this one to begin anew"
    if record is None:
        return f"{path}, line {number} is not the output of such a run; choose another output"
    if line is None:
        return f"{path} has more lines than {source} has prompts, so it belongs to another input; {advice}"
    try:
        tree = parse_object(line.text)
    except UserError:
        tree = {}
    if (record["id"], asked_by(record)) == (tree.get("id", line.number), asked_by(tree)):
        return (
            f"{path}, line {number} was written by another model or with other settings than this run's, and one file"
            f" must not mix them; {advice}"
        )
    return f"{path}, line {number} does not answer line {line.number} of {source} as it stands now; {advice}"


def _append(output: BinaryIO, path: Path, records: Sequence[dict[str, Any]], before: int) -> None:
    """Add whole lines to the output and see them onto the disk."""
    text = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records).encode()
    try:
        while text:
            text = text[output.write(text) :]
        os.fsync(output.fileno())
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}. Its first {before} lines are whole; make room and run the same"
            " command again: it goes on from there"
        ) from None


@contextmanager
def _progress(total: int, done: int) -> Iterator[Report]:
    """Show on stderr how far the run is and its rate: a bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f} tokens/s"), TimeRemainingColumn())
    with Progress(
        "prompts", *columns, console=console, disable=not console.is_terminal, speed_estimate_period=600
    ) as progress:
        task = progress.add_task("prompts", total=total, completed=done, rate=0.0)
        tokens, started = 0, time.monotonic()
        printed = started

        def report(lines: int, new_tokens: int) -> None:
            nonlocal tokens, printed, done
            now = time.monotonic()
            tokens, done = tokens + new_tokens, done + lines
            rate = tokens / (now - started)
            progress.update(task, advance=lines, rate=rate)
            if not console.is_terminal and now - printed > SECONDS_BETWEEN_LINES:
                printed = now
                console.print(f"{done}/{total} prompts  {rate:,.0f} tokens/s", highlight=False)

        yield report


# What decides an answer.


def _digest_run(params: Params, tokenizer: Tokenizer, defaults: DecodingConfig, identity: str) -> str:
    settings = json.dumps(asdict(defaults), sort_keys=True)
    return digest(identity, digest_of(tokenizer), settings, *_describe_parameters(params))


def _describe_parameters(params: Params) -> Iterator[str]:
    for path, leaf in jax.tree.leaves_with_path(params):
        yield f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {int(_checksum(leaf))}"


@jax.jit
def _checksum(leaf: Array) -> UInt32[Array, ""]:
    """Add up a hash of each number's bits and place: exact, whatever the order and the sharding."""
    bits = lax.bitcast_convert_type(leaf.ravel(), f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
    mixed = bits ^ (jnp.arange(leaf.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
