"""The config.json of each family of decoders, as fields of a `ModelConfig`, and back."""

from collections.abc import Callable
from typing import Any

from transformer_jax.architecture import MOST_LAYERS, LayerKind, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.pretrained.config_reader import (
    THEIR_ACTIVATIONS,
    Settings,
    read_activation,
    read_dtype,
    read_sizes,
    write_sizes,
)
from transformer_jax.pretrained.rope import read_rope, write_rope

Tree = dict[str, Any]

KINDS: dict[str, LayerKind] = {"full_attention": "global", "sliding_attention": "local"}
THEIR_KINDS = {ours: theirs for theirs, ours in KINDS.items()}


def _read_sizes(settings: Settings, *, tied: bool, eps: float) -> Tree:
    """What every family since Llama calls by the same names."""
    settings.expect("is_causal", True)
    fields = read_sizes(settings)
    return fields | {
        "num_kv_heads": settings.take("num_key_value_heads", fields["num_heads"]),
        "head_dim": settings.take("head_dim", None),
        "norm_eps": settings.take("rms_norm_eps", eps),
        "tie_embeddings": settings.take("tie_word_embeddings", tied),
        "attention_dropout": settings.take("attention_dropout", 0.0),
    }


def _write_sizes(c: ModelConfig) -> Tree:
    return write_sizes(c) | {
        "num_key_value_heads": c.K,
        "head_dim": c.H,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "attention_dropout": c.attention_dropout,
    }


def _read_layers(
    settings: Settings, fields: Tree, old: Callable[[int], bool], *, window: int | None = 4096, listed: bool = True
) -> Tree:
    """Which layers are local: `layer_types` where it is given, else what `old` says of a layer's number.

    `window` is the family's width where the file says nothing of it. A family that does not know `layer_types` is not
    `listed`: there they have to say the same.
    """
    types = settings.take("layer_types", None)
    window = settings.take_unless_absent("sliding_window", window) or None
    if types is None:
        pattern = tuple(KINDS["sliding_attention" if window and old(i) else "full_attention"] for i in _layers(fields))
    else:
        known = isinstance(types, list) and all(isinstance(kind, str) and kind in KINDS for kind in types)
        if not known or len(types) != fields["num_layers"]:
            raise settings.refuse("layer_types", f"{fields['num_layers']} times one of {', '.join(KINDS)}")
        pattern = tuple(KINDS[kind] for kind in types)
        if not listed and pattern != tuple(KINDS["sliding_attention" if window else "full_attention"] for _ in pattern):
            raise settings.refuse("layer_types", "all of one kind, as sliding_window says: the family knows no others")
    local = "local" in pattern
    if local and window is None:
        raise settings.refuse("sliding_window", "a width, because layer_types has sliding layers")
    return {"layer_pattern": pattern, "window": window if local else None}


def _layers(fields: Tree) -> range:
    # More are refused later, and would first be counted out one by one.
    return range(min(fields["num_layers"], MOST_LAYERS))


def _write_layers(c: ModelConfig) -> Tree:
    return {"layer_types": [THEIR_KINDS[kind] for kind in c.kinds], "sliding_window": c.window}


def read_llama(settings: Settings) -> Tree:
    fields = _read_sizes(settings, tied=False, eps=1e-6) | read_rope(settings)
    return fields | {
        "activation": read_activation(settings, "hidden_act", "silu"),
        "attention_bias": "all" if settings.take("attention_bias", False) else "none",
        "mlp_bias": settings.take("mlp_bias", False),
    }


def write_llama(c: ModelConfig) -> Tree:
    if c.D % c.N:
        raise UserError("its config.json wants a hidden size that is a multiple of the heads")
    return _write_sizes(c) | write_rope(c) | {"attention_bias": c.attention_bias == "all", "mlp_bias": c.mlp_bias}


def read_mistral(
    settings: Settings,
    *,
    eps: float = 1e-6,
    theta: float = 10_000.0,
    fraction: float | None = None,
    window: int | None = 4096,
) -> Tree:
    fields = _read_sizes(settings, tied=False, eps=eps) | read_rope(settings, theta=theta, fraction=fraction)
    fields |= _read_layers(settings, fields, old=lambda layer: True, window=window, listed=False)
    return fields | {"activation": read_activation(settings, "hidden_act", "silu")}


def write_mistral(c: ModelConfig) -> Tree:
    return _write_sizes(c) | write_rope(c) | {"sliding_window": c.window}


def read_mixtral(settings: Settings) -> Tree:
    return read_mistral(settings, eps=1e-5, theta=1e6, window=None) | {
        "num_experts": settings.take("num_local_experts", 8),
        "balance_loss": settings.take("router_aux_loss_coef", 0.001),
        "experts_per_token": settings.take("num_experts_per_tok", 2),
    }


def write_mixtral(c: ModelConfig) -> Tree:
    return write_mistral(c) | {
        "num_local_experts": c.E,
        "num_experts_per_tok": c.experts_per_token,
        "router_aux_loss_coef": c.balance_loss,
    }


def read_qwen2(settings: Settings) -> Tree:
    fields = _read_sizes(settings, tied=False, eps=1e-6) | read_rope(settings)
    first_local = settings.take("max_window_layers", 28)
    if type(first_local) is not int:
        raise settings.refuse("max_window_layers", "a whole number")
    uses_window = settings.take("use_sliding_window", False)
    fields |= _read_layers(settings, fields, old=lambda layer: uses_window and layer >= first_local)
    if fields["window"] is not None and not uses_window:
        raise settings.refuse("use_sliding_window", "true, because layer_types has sliding layers")
    return fields | {"activation": read_activation(settings, "hidden_act", "silu"), "attention_bias": "qkv"}


def write_qwen2(c: ModelConfig) -> Tree:
    return (
        {name: value for name, value in _write_sizes(c).items() if name != "head_dim"}
        | write_rope(c)
        | _write_layers(c)
        | {"use_sliding_window": c.window is not None, "max_window_layers": 0}
    )


def read_qwen3(settings: Settings) -> Tree:
    biased = settings.take("attention_bias", False)
    return read_qwen2(settings) | {"attention_bias": "all" if biased else "none", "qk_norm": "head"}


def write_qwen3(c: ModelConfig) -> Tree:
    return write_qwen2(c) | {"head_dim": c.H, "attention_bias": c.attention_bias == "all"}


def read_qwen3_moe(settings: Settings) -> Tree:
    settings.expect("decoder_sparse_step", 1)
    settings.expect("mlp_only_layers", [])
    fields = read_qwen3(settings)
    if "layer_types" in settings:
        raise settings.refuse("layer_types", "none: in this family all layers are alike")
    # Every layer has the window, whatever max_window_layers says.
    uses_window = settings.take("use_sliding_window", False)
    fields |= _read_layers(settings, fields, old=lambda layer: uses_window)
    return fields | {
        "d_ff": settings.take("moe_intermediate_size"),
        "num_experts": settings.take("num_experts", settings.take("num_local_experts", 128)),
        "balance_loss": settings.take("router_aux_loss_coef", 0.001),
        "experts_per_token": settings.take("num_experts_per_tok", 8),
        "renormalize_experts": settings.take("norm_topk_prob", False),
    }


def write_qwen3_moe(c: ModelConfig) -> Tree:
    return {name: value for name, value in write_qwen3(c).items() if name != "layer_types"} | {
        "moe_intermediate_size": c.F,
        "num_experts": c.E,
        "router_aux_loss_coef": c.balance_loss,
        "num_experts_per_tok": c.experts_per_token,
        "norm_topk_prob": c.renormalize_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def read_gemma(
    settings: Settings, *, theta: float = 10_000.0, names: tuple[str, str] = ("hidden_act", "hidden_activation")
) -> Tree:
    """`names` are those of the activation: the one that the family goes by, and the one that it does not look at."""
    fields = _read_sizes(settings, tied=True, eps=1e-6) | read_rope(settings, theta=theta)
    settings.expect("use_bidirectional_attention", False)
    # The first Gemma was published with "gelu" as its hidden_act, which means the tanh form there.
    used, other = (
        "gelu_tanh" if name == "hidden_act" and found == "gelu" else found
        for name in names
        for found in (read_activation(settings, name, "gelu_pytorch_tanh"),)
    )
    if names[1] in settings and other != used:
        raise settings.refuse(names[1], f"what {names[0]} is, which alone counts in this family")
    return fields | {
        "activation": used,
        "attention_bias": "all" if settings.take("attention_bias", False) else "none",
        "norm": "rmsnorm_plus_one",
        "scale_embeddings": True,
    }


def write_gemma(c: ModelConfig) -> Tree:
    if c.D % c.N:
        raise UserError("its config.json wants a hidden size that is a multiple of the heads")
    return _write_sizes(c) | write_rope(c) | {"attention_bias": c.attention_bias == "all"}


def read_gemma2(
    settings: Settings, *, theta: float = 10_000.0, softcaps: tuple[float | None, float | None] = (50.0, 30.0)
) -> Tree:
    fields = read_gemma(settings, theta=theta, names=("hidden_activation", "hidden_act"))
    return (
        fields
        | _read_layers(settings, fields, old=lambda layer: layer % 2 == 0)
        | {
            "residual": "pre_and_post",
            "query_scale": settings.number("query_pre_attn_scalar", 256) ** -0.5,
            "attention_softcap": settings.take_unless_absent("attn_logit_softcapping", softcaps[0]),
            "logit_softcap": settings.take_unless_absent("final_logit_softcapping", softcaps[1]),
        }
    )


def write_gemma2(c: ModelConfig) -> Tree:
    tree = write_gemma(c) | _write_layers(c)
    activation = tree.pop("hidden_act")
    scalar = c.H if c.query_scale is None else c.query_scale**-2
    if abs(scalar - round(scalar)) > 1e-6 * scalar:
        raise UserError("Gemma's query scale is one over the root of a whole number")
    return tree | {
        # The model asks for a width even where no layer has one.
        "sliding_window": c.window or 4096,
        "hidden_activation": activation,
        "query_pre_attn_scalar": round(scalar),
        "attn_logit_softcapping": c.attention_softcap,
        "final_logit_softcapping": c.logit_softcap,
    }


def read_gemma3(settings: Settings) -> Tree:
    every = settings.size("sliding_window_pattern", 6)
    if "layer_types" not in settings:
        settings.expect("_sliding_window_pattern", every)
    _check_rope_of_gemma3(settings)
    # The model has no soft cap inside attention, although its config may name one.
    settings.expect("attn_logit_softcapping")
    fields = read_gemma2(settings, theta=1e6, softcaps=(None, None))
    if "layer_types" not in settings:
        fields |= _read_layers(settings, fields, old=lambda layer: (layer + 1) % every != 0)
    local = 10_000.0 if fields["local_rope_theta"] is None else fields["local_rope_theta"]
    return fields | {"qk_norm": "head", "local_rope_theta": local if fields["window"] is not None else None}


def write_gemma3(c: ModelConfig) -> Tree:
    tree = write_gemma2(c)
    rope = tree["rope_parameters"]
    if "full_attention" not in rope:
        local = {"rope_type": "default", "rope_theta": 10_000.0}
        tree["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return tree


def _check_rope_of_gemma3(settings: Settings) -> None:
    """Refuse rotary settings that stand where transformers does not look for them in this family."""
    flat, old = (settings.section(name) for name in ("rope_parameters", "rope_scaling"))
    if flat is not None and "full_attention" not in flat:
        raise settings.refuse("rope_parameters", "full_attention and sliding_attention, each with its own")
    if flat is None and old is not None and "rope_type" not in old:
        raise settings.refuse("rope_scaling", "a rope_type")


def read_phi3(settings: Settings) -> Tree:
    # The context before scaling; it counts for "longrope" alone, which is refused with the rope's settings.
    settings.take("original_max_position_embeddings", None)
    fields = read_mistral(settings, eps=1e-5, fraction=1.0, window=None)
    if fields["rope_scaling"].kind != "none":
        raise settings.refuse(
            "rope_parameters" if "rope_parameters" in settings else "rope_scaling", "a rope_type of 'default'"
        )
    return fields


def read_neox(settings: Settings) -> Tree:
    settings.expect("num_key_value_heads", settings.take("num_attention_heads"))
    # What the other families call them does not count in this one.
    theta, fraction = settings.take("rotary_emb_base", 10_000.0), settings.take("rotary_pct", 0.25)
    settings.expect("rope_theta", theta)
    settings.expect("partial_rotary_factor", fraction)
    fields = _read_sizes(settings, tied=False, eps=1e-5) | read_rope(settings, theta=theta, fraction=fraction)
    return fields | {
        "num_kv_heads": fields["num_heads"],
        "norm": "layernorm",
        "norm_bias": True,
        "norm_eps": settings.take("layer_norm_eps", 1e-5),
        "mlp": "plain",
        "mlp_bias": True,
        "activation": read_activation(settings, "hidden_act", "gelu"),
        "attention_bias": "all" if settings.take("attention_bias", True) else "none",
        "residual": "parallel" if settings.take("use_parallel_residual", True) else "pre",
        "dropout": settings.take("hidden_dropout", 0.0),
    }


def write_neox(c: ModelConfig) -> Tree:
    dropped = ("num_key_value_heads", "rms_norm_eps", "head_dim")
    return {
        **{name: value for name, value in _write_sizes(c).items() if name not in dropped},
        **write_rope(c),
        "layer_norm_eps": c.norm_eps,
        "attention_bias": c.attention_bias == "all",
        "use_parallel_residual": c.residual == "parallel",
        "hidden_dropout": c.dropout,
    }


def read_olmo2(settings: Settings) -> Tree:
    return read_llama(settings) | {
        "norm_eps": settings.take("rms_norm_eps", 1e-5),
        "residual": "branch",
        "qk_norm": "projection",
    }


def read_gpt2(settings: Settings) -> Tree:
    settings.expect("is_causal", True)
    settings.expect("scale_attn_weights", True)
    settings.expect("scale_attn_by_inverse_layer_idx", False)
    width = settings.size("n_embd", 768)
    return {
        "vocab_size": settings.take("vocab_size", 50257),
        "max_seq_len": settings.take("n_positions", 1024),
        "num_layers": settings.take("n_layer", 12),
        "d_model": width,
        "d_ff": settings.take("n_inner", 4 * width),
        "num_heads": settings.take("n_head", 12),
        "positions": "learned",
        "norm": "layernorm",
        "norm_bias": True,
        "norm_eps": settings.take("layer_norm_epsilon", 1e-5),
        "mlp": "plain",
        "mlp_bias": True,
        "attention_bias": "all",
        "activation": read_activation(settings, "activation_function", "gelu_new"),
        "tie_embeddings": settings.take("tie_word_embeddings", True),
        "dropout": settings.take("resid_pdrop", 0.1),
        "attention_dropout": settings.take("attn_pdrop", 0.1),
        "dtype": read_dtype(settings),
    }


def write_gpt2(c: ModelConfig) -> Tree:
    return {
        "vocab_size": c.table_rows,
        "n_positions": c.max_seq_len,
        "n_layer": c.L,
        "n_embd": c.D,
        "n_inner": c.F,
        "n_head": c.N,
        "layer_norm_epsilon": c.norm_eps,
        "activation_function": "gelu_new" if c.activation == "gelu_tanh" else THEIR_ACTIVATIONS[c.activation],
        "tie_word_embeddings": c.tie_embeddings,
        "resid_pdrop": c.dropout,
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.attention_dropout,
        "dtype": c.dtype,
    }
