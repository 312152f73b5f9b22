"""Small models to decode with: real ones, and a table of bigrams whose answers can be read off."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.architecture import ModelConfig
from transformer_jax.model.transformer import Model, Output, Params, build


def make_model(**settings: Any) -> tuple[Model, Params]:
    """A Transformer of two layers."""
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "max_seq_len": 64,
        "num_layers": 2,
        "d_model": 24,
        "d_ff": 32,
        "num_heads": 4,
    }
    config = ModelConfig(**(shape | {"num_kv_heads": 2, "dtype": "float32"} | settings))
    model = build(config)
    return model, model.init(jax.random.key(7))


def bigram(vocab_size: int = 257, max_seq_len: int = 64) -> Model:
    """A model whose parameters are logits[token, next token], moved by the position; its cache is the positions."""

    def trunk(params: Any, tokens: Any, positions: Any, *, cache: Any = None, **others: Any) -> Any:
        del others
        hidden = params[tokens] + jnp.where(positions % 3 == 0, 0.25, 0.0)[..., None] * params[0]
        if cache is not None:
            rows = jnp.arange(len(tokens))[:, None]
            slots = jnp.where(positions < 0, cache.shape[1], positions)
            cache = cache.at[rows, slots].set(positions, mode="drop")
        return Output(hidden, cache)

    def init_cache(batch: int, length: int) -> Any:
        return jnp.full((batch, length), -1, jnp.int32)

    return Model(
        init=lambda key: 3 * jax.random.normal(key, (vocab_size, vocab_size)),
        trunk=trunk,
        unembed=lambda params, hidden: hidden,
        init_cache=init_cache,
        logical_axes=lambda: None,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
    )


def successor_logits(vocab_size: int) -> jax.Array:
    """Bigram parameters under which each id is followed by the next one."""
    return 20 * jnp.roll(jnp.eye(vocab_size), 1, axis=1)


def uncached_logprobs(model: Model, params: Params, tokens: Sequence[int]) -> np.ndarray:
    """Log probabilities after each prefix, [T V], from one pass over the whole without a cache."""
    row = jnp.asarray([tokens], jnp.int32)
    hidden, *_ = model.trunk(params, row, jnp.arange(len(tokens))[None])
    logits = np.asarray(model.unembed(params, hidden)[0], np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
