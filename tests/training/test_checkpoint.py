"""A run that is killed loses nothing that was saved, and nothing that was not written whole is ever read."""

import contextlib
import functools
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from transformer_jax.errors import UserError
from transformer_jax.training.checkpoint import Checkpoints, _hide_late_writes, restore_params
from transformer_jax.training.checksums import CHECKSUMS, find_damage


class State(NamedTuple):
    params: Any
    opt_state: Any
    step: Any
    key: Any


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.identity(), optax.adam(1e-2))


def make_state(step: int = 0, seed: int = 0) -> State:
    """A state with every kind of leaf that a run has, its numbers made from `seed`."""
    key = jax.random.key(seed)
    params = {
        "embed": {"table": jax.random.normal(key, (8, 512))},
        "half": jax.random.normal(key, (5, 3), jnp.bfloat16),
        # Minus zero, infinity and a NaN whose payload must survive.
        "odd": jnp.asarray(np.array([0x80000000, 0x7F800000, 0x7FC12345, 1], np.uint32).view(np.float32)),
        "scale": jnp.float32(seed),
    }
    others = (jnp.arange(6, dtype=jnp.int32), jnp.arange(3, dtype=jnp.uint32), None, (), jnp.ones((), bool))
    return State(params, (OPTIMIZER.init(params), others), jnp.int32(step), key)


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def to_bits(tree: Any) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Every leaf with its name, dtype, shape and bytes."""

    def bits(x: jax.Array) -> tuple[str, tuple[int, ...], bytes]:
        data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return str(x.dtype), x.shape, np.asarray(data).tobytes()

    return [(jax.tree_util.keystr(path), *bits(x)) for path, x in jax.tree.leaves_with_path(tree)]


def save(folder: Path, *steps: int, keep: int = 3) -> None:
    with Checkpoints(folder, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step, seed=step), step * 10)


class Restored(NamedTuple):
    state: Any
    place: Any
    step: int


def restore(folder: Path, like: Any = None) -> Restored:
    with Checkpoints(folder, keep=3) as checkpoints:
        restored = checkpoints.restore(abstract(make_state()) if like is None else like)
    assert restored is not None
    return Restored(*restored)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


# What is saved is what is restored


def test_every_kind_of_leaf_comes_back_bit_for_bit(folder: Path):
    state, place = make_state(7, seed=3), {"batches": 7, "of": ["a", None, 0.1, True]}
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.restore(abstract(state)) is None
        checkpoints.save(7, state, place)
    restored = restore(folder, abstract(state))
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert to_bits(restored.state) == to_bits(state)
    assert (restored.place, restored.step) == (place, 7)


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_a_restored_key_draws_what_the_saved_one_would_have(folder: Path, generator: str):
    keys = {"params": jnp.zeros(1), "one": jax.random.key(5, impl=generator)}
    keys["many"] = jax.random.split(keys["one"], (2, 3))
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(0, keys, None)
    restored = restore(folder, abstract(keys)).state
    assert to_bits(restored) == to_bits(keys)
    assert jax.random.bits(restored["many"][1, 2]) == jax.random.bits(keys["many"][1, 2])


def test_a_key_of_another_generator_does_not_fit(folder: Path):
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(0, {"params": jnp.zeros(1), "key": jax.random.key(5)}, None)
    like = abstract({"params": jnp.zeros(1), "key": jax.random.key(5, impl="rbg")})
    with pytest.raises(UserError, match=r"key is key<fry>\[\] in the checkpoint and key<rbg>\[\] here"):
        restore(folder, like)


@pytest.mark.parametrize("devices", [1, 8])
def test_the_state_may_be_donated_as_soon_as_save_returns(folder: Path, devices: int):
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("fsdp"))
    state = {"params": jax.device_put({str(i): jnp.full((1 << 18,), i, jnp.float32) for i in range(8)}, sharding)}
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    expected = to_bits(state)
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, state, None)
        for _ in range(5):
            state = overwrite(state)
        jax.block_until_ready(state)
    assert to_bits(restore(folder, abstract(state)).state) == expected


def test_the_place_may_change_as_soon_as_save_returns(folder: Path):
    place = {"batches": 1}
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(0, make_state(), place)
        place["batches"] = 2
    assert restore(folder).place == {"batches": 1}


def test_the_newest_are_kept(folder: Path):
    save(folder, 1, 2, 5, 10, keep=2)
    assert names(folder) == {"5", "10"}
    assert restore(folder).step == 10


def test_a_step_that_is_on_disk_is_not_written_again(folder: Path):
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(3, make_state(3), None)
        checkpoints.save(3, make_state(3), None)
    before = (folder / "3" / CHECKSUMS).stat().st_mtime_ns
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.restore(abstract(make_state()))
        checkpoints.save(3, make_state(3), None)
    assert (folder / "3" / CHECKSUMS).stat().st_mtime_ns == before


@pytest.mark.parametrize("step", [3, 4])
def test_another_run_cannot_write_among_later_checkpoints(folder: Path, step: int):
    save(folder, 4)
    with Checkpoints(folder, keep=2) as checkpoints, pytest.raises(UserError, match="holds a checkpoint of step 4"):
        checkpoints.save(step, make_state(step), None)
    assert restore(folder).step == 4


def test_mistakes_in_code_are_refused(folder: Path):
    state = make_state(2)
    with Checkpoints(folder, keep=2) as checkpoints:
        with pytest.raises(ValueError, match="made 2 steps"):
            checkpoints.save(3, state, None)
        with pytest.raises(TypeError, match="place"):
            checkpoints.save(2, state, (1, 2))
        with pytest.raises(TypeError, match=r"params\.scale is a float"):
            checkpoints.save(2, state._replace(params={"scale": 1.0}), None)
        checkpoints.save(2, state, None)
        with pytest.raises(TypeError, match="no sharding"):
            checkpoints.restore(jax.eval_shape(lambda: state))
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(folder, keep=0)


# From one mesh to another


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (4, 1), (1, 8), (4, 2)])
def test_saved_on_one_mesh_restored_on_another(folder: Path, shape: tuple[int, int]):
    def put(state: Any, shape: tuple[int, int]) -> Any:
        mesh = jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

        def spec(x: jax.Array) -> jax.P:
            return jax.P("fsdp", "tensor") if x.ndim == 2 and x.shape[0] % 8 == 0 else jax.P()

        return jax.tree.map(lambda x: jax.device_put(x, jax.NamedSharding(mesh, spec(x))), state)

    state = put(make_state(1), (8, 1))
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, state, None)
    like = put(make_state(1), shape)
    restored = restore(folder, abstract(like)).state
    assert to_bits(restored) == to_bits(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: x.sharding == y.sharding, restored, like)))
    params, step = restore_params(folder, abstract(like.params))
    assert (to_bits(params), step) == (to_bits(state.params), 1)


# What does not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": jnp.zeros(4)}, r"params\.scale is float32\[\] in the checkpoint and float32\[4\] here"),
        ({"half": jnp.zeros((5, 3))}, r"params\.half is bfloat16\[5,3\] in the checkpoint and float32\[5,3\] here"),
        ({"more": jnp.zeros(2)}, r"params\.more is absent in the checkpoint and float32\[2\] here"),
        ({"scale": None}, r"params\.scale is float32\[\] in the checkpoint and absent here"),
    ],
)
def test_another_shape_is_a_mistake_and_not_damage(folder: Path, change: dict[str, Any], message: str):
    save(folder, 1, 2)
    state = make_state()
    wanted = state._replace(params={**state.params, **change})
    with pytest.raises(UserError, match=message):
        restore(folder, abstract(wanted))
    with pytest.raises(UserError, match=message):
        restore_params(folder, abstract(wanted.params))
    assert names(folder) == {"1", "2"}


# Damage


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path, where: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(data)


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a truncated array": lambda step: truncate(largest(step / "params")),
    "a deleted array": lambda step: largest(step / "rest").unlink(),
    "a flipped bit in an array": lambda step: flip_bit(largest(step / "params")),
    "a deleted folder": lambda step: shutil.rmtree(step / "rest"),
    "an empty step": make_empty,
    "garbage metadata": lambda step: (step / "params" / "_METADATA").write_bytes(b"\xff\x00 garbage"),
    "a flipped bit in the place": lambda step: flip_bit(step / "about" / "metadata"),
    "no checksums": lambda step: (step / CHECKSUMS).unlink(),
    "empty checksums": lambda step: (step / CHECKSUMS).write_text(""),
    "checksums of nothing": lambda step: (step / CHECKSUMS).write_text("{}"),
    "checksums of another kind": lambda step: (step / CHECKSUMS).write_text('{"params/a": 1, "b": null}'),
    "checksums of half a file": lambda step: truncate(step / CHECKSUMS),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used_with_one_warning(folder: Path, damage: str):
    save(folder, 10, 20, 30)
    DAMAGES[damage](folder / "30")
    with Checkpoints(folder, keep=3) as checkpoints:
        with pytest.warns(UserWarning, match="is damaged") as caught:
            restored = checkpoints.restore(abstract(make_state()))
        assert restored is not None
        state, place, step = restored
        assert (place, step) == (200, 20)
        assert to_bits(state) == to_bits(make_state(20, seed=20))
        assert [str(folder / "30") in str(warning.message) for warning in caught] == [True]
        assert names(folder) == {"10", "20", "30.damaged-1"}
        checkpoints.save(30, make_state(30, seed=31), 310)
    assert restore(folder).place == 310
    assert names(folder) == {"10", "20", "30", "30.damaged-1"}


def test_no_whole_checkpoint_is_removed_before_it_is_known_to_be_needed(folder: Path):
    """Fewer are to be kept than there are, and the newest are damaged."""
    save(folder, 10, 20, 30)
    for step in (20, 30):
        (folder / str(step) / CHECKSUMS).write_text("")
    (folder / "99").mkdir()
    with Checkpoints(folder, keep=2) as checkpoints:
        with pytest.warns(UserWarning, match="is damaged"):
            restored = checkpoints.restore(abstract(make_state()))
        assert restored is not None
        assert restored[2] == 10
    assert "10" in names(folder)


def test_a_second_damaged_checkpoint_does_not_replace_the_first(folder: Path):
    for _ in range(2):
        save(folder, 1, 2) if not folder.exists() else None
        with Checkpoints(folder, keep=3) as checkpoints:
            flip_bit(largest(folder / "2"))
            with pytest.warns(UserWarning, match="2 is damaged"):
                checkpoints.restore(abstract(make_state()))
            checkpoints.save(2, make_state(2), None)
    assert names(folder) == {"1", "2", "2.damaged-1", "2.damaged-2"}


def test_a_changed_bit_is_seen_wherever_it_is(folder: Path):
    save(folder, 1)
    items = ("about", "params", "rest")
    files = [path for item in items for path in (folder / "1" / item).rglob("*") if path.is_file()]
    assert find_damage(folder / "1", items) is None
    for path in files:
        whole = path.read_bytes()
        for where in (0.0, 0.3, 0.999):
            flip_bit(path, where)
            name = path.relative_to(folder / "1").as_posix()
            assert find_damage(folder / "1", items) == f"{name} does not match its checksum"
            path.write_bytes(whole)


def test_no_fresh_start_when_every_checkpoint_is_damaged(folder: Path):
    save(folder, 1, 2)
    flip_bit(largest(folder / "1" / "params"))
    truncate(largest(folder / "2"))
    for _ in range(2):
        with pytest.raises(UserError, match=r"every checkpoint .* is damaged .*step 2: .*step 1: "):
            restore(folder)
    with pytest.raises(UserError, match="every checkpoint"):
        restore_params(folder, abstract(make_state().params))
    assert names(folder) == {"1", "2"}


def test_reading_parameters_reads_no_optimizer_state_and_changes_nothing(folder: Path):
    save(folder, 1, 2, 3)
    flip_bit(largest(folder / "3" / "params"))
    flip_bit(largest(folder / "2" / "rest"))
    (folder / "9.orbax-checkpoint-tmp").mkdir()
    before = names(folder)
    with pytest.warns(UserWarning, match=r"3 is damaged \(params/.*: using step 2") as caught:
        params, step = restore_params(folder, abstract(make_state().params))
    assert len(caught) == 1
    assert (to_bits(params), step) == (to_bits(make_state(2, seed=2).params), 2)
    assert names(folder) == before


@pytest.mark.parametrize("exists", [True, False])
def test_parameters_of_no_checkpoint(folder: Path, exists: bool):
    if exists:
        folder.mkdir()
    with pytest.raises(UserError, match="no checkpoint in"):
        restore_params(folder, abstract(make_state().params))
    assert folder.exists() == exists


# Killed


def test_what_a_killed_save_left_is_removed_and_nothing_else(folder: Path):
    save(folder, 1)
    (folder / "2.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "old").mkdir()
    with Checkpoints(folder, keep=2) as checkpoints:
        assert names(folder) == {"1", "notes.txt", "old"}
        (folder / "2.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
        checkpoints.save(2, make_state(2), None)
    assert names(folder) == {"1", "2", "notes.txt", "old"}


PROCESSES = """
import sys
import jax, jax.numpy as jnp
from transformer_jax.training.checkpoint import Checkpoints, restore_params

folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, rank)
mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = jax.NamedSharding(mesh, jax.P("fsdp")), jax.NamedSharding(mesh, jax.P())

def make(step):
    return {"params": jnp.arange(8.0) * step, "step": jnp.int32(step), "key": jax.random.key(3)}

make = jax.jit(make, out_shardings={"params": split, "step": whole, "key": whole})
with Checkpoints(folder, keep=2) as checkpoints:
    restored = checkpoints.restore(make(0))
    step = 0 if restored is None else restored[2]
    print("found", step)
    for step in range(step + 1, step + 4):
        checkpoints.save(step, make(step), step)
    state, place, step = checkpoints.restore(make(0))
params, _ = restore_params(folder, make(0)["params"])
print("found", place, step, state["step"], [shard.data.tolist() for shard in params.addressable_shards])
"""


@pytest.mark.slow
def test_many_processes_save_and_restore_together(folder: Path, repository: Path):
    for start_step in (0, 2):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        processes = [start(PROCESSES, folder, port, rank, cwd=repository) for rank in range(2)]
        outputs = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        last = start_step + 3
        shards = [[2 * i * last, (2 * i + 1) * last] for i in range(4)]
        for rank, (out, err) in enumerate(outputs):
            # The collectives print lines of their own.
            lines = [line for line in out.splitlines() if line.startswith("found")]
            mine = [[float(x) for x in shard] for shard in shards[2 * rank : 2 * rank + 2]]
            assert lines == [f"found {start_step}", f"found {last} {last} {last} {mine}"]
            # One process warns, and the other follows it to the checkpoint before.
            assert err.count("is damaged") == (1 if start_step and rank == 0 else 0)
        assert {str(last - 1), str(last)} <= names(folder)
        flip_bit(largest(folder / str(last) / "params"))


RUN = """
import sys
import jax, jax.numpy as jnp
from transformer_jax.training.checkpoint import Checkpoints

folder, last = sys.argv[1], int(sys.argv[2])

@jax.jit
def train_step(state, batch):
    noise = jax.random.normal(jax.random.fold_in(state["key"], state["step"]), state["params"].shape)
    params = state["params"] * 0.999 + batch + noise
    moment = state["moment"] * jnp.bfloat16(0.9) + params.astype(jnp.bfloat16)
    return {"params": params, "moment": moment, "step": state["step"] + 1, "key": state["key"]}

train_step = jax.jit(train_step, donate_argnums=0)
zeros = jnp.zeros((64, 64))
state = {"params": zeros, "moment": zeros.astype(jnp.bfloat16), "step": jnp.int32(0), "key": jax.random.key(1)}
place = 0
with Checkpoints(folder, keep=2) as checkpoints:
    restored = checkpoints.restore(state)
    if restored is not None:
        state, place, _ = restored
    print("resumed", place, flush=True)
    while place < last:
        state = train_step(state, jnp.sin(jnp.float32(place)))
        place += 1
        checkpoints.save(place, state, place)
        # The save before this one is on disk now.
        print("saved", place - 1, flush=True)
print("done", last, flush=True)
"""


def start(code: str, *arguments: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def run(code: str, *arguments: object, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    process = start(code, *arguments, cwd=cwd, **options)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_resumed_equals_never_killed(tmp_path: Path, repository: Path, kills: int):
    rng = random.Random(kills)
    never, killed = tmp_path / "never", tmp_path / "killed"
    saved = 0
    for _ in range(kills):
        process = start(RUN, killed, 10_000, cwd=repository)
        assert process.stdout is not None
        resumed = int(process.stdout.readline().split()[1])
        assert resumed >= saved, "steps that were on disk are lost"
        # From the second line on there is something to lose.
        lines = [process.stdout.readline() for _ in range(rng.randrange(2, 5))]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        assert (process.returncode, err) == (-signal.SIGKILL, "")
        saved = max(
            [
                resumed,
                *(int(line.split()[1]) for line in [*lines, *out.splitlines(keepends=True)] if line.endswith("\n")),
            ]
        )
    last = saved + 3
    for folder, resumes in ((killed, True), (never, False)):
        process = run(RUN, folder, last, cwd=repository)
        assert (process.returncode, process.stderr) == (0, "")
        assert (process.stdout.splitlines()[0] != "resumed 0") == resumes
        assert process.stdout.splitlines()[-1] == f"done {last}"
    zeros = jnp.zeros((64, 64))
    like = {"params": zeros, "moment": zeros.astype(jnp.bfloat16), "step": jnp.int32(0), "key": jax.random.key(1)}
    ours, theirs = restore(killed, abstract(like)), restore(never, abstract(like))
    assert (ours.step, ours.place) == (theirs.step, theirs.place) == (last, last)
    assert to_bits(ours.state) == to_bits(theirs.state)
    assert names(killed) == {str(last - 1), str(last)}


# Saves that fail

FAIL = """
import resource, sys
import jax.numpy as jnp
from transformer_jax.errors import UserError
from transformer_jax.training.checkpoint import Checkpoints

def make(seed):
    return {"params": {str(i): jnp.full((50_000,), seed + i) for i in range(9)}}

def limit_files(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

for surfaces in ("save", "close"):
    folder = f"{sys.argv[1]}/{surfaces}"
    try:
        with Checkpoints(folder, keep=2) as checkpoints:
            checkpoints.save(1, make(1), None)
            checkpoints.wait()
            limit_files(100_000)
            checkpoints.save(2, make(2), None)
            if surfaces == "save":
                checkpoints.save(3, make(3), None)
                print("not reached")
    except UserError as error:
        print(error)
    limit_files(resource.RLIM_INFINITY)
    with Checkpoints(folder, keep=2) as checkpoints:
        print(checkpoints.restore(make(0))[2])
        checkpoints.save(2, make(2), None)
"""


def test_a_save_that_fails_in_the_background_surfaces_at_the_next_call(tmp_path: Path, repository: Path):
    process = run(FAIL, tmp_path, cwd=repository)
    assert process.returncode == 0, process.stderr
    expected = []
    for folder in (tmp_path / "save", tmp_path / "close"):
        expected += [
            f"the checkpoint of step 2 could not be written to {folder}: File too large; "
            "the earlier checkpoints are intact (steps 1). Mend this and resume",
            "1",
        ]
        assert names(folder) == {"1", "2"}
    assert process.stdout.splitlines() == expected
    assert "Traceback" not in process.stderr
    assert "ERROR" not in process.stderr


def test_nothing_is_hidden_but_what_orbax_says_of_a_failed_save():
    orbax = f"{os.path.dirname(ocp.__file__)}/_src/futures/future.py"
    write = ValueError("Error writing to /runs/2.orbax-checkpoint-tmp/params")
    hidden = [("absl", orbax, None), ("asyncio", "base_events.py", write)]
    shown = [
        ("absl", "/elsewhere.py", None),
        ("asyncio", "base_events.py", ValueError("mine")),
        ("other", orbax, write),
    ]
    for records, passes in ((hidden, False), (shown, True)):
        for name, path, error in records:
            trace = None if error is None else (type(error), error, None)
            record = logging.LogRecord(name, logging.ERROR, path, 1, "message", None, trace)
            assert bool(logging.getLogger(name).filter(record)) == passes, record

    closed = RuntimeError("Event loop is closed")
    for error, source, passes in ((closed, None, False), (closed, "a transport", True), (OSError("mine"), None, True)):
        reported = []
        _hide_late_writes(reported.append, SimpleNamespace(exc_value=error, object=source))
        assert bool(reported) == passes
    hook = sys.unraisablehook
    assert isinstance(hook, functools.partial)
    assert hook.func is _hide_late_writes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("mounting a small disk needs Linux and root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_refused_with_what_is_needed_and_leaves_the_checkpoint_before(small_disk: Path):
    def state(size: int) -> Any:
        return {"params": {str(i): jnp.full((size,), i, jnp.float32) for i in range(4)}}

    with Checkpoints(small_disk, keep=2) as checkpoints:
        checkpoints.save(1, state(30_000), None)
        with pytest.raises(UserError, match=r"step 2 needs 0\.6 MB .* has 0\.\d MB free; .* intact \(steps 1\)"):
            checkpoints.save(2, state(40_000), None)
        restored = checkpoints.restore(abstract(state(30_000)))
    assert restored is not None
    assert to_bits(restored[0]) == to_bits(state(30_000))


def test_a_folder_that_goes_away_is_not_made_again(folder: Path):
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(1, make_state(1), None)
        checkpoints.wait()
        shutil.rmtree(folder)
        with pytest.raises(UserError, match="is gone"):
            checkpoints.save(2, make_state(2), None)
    assert not folder.exists()


def test_a_folder_that_cannot_hold_checkpoints_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(UserError, match=f"cannot keep checkpoints in {folder}: "):
            Checkpoints(folder, keep=2)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="read-only"):
        Checkpoints(tmp_path, keep=2)


# What it costs

MEMORY = """
import sys
import jax, jax.numpy as jnp
from transformer_jax.training.checkpoint import Checkpoints

def megabytes(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))

def save(folder, size, steps):
    make = jax.jit(lambda step: {"params": {str(i): jnp.full((size,), step + i, jnp.float32) for i in range(16)}})
    state = jax.block_until_ready(make(0))
    with Checkpoints(folder, keep=1) as checkpoints:
        start = megabytes("VmRSS")
        for step in range(steps):
            checkpoints.save(step, state, step)
            state = make(step)
            if step == steps // 2:
                checkpoints.wait()
                middle = megabytes("VmRSS")
    return start, middle, megabytes("VmRSS")

_, middle, end = save(sys.argv[1] + "/small", 1 << 12, 100)
start, *_ = save(sys.argv[1] + "/large", 1 << 21, 8)
print((end - middle) / 50, megabytes("VmHWM") - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_saves_leak_nothing_and_hold_one_more_copy(tmp_path: Path, repository: Path):
    process = run(MEMORY, tmp_path, cwd=repository)
    assert process.returncode == 0, process.stderr
    slope, peak = map(float, process.stdout.split())
    assert slope < 0.5
    # The large state has 128 MB; beside the one that is written, this program makes the next one.
    assert peak - 128 < 1.5 * 128
