"""Weights that people use, against what transformers computes with them in float32.

They come in packages that `./check` installs; without them these tests are skipped. real/ is made by make_fixtures.py.
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
    "In 2018, 12345 people": [788, 216, 34, 32, 33, 40, 28, 216, 33, 34, 35, 36, 37, 701],
    "x =  2": [104, 446, 256, 34],
    "a  10b": [81, 256, 33, 32, 82],
    "  two spaces": [216, 827, 5600],
    "tab\t5 \n\n  7": [15999, 197, 37, 38028, 256, 39],
    "don't I'll": [12420, 982, 339, 3060],
    "é 你好 🙂 ½ ٣٤": [2756, 216, 18645, 250, 48392, 138, 47526, 216, 16738, 216, 164, 113, 164, 114],
}
"""What llama.cpp makes of texts that are easily split wrongly."""


@functools.cache
def opened(name):
    try:
        PACKAGES[name]()
    except UserError as error:
        pytest.skip(str(error))
    return open_model(name, "float32")


def test_smollm2_tokenizes_as_llama_cpp_does():
    tokenizer = opened("smollm2").tokenizer
    assert {text: tokenizer.encode(text) for text in TOKENIZED} == TOKENIZED


def test_every_hidden_state_of_smollm2_and_its_logits():
    found = opened("smollm2")
    c, expected = found.config, np.load(REAL / "smollm2.npz")
    tokens = jnp.asarray(expected["ids0"])[None]
    positions = jnp.arange(tokens.shape[1])[None]
    may = may_attend(MaskSpec(causal=True), positions, positions)
    context = Context({"global": may}, {"global": rotation(c, positions, positions)}, positions, True)
    block = jax.jit(lambda params, x: Block(c, "global").apply({"params": params}, x, context, None, None)[0])
    x = found.params["embed"][tokens]
    for layer in range(c.L):
        # One entry of the first token grows to 22,552, where float32 numbers lie 0.002 apart, and shrinks again.
        np.testing.assert_allclose(x[0], expected["hidden"][layer], rtol=1e-5, atol=1e-3, err_msg=f"layer {layer}")
        x = block(found.params[f"layers_{layer}"], x)
    hidden = found.model.trunk(found.params, tokens, positions).hidden
    np.testing.assert_allclose(hidden[0], expected["hidden"][-1], atol=1e-3)
    logits = found.model.unembed(found.params, hidden)
    np.testing.assert_allclose(logits[0, -1], expected["logits"], atol=1e-3)


def test_smollm2_writes_the_same_tokens():
    found, expected = opened("smollm2"), np.load(REAL / "smollm2.npz")
    prompts = [expected[f"ids{number}"].tolist() for number in range(4)]
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
