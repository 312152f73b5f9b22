"""Weights that people use, against what transformers computes with them in float32.

They come in packages; without them these tests are skipped. `./check` installs all but Gemma's, whose licence is not an
open one: who accepts it installs them with the command that the skipped test names. real/ is made by make_fixtures.py.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.embedding import embed
from transformer_jax.decoding.generate import generate
from transformer_jax.errors import UserError
from transformer_jax.model.block import Block, Context
from transformer_jax.model.masks import MaskSpec, may_attend
from transformer_jax.model.positions import rotation
from transformer_jax.pretrained.source import PACKAGES
from transformer_jax.training.open_model import open_model

REAL = Path(__file__).parent / "real"
pytestmark = pytest.mark.slow

TOKENIZED = {
    "smollm2": {
        "In 2018, 12345 people": [788, 216, 34, 32, 33, 40, 28, 216, 33, 34, 35, 36, 37, 701],
        "x =  2": [104, 446, 256, 34],
        "a  10b": [81, 256, 33, 32, 82],
        "  two spaces": [216, 827, 5600],
        "tab\t5 \n\n  7": [15999, 197, 37, 38028, 256, 39],
        "don't I'll": [12420, 982, 339, 3060],
        "é 你好 🙂 ½ ٣٤": [2756, 216, 18645, 250, 48392, 138, 47526, 216, 16738, 216, 164, 113, 164, 114],
    },
    "gemma3-270m": {
        "12345 people": [2, 236770, 236778, 236800, 236812, 236810, 1331],
        "x =  2": [2, 236781, 578, 138, 236778],
        "  two spaces": [2, 138, 13498, 9952],
        " a space first": [2, 496, 2557, 1171],
        "ends with a space ": [2, 2068, 607, 496, 2557, 236743],
        "tab\t5 \n\n  7": [2, 4823, 255968, 236810, 236743, 108, 138, 236832],
        "\n\n\nif x:\n        return  y\n": [2, 109, 584, 1123, 236787, 107, 144, 2060, 138, 236762, 107],
        "don't I'll": [2, 13246, 236789, 236745, 564, 236789, 859],
        "é 你好 🙂 ½ ٣٤": [2, 236859, 43758, 237389, 57235, 47041, 223766, 242090],
        "▁under \r\n \u00a0x": [2, 1208, 236743, 251, 107, 236743, 432, 398, 236781],
        "": [2],
    },
}
"""What llama.cpp makes of texts that are easily split wrongly, the token that begins a text included."""

every_decoder = pytest.mark.parametrize("name", list(TOKENIZED))


@functools.cache
def opened(name):
    try:
        PACKAGES[name]()
    except UserError as error:
        pytest.skip(str(error))
    return open_model(name, "float32")


@every_decoder
def test_text_is_split_as_llama_cpp_splits_it(name):
    tokenizer = opened(name).tokenizer
    assert {text: tokenizer.begin(text) for text in TOKENIZED[name]} == TOKENIZED[name]


@every_decoder
def test_every_hidden_state_and_the_logits(name):
    found = opened(name)
    c, expected = found.config, np.load(REAL / f"{name}.npz")
    tokens = jnp.asarray(expected["ids0"])[None]
    positions = jnp.arange(tokens.shape[1])[None]
    may, turned = {}, {}
    for kind in c.kinds:
        spec = MaskSpec(causal=True, window=c.window if kind == "local" else None)
        may[kind] = may_attend(spec, positions, positions)
        turned[kind] = rotation(c, positions, positions, local=kind == "local")
    context = Context(may, turned, positions, True)

    @functools.partial(jax.jit, static_argnames="kind")
    def block(params, x, kind):
        return Block(c, kind).apply({"params": params}, x, context, None, None)[0]

    x = found.params["embed"][tokens] * (c.D**0.5 if c.scale_embeddings else 1)
    largest = np.zeros((tokens.shape[1], 1))
    for layer, kind in enumerate(c.kinds):
        # A residual stream keeps the rounding of the largest number that it has held. Some entries of Gemma's grow to
        # 103,795, where float32 numbers lie 0.008 apart, and of SmolLM2's to 22,552; the last norm makes them small.
        wanted = expected["hidden"][layer]
        largest = np.maximum(largest, abs(wanted).max(axis=-1, keepdims=True))
        error = abs(np.asarray(x[0]) - wanted)
        assert (error <= np.maximum(1e-3, 4e-6 * largest)).all(), f"layer {layer}: off by {error.max()}"
        x = block(found.params[f"layers_{layer}"], x, kind)
    hidden = found.model.trunk(found.params, tokens, positions).hidden
    np.testing.assert_allclose(hidden[0], expected["hidden"][-1], atol=1e-3)
    logits = found.model.unembed(found.params, hidden)[0, -1]
    np.testing.assert_allclose(logits[expected.get("logit_ids", slice(None))], expected["logits"], atol=1e-3)


@every_decoder
def test_the_same_tokens_are_written(name):
    found, expected = opened(name), np.load(REAL / f"{name}.npz")
    prompts = [expected[f"ids{number}"].tolist() for number in range(4 if name == "smollm2" else 3)]
    greedy = DecodingConfig(max_tokens=32, temperature=0.0)
    completions = generate(found.model, found.params, prompts, greedy, stop_ids=found.tokenizer.stop_ids)
    for number, completion in enumerate(completions):
        ids = expected[f"greedy{number}"].tolist()
        stopped = ids[-1] in found.tokenizer.stop_ids
        assert completion.tokens == (ids[:-1] if stopped else ids)
        assert completion.finish_reason == ("stop" if stopped else "length")


def test_minilm_embeds_sentences():
    found, expected = opened("minilm"), np.load(REAL / "minilm.npz")
    sentences = ("The cat sits on the mat.", "A kitten is resting on a rug.", "Stock markets fell sharply today.")
    tokenizer = found.tokenizer
    ids = [[*tokenizer.begin(sentence), *tokenizer.suffix] for sentence in sentences]
    assert ids == [expected[f"ids{number}"].tolist() for number in range(3)]
    vectors = embed(found.model, found.params, ids)
    np.testing.assert_allclose(vectors, [expected[f"vector{number}"] for number in range(3)], atol=1e-5)
    cosines = [vectors[0] @ vectors[1], vectors[0] @ vectors[2], vectors[1] @ vectors[2]]
    np.testing.assert_allclose(cosines, [0.641133, 0.046225, 0.049227], atol=1e-5)
    alone = embed(found.model, found.params, ids[:1], batch_size=1)
    np.testing.assert_allclose(alone[0], vectors[0], atol=1e-6)
    assert embed(found.model, found.params, ids, pooling="pooler").shape == (3, 384)
    with pytest.raises(UserError, match="text 1 has 0 tokens"):
        embed(found.model, found.params, [[1], []])
