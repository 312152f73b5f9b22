"""Train until done, or until told to stop; begin again where it stopped.

Only here do the pieces of training meet: the run's folder, the batches, the step, evaluation, checkpoints and the
person who watches.
"""

import dataclasses
import math
import shlex
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import jax
from rich.console import Console

from transformer_jax.config import RunConfig
from transformer_jax.decoding.text import stream_text
from transformer_jax.errors import UserError
from transformer_jax.machine import matmul_peak
from transformer_jax.model.cost import train_flops
from transformer_jax.model.transformer import cast_matrices
from transformer_jax.report import make_table, plot_curves, reading_progress
from transformer_jax.sharding import Mesh, make_mesh, use_mesh
from transformer_jax.text.pipeline import eval_batches, make_batches
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.evaluation import evaluate
from transformer_jax.training.folder import locked, open_run, record_run
from transformer_jax.training.metrics import MetricsLog
from transformer_jax.training.open_model import Opened, open_model
from transformer_jax.training.optimizer import learning_rate
from transformer_jax.training.progress import TrainingProgress
from transformer_jax.training.setup import Setup, describe, set_up
from transformer_jax.training.step import Metrics, TrainState
from transformer_jax.training.stop import Stopped, stop_signals


def train(requested: RunConfig, folder: Path, console: Console) -> Stopped | None:
    """Train the run in `folder` to its last step; None when it got there, else what stopped it.

    The first SIGINT or SIGTERM saves a checkpoint and returns; the same call then goes on as if nothing had happened.
    """
    with locked(folder), ExitStack() as stack:
        start_from = requested.training.start_from
        mesh = make_mesh(requested.mesh)
        source = None if start_from is None else cache(lambda: _open_source(start_from, mesh))
        run = open_run(folder, requested, source and (lambda: source().tokenizer))
        stack.enter_context(use_mesh(mesh))
        setup = set_up(run, mesh, source and (lambda: source().params))
        describe(setup, mesh, console)
        keep = run.config.training.keep_checkpoints
        record_run(folder, run)
        checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", keep))
        state = _restore(setup, checkpoints, console)
        begun = (folder / "metrics.jsonl").exists()
        if begun and not int(state.step):
            console.print("No checkpoint was saved: beginning anew.", highlight=False)
        log = stack.enter_context(closing(MetricsLog(folder, int(state.step))))
        last = run.config.training.steps
        if int(state.step) >= last and not any(row["step"] == last and "heldout_loss" in row for row in log.rows):
            # The figures of the end have been lost.
            _evaluate(setup, state, log, console)
        stopped = _run_steps(setup, state, checkpoints, log, console)
        if stopped is None:
            _conclude(setup, folder, log, console)
        return stopped


def _open_source(name: str, mesh: Mesh) -> Opened:
    """Open the model that a run starts from, its parameters where the run has them."""
    with reading_progress() as report:
        return open_model(name, "float32", mesh=mesh, report=report)


def _place(step: int) -> dict[str, int]:
    """Where the data stands after a step: one batch is drawn a step."""
    return {"batches": step}


def _restore(setup: Setup, checkpoints: Checkpoints, console: Console) -> TrainState:
    """Read the newest checkpoint, or begin."""
    restored = checkpoints.restore(setup.shapes)
    if restored is None:
        return setup.init()
    state, place, step = restored
    if place != _place(step):
        raise UserError(f"the checkpoint of step {step} says that the data was at {place}; expected {_place(step)}")
    finished = step >= setup.config.training.steps
    console.print("The run is finished." if finished else f"Going on from step {step}.", highlight=False)
    return state


def _run_steps(
    setup: Setup, state: TrainState, checkpoints: Checkpoints, log: MetricsLog, console: Console
) -> Stopped | None:
    config, data = setup.config.training, setup.config.data
    start = int(state.step)
    peak = matmul_peak(setup.config.model.dtype)
    batches = make_batches(
        setup.train,
        data.batch_size,
        seed=data.seed,
        start=start,
        workers=data.workers,
        shard_index=jax.process_index(),
        shard_count=jax.process_count(),
        mixture=data.mixture,
    )
    with closing(batches), stop_signals() as stop, _make_progress(setup, start, peak, console) as progress:
        pending: tuple[int, Metrics] | None = None
        for step in range(start + 1, config.steps + 1):
            state, metrics = setup.train_step(state, setup.place_batch(next(batches)))
            # Reading a figure waits for its step, so each is read while the next one runs.
            if pending is not None:
                _record(setup, *pending, log, progress)
            pending = (step, metrics)
            received = stop.received
            evaluating = step % config.eval_every == 0 or step == config.steps
            saving = step % config.checkpoint_every == 0 or step == config.steps or received is not None
            if not (evaluating or saving):
                continue
            _record(setup, *pending, log, progress)
            pending = None
            if evaluating:
                _evaluate(setup, state, log, console)
            if saving:
                checkpoints.save(step, state, _place(step))
            progress.resume()
            if received is not None and step < config.steps:
                checkpoints.wait()
                return Stopped(received, step)
    checkpoints.wait()
    return None


def _make_progress(setup: Setup, start: int, peak: float, console: Console) -> TrainingProgress:
    config = setup.config
    flops = train_flops(config.model, config.data.batch_size, config.data.seq_len)
    return TrainingProgress(console, start, config.training.steps, flops, peak)


def _record(setup: Setup, step: int, metrics: Metrics, log: MetricsLog, progress: TrainingProgress) -> None:
    figures = {name: float(value) for name, value in metrics.items()}
    config, updates = setup.config.training, int(figures.pop("updates"))
    lost = [name for name, value in figures.items() if not math.isfinite(value)]
    if lost and not (config.skip_nonfinite or config.skip_spikes is not None):
        raise UserError(
            f"the {lost[0]} is {figures[lost[0]]} at step {step}, which is not saved: begin a new run with a lower"
            " OptimizerConfig.learning_rate, look for another extreme setting, or skip such steps"
            " (TrainingConfig.skip_nonfinite)"
        )
    # The schedule counts updates: a step that is skipped does not bring it forward.
    rate: jax.typing.ArrayLike = learning_rate(setup.config.optimizer, config.steps)(max(updates - 1, 0))
    figures["learning_rate"] = jax.numpy.asarray(rate).item()
    if updates < step:
        figures["skipped"] = step - updates
    progress.advance(step, figures["loss"], figures["tokens"])
    # JSON has no name for what is not finite.
    figures = {name: value for name, value in figures.items() if name not in lost}
    if progress.tokens_per_s is not None:
        figures["tokens_per_s"] = round(progress.tokens_per_s, 1)
    log.write(step, **figures)


def _evaluate(setup: Setup, state: TrainState, log: MetricsLog, console: Console) -> None:
    """Log and show held-out bits per byte beside the compressors', and a sample; of an encoder, the loss alone."""
    config, step = setup.config, int(state.step)
    batches = map(setup.place_batch, eval_batches(setup.heldout, config.data.batch_size))
    # What the run's model is to whoever opens it.
    params = state.params if state.ema is None else state.ema
    if config.objective.predict == "masked":
        loss = evaluate(setup.eval_step, params, batches, None).loss
        log.write(step, heldout_loss=loss)
        console.print(f"step {step}: {loss:.3f} nats per hidden token of held-out text", highlight=False)
        return
    found = evaluate(setup.eval_step, params, batches, setup.heldout.num_bytes)
    settings = dataclasses.replace(config.decoding, max_tokens=config.training.sample_tokens)
    params = cast_matrices(params, config.model.dtype)
    prompt = config.training.sample_prompt
    tokenizer = setup.run.tokenizer
    sample = prompt + "".join(stream_text(setup.model, params, tokenizer, tokenizer.begin(prompt), settings))
    log.write(step, heldout_loss=found.loss, heldout_bits_per_byte=found.bits_per_byte, sample=sample)
    console.print(
        f"step {step}: {found.bits_per_byte:.3f} bits per byte on held-out text"
        f" (gzip -9 {setup.compressors.gzip:.3f}, xz {setup.compressors.xz:.3f})",
        highlight=False,
    )
    console.print(sample, style="dim", markup=False, highlight=False)


def _conclude(setup: Setup, folder: Path, log: MetricsLog, console: Console) -> None:
    """Show what was learnt, draw the curves and say what can be done next."""
    shown = shlex.quote(str(folder))
    end = f"Trained to step {setup.config.training.steps}. The run is in {folder}; its curves: {folder}/curves.png."
    if setup.config.objective.predict == "masked":
        plot_curves(log.rows, {}, folder / "curves.png")
        further = (
            f"Make vectors of texts:  python serve.py embed --model {shown} --input texts.jsonl --output out.jsonl"
        )
        console.print(f"{end}\n{further}", highlight=False, markup=False, soft_wrap=True)
        return
    compressors = {"gzip -9": setup.compressors.gzip, "xz": setup.compressors.xz}
    plot_curves(log.rows, compressors, folder / "curves.png")
    bits = [row["heldout_bits_per_byte"] for row in log.rows if "heldout_bits_per_byte" in row]
    rows = [[name, f"{value:.3f}"] for name, value in {"this model": bits[-1], **compressors}.items()]
    console.print(make_table("Held-out text, a document at a time", ["", "bits per byte"], rows))
    console.print(
        f"{end}\nLet it write:  python serve.py generate --model {shown}"
        f" --prompt {shlex.quote(setup.config.training.sample_prompt)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
