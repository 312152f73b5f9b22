import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.models import make_model
from transformer_jax.decoding.embedding import embed, embed_file
from transformer_jax.errors import UserError
from transformer_jax.text.tokenizer import byte_tokenizer

ENCODER = {"attention": "bidirectional", "pooler": True, "vocab_size": 257}
TEXTS = [[1, 2, 3], [4] * 20, [5, 6, 7, 8, 9], [10]]


@pytest.fixture(scope="module")
def encoder():
    return make_model(**ENCODER)


@pytest.mark.parametrize("pooling", ["mean", "first", "pooler"])
def test_a_vector_is_what_numpy_makes_of_the_hidden_states(encoder, pooling):
    model, params = encoder
    found = embed(model, params, TEXTS, pooling=pooling, batch_size=3)
    trunk = jax.jit(model.trunk)
    for text, vector in zip(TEXTS, found, strict=True):
        tokens = jnp.asarray([text])
        hidden = np.asarray(trunk(params, tokens, jnp.arange(len(text))[None]).hidden[0], np.float64)
        expected = hidden.mean(0) if pooling == "mean" else hidden[0]
        if pooling == "pooler":
            layer = params["pooler"]
            expected = np.tanh(expected @ np.asarray(layer["weight"], np.float64) + np.asarray(layer["bias"]))
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)


def test_what_cannot_be_embedded_is_refused(encoder):
    model, params = encoder
    with pytest.raises(UserError, match="text 1 has 65 tokens; expected 1 to 64"):
        embed(model, params, [[1], [2] * 65])
    with pytest.raises(UserError, match="text 0 has an id outside the vocabulary"):
        embed(model, params, [[257]])
    with pytest.raises(UserError, match="the model has no pooler"):
        embed(*make_model(), [[1]], pooling="pooler")
    assert embed(model, params, []).shape[0] == 0


def test_a_file_of_texts_becomes_a_file_of_vectors(encoder, tmp_path):
    model, params = encoder
    source, target = tmp_path / "texts.jsonl", tmp_path / "vectors.jsonl"
    source.write_text('{"text": "abc", "id": "a"}\n\n{"text": "x"}\n')
    assert embed_file(model, params, byte_tokenizer(), source, target) == 2
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["a", 3]
    expected = embed(model, params, [[256, *b"abc"], [256, *b"x"]])
    np.testing.assert_allclose([line["embedding"] for line in lines], expected, atol=1e-6)
    source.write_text('{"text": "abc"}\n{"text": 3}\n')
    with pytest.raises(UserError, match=r"texts.jsonl, line 2: expected an object with a text"):
        embed_file(model, params, byte_tokenizer(), source, target)
    source.write_text(json.dumps({"text": "a" * 64}))
    with pytest.raises(UserError, match=r"line 1: the text has 65 tokens"):
        embed_file(model, params, byte_tokenizer(), source, target)
    source.write_text('{"text": "abc"}')
    with pytest.raises(UserError, match="cannot write"):
        embed_file(model, params, byte_tokenizer(), source, tmp_path / "none" / "vectors.jsonl")
    assert [path.name for path in tmp_path.iterdir()].count("vectors.jsonl") == 1
    assert len(list(tmp_path.iterdir())) == 2
