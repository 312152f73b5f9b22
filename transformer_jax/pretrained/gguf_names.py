"""The tables of GGUF: which tensor of a file is which parameter of ours, for each architecture that llama.cpp knows."""

from transformer_jax.pretrained.layouts import (
    AS_IT_IS,
    JOINED_HEADS,
    JOINED_TRANSPOSED,
    PAIRED,
    PLUS_ONE,
    STACKED_EXPERTS,
    TRANSPOSED,
    Layout,
)
from transformer_jax.pretrained.names import HEADS, Row, as_it_is, joined, linear, norm


def _norm(ours: str, theirs: str, scale: Layout) -> tuple[Row, Row]:
    return Row((f"{ours}/scale",), (f"{theirs}.weight",), scale), as_it_is(f"{ours}/bias", f"{theirs}.bias")


def _ends(scale: Layout = AS_IT_IS) -> tuple[Row, ...]:
    return (
        as_it_is("embed", "token_embd.weight"),
        *linear("layers_{i}/attn/o", "blk.{i}.attn_output"),
        *linear("layers_{i}/mlp/down", "blk.{i}.ffn_down"),
        *_norm("final_norm", "output_norm", scale),
        *linear("output", "output"),
    )


def _pre_norms(scale: Layout = AS_IT_IS) -> tuple[Row, ...]:
    return (
        *_norm("layers_{i}/attn_norm", "blk.{i}.attn_norm", scale),
        *_norm("layers_{i}/mlp_norm", "blk.{i}.ffn_norm", scale),
    )


def _post_norms(scale: Layout = AS_IT_IS) -> tuple[Row, ...]:
    return (
        *_norm("layers_{i}/attn_post_norm", "blk.{i}.post_attention_norm", scale),
        *_norm("layers_{i}/mlp_post_norm", "blk.{i}.post_ffw_norm", scale),
    )


def _attention(scale: Layout = AS_IT_IS, heads: Layout = TRANSPOSED) -> tuple[Row, ...]:
    bias = PAIRED if heads is PAIRED else AS_IT_IS
    return (
        Row(("layers_{i}/attn/q/weight",), ("blk.{i}.attn_q.weight",), heads),
        Row(("layers_{i}/attn/k/weight",), ("blk.{i}.attn_k.weight",), heads),
        Row(("layers_{i}/attn/q/bias",), ("blk.{i}.attn_q.bias",), bias),
        Row(("layers_{i}/attn/k/bias",), ("blk.{i}.attn_k.bias",), bias),
        *linear("layers_{i}/attn/v", "blk.{i}.attn_v"),
        *_norm("layers_{i}/attn/q_norm", "blk.{i}.attn_q_norm", scale),
        *_norm("layers_{i}/attn/k_norm", "blk.{i}.attn_k_norm", scale),
    )


MLP = (*linear("layers_{i}/mlp/gate", "blk.{i}.ffn_gate"), *linear("layers_{i}/mlp/up", "blk.{i}.ffn_up"))

EXPERTS = (
    as_it_is("embed", "token_embd.weight"),
    *linear("layers_{i}/attn/o", "blk.{i}.attn_output"),
    *norm("final_norm", "output_norm"),
    *linear("output", "output"),
    *linear("layers_{i}/mlp/router", "blk.{i}.ffn_gate_inp"),
    Row(("layers_{i}/mlp/gate",), ("blk.{i}.ffn_gate_exps.weight",), STACKED_EXPERTS),
    Row(("layers_{i}/mlp/up",), ("blk.{i}.ffn_up_exps.weight",), STACKED_EXPERTS),
    Row(("layers_{i}/mlp/down",), ("blk.{i}.ffn_down_exps.weight",), STACKED_EXPERTS),
)

LLAMA = (*_ends(), *_pre_norms(), *_attention(heads=PAIRED), *MLP)
MIXTRAL = (*EXPERTS, *_pre_norms(), *_attention(heads=PAIRED))
QWEN = (*_ends(), *_pre_norms(), *_attention(), *MLP)
QWEN_EXPERTS = (*EXPERTS, *_pre_norms(), *_attention())
GEMMA = (*_ends(PLUS_ONE), *_pre_norms(PLUS_ONE), *_post_norms(PLUS_ONE), *_attention(PLUS_ONE), *MLP)
OLMO_2 = (*_ends(), *_post_norms(), *_attention(), *MLP)

BERT = (
    as_it_is("embed", "token_embd.weight"),
    as_it_is("position_embed", "position_embd.weight"),
    as_it_is("type_embed", "token_types.weight"),
    *norm("embed_norm", "token_embd_norm"),
    *_attention(),
    *linear("layers_{i}/attn/o", "blk.{i}.attn_output"),
    *norm("layers_{i}/attn_post_norm", "blk.{i}.attn_output_norm"),
    *linear("layers_{i}/mlp/up", "blk.{i}.ffn_up"),
    *linear("layers_{i}/mlp/down", "blk.{i}.ffn_down"),
    *norm("layers_{i}/mlp_post_norm", "blk.{i}.layer_output_norm"),
    *linear("pooler", "cls"),
)
"""Without an output layer, which llama.cpp knows none for."""

PHI_3 = (
    *_ends(),
    *_pre_norms(),
    *joined(HEADS, "blk.{i}.attn_qkv", JOINED_TRANSPOSED, JOINED_HEADS),
    *joined(("layers_{i}/mlp/gate", "layers_{i}/mlp/up"), "blk.{i}.ffn_up", JOINED_TRANSPOSED, JOINED_TRANSPOSED),
)

JOINED = (
    *_ends(),
    *_pre_norms(),
    *joined(HEADS, "blk.{i}.attn_qkv", JOINED_TRANSPOSED, JOINED_HEADS),
    *linear("layers_{i}/mlp/up", "blk.{i}.ffn_up"),
    as_it_is("position_embed", "position_embd.weight"),
)
"""GPT-2 and GPT-NeoX."""
