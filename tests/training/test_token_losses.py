"""Losses token by token, whole and by parts of the vocabulary, against float64 and against each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.models import bigram
from transformer_jax.architecture import ModelConfig
from transformer_jax.model.transformer import build
from transformer_jax.training.token_losses import losses_of_logits, token_losses

C = ModelConfig(
    vocab_size=53, max_seq_len=16, num_layers=1, d_model=16, d_ff=24, num_heads=2, dtype="float32", vocab_multiple=8
)
CONFIGS = {
    "tied": C,
    "untied": dataclasses.replace(C, tie_embeddings=False),
    "soft cap": dataclasses.replace(C, logit_softcap=2.0),
    "bert": dataclasses.replace(
        C, attention="bidirectional", output_transform=True, output_bias=True, norm="layernorm", positions="learned"
    ),
    "bfloat16": dataclasses.replace(C, dtype="bfloat16"),
}
RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.normal(size=(3, 5, 16)), jnp.float32)
TARGETS = jnp.asarray(RNG.integers(0, 53, (3, 5)), jnp.int32).at[0, 0].set(52)
WANTED = [jnp.asarray(RNG.normal(size=(3, 5)), jnp.float32) for _ in range(3)]


def value_and_gradients(c: ModelConfig, most_logits: int):
    model = build(c)
    params = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), model.init(jax.random.key(0))
    )

    @jax.jit
    def run(params, hidden):
        losses = token_losses(model, params, hidden, TARGETS, most_logits)
        return sum(jnp.sum(by * loss) for by, loss in zip(WANTED, losses, strict=True)), losses

    (_, losses), gradients = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(params, HIDDEN.astype(c.dtype))
    return losses, gradients, np.asarray(model.unembed(params, HIDDEN.astype(c.dtype)), np.float64)


def assert_close(found, wanted, tolerance: float):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance / 10), found, wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_any_size_are_as_the_whole(name):
    """Sizes that divide the vocabulary and sizes that do not, down to one id."""
    c = CONFIGS[name]
    whole, whole_gradients, logits = value_and_gradients(c, 10**9)
    log_normalizer = np.log(np.exp(logits).sum(-1))
    target = np.take_along_axis(logits, np.asarray(TARGETS)[..., None], -1)[..., 0]
    expected = (log_normalizer - target, log_normalizer, log_normalizer - logits.mean(-1))
    for found, wanted in zip(whole, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    for size in (1, 7, 27, 52):
        losses, gradients, _ = value_and_gradients(c, 15 * size)
        for found, wanted in zip(losses, expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-5)
        # In bfloat16 the gradient of the hidden states is rounded once in either form, of sums in another order.
        assert_close(gradients, whole_gradients, 0.02 if c.dtype == "bfloat16" else 1e-4)


def test_extreme_logits_stay_finite():
    logits = jnp.asarray([[1e4, -1e4, 0.0], [-3e38, 0.0, 3e38]])
    losses = losses_of_logits(logits, jnp.asarray([1, 2]))
    assert losses.nll.tolist() == [2e4, 0]


def test_a_model_without_an_output_layer_is_taken_whole():
    model = bigram(7, 8)
    params = model.init(jax.random.key(0))
    targets = jnp.asarray([[1, 2, 3]])
    logits = model.unembed(params, params[targets])
    found = token_losses(model, params, params[targets], targets, most_logits=1)
    for x, y in zip(found, losses_of_logits(logits, targets), strict=True):
        np.testing.assert_array_equal(x, y)


def bytes_of_temporaries(vocab_size: int, most_logits: int) -> int:
    c = dataclasses.replace(C, vocab_size=vocab_size)
    model = build(c)
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def loss(params, hidden, targets):
        return token_losses(model, params, hidden, targets, most_logits).nll.sum()

    rows = jax.ShapeDtypeStruct((8, 64), jnp.int32), jax.ShapeDtypeStruct((8, 64, 16), jnp.float32)
    compiled = jax.jit(jax.grad(loss, argnums=1)).lower(shapes, rows[1], rows[0]).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def test_memory_is_flat_in_the_vocabulary():
    """By the compiler's own figures, of 512 tokens: eight times the vocabulary, and no more bytes than its table's."""
    small, large = (bytes_of_temporaries(V, 2**18) for V in (4096, 32768))
    whole = bytes_of_temporaries(32768, 2**40)
    assert whole > 512 * 32768 * 4
    table = 4 * 16 * 32768
    assert large - small <= 2 * table
    assert large < whole / 8
