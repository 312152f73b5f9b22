"""Tiny models of every family, as transformers saves them, against the logits that transformers computes.

fixtures/ is made by make_fixtures.py. All in float32, on sequences of 12 and 7 tokens.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.transformer import build
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.huggingface import load_folder, save_folder
from transformer_jax.pretrained.safetensors import open_folder

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
    arrays = np.load(FIXTURES / name / "expected.npz")
    return [(arrays[f"ids{row}"], arrays[f"logits{row}"]) for row in (0, 1)]


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
    assert {load(name).family for name in NAMES} == {family.model_type for family in FAMILIES}


@every_model
def test_logits_are_those_of_transformers_packed_and_padded(name):
    (first, first_logits), (second, second_logits) = expected(name)
    tokens = jnp.asarray([[0, *first, *second]])
    positions = jnp.asarray([[-1, *range(12), *range(7)]])
    segments = jnp.asarray([[0, *[1] * 12, *[2] * 7]])
    logits = compiled(name)(tokens, positions, segment_ids=segments)[0][0]
    np.testing.assert_allclose(logits[1:13], first_logits, atol=1e-4)
    np.testing.assert_allclose(logits[13:], second_logits, atol=1e-4)


# Beyond the first context a dynamic base rotates keys that are in a cache otherwise than a whole sequence does.
@pytest.mark.parametrize("name", marked(name for name in NAMES if name not in (*ENCODERS, "llama-dynamic")))
def test_logits_are_those_of_transformers_in_chunks_and_token_by_token(name):
    """Rows of 12 and 7 tokens: two chunks of 5, the shorter row's second one padded, then single tokens."""
    rows = expected(name)
    cache = build(load(name).config).init_cache(2, 16)
    found = []
    for start, width in ((0, 5), (5, 5), (10, 1), (11, 1)):
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
