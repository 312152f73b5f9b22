"""The config.json of each family of encoders, as fields of a `ModelConfig`, and back."""

from typing import Any

from transformer_jax.architecture import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.pretrained.config_reader import Settings, read_activation, read_sizes, write_sizes
from transformer_jax.pretrained.names import ROBERTA_UNUSED_POSITIONS

Tree = dict[str, Any]


def read_bert(settings: Settings) -> Tree:
    has_output = any(name.startswith(("cls.", "lm_head.")) for name in settings.tensors)
    has_pooler = any("pooler.dense." in name for name in settings.tensors)
    settings.expect("position_embedding_type", "absolute")
    settings.expect("is_decoder", False)
    return read_sizes(settings) | {
        "attention": "bidirectional",
        "positions": "learned",
        "residual": "post",
        "norm": "layernorm",
        "norm_bias": True,
        "norm_eps": settings.take("layer_norm_eps", 1e-12),
        "embedding_norm": True,
        "mlp": "plain",
        "mlp_bias": True,
        "attention_bias": "all",
        "output_bias": has_output,
        "output_transform": has_output,
        "pooler": has_pooler,
        "activation": read_activation(settings, "hidden_act", "gelu"),
        "num_token_types": settings.take("type_vocab_size", 2),
        "tie_embeddings": settings.take("tie_word_embeddings", True),
        "dropout": settings.take("hidden_dropout_prob", 0.1),
        "attention_dropout": settings.take("attention_probs_dropout_prob", 0.1),
    }


def write_bert(c: ModelConfig) -> Tree:
    """Of a model with an output layer."""
    if not c.output_transform:
        raise UserError("the model has no output layer")
    return write_bare_bert(c)


def write_bare_bert(c: ModelConfig) -> Tree:
    """Of a model without one, or apart from it."""
    return write_sizes(c) | {
        "layer_norm_eps": c.norm_eps,
        "type_vocab_size": c.num_token_types,
        "tie_word_embeddings": c.tie_embeddings,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": c.attention_dropout,
    }


def read_roberta(settings: Settings) -> Tree:
    fields = read_bert(settings)
    if fields["output_transform"] and fields["activation"] != "gelu":
        raise settings.refuse("hidden_act", "'gelu', because the output layer has no other")
    settings.expect("pad_token_id", ROBERTA_UNUSED_POSITIONS - 1)
    return fields | {"max_seq_len": fields["max_seq_len"] - ROBERTA_UNUSED_POSITIONS}


def write_roberta(c: ModelConfig) -> Tree:
    return write_bert(c) | write_bare_roberta(c)


def write_bare_roberta(c: ModelConfig) -> Tree:
    unused = ROBERTA_UNUSED_POSITIONS
    return write_bare_bert(c) | {"max_position_embeddings": c.max_seq_len + unused, "pad_token_id": unused - 1}
