"""How parameters come from a file to their devices: every bit of them, nothing twice, and people see how far it is."""

import dataclasses
import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf.constants
import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from transformer_jax import report
from transformer_jax.architecture import ModelConfig
from transformer_jax.config import MeshConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import build, param_shapes
from transformer_jax.pretrained import stored
from transformer_jax.pretrained.convert import convert
from transformer_jax.pretrained.gguf import load_gguf
from transformer_jax.pretrained.gguf_file import SUPPORTED, GGUFTensor
from transformer_jax.pretrained.gguf_tokenizer import read_gguf_tokenizer
from transformer_jax.pretrained.huggingface import load_folder, save_folder
from transformer_jax.pretrained.safetensors import StoredTensor, open_folder
from transformer_jax.sharding import make_mesh, param_shardings
from transformer_jax.text.tokenizer import byte_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize("name", SUPPORTED)
def test_blocks_of_every_type_become_the_numbers_of_the_gguf_package(name, tmp_path, monkeypatch):
    """Also in small blocks, transposed, on several threads; and rounded once where that is asked for."""
    kind = gguf.constants.GGMLQuantizationType[name]
    rows, width = 37, 512
    size = gguf.quants.quant_shape_to_byte_shape((rows, width), kind)[-1]
    content = np.random.default_rng(0).integers(0, 256, (rows, size), np.uint8)
    # Any bits but those of an exponent that says infinity.
    content[::2] &= 0xBF
    content[1::2] &= 0xFB
    path = tmp_path / "blocks"
    path.write_bytes(b"\0" * 32 + content.tobytes())
    tensor = GGUFTensor(path, kind, (rows, width), 32, content.size)
    expected = gguf.quants.dequantize(content, kind)
    np.testing.assert_array_equal(tensor.read().view(np.uint32), expected.view(np.uint32))
    monkeypatch.setattr(stored, "BLOCK", 5 * width)
    with ThreadPoolExecutor(3) as pool:
        for dtype in (np.float32, jnp.bfloat16):
            upper, lower = stored.empty((width, 20), dtype), stored.empty((width, 17), dtype)
            assert sum(stored.fill([upper.T, lower.T], tensor, pool)) == rows * width
            np.testing.assert_array_equal(np.concatenate([upper, lower], axis=1), expected.T.astype(dtype))
            beside = [stored.empty((rows, part), dtype) for part in (300, 12, 200)]
            assert sum(stored.fill_beside(beside, tensor, pool)) == rows * width
            np.testing.assert_array_equal(np.concatenate(beside, axis=1), expected.astype(dtype))


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * 15)
    with pytest.raises(UserError, match=r"model.safetensors has become shorter while it was being read"):
        StoredTensor(path, np.dtype(np.float32), (2, 2), 0).read()


SMALL = ModelConfig(
    vocab_size=320,
    max_seq_len=32,
    num_layers=2,
    d_model=32,
    d_ff=64,
    num_heads=4,
    tie_embeddings=False,
    dtype="float32",
)


@pytest.mark.parametrize(
    "name", ["llama.gguf", *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "mixtral"))]
)
def test_each_parameter_goes_straight_to_the_devices_that_hold_it(name, tmp_path):
    c = dataclasses.replace(SMALL, num_experts=4, experts_per_token=2) if name == "mixtral" else SMALL
    params = build(c).init(jax.random.key(0))
    convert(tmp_path / name, c, params, byte_tokenizer(), "float32")
    load = load_gguf if name.endswith("gguf") else load_folder
    alone = load(tmp_path / name)
    first = {jax.local_devices()[0]}
    assert all(x.devices() == first for x in jax.tree.leaves(alone.params))
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    split = load(tmp_path / name, None, mesh)
    expected = param_shardings(mesh, build(c).logical_axes(), param_shapes(c))
    jax.tree.map(lambda x, at: x.sharding == at or pytest.fail(f"{x.sharding} {at}"), split.params, expected)
    jax.tree.map(np.testing.assert_array_equal, split.params, alone.params)
    jax.tree.map(np.testing.assert_array_equal, alone.params, params)
    down = split.params["layers_0"]["mlp"]["down"]
    down = down["weight"] if isinstance(down, dict) else down
    assert all(shard.data.size == down.size // 8 for shard in down.addressable_shards)


def test_jax_takes_over_the_arrays_that_are_read_into():
    array = stored.empty((3, 5), np.float32)
    array[...] = 1
    taken = jax.device_put(array, jax.local_devices()[0])
    assert taken.unsafe_buffer_pointer() == array.ctypes.data or jax.default_backend() != "cpu"


def test_reading_is_told_to_the_end():
    told = []
    load_folder(FIXTURES / "phi3", report=lambda done, total: told.append((done, total)))
    numbers = sum(int(np.prod(tensor.shape)) for tensor in open_folder(FIXTURES / "phi3").values())
    assert told[-1] == (numbers, numbers)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def shown(terminal, capsys):
    stream = io.StringIO()
    with report.reading_progress(Console(file=stream, force_terminal=terminal, width=80)) as tell:
        for done in range(4):
            tell(done * 10**6, 4 * 10**6)
            print("answer")
    assert capsys.readouterr() == ("answer\n" * 4, "")
    return stream.getvalue()


def test_a_bar_shows_how_far_reading_is_where_it_takes_long(capsys, monkeypatch):
    for terminal in (True, False):
        assert shown(terminal, capsys) == ""
    monkeypatch.setattr(report, "SECONDS_WITHOUT_BAR", 0.0)
    monkeypatch.setattr(report, "SECONDS_BETWEEN_LINES", 0.0)
    bar = shown(True, capsys)
    assert "reading 4 M parameters" in bar
    assert "75%" in bar
    assert shown(False, capsys).splitlines() == [f"{done}/4 M parameters read" for done in (1, 2, 3)]


def test_merges_are_all_the_ways_to_make_a_word_of_two_others_the_best_word_first():
    words = ["<s>", "</s>", "<unk>", "a", "b", "ab", "ba", "aba", "abab", "bab", "b▁"]
    scores = [0.0, 0.0, 0.0, -9.0, -9.0, -2.0, -3.0, -1.0, -2.0, -5.0, -5.0]
    settings = {
        "tokens": words,
        "scores": scores,
        "token_type": [3, 3, 2, *[1] * 8],
        "model": "llama",
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    tokenizer = read_gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in settings.items()}, Path("x"))
    ways = [
        (-scores[whole], whole, left, right)
        for whole in range(len(words))
        for left in range(len(words))
        for right in range(len(words))
        if words[left] + words[right] == words[whole]
    ]
    expected = [[words[left], words[right]] for _, _, left, right in sorted(ways)]
    assert len(expected) == 9
    assert json.loads(tokenizer.json)["model"]["merges"] == expected


MEASURE = """
import pathlib, sys, jax
from transformer_jax.pretrained.gguf import load_gguf
from transformer_jax.pretrained.huggingface import load_folder

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

small, large = map(pathlib.Path, sys.argv[1:])
load = load_folder if large.is_dir() else load_gguf
load(small)
before = peak()
params = load(large).params
print((peak() - before) / sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["folder", "file.gguf"])
def test_no_tensor_is_held_twice(name, tmp_path, repository):
    """The peak of memory while 200 MB of parameters are read, in a process that has read others before."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the system does not tell a process's peak of memory")
    large = dataclasses.replace(SMALL, vocab_size=8192, d_model=1024, d_ff=4096, num_heads=16)
    for place, c in ((tmp_path / f"small-{name}", SMALL), (tmp_path / name, large)):
        params = jax.tree.map(lambda shape: jnp.full(shape.shape, 0.5), param_shapes(c))
        if name == "folder":
            save_folder(place, c, params)
        else:
            convert(place, c, params, byte_tokenizer(), "q8_0")
    command = [sys.executable, "-c", MEASURE, tmp_path / f"small-{name}", tmp_path / name]
    found = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 1.3
