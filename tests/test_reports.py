"""Faults that users of other implementations have reported in public, each as a test or impossible by construction.

- Masks added as large numbers overflow, or leave NaN in rows that see nothing: masks are booleans, combined and
  applied once (`masks.may_attend`); `test_rows_that_see_nothing_have_finite_gradients`.
- A row of padding alone spreads NaN: the same; `model/test_fast_paths.py::test_attention`.
- A causal mask aligned with the wrong end of a cache: masks compare positions, not slots;
  `model/test_transformer.py::test_cached_in_any_chunks_is_as_whole`.
- One attention backend drops the mask: both forms take the same booleans; `model/test_fast_paths.py::test_attention`.
- One cache position for a whole batch: every row has its own; `decoding/test_generate.py::TestCompany`.
- Learned positions of the padded index: positions are given, padding is -1;
  `model/test_transformer.py::test_padding_is_neither_seen_nor_does_it_see`.
- Decoding from the padding of right-padded rows:
  `model/test_transformer.py::test_rows_of_different_lengths_share_a_cache`.
- Positions in 16 bits: angles are integers, then float32; `model/test_positions.py::test_angles_are_exact...`.
- Llama 3's scaling read but not used, or under another key: `test_rope_settings_in_every_schema_are_the_same`,
  `model/test_positions.py::test_llama3_scaling...`.
- YaRN's attention factor dropped, or applied twice: `model/test_positions.py::test_yarn_attention_factor...`.
- A context that is already scaled is scaled again: `test_a_scaled_context_is_not_scaled_again`.
- Partial rotation ignored, or over the wrong width: `model/test_positions.py::test_what_is_not_rotated...`, fixtures
  phi3 and gpt-neox.
- Tied heads not tied, untied heads tied: `pretrained/test_untrusted.py::test_a_tied_head...` and
  `...not_those_of_the_config...`.
- Gemma: GELU's form, 1 + w in float32, the scale of embeddings rounded: fixtures gemma, gemma2, gemma3;
  `test_the_scale_of_embeddings_is_rounded_to_the_compute_dtype`.
- A norm's sums in bfloat16: `model/test_fast_paths.py::test_norms_are_computed_in_float32`.
- The soft cap dropped on the cached path, or after the mask: one path; config gemma of `model/test_transformer.py`,
  `pretrained/test_untrusted.py::test_softcaps...`.
- A window of W keys that shows W + 1: `test_a_window_shows_its_width_itself_included`.
- Key heads tiled instead of repeated: `test_query_heads_read_the_key_heads_in_order`.
- The width of a head derived although it is given: fixture llama-tied-biases.
- Ids outside the vocabulary clamped: `text/test_pipeline.py`, `decoding/test_generate.py`,
  `test_a_prefill_past_the_end_is_refused`.
- Writing past the end of the cache: the same.
- GGUF's order of rotary pairs: `test_gguf_files_of_llama_and_of_qwen_hold_the_same_model`;
  `pretrained/test_real_weights.py`.
- Headers, sizes and offsets of untrusted files believed; missing and foreign tensors: `pretrained/test_untrusted.py`.
- Bfloat16 read by way of float32, or not at all: `test_stored_precisions_come_back_bit_for_bit`.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.architecture import DType, ModelConfig
from transformer_jax.decoding.prefill import prefill
from transformer_jax.model.attention import attend, attend_transposed
from transformer_jax.model.masks import MaskSpec, may_attend
from transformer_jax.model.transformer import Transformer, build
from transformer_jax.pretrained.convert import convert
from transformer_jax.pretrained.families import family_of, read_config
from transformer_jax.pretrained.gguf import load_gguf
from transformer_jax.pretrained.huggingface import load_folder
from transformer_jax.text.tokenizer import byte_tokenizer

LLAMA = Path(__file__).parent / "pretrained" / "fixtures" / "llama"
SMALL = ModelConfig(vocab_size=300, max_seq_len=32, num_layers=2, d_model=32, d_ff=32, num_heads=4, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_rows_that_see_nothing_have_finite_gradients(dtype):
    """Padding on the left, on the right, and a row of nothing else; every other number is as without that row."""
    model = build(dataclasses.replace(SMALL, dtype=dtype))
    params = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 20), 0, 300)
    positions = jnp.asarray([[-1] * 4 + [*range(16)], [*range(16)] + [-1] * 4, [-1] * 20])

    @jax.jit
    def both(params, tokens, positions):
        def loss(params):
            hidden = model.trunk(params, tokens, positions).hidden
            return jnp.where((positions >= 0)[..., None], hidden, 0).astype(jnp.float32).sum()

        return jax.value_and_grad(loss)(params)

    value, slopes = both(params, tokens, positions)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((value, slopes)))
    hidden = jax.jit(lambda rows: model.trunk(params, tokens[rows], positions[rows]).hidden)
    with_it, without = hidden(jnp.asarray([0, 1, 2])), hidden(jnp.asarray([0, 1, 0]))
    np.testing.assert_array_equal(with_it[:2], without[:2])
    assert bool(jnp.isfinite(with_it).all())


def llama3(**rope):
    tree = json.loads((LLAMA / "config.json").read_text()) | {"max_position_embeddings": 64, "rope_parameters": None}
    return read_config(family_of(tree, "config.json", ()), tree | rope, "config.json")


def test_rope_settings_in_every_schema_are_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    newest = llama3(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert newest.rope_scaling.kind == "llama3"
    assert newest.rope_theta == 5e5
    for key in ("rope_type", "type"):
        assert llama3(rope_theta=5e5, rope_scaling={key: "llama3", **scaling}) == newest
    assert llama3(rope_theta=5e5).rope_scaling.kind == "none"


def test_a_scaled_context_is_not_scaled_again():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    assert llama3(rope_parameters=yarn).max_seq_len == 64
    without_factor = {name: value for name, value in yarn.items() if name != "factor"}
    assert llama3(rope_parameters=without_factor).rope_scaling.factor == 4


def test_the_scale_of_embeddings_is_rounded_to_the_compute_dtype():
    scales: dict[DType, float] = {"bfloat16": 55.5, "float32": float(np.float32(3072**0.5))}
    for dtype, scale in scales.items():
        c = ModelConfig(vocab_size=2, d_model=3072, d_ff=8, num_heads=1, scale_embeddings=True, dtype=dtype)
        tokens, table = jnp.asarray([[1]]), {"embed": jnp.ones((2, 3072))}
        embedded = Transformer(c).apply({"params": table}, tokens, 0 * tokens, None, None, method="embed")
        assert (np.asarray(embedded, np.float32) == scale).all()


def test_a_window_shows_its_width_itself_included():
    positions = jnp.arange(12)[None]
    may = may_attend(MaskSpec(causal=True, window=4), positions, positions)[0]
    assert may.sum(axis=1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    assert may[9, 6]
    assert not may[9, 5]
    tree = json.loads((LLAMA.parent / "mistral" / "config.json").read_text())
    for window in (None, 0):
        c = read_config(family_of(tree, "c", ()), tree | {"sliding_window": window}, "c")
        assert (c.window, set(c.kinds)) == (None, {"global"})


def test_query_heads_read_the_key_heads_in_order():
    """Two key heads whose values are 0 and 1, read by four query heads: 0, 0, 1, 1, in both forms."""
    q, k = jnp.ones((1, 16, 4, 2)), jnp.ones((1, 2, 16, 2))
    v = jnp.stack([jnp.zeros((1, 16, 2)), jnp.ones((1, 16, 2))], axis=1)
    may = jnp.ones((1, 16, 16), bool)
    for y in (attend(q[:, :1], k, v, may[:, :1], 1.0), attend_transposed(q, k, v, may, 1.0, 1)):
        np.testing.assert_allclose(y[0, 0, :, 0], [0, 0, 1, 1], atol=1e-6)


def test_a_prefill_past_the_end_is_refused():
    model = build(SMALL)
    params = model.init(jax.random.key(0))
    tokens, positions = np.ones((1, 8), np.int32), np.arange(8)[None]
    with pytest.raises(ValueError, match="position 7; the cache and the model hold 0 to 3"):
        prefill(model, params, model.init_cache(1, 4), tokens, positions)
    with pytest.raises(ValueError, match="position 33; the cache and the model hold 0 to 31"):
        prefill(model, params, model.init_cache(1, 64), tokens, positions + 26)
    for bad in (300, -1):
        with pytest.raises(ValueError, match="an id outside the vocabulary"):
            prefill(model, params, model.init_cache(1, 16), tokens * bad, positions)


def test_gguf_files_of_llama_and_of_qwen_hold_the_same_model(tmp_path):
    """The same weights under both names: only llama's rows stand in the order of rotary pairs."""
    c = dataclasses.replace(SMALL, num_kv_heads=2)
    with_bias = dataclasses.replace(c, attention_bias="qkv")
    params = build(with_bias).init(jax.random.key(0))
    plain = jax.tree.map(lambda x: x, params)
    for layer in range(2):
        for name in "qkv":
            del plain[f"layers_{layer}"]["attn"][name]["bias"]
    convert(tmp_path / "llama.gguf", c, plain, byte_tokenizer(), "float32")
    convert(tmp_path / "qwen2.gguf", with_bias, params, byte_tokenizer(), "float32")
    llama, qwen = load_gguf(tmp_path / "llama.gguf"), load_gguf(tmp_path / "qwen2.gguf")
    assert (llama.family, qwen.family) == ("llama", "qwen2")
    jax.tree.map(np.testing.assert_array_equal, llama.params, plain)
    jax.tree.map(np.testing.assert_array_equal, qwen.params, params)
    raw = [load_raw(tmp_path / name)["blk.0.attn_q.weight"] for name in ("llama.gguf", "qwen2.gguf")]
    assert not np.array_equal(raw[0], raw[1])
    assert llama.tokenizer is not None
    assert llama.tokenizer.begin("é") == byte_tokenizer().begin("é")


def load_raw(path):
    from transformer_jax.pretrained.gguf_file import open_gguf

    return {name: tensor.read() for name, tensor in open_gguf(path).tensors.items()}


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_stored_precisions_come_back_bit_for_bit(tmp_path, stored):
    loaded = load_folder(LLAMA)
    convert(tmp_path / "half", loaded.config, loaded.params, byte_tokenizer(), stored)
    rounded = jax.tree.map(lambda x: x.astype(stored), loaded.params)
    computed: tuple[DType, ...] = ("float32", "bfloat16")
    for dtype in computed:
        again = load_folder(tmp_path / "half", dtype)
        for ours, theirs in zip(jax.tree.leaves(again.params), jax.tree.leaves(rounded), strict=True):
            assert ours.dtype == (dtype if ours.ndim >= 2 else jnp.float32)
            np.testing.assert_array_equal(ours, theirs.astype(ours.dtype))
    assert load_folder(tmp_path / "half").config.dtype == ("bfloat16" if stored == "bfloat16" else "float32")
