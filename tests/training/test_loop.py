"""Whole runs by the real command: finished, stopped, killed, gone on with, and refused."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.text.documents import windows_of
from transformer_jax.errors import UserError
from transformer_jax.text.corpus import find_corpus, split
from transformer_jax.text.pipeline import eval_batches
from transformer_jax.text.tokenizer import train_bpe
from transformer_jax.training.evaluation import evaluate, make_eval_step
from transformer_jax.training.folder import open_trained

TINY = [
    "--model.num-layers",
    "1",
    "--model.d-model",
    "16",
    "--model.d-ff",
    "32",
    "--model.num-heads",
    "2",
    "--model.max-seq-len",
    "16",
    "--model.dropout",
    "0.1",
    "--data.tokenizer",
    "bytes",
    "--data.seq-len",
    "16",
    "--data.batch-size",
    "4",
    "--data.holdout",
    "0.2",
    "--optimizer.warmup-steps",
    "2",
    "--training.steps",
    "40",
    "--training.eval-every",
    "15",
    "--training.checkpoint-every",
    "6",
    "--training.sample-tokens",
    "6",
    "--training.accumulate",
    "2",
    "--training.ema-decay",
    "0.9",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    words = ["def", "return", "import", "class", "self", "for", "in", "if", "else", "None", "True", "print"]
    for number in range(30):
        rng = random.Random(number)
        (folder / f"{number:02}.txt").write_text(" ".join(rng.choice(words) for _ in range(30)))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """One compilation cache for all processes, and the number of devices that a laptop has."""
    cache = tmp_path_factory.mktemp("cache")
    return {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}


def command(corpus, run, *extra):
    train = [sys.executable, "-m", "transformer_jax", "train", "--data.paths", str(corpus), "--run", str(run)]
    return [*train, *TINY, *extra]


def run_to_end(arguments, environment):
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def finished(corpus, environment, tmp_path_factory):
    """The run that nothing interrupts, and what it printed."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    done = run_to_end(command(corpus, run), environment)
    assert done.returncode == 0, done.stderr
    return run, done


def newest_state(run: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, read by Orbax alone."""
    import orbax.checkpoint as ocp

    step = max(int(folder.name) for folder in (run / "checkpoints").iterdir() if folder.name.isdigit())
    arrays = {}
    for item in ("params", "ema", "rest"):
        with warnings.catch_warnings():
            # Orbax says that it takes the devices from the file, which is where they are.
            warnings.simplefilter("ignore")
            tree = ocp.PyTreeCheckpointer().restore(run / "checkpoints" / str(step) / item)
        arrays |= {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}
    return arrays


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "tokens_per_s"} for row in rows]


def assert_same_run(run: Path, expected: Path) -> None:
    ours, theirs = newest_state(run), newest_state(expected)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert timeless(rows_of(run)) == timeless(rows_of(expected))


@pytest.mark.slow
def test_a_run_leaves_what_it_learnt(finished, corpus):
    run, done = finished
    rows = rows_of(run)
    training = [row for row in rows if "loss" in row]
    assert [row["step"] for row in training] == list(range(1, 41))
    assert [row["step"] for row in rows if "heldout_bits_per_byte" in row] == [15, 30, 40]
    assert training[-1]["loss"] < training[0]["loss"]
    assert all(row["tokens_per_s"] > 0 for row in training[1:])
    for text in ("gzip -9", "xz", "bits per byte", "tokens/s", "of matmul peak", "serve.py generate"):
        assert text in done.stdout, text
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(int(f.name) for f in (run / "checkpoints").iterdir() if f.name.isdigit()) == [30, 36, 40]
    events = EventAccumulator(str(run / "events")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 41))
    trained = open_trained(run)
    assert trained.step == 40
    # The run's model is the running mean of its parameters.
    mean = next(array for name, array in newest_state(run).items() if "ema" in name and "embed" in name)
    np.testing.assert_array_equal(trained.params["embed"], mean.astype(trained.params["embed"].dtype))
    # The schedule's own equation, and bits per byte of the documents held out, computed anew.
    rates = [row["learning_rate"] for row in training]
    cosine = [0.05 + 0.95 * (1 + math.cos(math.pi * (t - 2) / 38)) / 2 for t in range(3, 41)]
    np.testing.assert_allclose(rates, [3e-3 * f for f in (0.5, 1.0, *cosine)], rtol=1e-5)
    found = find_corpus([str(corpus)])
    parts = split(found.documents(), found.survey(), 0.2)
    windows = windows_of([part.heldout.text for part in parts if part.heldout is not None], 16)
    step = jax.jit(make_eval_step(trained.model))
    bits = evaluate(step, trained.params, eval_batches(windows, 4), windows.num_bytes).bits_per_byte
    assert rows[-1]["heldout_bits_per_byte"] == pytest.approx(bits, rel=2e-3)
    assert trained.config.training.steps == 40
    assert trained.config.model.vocab_size == 257


@pytest.mark.slow
def test_a_run_starts_from_a_model_with_its_tokenizer_and_goes_on(finished, corpus, environment, tmp_path):
    """From a run, and from what it was converted to: the same parameters, so the same first loss, below a new run's."""
    folder = tmp_path / "published"
    converting = [sys.executable, "-m", "transformer_jax", "convert", "--model", str(finished[0]), "--to", str(folder)]
    assert run_to_end(converting, environment).returncode == 0
    rows = {}
    for name, source in (("own", finished[0]), ("published", folder)):
        run = tmp_path / f"from {name}"
        start = [sys.executable, "-m", "transformer_jax", "train", "--from", str(source), "--run", str(run)]
        options = ["--data.paths", str(corpus), "--data.seq-len", "16", "--training.steps", "3"]
        small = [*options, "--training.sample-tokens", "4", "--data.holdout", "0.2", "--model.dropout", "0"]
        small += ["--model.dtype", "float32"]
        done = run_to_end([*start, *small], environment)
        assert done.returncode == 0, done.stderr
        assert (run / "tokenizer.json").read_text() == (finished[0] / "tokenizer.json").read_text()
        rows[name] = timeless(rows_of(run))
        assert "The run is finished" in run_to_end([*start, *small], environment).stdout
    assert rows["own"] == rows["published"]
    assert rows["own"][0]["loss"] < rows_of(finished[0])[0]["loss"] - 0.5
    wrong = [*start[:-1], str(tmp_path / "wrong"), *small, "--model.d-ff", "64"]
    assert "differs in shape from the model" in run_to_end(wrong, environment).stderr


@pytest.mark.slow
def test_killed_and_resumed_is_never_killed(finished, corpus, environment, tmp_path):
    """SIGKILL at random moments, SIGTERM and SIGINT in between: the same bits in the end, and the same metrics."""
    run, rng = tmp_path / "killed", random.Random(7)
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGKILL]
    codes = []
    for number in signals:
        process = subprocess.Popen(command(corpus, run), env=environment, stdout=subprocess.DEVNULL)
        before = len(rows_of(run)) if (run / "metrics.jsonl").exists() else 0
        deadline = time.monotonic() + 120
        wanted = rng.randint(1, 6)
        while process.poll() is None and time.monotonic() < deadline:
            if (run / "metrics.jsonl").exists():
                lines = (run / "metrics.jsonl").read_bytes().count(b"\n")
                if lines >= before + wanted or (number == signal.SIGKILL and lines > before):
                    break
            time.sleep(0.002)
        process.send_signal(number)
        codes.append(process.wait(timeout=120))
    assert set(codes) <= {-signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT, 0}
    assert 128 + signal.SIGTERM in codes
    assert -signal.SIGKILL in codes
    done = run_to_end(command(corpus, run), environment)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, finished[0])


@pytest.mark.slow
def test_bad_settings_and_folders_are_refused(finished, corpus, environment, tmp_path):
    run, _ = finished

    def error(*arguments, folder=run):
        done = run_to_end(command(corpus, folder, *arguments), environment)
        assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "training.steps: 40 | 41" in error("--training.steps", "41")
    assert "model.d_ff: 32 | 48" in error("--model.d-ff", "48")
    assert "no preset is called 'huge'" in error("--preset", "huge")
    assert "holds 'notes.txt' and no config.json" in error(folder=_with_file(tmp_path / "other", "notes.txt"))
    missing = error("--data.paths", str(tmp_path / "nowhere.txt"), folder=tmp_path / "b")
    assert "nowhere.txt" in missing
    empty = _with_file(tmp_path / "empty", "nothing.txt")
    assert "empty" in error("--data.paths", str(empty), folder=tmp_path / "c")
    (tmp_path / "short.txt").write_text("short text")
    assert "one window needs 17" in error("--data.paths", str(tmp_path / "short.txt"), folder=tmp_path / "d")
    assert "predicts what is 'masked'" in error("--model.attention", "bidirectional", folder=tmp_path / "e")
    assert not (tmp_path / "e" / "config.json").exists()
    assert "cannot hold a run" in error(folder=tmp_path / "short.txt")
    assert "GB of memory; found" in error("--model.d-ff", "1000000000", folder=tmp_path / "f")
    assert "GB of memory; found" in error("--data.batch-size", "10000000000", folder=tmp_path / "f")
    assert "--data.paths is empty" in error("--data.paths", "--seed", "1", folder=tmp_path / "f")
    changed = corpus / "99.txt"
    changed.write_text("a new file")
    try:
        assert "the corpus has changed" in error()
    finally:
        changed.unlink()


def _with_file(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / name).write_text("")
    return folder


@pytest.mark.slow
def test_a_run_goes_on_with_other_settings_that_do_not_change_it(finished, corpus, environment, tmp_path):
    """Another mesh, other intervals, and data prepared by another process."""
    environment = {**environment, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run, common = tmp_path / "run", ["--model.vocab-size", "258", "--training.steps", "4000"]
    with subprocess.Popen(
        command(corpus, run, *common, "--mesh.fsdp", "2"), env=environment, stdout=subprocess.DEVNULL
    ) as first:
        while first.poll() is None and not ((run / "metrics.jsonl").exists() and len(rows_of(run)) > 1):
            time.sleep(0.05)
        first.terminate()
        assert first.wait(timeout=120) == 128 + signal.SIGTERM
    reached = len(rows_of(run))
    arguments = [*common, "--training.eval-every", "3999", "--data.workers", "1", "--mesh.data", "2"]
    with subprocess.Popen(command(corpus, run, *arguments), env=environment, stdout=subprocess.DEVNULL) as second:
        while second.poll() is None and len(rows_of(run)) <= reached:
            time.sleep(0.05)
        second.terminate()
        assert second.wait(timeout=120) == 128 + signal.SIGTERM
    assert json.loads((run / "config.json").read_text())["mesh"] == {"data": 2, "fsdp": 1, "tensor": 1}


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [1, 3, 8])
def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(kilobytes, finished, corpus, environment, tmp_path):
    """The kernel ends every file at a size, as a full disk does; each size stops the run at another place."""
    run = tmp_path / "run"
    environment = {**environment, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    full = subprocess.run(
        ["bash", "-c", 'ulimit -f "$1"; shift; exec "$@"', "bash", str(kilobytes), *command(corpus, run)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert full.returncode == 2, (full.returncode, full.stdout, full.stderr)
    assert "Traceback" not in full.stderr
    assert "Exception ignored" not in full.stderr
    assert "error: " in full.stderr
    assert "File too large" in full.stderr
    done = run_to_end(command(corpus, run), environment)
    assert done.returncode == 0, done.stderr
    # What the full disk left of the compilation cache is mended and not complained of.
    assert "warning" not in done.stderr
    assert_same_run(run, finished[0])


@pytest.mark.slow
def test_what_a_finished_run_has_lost_is_made_again_or_said(finished, corpus, environment, tmp_path):
    """Its metrics; its tokenizer, which only a foreign hand can have changed; its checkpoints."""
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    whole = rows_of(run)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for kept in (0, 25):  # 25 rows hold an earlier evaluation, which is not the end's.
        (run / "metrics.jsonl").write_bytes(b"".join(lines[:kept]))
        again = run_to_end(command(corpus, run), environment)
        assert again.returncode == 0, again.stderr
        assert rows_of(run) == [*whole[:kept], whole[-1]]

    own = (run / "tokenizer.json").read_bytes()
    (run / "tokenizer.json").write_text(train_bpe(["foreign text " * 9], 258).json)
    with pytest.raises(UserError, match=r"tokenizer.json, or a file beside it, has changed"):
        open_trained(run)
    (run / "tokenizer.json").write_bytes(own)

    shutil.rmtree(run / "checkpoints")
    again = run_to_end(command(corpus, run), environment)
    assert again.returncode == 0, again.stderr
    assert "No checkpoint was saved: beginning anew." in again.stdout
    assert_same_run(run, finished[0])


@pytest.mark.slow
def test_whoever_stops_reading_does_not_stop_the_run(finished, corpus, environment, tmp_path):
    """With output to a closed pipe, and in a locale that knows ASCII alone."""
    run = tmp_path / "run"
    environment = {**environment, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with subprocess.Popen(
        command(corpus, run), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")
    assert_same_run(run, finished[0])


@pytest.mark.slow
def test_two_processes_do_not_train_in_one_folder(corpus, environment, tmp_path):
    first = subprocess.Popen(
        command(corpus, tmp_path / "run", "--training.steps", "100000"), env=environment, stdout=subprocess.DEVNULL
    )
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert first.poll() is None
            time.sleep(0.05)
        second = run_to_end(command(corpus, tmp_path / "run", "--training.steps", "100000"), environment)
        assert second.returncode == 2
        assert "another process is training" in second.stderr
    finally:
        first.kill()
        first.wait()
