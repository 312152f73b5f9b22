"""Tiny models of every family, as transformers saves them, against the logits that transformers computes.

fixtures/ is made by make_fixtures.py. All in float32, on sequences of 12 (or, in those called
long, 60) and 7 tokens.

The bound is 1e-4. At thousands of positions it would have to be 1e-3: transformers' angles are float32 there, and ours,
which agree with float64, part from them by as much.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.transformer import build
from transformer_jax.pretrained import huggingface
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.huggingface import load_folder, save_folder
from transformer_jax.pretrained.safetensors import open_file, open_folder

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
ENCODERS = [name for name in NAMES if "bert" in name]
QUICK = ("bert", "gemma3", "qwen3-moe")


def marked(names):
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


every_model = pytest.mark.parametrize("name", marked(NAMES))


@functools.cache
def load(name):
    return load_folder(FIXTURES / name)


def expected(name):
    """For each sequence its ids, their types (None in a model without any) and the logits."""
    arrays = np.load(FIXTURES / name / "expected.npz")
    return [(arrays[f"ids{row}"], arrays.get(f"types{row}"), arrays[f"logits{row}"]) for row in (0, 1)]


@functools.cache
def compiled(name):
    """The trunk, followed by the output layer where the published model has one."""
    loaded = load(name)
    model = build(loaded.config)

    def run(tokens, positions, **options):
        hidden, cache, _ = model.trunk(loaded.params, tokens, positions, **options)
        return hidden if name.endswith("bare") else model.unembed(loaded.params, hidden), cache

    return jax.jit(run)


def test_there_is_a_model_of_every_family():
    configs = [json.loads((FIXTURES / name / "config.json").read_text()) for name in NAMES]
    assert {config["model_type"] for config in configs} == {family.model_type for family in FAMILIES}


@every_model
def test_logits_are_those_of_transformers_packed_and_padded(name):
    (first, first_types, first_logits), (second, second_types, second_logits) = expected(name)
    end = 1 + len(first)
    tokens = jnp.asarray([[0, *first, *second]])
    positions = jnp.asarray([[-1, *range(len(first)), *range(len(second))]])
    options = {"segment_ids": jnp.asarray([[0, *[1] * len(first), *[2] * len(second)]])}
    if first_types is not None:
        options["token_types"] = jnp.asarray([[0, *first_types, *second_types]])
    logits = compiled(name)(tokens, positions, **options)[0][0]
    np.testing.assert_allclose(logits[1:end], first_logits, atol=1e-4)
    np.testing.assert_allclose(logits[end:], second_logits, atol=1e-4)


# Beyond the first context a dynamic base rotates keys that are in a cache otherwise than a whole sequence does.
@pytest.mark.parametrize("name", marked(name for name in NAMES if name not in ENCODERS and "dynamic" not in name))
def test_logits_are_those_of_transformers_in_chunks_and_token_by_token(name):
    """Two chunks of 5, the shorter row's second one padded, then single tokens."""
    rows = [(ids, logits) for ids, _, logits in expected(name)]
    longest = len(rows[0][0])
    cache = build(load(name).config).init_cache(2, longest + 4)
    found = []
    for start, width in ((0, 5), (5, 5), *((start, 1) for start in range(10, longest))):
        tokens, positions = np.zeros((2, width), int), np.full((2, width), -1)
        for row, (ids, _) in enumerate(rows):
            piece = ids[start : start + width]
            tokens[row, : len(piece)], positions[row, : len(piece)] = piece, start + np.arange(len(piece))
        logits, cache = compiled(name)(jnp.asarray(tokens), jnp.asarray(positions), cache=cache)
        found.append(logits)
    found = np.concatenate(found, axis=1)
    for row, (ids, logits) in enumerate(rows):
        np.testing.assert_allclose(found[row, : len(ids)], logits, atol=1e-4)


@every_model
def test_exported_and_imported_is_the_identity(name, tmp_path):
    """Also of the file: the same tensors with the same numbers, but for RoBERTa's rows that no position reads."""
    loaded = load(name)
    save_folder(tmp_path / "out", loaded.config, loaded.params, prefer=loaded.family)
    again = load_folder(tmp_path / "out")
    assert (again.config, again.family) == (loaded.config, loaded.family)
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    theirs, ours = open_folder(FIXTURES / name), open_folder(tmp_path / "out")
    assert set(theirs) == set(ours)
    for tensor in theirs:
        skipped = 2 if "roberta" in name and "position" in tensor else 0
        np.testing.assert_array_equal(ours[tensor].read()[skipped:], theirs[tensor].read()[skipped:])


def test_several_files_and_their_index_are_the_whole_model(tmp_path, monkeypatch):
    loaded, limit = load("llama"), 4000
    monkeypatch.setattr(huggingface, "SHARD_BYTES", limit)
    save_folder(tmp_path / "out", loaded.config, loaded.params, prefer=loaded.family)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    whole = open_folder(FIXTURES / "llama")
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"] == {"total_size": sum(tensor.read().nbytes for tensor in whole.values())}
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert len(files) > 3
    for file in files:
        held = {name: tensor.read().nbytes for name, tensor in open_file(file).items()}
        assert {name for name, place in index["weight_map"].items() if place == file.name} == set(held)
        assert sum(held.values()) <= limit
    again = load_folder(tmp_path / "out")
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
