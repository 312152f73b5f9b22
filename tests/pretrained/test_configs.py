"""What a config.json means where it says nothing, or says what a family does not know: as transformers 5 has it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.architecture import ModelConfig, RopeScaling
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import build
from transformer_jax.pretrained.config_reader import Settings
from transformer_jax.pretrained.convert import Stored, convert
from transformer_jax.pretrained.families import family_of, read_config, write_config
from transformer_jax.pretrained.gguf import ARCHITECTURES
from transformer_jax.pretrained.huggingface import load_folder
from transformer_jax.text.tokenizer import byte_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
ABSENT: Any = object()


def config(name, **settings):
    tree = json.loads((FIXTURES / name / "config.json").read_text()) | settings
    tree = {setting: value for setting, value in tree.items() if value is not ABSENT}
    tensors = [family_of(tree, "c", ()).rows[0].theirs[0]]
    if name in ("bert", "roberta"):
        tensors.append("lm_head.bias")
    return read_config(family_of(tree, "c", tensors), tree, "c", tensors)


@pytest.mark.parametrize(
    ("name", "absent", "fields"),
    [
        ("mistral", ["sliding_window"], {"window": 4096}),
        ("mixtral", ["rope_parameters", "rms_norm_eps"], {"rope_theta": 1e6, "norm_eps": 1e-5, "window": None}),
        ("phi3", ["rms_norm_eps", "sliding_window"], {"norm_eps": 1e-5, "window": None}),
        ("gemma2", ["attn_logit_softcapping"], {"attention_softcap": 50.0, "logit_softcap": 3.0}),
        ("gemma2", ["final_logit_softcapping", "sliding_window"], {"logit_softcap": 30.0, "window": 4096}),
        ("gemma3", ["rope_parameters"], {"rope_theta": 1e6, "local_rope_theta": 1e4}),
        ("llama", ["rope_parameters", "rms_norm_eps"], {"rope_theta": 1e4, "norm_eps": 1e-6}),
        ("qwen2", ["layer_types"], {"layer_pattern": ("global", "local", "local"), "window": 4}),
    ],
)
def test_what_is_absent_is_the_familys_own(name, absent, fields):
    c = config(name, **dict.fromkeys(absent, ABSENT))
    assert {field: getattr(c, field) for field in fields} == fields


def test_a_quarter_of_each_head_turns_in_gpt_neox():
    assert config("gpt-neox", rope_parameters=ABSENT, hidden_size=32).rope_fraction == 0.25


def test_null_is_not_absent():
    assert config("mistral", sliding_window=None).window is None
    assert config("gemma2", attn_logit_softcapping=None).attention_softcap is None


def test_local_layers_of_gemma_3_have_their_own_base_in_every_schema():
    linear = {"rope_type": "linear", "factor": 8.0}
    for settings in (
        {"rope_parameters": ABSENT, "rope_theta": 900.0, "rope_scaling": linear},
        {"rope_parameters": {"full_attention": {**linear, "rope_theta": 900.0}}},
        {"rope_parameters": {"full_attention": {**linear, "rope_theta": 900.0}, "sliding_attention": {}}},
    ):
        c = config("gemma3", **settings)
        assert (c.rope_theta, c.local_rope_theta, c.rope_scaling.factor) == (900, 10_000, 8)
    assert config("gemma3", layer_types=["full_attention"] * 3).local_rope_theta is None
    own_base = {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "rope_local_base_freq": 77.0}
    assert config("gemma3", **own_base).local_rope_theta == 77


def test_gemma_goes_by_one_name_of_its_activation():
    assert config("gemma", hidden_act="gelu").activation == "gelu_tanh"
    assert config("gemma", hidden_act=ABSENT, hidden_activation="gelu_pytorch_tanh").activation == "gelu_tanh"
    assert config("gemma2", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh").activation == "gelu_tanh"
    assert config("gemma2", hidden_act=ABSENT, hidden_activation="silu").activation == "silu"


def test_a_setting_that_says_false_is_no_less_a_setting():
    assert config("llama", attention_bias=False, is_encoder_decoder=False, is_causal=True) == config("llama")
    for name in ("llama", "gpt2", "gemma3", "gpt-neox", "phi3"):
        with pytest.raises(UserError, match="is_causal is False"):
            config(name, is_causal=False)
    for value in (False, 0, "", [], {}):
        with pytest.raises(UserError, match="a setting that this version does not know"):
            config("llama", uses_something_new=value)


def test_every_layer_of_qwen_3_with_experts_has_the_window():
    c = config("qwen3-moe", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert (set(c.kinds), c.window) == ({"local"}, 4)
    mixed = dataclasses.replace(c, layer_pattern=("local", "global"))
    with pytest.raises(UserError, match="no family of published models computes this one exactly"):
        write_config(mixed)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types is"),
        ("phi3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ("qwen3-moe", {"layer_types": ["full_attention"] * 2}, "layer_types is"),
        ("qwen2", {"use_sliding_window": False}, "use_sliding_window is False"),
        ("gemma3", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping is 2.0; this version can honour null"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act is 'relu'; expected 'gelu'"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act is 'silu'; expected what hidden_activation is"),
        ("gemma2", {"hidden_act": "silu", "hidden_activation": ABSENT}, "hidden_act is 'silu'"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation is 'silu'; expected what hidden_act is"),
        ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "expected full_attention and"),
        ("gemma3", {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 8.0}}, "a rope_type"),
        ("gemma3", {"layer_types": ABSENT, "_sliding_window_pattern": 2}, "_sliding_window_pattern is 2"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}},
            "truncate is False",
        ),
        ("gpt-neox", {"rope_theta": 77.0}, "rope_theta is 77.0"),
        ("gpt-neox", {"rotary_pct": 0.5, "partial_rotary_factor": 1.0}, "partial_rotary_factor is 1.0"),
        ("llama", {"rotary_emb_base": 77.0}, "rotary_emb_base is 77.0, a setting that this version does not know"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "expected a rope_type of 'default'"),
        ("llama", {"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]; expected one of"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; expected a number of more than 0"),
        ("gemma2", {"layer_types": 1.5}, "layer_types is 1.5; expected 2 times one of"),
        ("llama", {"num_hidden_layers": 10**30}, "num_layers is 10+; expected at most 4096"),
        ("mixtral", {"num_hidden_layers": 10**30}, "num_layers is 10+; expected at most 4096"),
        ("gemma3", {"num_hidden_layers": 10**30, "layer_types": ABSENT}, "num_layers is 10+; expected at most 4096"),
        ("qwen2", {"max_window_layers": "x"}, "max_window_layers is 'x'; expected a whole number"),
        (
            "gemma3",
            {"layer_types": ABSENT, "sliding_window_pattern": "6"},
            "sliding_window_pattern is '6'; expected a whole",
        ),
        (
            "gemma2",
            {"query_pre_attn_scalar": 10**400},
            "query_pre_attn_scalar is 10+; expected a number of more than 0",
        ),
        ("phi3", {"num_hidden_layers": "two"}, "num_hidden_layers is 'two'; expected a whole number of more"),
        ("llama-yarn", {"max_position_embeddings": [9]}, r"max_position_embeddings is \[9\]; expected a whole number"),
    ],
)
def test_what_transformers_would_read_otherwise_is_refused(name, settings, message):
    with pytest.raises(UserError, match=message):
        config(name, **settings)


def test_what_transformers_would_not_load_is_not_written():
    odd = ModelConfig(vocab_size=48, num_layers=1, d_model=42, d_ff=16, num_heads=4, head_dim=8, max_seq_len=32)
    # Mistral alone does not ask that the heads divide the width.
    assert write_config(odd)[0].model_type == "mistral"
    partly = dataclasses.replace(odd, rope_fraction=0.5, rope_scaling=RopeScaling("linear", factor=2.0), d_model=32)
    with pytest.raises(UserError, match="no family of published models computes this one exactly"):
        write_config(partly)
    assert (
        write_config(config("gemma3", layer_types=["full_attention"] * 3), "gemma3_text")[1]["sliding_window"] == 4096
    )


def test_the_scale_of_the_largest_gemma_3_is_another_in_a_gguf_file():
    """One over the root of 5376 / 32, the width by the heads, where the others have that of a head: by its card."""
    fields = {"d_model": 5376, "num_heads": 32, "num_layers": 62}
    settings = Settings({"attention.sliding_window": 1024}, "g")
    assert ARCHITECTURES["gemma3"].fields(settings, fields)["query_scale"] == pytest.approx(168**-0.5)
    assert ARCHITECTURES["gemma3"].fields(settings, fields | {"num_layers": 48})["query_scale"] is None


def test_more_layers_than_tensors_are_refused_at_once(tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((FIXTURES / "llama" / file).read_bytes())
    tree = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 4000}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match="it has 21 tensors, too few for 4000 layers"):
        load_folder(tmp_path)


@pytest.mark.slow
def test_rows_that_pad_the_vocabulary_are_not_published(tmp_path):
    c = ModelConfig(
        vocab_size=300,
        vocab_multiple=64,
        max_seq_len=32,
        num_layers=1,
        d_model=32,
        d_ff=32,
        num_heads=2,
        dtype="float32",
    )
    params = build(c).init(jax.random.key(0))
    assert params["embed"].shape == (320, 32)
    convert(tmp_path / "folder", c, params, byte_tokenizer(), "float32")
    again = load_folder(tmp_path / "folder")
    assert again.params["embed"].shape == (300, 32)
    tokens, positions = jnp.arange(8)[None] * 30, jnp.arange(8)[None]

    def logits(model, params):
        return model.unembed(params, model.trunk(params, tokens, positions).hidden)

    np.testing.assert_array_equal(logits(build(again.config), again.params), logits(build(c), params))


@pytest.mark.slow
def test_what_a_format_cannot_hold_is_refused(tmp_path):
    c = ModelConfig(vocab_size=300, max_seq_len=32, num_layers=1, d_model=16, d_ff=32, num_heads=2, dtype="float32")
    params = build(c).init(jax.random.key(0))
    large = {**params, "embed": params["embed"].at[3, 3].set(1e5)}
    cases: list[tuple[Stored, str]] = [("float16", "a.gguf"), ("q8_0", "b.gguf"), ("float16", "c")]
    for dtype, name in cases:
        with pytest.raises(
            UserError, match="a parameter is 100000 or no number, and float16 holds numbers of up to 65504 alone"
        ):
            convert(tmp_path / name, c, large, byte_tokenizer(), dtype)
    odd: list[tuple[float, Stored]] = [(3.4e38, "bfloat16"), (float("nan"), "float32"), (float("-inf"), "q8_0")]
    for number, dtype in odd:
        with pytest.raises(UserError, match="a parameter is"):
            convert(
                tmp_path / "e.gguf",
                c,
                {**params, "embed": params["embed"].at[3, 3].set(number)},
                byte_tokenizer(),
                dtype,
            )
    with pytest.raises(UserError, match="exists already"):
        convert(Path("/"), c, params, byte_tokenizer(), "float32")
    tied = dataclasses.replace(c, residual="branch", qk_norm="projection")
    with pytest.raises(UserError, match="olmo2 has an output layer of its own"):
        convert(tmp_path / "d.gguf", tied, build(tied).init(jax.random.key(0)), byte_tokenizer(), "float32")
    assert list(tmp_path.iterdir()) == []
