"""Train until done, or until told to stop; begin again where it stopped.

Only here do the pieces of training meet: the run's folder, the batches, the step, evaluation, checkpoints and the
person who watches.
"""

import dataclasses
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from rich.console import Console

from transformer_jax.config import RunConfig
from transformer_jax.decoding.generate import check_prompt
from transformer_jax.decoding.text import stream_text
from transformer_jax.errors import UserError
from transformer_jax.machine import matmul_peak
from transformer_jax.model.cost import num_params, train_flops
from transformer_jax.model.transformer import Model, build, cast_matrices
from transformer_jax.report import make_table, plot_curves
from transformer_jax.sharding import batch_sharding, make_mesh, param_shardings, replicated, use_mesh
from transformer_jax.text.corpus import CompressedSizes, compressed_sizes
from transformer_jax.text.pipeline import Batch, Windows, eval_batches, make_batches, make_windows
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.evaluation import bits_per_byte, make_eval_step
from transformer_jax.training.folder import Run, locked, open_run
from transformer_jax.training.metrics import MetricsLog
from transformer_jax.training.optimizer import learning_rate, make_optimizer
from transformer_jax.training.progress import TrainingProgress
from transformer_jax.training.step import TrainState, init_state, make_train_step


class Stopped(NamedTuple):
    """Why a run ended before its last step."""

    signal: signal.Signals
    step: int


class Setup(NamedTuple):
    """What does not change while a run trains."""

    config: RunConfig
    run: Run
    model: Model
    train: Windows
    heldout: Windows
    compressors: CompressedSizes
    init: Callable[[], TrainState]
    abstract_state: TrainState
    """Shapes, dtypes and shardings of the state."""
    train_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    eval_step: Callable[[Any, Batch], tuple[jax.Array, jax.Array]]
    place_batch: Callable[[Batch], Batch]


def train(requested: RunConfig, folder: Path, console: Console) -> Stopped | None:
    """Train the run in `folder` to its last step; None when it got there, else what stopped it.

    The first SIGINT or SIGTERM saves a checkpoint and returns; the same call then goes on as if nothing had happened.
    """
    with locked(folder), ExitStack() as stack:
        run = open_run(folder, requested)
        mesh = make_mesh(run.config.mesh)
        stack.enter_context(use_mesh(mesh))
        setup = _set_up(run, mesh, console)
        checkpoints = stack.enter_context(
            Checkpoints(folder / "checkpoints", keep=run.config.training.keep_checkpoints)
        )
        restored = checkpoints.restore(setup.abstract_state)
        if restored is None:
            state, start = setup.init(), 0
        else:
            state, place, start = restored
            if place != _place(start):
                raise UserError(f"the checkpoint of step {start} in {folder} was at {place} of the data, not at its own step")
            console.print(f"Going on from step {start} of {folder}.", highlight=False)
        log = MetricsLog(folder, start)
        stack.callback(log.close)
        stopped = _run_steps(setup, state, checkpoints, log, console)
        if stopped is None:
            _conclude(setup, folder, log, console)
        return stopped


def _place(step: int) -> dict[str, int]:
    """Where the data stands after a step: one batch is drawn a step."""
    return {"batches": step}


def _set_up(run: Run, mesh: jax.sharding.Mesh, console: Console) -> Setup:
    config = run.config
    model = build(config.model)
    if config.model.attention != "causal":
        raise UserError("ModelConfig.attention is 'bidirectional'; next-token training needs 'causal'")
    check_prompt(model, [run.tokenizer.end_of_text, *run.tokenizer.encode(config.training.sample_prompt)])
    windows = [
        make_windows([document.text for document in documents], run.tokenizer, config.data.seq_len, config.model.V)
        for documents in run.split
    ]
    optimizer = make_optimizer(config.optimizer, config.training.steps)
    init = _make_init(model, optimizer, config, mesh)
    rows = batch_sharding(mesh, config.data.batch_size)
    setup = Setup(
        config=config,
        run=run,
        model=model,
        train=windows[0],
        heldout=windows[1],
        compressors=compressed_sizes(run.split.heldout),
        init=init,
        abstract_state=jax.eval_shape(init),
        train_step=jax.jit(make_train_step(model, optimizer), donate_argnums=0),
        eval_step=jax.jit(make_eval_step(model)),
        place_batch=lambda batch: jax.device_put(batch, rows),
    )
    _describe(setup, mesh, console)
    return setup


def _make_init(
    model: Model, optimizer: optax.GradientTransformation, config: RunConfig, mesh: jax.sharding.Mesh
) -> Callable[[], TrainState]:
    """Return a function that makes the first state, each array on the devices that hold it from then on."""
    shapes = jax.eval_shape(lambda key: init_state(model, optimizer, key), jax.random.key(0))
    params = param_shardings(mesh, model.logical_axes(), shapes.params)
    whole = replicated(mesh)
    moments = optax.tree.map_params(
        optimizer, lambda _, sharding: sharding, shapes.opt_state, params, transform_non_params=lambda _: whole
    )
    shardings = TrainState(params, moments, whole, whole)
    return jax.jit(
        lambda: init_state(model, optimizer, jax.random.key(config.training.seed)), out_shardings=shardings
    )


def _describe(setup: Setup, mesh: jax.sharding.Mesh, console: Console) -> None:
    config, documents = setup.config, setup.run.split
    skipped = f" {len(setup.run.skipped)} files that are not text were left out." if setup.run.skipped else ""
    console.print(
        f"Text: {len(documents.train):,} documents, {setup.train.num_bytes / 1e6:.1f} MB, {setup.train.num_targets:,}"
        f" tokens to train on; {len(documents.heldout):,} documents, {setup.heldout.num_bytes / 1e6:.2f} MB held out."
        f"{skipped}\n"
        f"Model: {num_params(config.model):,} parameters, {config.model.L} layers of width {config.model.D},"
        f" {config.model.V:,} tokens ({config.data.tokenizer}), {config.model.dtype},"
        f" on {mesh.size} {jax.default_backend()} device{'s' if mesh.size > 1 else ''}.",
        highlight=False,
        soft_wrap=True,
    )


def _run_steps(
    setup: Setup, state: TrainState, checkpoints: Checkpoints, log: MetricsLog, console: Console
) -> Stopped | None:
    config = setup.config.training
    data = setup.config.data
    start = int(state.step)
    flops = train_flops(setup.config.model, data.batch_size, data.seq_len)
    peak = matmul_peak(setup.config.model.dtype) if start < config.steps else 1.0
    schedule = learning_rate(setup.config.optimizer, config.steps)
    batches = make_batches(setup.train, data.batch_size, seed=data.seed, start=start, workers=data.workers)
    with (
        stop_signals() as stop,
        TrainingProgress(console, start, config.steps, flops, peak) as progress,
        ExitStack() as stack,
    ):
        stack.callback(batches.close)

        def record(step: int, metrics: dict[str, jax.Array]) -> None:
            figures = {name: float(value) for name, value in metrics.items()}
            if not math.isfinite(figures["loss"]):
                raise UserError(
                    f"the loss is {figures['loss']} at step {step}; checkpoints are from earlier steps:"
                    " lower OptimizerConfig.learning_rate in a new run"
                )
            log.write(step, **figures, learning_rate=float(schedule(step - 1)))
            progress.advance(step, figures["loss"], figures["tokens"])

        pending: tuple[int, dict[str, jax.Array]] | None = None
        for step in range(start + 1, config.steps + 1):
            state, metrics = setup.train_step(state, setup.place_batch(next(batches)))
            # Reading a figure waits for its step, so each is read while the next one runs.
            if pending is not None:
                record(*pending)
            pending = (step, metrics)
            stopping = stop.received is not None
            evaluating = step % config.eval_every == 0 or step == config.steps
            saving = step % config.checkpoint_every == 0 or step == config.steps or stopping
            if evaluating or saving:
                record(*pending)
                pending = None
            if evaluating:
                _evaluate(setup, state, log, console)
            if saving:
                checkpoints.save(step, state, _place(step))
            if evaluating or saving:
                progress.resume()
            if stopping and step < config.steps:
                checkpoints.wait()
                return Stopped(signal.Signals(stop.received), step)
    checkpoints.wait()
    return None


def _evaluate(setup: Setup, state: TrainState, log: MetricsLog, console: Console) -> None:
    """Log and show held-out bits per byte beside the compressors', and a sample."""
    config = setup.config
    batches = map(setup.place_batch, eval_batches(setup.heldout, config.data.batch_size))
    bits = bits_per_byte(setup.eval_step, state.params, batches, setup.heldout.num_bytes)
    settings = dataclasses.replace(config.decoding, max_tokens=config.training.sample_tokens)
    params = cast_matrices(state.params, config.model.dtype)
    prompt = config.training.sample_prompt
    sample = prompt + "".join(stream_text(setup.model, params, setup.run.tokenizer, prompt, settings))
    step = int(state.step)
    log.write(step, heldout_bits_per_byte=bits, sample=sample)
    console.print(
        f"step {step}: {bits:.3f} bits per byte on held-out text"
        f" (gzip -9 {setup.compressors.gzip:.3f}, xz {setup.compressors.xz:.3f})",
        highlight=False,
    )
    console.print(sample, style="dim", markup=False, highlight=False)


def _conclude(setup: Setup, folder: Path, log: MetricsLog, console: Console) -> None:
    """Show what was learnt, draw the curves and say what can be done next."""
    evals = [row for row in log.rows if "heldout_bits_per_byte" in row]
    compressors = {"gzip -9": setup.compressors.gzip, "xz": setup.compressors.xz}
    plot_curves(log.rows, compressors, folder / "curves.png")
    rows = [["this model", evals[-1]["heldout_bits_per_byte"]], *([name, value] for name, value in compressors.items())]
    console.print(
        make_table(
            "Held-out text, a document at a time", ["", "bits per byte"], [[name, f"{v:.3f}"] for name, v in rows]
        )
    )
    console.print(
        f"Trained to step {setup.config.training.steps}. The run is in {folder}; its curves are in {folder}/curves.png.\n"
        f'Let it write:  python serve.py generate --model {folder} --prompt "{setup.config.training.sample_prompt}"',
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


class _StopRequest:
    received: int | None = None


@contextmanager
def stop_signals() -> Iterator[_StopRequest]:
    """Note the first SIGINT or SIGTERM instead of dying of it; the second one ends the process as usual."""
    request = _StopRequest()
    previous: dict[int, Any] = {}

    def note(number: int, frame: object) -> None:
        del frame
        request.received = number
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
