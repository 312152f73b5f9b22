import dataclasses

import pytest

from transformer_jax.architecture import ModelConfig
from transformer_jax.config import DataConfig, DecodingConfig, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.presets import PRESETS, preset
from transformer_jax.settings import differences, from_json, to_json


@pytest.mark.parametrize("name", PRESETS)
def test_json_gives_every_preset_back(name):
    run = preset(name)
    assert from_json(RunConfig, to_json(run)) == run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": {"d_mode": 3}}', "RunConfig.model: unknown field 'd_mode'; expected some of vocab_size"),
        ('{"model": {"d_model": "wide"}}', "ModelConfig.d_model is 'wide'; expected an integer"),
        ('{"model": {"mlp_bias": 1}}', "ModelConfig.mlp_bias is 1; expected true or false"),
        (
            '{"model": {"norm": "batch"}}',
            "ModelConfig.norm is 'batch'; expected one of 'rmsnorm', ",
        ),
        ('{"data": {"paths": [1]}}', r"DataConfig.paths is \(1,\); expected a list of text"),
        ('{"model": 7}', "RunConfig.model: found 7; expected an object"),
        ("{", "RunConfig: not JSON"),
        ("{}", "RunConfig: the field 'model' is missing"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text, message):
    with pytest.raises(UserError, match=message):
        from_json(RunConfig, text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3; expected a positive divisor of num_heads = 4"),
        ({"head_dim": 5}, "head_dim comes to 5; rotary positions need an even number"),
        ({"dropout": 1.0}, "dropout is 1.0; expected at least 0 and less than 1"),
        ({"norm_eps": float("nan")}, "norm_eps is nan; expected a finite number"),
        ({"norm_eps": 10**400}, "expected a finite number"),
        ({"num_layers": 0}, "num_layers is 0; expected more than 0"),
        ({"vocab_size": 1}, "vocab_size is 1; expected at least 2, or null"),
    ],
)
def test_a_model_that_cannot_be_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**settings)


def test_a_window_longer_than_the_context_is_refused():
    with pytest.raises(UserError, match=r"DataConfig.seq_len is 512; expected at most ModelConfig.max_seq_len = 256"):
        RunConfig(data=DataConfig(seq_len=512))


def test_letters_are_derived():
    c = ModelConfig(d_model=96, num_heads=6, num_kv_heads=2)
    assert (c.D, c.N, c.K, c.G, c.H) == (96, 6, 2, 3, 16)
    assert dataclasses.replace(c, num_kv_heads=None).K == 6
    assert dataclasses.replace(c, head_dim=32).H == 32


def test_differences_name_the_fields():
    ours = RunConfig()
    theirs = dataclasses.replace(ours, decoding=DecodingConfig(top_k=5), model=ModelConfig(dropout=0.5))
    assert differences(ours, theirs) == ["model.dropout: 0.0 | 0.5", "decoding.top_k: None | 5"]
    assert differences(ours, ours) == []
