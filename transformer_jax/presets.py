"""Named runs and public model shapes: functions from nothing to a `RunConfig`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from transformer_jax.architecture import ModelConfig
from transformer_jax.config import DataConfig, OptimizerConfig, RunConfig, TrainingConfig
from transformer_jax.errors import UserError


def tiny() -> RunConfig:
    """Learns to write Python-like text from the standard library's source in about 3 minutes on 2 cores."""
    return RunConfig()


def small() -> RunConfig:
    """10.7M parameters over bytes: the shape that training rates are compared at."""
    return RunConfig(
        model=ModelConfig(num_layers=6, d_model=384, d_ff=1024, num_heads=6),
        data=DataConfig(tokenizer="bytes", batch_size=16),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100),
        training=TrainingConfig(steps=5000, eval_every=500, checkpoint_every=500),
    )


def gpt2() -> RunConfig:
    """GPT-2 small, 124M parameters: learned positions, layer norm, plain GELU feed-forward, biases."""
    model = ModelConfig(
        vocab_size=50257,
        max_seq_len=1024,
        num_layers=12,
        d_model=768,
        d_ff=3072,
        num_heads=12,
        positions="learned",
        norm="layernorm",
        mlp="plain",
        activation="gelu_tanh",
        attention_bias="all",
        mlp_bias=True,
        norm_bias=True,
    )
    return _long_run(model)


def smollm2_135m() -> RunConfig:
    """SmolLM2-135M: a Llama shape with 3 key/value heads for 9 query heads."""
    model = ModelConfig(
        vocab_size=49152,
        max_seq_len=8192,
        num_layers=30,
        d_model=576,
        d_ff=1536,
        num_heads=9,
        num_kv_heads=3,
        rope_theta=100_000.0,
    )
    return _long_run(model)


def llama3_8b() -> RunConfig:
    """Llama 3 8B: 8 key/value heads for 32 query heads, an output layer of its own."""
    model = ModelConfig(
        vocab_size=128256,
        max_seq_len=8192,
        num_layers=32,
        d_model=4096,
        d_ff=14336,
        num_heads=32,
        num_kv_heads=8,
        rope_theta=500_000.0,
        tie_embeddings=False,
        remat="block",
    )
    return _long_run(model)


def _long_run(model: ModelConfig) -> RunConfig:
    return RunConfig(
        model=model,
        data=DataConfig(seq_len=model.max_seq_len, batch_size=16, bpe_vocab_size=32_768),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=2000, final_fraction=0.1),
        training=TrainingConfig(steps=100_000, eval_every=1000, checkpoint_every=1000),
    )


PRESETS: Mapping[str, Callable[[], RunConfig]] = MappingProxyType(
    {function.__name__: function for function in (tiny, small, gpt2, smollm2_135m, llama3_8b)}
)


def preset(name: str) -> RunConfig:
    """Look a preset up by name. Raises `UserError` listing the names when there is none."""
    if name not in PRESETS:
        raise UserError(f"no preset is called {name!r}; expected one of {', '.join(PRESETS)}")
    return PRESETS[name]()
