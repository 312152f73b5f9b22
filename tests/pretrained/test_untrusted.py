"""Files that somebody else made: each that is not as its format says is refused at once, by its name and its tensor's.

Rows F01 to F03 and M13 of the collected public reports.
"""

import json
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.pretrained.gguf_file import open_gguf
from transformer_jax.pretrained.huggingface import load_folder
from transformer_jax.pretrained.safetensors import open_file, open_folder

LLAMA = Path(__file__).parent / "fixtures" / "llama"


def refused(function, path, match):
    start = time.perf_counter()
    with pytest.raises(UserError, match=match) as error:
        function(path)
    assert path.name in str(error.value)
    # Generous: the point is that nothing is allocated or searched by what the file says.
    assert time.perf_counter() - start < 1


def entry(shape: Any = (2,), dtype: Any = "F32", offsets: Any = (0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def safetensors(header, data=b"\0" * 8, length=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a whole safetensors file"),
        (b"\1\0\0", "not a whole safetensors file"),
        (safetensors({}, b"", length=2**63), "not a whole safetensors file"),
        (safetensors({}, b"", length=3), "not a whole safetensors file"),
        (safetensors(b"", b""), "not JSON"),
        (safetensors(b"\xff\xfe", b""), "not JSON"),
        (safetensors(b"[]", b""), r"found \[\]; expected an object"),
        (safetensors(b"[" * 100_000, b""), "not JSON"),
        (safetensors(b'{"w": NaN}', b""), "'w' is not described by"),
        (safetensors(b'{"__metadata__": {"a": NaN}}', b""), "expected texts by name"),
        (safetensors(b'{"w": 1, "w": 2}', b""), "a name stands twice"),
        (safetensors({"w": 3}), "'w' is not described by"),
        (safetensors({"w": {"dtype": "F32", "shape": [2]}}), "'w' is not described by"),
        (safetensors({"w": entry(dtype="F99")}), "'w' has dtype 'F99'"),
        (safetensors({"w": entry(dtype=["F32"])}), "'w' has dtype"),
        (safetensors({"w": entry(offsets=(8, 0))}), "'w' has 8 bytes by its shape, -8 by its offsets"),
        (safetensors({"w": entry(offsets=(-8, 0))}), "none negative"),
        (safetensors({"w": entry(offsets=(0, 8, 8))}), "expected 2 offsets"),
        (safetensors({"w": entry(offsets=(0.0, 8.0))}), "expected a list of whole numbers"),
        (safetensors({"w": entry(shape=(-2,))}), "none negative"),
        (safetensors({"w": entry(shape=(True, 2))}), "expected a list of whole numbers"),
        (safetensors({"w": entry(shape=(2**62, 4))}), "bytes by its shape"),
        (safetensors({"w": entry(shape=[1] * 9 + [2])}), "at most 8"),
        (safetensors({"w": entry()}, b"\0" * 4), "its tensors end at byte"),
        (safetensors({"w": entry()}, b"\0" * 12), "its tensors end at byte"),
        (safetensors({"v": entry(), "w": entry(offsets=(4, 12))}, b"\0" * 12), "a hole or an overlap"),
        (safetensors({"v": entry(), "w": entry(offsets=(12, 20))}, b"\0" * 20), "a hole or an overlap"),
    ],
)
def test_a_malformed_safetensors_file_is_refused(tmp_path, content, match):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refused(open_file, path, match)


def test_a_good_safetensors_file_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    numbers = np.array([1.5, -2.0], np.float32)
    header = {"__metadata__": {"format": "pt"}, "v": entry(), "w": entry(shape=(0, 3), offsets=(8, 8))}
    path.write_bytes(safetensors(header, numbers.tobytes()))
    tensors = open_file(path)
    np.testing.assert_array_equal(tensors["v"].read(), numbers)
    assert tensors["w"].read().shape == (0, 3)


@pytest.fixture
def sharded(tmp_path):
    """A folder of two files and their index."""
    from safetensors.numpy import save_file

    folder = tmp_path / "sharded"
    shutil.copytree(LLAMA, folder)
    (folder / "model.safetensors").unlink()
    tensors = {name: np.array(tensor.read()) for name, tensor in open_folder(LLAMA).items()}
    places = {name: f"model-0000{1 + i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == place}, folder / place)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_several_files_are_read_as_one(sharded):
    whole, parts = open_folder(LLAMA), open_folder(sharded)
    assert set(whole) == set(parts)
    assert all(np.array_equal(whole[name].read(), parts[name].read()) for name in whole)


def test_a_missing_file_is_named(sharded):
    (sharded / "model-00002.safetensors").unlink()
    refused(load_folder, sharded, r"model-00002.safetensors is missing")


def test_a_file_that_is_cut_is_named(sharded):
    path = sharded / "model-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(load_folder, sharded, r"model-00001.safetensors: its tensors end at byte")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda places: places.update({"model.norm.weight": "../model-00001.safetensors"}), "not the name of a file"),
        (lambda places: places.update({"no.such": "model-00001.safetensors"}), "lacks the tensor 'no.such'"),
        (lambda places: places.pop("model.norm.weight"), "has the tensor 'model.norm.weight', against"),
        (lambda places: places.update({"model.norm.weight": 3}), "not a list of tensors"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(sharded, change, match):
    index = sharded / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    change(tree["weight_map"])
    index.write_text(json.dumps(tree))
    refused(load_folder, sharded, match)


def changed(tmp_path, tensors=lambda tensors: None, **settings):
    """A copy of the model with other tensors, or with other settings."""
    from safetensors.numpy import save_file

    folder = tmp_path / "changed"
    shutil.copytree(LLAMA, folder)
    arrays = {name: np.array(tensor.read()) for name, tensor in open_folder(LLAMA).items()}
    tensors(arrays)
    save_file(arrays, folder / "model.safetensors")
    tree = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (lambda t: t.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing"),
        (lambda t: t.update({"extra.weight": np.zeros(2, np.float32)}), "'extra.weight' is not known"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(17, np.float32)}),
            r"'model.norm.weight' has shape \[17\]; expected \[16\]",
        ),
    ],
)
def test_tensors_that_are_not_those_of_the_config_are_refused(tmp_path, tensors, match):
    refused(load_folder, changed(tmp_path, tensors), match)


def test_what_older_files_hold_besides_is_left_aside(tmp_path):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    load_folder(changed(tmp_path, lambda t: t.update(frequencies)))


def test_a_bert_of_the_first_hour_is_read(tmp_path):
    """Its norms call their parameters gamma and beta, and it also guesses whether sentences follow one another."""
    from safetensors.numpy import save_file

    bert = LLAMA.parent / "bert"
    shutil.copytree(bert, tmp_path / "old")
    arrays = {name: np.array(tensor.read()) for name, tensor in open_folder(bert).items()}
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in arrays.items()
    }
    assert set(old) != set(arrays)
    save_file(old | {"cls.seq_relationship.bias": np.zeros(2, np.float32)}, tmp_path / "old" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_folder(tmp_path / "old").params, load_folder(bert).params)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_what_an_encoder_ties_may_be_in_the_file_too_and_is_alike(family, tmp_path):
    from safetensors.numpy import save_file

    fixture, prefix = LLAMA.parent / family, {"bert": "cls.predictions", "roberta": "lm_head"}[family]
    arrays = {name: np.array(tensor.read()) for name, tensor in open_folder(fixture).items()}
    table = next(array for name, array in arrays.items() if name.endswith("word_embeddings.weight"))
    tied = {f"{prefix}.decoder.weight": table, f"{prefix}.decoder.bias": arrays[f"{prefix}.bias"]}
    shutil.copytree(fixture, tmp_path / "both")
    save_file(arrays | tied, tmp_path / "both" / "model.safetensors")
    load_folder(tmp_path / "both")
    tied[f"{prefix}.decoder.bias"] = tied[f"{prefix}.decoder.bias"] + 1
    save_file(arrays | tied, tmp_path / "both" / "model.safetensors")
    refused(load_folder, tmp_path / "both", "are not alike, and the model has one of them")


def test_a_tied_head_that_is_in_the_file_is_the_table_or_a_warning(tmp_path):
    def tie(arrays):
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()

    assert load_folder(changed(tmp_path, tie, tie_word_embeddings=True)).config.tie_embeddings
    shutil.rmtree(tmp_path / "changed")
    with pytest.warns(UserWarning, match=r"'lm_head.weight' is not the embedding table"):
        load_folder(changed(tmp_path, tie_word_embeddings=True))
    shutil.rmtree(tmp_path / "changed")
    assert load_folder(changed(tmp_path, lambda t: t.pop("lm_head.weight"), tie_word_embeddings=True)).config.V == 48


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; expected one of llama"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; expected one of silu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'; expected one of default, linear"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 4.0}}, "type is 'su'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "bend": 3}}, "bend is 3, a setting that"),
        ({"sliding_window": 4096}, "sliding_window is 4096, a setting that this version does not know"),
        ({"hidden_size": None}, "the setting 'hidden_size' is missing"),
        ({"hidden_size": "16"}, "hidden_size is '16'; expected a whole number"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3; expected a positive divisor"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, a setting that"),
        ({"rms_norm_eps": float("nan")}, "norm_eps is nan"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(tmp_path, settings, match):
    refused(load_folder, changed(tmp_path, **settings), match)


def test_softcaps_that_cap_nothing_are_refused(tmp_path):
    """Row M16: null is no cap; zero, a negative number or NaN is a mistake."""
    gemma2 = LLAMA.parent / "gemma2"
    for number, cap in enumerate((0.0, -1.0, float("nan"))):
        folder = tmp_path / str(number)
        shutil.copytree(gemma2, folder)
        tree = json.loads((folder / "config.json").read_text()) | {"attn_logit_softcapping": cap}
        (folder / "config.json").write_text(json.dumps(tree))
        with pytest.raises(UserError, match="attention_softcap is"):
            load_folder(folder)


def text(string):
    content = string.encode()
    return struct.pack("<Q", len(content)) + content


def gguf(settings=(), tensors=(), data=b"\0" * 64, version=3, counts=None):
    """A file by hand: settings are (name, type, bytes), tensors are (name, dimensions, type, offset)."""
    content = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(settings))))
    for name, kind, value in settings:
        content += text(name) + struct.pack("<I", kind) + value
    for name, dimensions, kind, offset in tensors:
        content += text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        content += struct.pack("<IQ", kind, offset)
    return content + b"\0" * (-len(content) % 32) + data


W = ("w", (4, 2), 0, 0)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"GG", "ends at byte 2"),
        (b"GGML" + b"\0" * 20, "is not a GGUF file"),
        (gguf(version=1), "is of version 1; expected 2 or 3"),
        (gguf(version=3 << 24), "little-endian"),
        (gguf(counts=(2**62, 0)), "says that it has .* of tensors"),
        (gguf(counts=(0, 2**40)), "says that it has .* of settings"),
        (gguf([("a", 8, struct.pack("<Q", 2**30))]), "says that it has 1,073,741,824 of letters"),
        (gguf([("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "not UTF-8"),
        (gguf([("a", 99, b"")]), "the setting 'a' of type 99"),
        (gguf([("a", 9, struct.pack("<IQ", 9, 1))]), "'a', a list of type 9"),
        (gguf([("a", 9, struct.pack("<IQ", 4, 2**61))]), "says that it has .* of a"),
        (gguf([("a", 4, b"\0" * 4), ("a", 4, b"\0" * 4)]), "the setting 'a' twice"),
        (gguf([("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment 0"),
        (gguf([("general.alignment", 4, struct.pack("<I", 2**30))]), "general.alignment 1073741824"),
        (gguf([("general.alignment", 4, struct.pack("<I", 24))]), "general.alignment 24"),
        (gguf([("general.alignment", 8, text("32"))]), "general.alignment '32'"),
        (gguf(tensors=[W, W]), "the tensor 'w' twice"),
        (gguf(tensors=[("w", (1,) * 9, 0, 0)]), "'w' with 9 dimensions"),
        (gguf(tensors=[("w", (), 0, 0)]), "'w' with 0 dimensions"),
        (gguf(tensors=[("w", (0, 4), 0, 0)]), "expected no 0"),
        (gguf(tensors=[("w", (2**32, 2**32), 0, 0)]), "within the tensor 'w'"),
        (gguf(tensors=[("w", (33,), 2, 0)]), "the last a multiple of 32"),
        (gguf(tensors=[("w", (4,), 77, 0)]), "'w' of type 77; expected one of F32"),
        (gguf(tensors=[("w", (4,), 0, 5)]), "'w' at offset 5; expected a multiple of 32"),
        (gguf(tensors=[("w", (4,), 0, 64)]), "within the tensor 'w'"),
        (gguf(tensors=[("v", (16,), 0, 0), ("w", (4,), 0, 32)]), "'w' overlapping another"),
    ],
)
def test_a_malformed_gguf_file_is_refused(tmp_path, content, match):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refused(open_gguf, path, match)


def test_a_good_gguf_file_is_read_and_refused_cut_anywhere(tmp_path):
    path = tmp_path / "model.gguf"
    numbers = np.arange(8, dtype=np.float32)
    settings = [
        ("a", 4, struct.pack("<I", 7)),
        ("b", 8, text("é")),
        ("c", 9, struct.pack("<IQ", 8, 2) + text("x") + text("")),
    ]
    whole = gguf([*settings, ("d", 9, struct.pack("<IQ2f", 6, 2, 1.5, 2.5))], [W], numbers.tobytes())
    path.write_bytes(whole)
    file = open_gguf(path)
    assert file.settings == {"a": 7, "b": "é", "c": ["x", ""], "d": [1.5, 2.5]}
    np.testing.assert_array_equal(file.tensors["w"].read(), numbers.reshape(2, 4))
    for length in range(0, len(whole), 8):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError):
            open_gguf(path)
