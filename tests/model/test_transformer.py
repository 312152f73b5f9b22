"""The laws of the model: each must hold for every kind of attention, position, norm and feed-forward layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model import reference
from transformer_jax.architecture import ModelConfig, RopeScaling
from transformer_jax.errors import UserError
from transformer_jax.model.block import Block, Context
from transformer_jax.model.cost import cache_bytes, num_params
from transformer_jax.model.masks import MaskSpec, may_attend
from transformer_jax.model.transformer import build, cast_matrices, param_shapes
from transformer_jax.presets import preset

LLAMA = ModelConfig(
    vocab_size=61, max_seq_len=32, num_layers=2, d_model=32, d_ff=48, num_heads=4, num_kv_heads=2, dtype="float32"
)
GPT = dataclasses.replace(
    LLAMA,
    num_kv_heads=4,
    head_dim=6,
    positions="learned",
    norm="layernorm",
    mlp="plain",
    activation="gelu_tanh",
    attention_bias="all",
    mlp_bias=True,
    norm_bias=True,
)
CONFIGS = {
    "llama": LLAMA,
    "gpt": GPT,
    "mqa": dataclasses.replace(LLAMA, num_kv_heads=1, tie_embeddings=False, activation="relu"),
    "wide heads": dataclasses.replace(LLAMA, head_dim=16, norm="layernorm", activation="gelu"),
    "encoder": dataclasses.replace(
        LLAMA, attention="bidirectional", attention_bias="all", mlp_bias=True, rope_theta=500.0
    ),
    "gemma": dataclasses.replace(
        LLAMA,
        num_layers=3,
        layer_pattern=("local", "global"),
        window=3,
        residual="pre_and_post",
        norm="rmsnorm_plus_one",
        qk_norm="head",
        query_scale=0.4,
        attention_softcap=2.0,
        logit_softcap=3.0,
        scale_embeddings=True,
        local_rope_theta=100.0,
        vocab_multiple=8,
    ),
    "neox": dataclasses.replace(
        GPT, positions="rope", head_dim=8, rope_fraction=0.5, residual="parallel", tie_embeddings=False
    ),
    "bert": dataclasses.replace(
        GPT,
        attention="bidirectional",
        residual="post",
        num_token_types=2,
        embedding_norm=True,
        output_transform=True,
        output_bias=True,
    ),
    "experts": dataclasses.replace(
        LLAMA,
        num_experts=4,
        experts_per_token=2,
        renormalize_experts=False,
        residual="branch",
        qk_norm="projection",
        rope_interleaved=True,
        rope_scaling=RopeScaling("yarn", factor=4.0, original_max_len=8, beta_fast=2.0),
        attention_bias="qkv",
    ),
    "original": dataclasses.replace(LLAMA, positions="sinusoidal", residual="post", norm="layernorm"),
}
QUICK = ("llama", "gpt", "gemma")


def marked(names):
    return [pytest.param(CONFIGS[n], id=n, marks=[] if n in QUICK else pytest.mark.slow) for n in names]


every_config = pytest.mark.parametrize("c", marked(CONFIGS))
every_decoder = pytest.mark.parametrize("c", marked(n for n, c in CONFIGS.items() if c.attention == "causal"))


@functools.cache
def params_of(c):
    """Parameters in which nothing is zero or one, so that nothing can be left out unseen."""
    leaves, tree = jax.tree.flatten(build(c).init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


@functools.cache
def run(c):
    """The compiled trunk, followed by the output layer."""
    model = build(c)

    def logits_and_cache(params, tokens, positions, **options):
        hidden, cache, _ = model.trunk(params, tokens, positions, **options)
        return model.unembed(params, hidden), cache

    return jax.jit(logits_and_cache)


def logits_of(c, tokens, positions=None, **options):
    tokens = jnp.asarray(tokens)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(run(c)(params_of(c), tokens, jnp.asarray(positions), **options)[0])


def random_tokens(*shape):
    return np.random.default_rng(0).integers(0, 61, shape)


@every_config
def test_agrees_with_numpy_in_float64(c):
    tokens = random_tokens(2, 9)
    expected = [reference.forward(c, params_of(c), row) for row in tokens.tolist()]
    np.testing.assert_allclose(logits_of(c, tokens), expected, atol=2e-5)


@every_decoder
def test_causal_no_output_moves_when_a_later_token_changes(c):
    tokens = random_tokens(1, 10)
    changed = tokens.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % 61
    before, after = logits_of(c, tokens), logits_of(c, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(axis=-1).all()


@every_decoder
def test_causal_no_gradient_comes_from_a_later_token(c):
    params, places = params_of(c), jnp.arange(8)[None]

    @jax.jit
    def slope(t):
        # Token i stands at place i, so that row i of the embedding's gradient is the gradient from place i.
        def output(table):
            return build(c).trunk({**params, "embed": table}, places, places)[0][0, t].sum()

        return jax.grad(output)(params["embed"])[:8]

    for t in (0, 3, 7):
        assert (slope(t)[t + 1 :] == 0).all()
        assert (slope(t)[: t + 1] != 0).any(axis=-1).all()


def test_bidirectional_every_output_moves_when_any_token_changes():
    c = CONFIGS["encoder"]
    tokens = random_tokens(1, 8)
    for place in (0, 4, 7):
        changed = tokens.copy()
        changed[0, place] = (changed[0, place] + 1) % 61
        assert (logits_of(c, tokens) != logits_of(c, changed)).any(axis=-1).all()


@every_config
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_is_neither_seen_nor_does_it_see(c, side):
    tokens = random_tokens(1, 6)
    before = {"left": 4, "right": 0, "both": 2}[side]
    padded, positions = np.full((1, 10), 7), np.full((1, 10), -1)
    padded[:, before : before + 6], positions[:, before : before + 6] = tokens, np.arange(6)
    real = slice(before, before + 6)
    alone, among = logits_of(c, tokens), logits_of(c, padded, positions)
    np.testing.assert_allclose(among[:, real], alone, atol=1e-5)
    padded[positions < 0] = 8
    np.testing.assert_array_equal(logits_of(c, padded, positions)[:, real], among[:, real])
    assert np.isfinite(logits_of(c, padded, np.full((1, 10), -1))).all()


@every_config
def test_packed_documents_are_as_they_are_alone(c):
    tokens = random_tokens(1, 11)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, -1]])
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 0]])
    packed = logits_of(c, tokens, positions, segment_ids=jnp.asarray(segments))
    for part in (slice(0, 4), slice(4, 9), slice(9, 10)):
        np.testing.assert_allclose(packed[:, part], logits_of(c, tokens[:, part]), atol=1e-5)
    tokens[:, :4] = 5
    changed = logits_of(c, tokens, positions, segment_ids=jnp.asarray(segments))
    np.testing.assert_array_equal(packed[:, 4:10], changed[:, 4:10])


@every_config
def test_the_promise_of_order_changes_no_number(c):
    """48 tokens are enough for several blocks of queries; the last document is followed by padding."""
    tokens = jnp.asarray(random_tokens(2, 48))
    positions = jnp.asarray([[*range(30), *range(14), *[-1] * 4], [*range(48)]])
    segments = jnp.asarray([[1] * 30 + [2] * 14 + [0] * 4, [1] * 48])
    model = build(c)

    @functools.partial(jax.jit, static_argnums=0)
    def hidden(in_order):
        return model.trunk(params_of(c), tokens, positions, segment_ids=segments, in_order=in_order)[0]

    np.testing.assert_allclose(hidden(True), hidden(False), atol=2e-5)


def test_a_prefix_is_seen_whole_and_what_follows_it_is_causal():
    """Every output moves with a token of the prefix, and none before it moves with a later one."""
    tokens = random_tokens(1, 9)
    prefix = jnp.full((1, 9), 4)
    before = logits_of(LLAMA, tokens, prefix_lengths=prefix)
    assert not np.allclose(before[:, :3], logits_of(LLAMA, tokens)[:, :3], atol=1e-3)
    for place, moved_from in ((3, 0), (6, 6)):
        changed = tokens.copy()
        changed[0, place] = (changed[0, place] + 1) % 61
        moved = (logits_of(LLAMA, changed, prefix_lengths=prefix) != before).any(axis=-1)[0]
        assert moved.tolist() == [t >= moved_from for t in range(9)]


@every_decoder
@pytest.mark.parametrize("chunks", [[1] * 12, [12], [5, 1, 3, 3], [7, 5]])
def test_cached_in_any_chunks_is_as_whole(c, chunks):
    tokens = random_tokens(2, 12)
    cache, start, pieces = build(c).init_cache(2, 16), 0, []
    for width in chunks:
        columns = slice(start, start + width)
        positions = jnp.broadcast_to(jnp.arange(12)[columns], (2, width))
        logits, cache = run(c)(params_of(c), jnp.asarray(tokens[:, columns]), positions, cache=cache)
        pieces.append(logits)
        start += width
    np.testing.assert_allclose(np.concatenate(pieces, 1), logits_of(c, tokens), atol=1e-5)
    np.testing.assert_array_equal(cache.positions, np.where(np.arange(16) < 12, np.arange(16), -1)[None].repeat(2, 0))


@every_decoder
def test_rows_of_different_lengths_share_a_cache(c):
    """A ragged prefill, padded on either side, then one more token in each row."""
    tokens = random_tokens(2, 9)
    lengths = (8, 3)
    rows, positions = np.zeros((2, 8), int), np.full((2, 8), -1)
    rows[0, :8], positions[0, :8] = tokens[0, :8], np.arange(8)
    rows[1, 5:], positions[1, 5:] = tokens[1, :3], np.arange(3)
    cache = build(c).init_cache(2, 16)
    _, cache = run(c)(params_of(c), jnp.asarray(rows), jnp.asarray(positions), cache=cache)
    newest = jnp.asarray([[tokens[0, 8]], [tokens[1, 3]]])
    logits, _ = run(c)(params_of(c), newest, jnp.asarray(lengths)[:, None], cache=cache)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, 0], logits_of(c, tokens[row : row + 1, : length + 1])[0, -1], atol=1e-5)


def test_a_cache_is_a_value():
    model, params = build(LLAMA), params_of(LLAMA)
    empty = model.init_cache(1, 8)
    model.trunk(params, jnp.ones((1, 3), jnp.int32), jnp.arange(3)[None], cache=empty)
    assert (empty.positions == -1).all()
    assert all((layer == 0).all() for layer in empty.k)
    assert sum(x.nbytes for x in (*empty.k, *empty.v)) == cache_bytes(LLAMA, 1, 8)


def tiled(params, c, heads):
    """The parameters with each key/value head written out for each of the query heads that read it."""

    def spread(weight):
        return jnp.repeat(weight.reshape(*weight.shape[:-1], c.K, c.H), heads // c.K, axis=-2).reshape(
            *weight.shape[:-1], -1
        )

    params = jax.tree.map(lambda x: x, params)
    for layer in range(c.num_layers):
        attention = params[f"layers_{layer}"]["attn"]
        for name in "kv":
            attention[name] = jax.tree.map(spread, attention[name])
    return params


@pytest.mark.parametrize("K", [1, *(pytest.param(K, marks=pytest.mark.slow) for K in (2, 4))])
def test_grouped_heads_are_full_heads_that_share(K):
    """With as many KV heads as query heads grouped-query attention is multi-head attention; with one, multi-query."""
    grouped = dataclasses.replace(LLAMA, num_kv_heads=K)
    full = dataclasses.replace(LLAMA, num_kv_heads=None)
    tokens, positions = jnp.asarray(random_tokens(2, 7)), jnp.broadcast_to(jnp.arange(7), (2, 7))
    params = params_of(grouped)
    expected, *_ = build(full).trunk(tiled(params, grouped, 4), tokens, positions)
    actual, *_ = build(grouped).trunk(params, tokens, positions)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def gradient(c, params, tokens, dropout_key=None):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model = build(c)

    def loss(params):
        hidden, *_ = model.trunk(params, tokens, positions, dropout_key=dropout_key)
        return (model.unembed(params, hidden) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.slow
def test_remat_is_plain_with_dropout_too():
    c = dataclasses.replace(LLAMA, dropout=0.3)
    tokens, key = jnp.asarray(random_tokens(2, 8)), jax.random.key(3)
    plain = gradient(c, params_of(LLAMA), tokens, key)
    remat = gradient(dataclasses.replace(c, remat="block"), params_of(LLAMA), tokens, key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), plain, remat)
    assert plain[0] != gradient(c, params_of(LLAMA), tokens, jax.random.key(4))[0]


def test_remat_keeps_less_for_the_backward_pass():
    tokens = jnp.asarray(random_tokens(1, 8))

    def trace(remat):
        model = build(dataclasses.replace(LLAMA, remat=remat))

        def loss(params):
            return model.trunk(params, tokens, jnp.arange(8)[None]).hidden.sum()

        return str(jax.make_jaxpr(jax.grad(loss))(params_of(LLAMA)))

    assert "remat" in trace("block")
    assert "remat" not in trace("none")


def test_dropout_strikes_each_sub_layer_by_itself():
    """With one sub-layer silenced, an entry of the stream is what it was, or has twice what the other one adds."""
    c = dataclasses.replace(LLAMA, dropout=0.5)
    x, positions = jax.random.normal(jax.random.key(5), (2, 8, 32)), jnp.broadcast_to(jnp.arange(8), (2, 8))
    context = Context({"global": may_attend(MaskSpec(causal=True), positions, positions)}, {}, positions, False)
    params = params_of(LLAMA)["layers_0"]
    masks = {}
    for silent, name in (("attn", "o"), ("mlp", "down")):
        quiet = jax.tree.map(lambda a: a, params)
        quiet[silent][name]["weight"] = 0 * quiet[silent][name]["weight"]

        def block(key, quiet=quiet):
            return Block(c, "global").apply({"params": quiet}, x, context, None, key)[0] - x

        added, struck = block(None), block(jax.random.key(7))
        assert (jnp.isclose(struck, 2 * added, atol=1e-5) | (struck == 0)).all()
        masks[silent] = np.asarray(struck != 0)
        assert 0.35 < masks[silent].mean() < 0.65
    assert (masks["attn"] != masks["mlp"]).mean() > 0.3


def test_dropout_differs_between_keys_layers_and_rows_and_is_off_without_a_key():
    c = dataclasses.replace(LLAMA, dropout=0.5)
    tokens = np.full((2, 6), 3)
    assert not np.array_equal(*logits_of(c, tokens, dropout_key=jax.random.key(1)))
    first, second = (logits_of(c, tokens, dropout_key=jax.random.key(seed)) for seed in (1, 2))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(logits_of(c, tokens), logits_of(LLAMA, tokens))


def test_bfloat16_follows_float32_and_cast_matrices_change_nothing():
    c = dataclasses.replace(LLAMA, dtype="bfloat16")
    tokens = random_tokens(2, 12)
    exact, rounded = logits_of(LLAMA, tokens), logits_of(c, tokens)
    # Some 20 roundings of relative size 2^-9 a layer, adding up like a random walk.
    assert np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()
    cast = cast_matrices(params_of(LLAMA), jnp.bfloat16)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    np.testing.assert_array_equal(run(c)(cast, jnp.asarray(tokens), positions)[0], rounded)
    assert all(x.dtype == jnp.bfloat16 for x in build(c).init_cache(1, 4).k)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_bfloat16_model_are_not_rounded_to_bfloat16(tied):
    """The last hidden states times the output matrix, both in bfloat16, summed by numpy in float64."""
    c = dataclasses.replace(LLAMA, dtype="bfloat16", tie_embeddings=tied)
    model, params = build(c), cast_matrices(params_of(dataclasses.replace(c, dtype="float32")), jnp.bfloat16)
    hidden = model.trunk(params, jnp.asarray(random_tokens(1, 5)), jnp.arange(5)[None]).hidden
    matrix = params["embed"].T if tied else params["output"]["weight"]
    expected = np.asarray(hidden[0], np.float64) @ np.asarray(matrix, np.float64)
    np.testing.assert_allclose(model.unembed(params, hidden)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["small", "gpt2", "llama3_8b", "smollm2_135m"])
def test_closed_form_counts_every_parameter(name):
    c = preset(name).model
    c = c if c.vocab_size else dataclasses.replace(c, vocab_size=257)
    shapes = jax.eval_shape(build(c).init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == num_params(c)


@every_config
def test_every_parameter_has_a_shape_and_named_dimensions(c):
    shapes = jax.eval_shape(build(c).init, jax.random.key(0))
    axes = build(c).logical_axes()
    assert param_shapes(c) == shapes
    assert jax.tree.structure(shapes) == jax.tree.structure(axes)
    jax.tree.map(lambda shape, names: len(names) == len(shape.shape) or pytest.fail(str(names)), shapes, axes)


def test_a_model_needs_a_vocabulary_and_a_cache_needs_one_sequence_a_row():
    with pytest.raises(UserError, match="vocab_size is null"):
        build(ModelConfig())
    model = build(LLAMA)
    tokens = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(UserError, match="attention is 'bidirectional'; continuing a text needs 'causal'"):
        build(CONFIGS["encoder"]).init_cache(1, 4)
    with pytest.raises(ValueError, match="num_token_types is 0"):
        model.trunk(params_of(LLAMA), tokens, tokens, token_types=tokens)
    with pytest.raises(ValueError, match="a bidirectional model sees everything"):
        build(CONFIGS["encoder"]).trunk(params_of(CONFIGS["encoder"]), tokens, tokens, prefix_lengths=tokens)
    with pytest.raises(ValueError, match="one sequence a row"):
        model.trunk(params_of(LLAMA), tokens, tokens, segment_ids=tokens, cache=model.init_cache(1, 4))
