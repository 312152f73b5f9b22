"""One table a family: which tensor of a published file is which parameter of ours, read in both directions.

A row whose parameters the model at hand does not have, such as a bias, is left out; every one it has is in one row.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from transformer_jax.architecture import ModelConfig
from transformer_jax.pretrained.layouts import (
    AS_IT_IS,
    EXPERTS,
    JOINED_BY_HEAD,
    JOINED_HEADS,
    JOINED_TRANSPOSED,
    TRANSPOSED,
    Layout,
    skipping_rows,
)


@dataclass(frozen=True)
class Row:
    """Some parameters of ours, some tensors of theirs, and what turns one into the other."""

    ours: tuple[str, ...]
    """Paths in the parameter tree; {i} stands for the layer."""
    theirs: tuple[str, ...]
    """Names in the file; {i} stands for the layer, {e} for the expert."""
    layout: Layout


def as_it_is(ours: str, theirs: str) -> Row:
    """A vector, or a table that both store alike."""
    return Row((ours,), (theirs,), AS_IT_IS)


def linear(ours: str, theirs: str) -> tuple[Row, Row]:
    """A product's weight, and its bias where there is one."""
    return Row((f"{ours}/weight",), (f"{theirs}.weight",), TRANSPOSED), as_it_is(f"{ours}/bias", f"{theirs}.bias")


def norm(ours: str, theirs: str) -> tuple[Row, Row]:
    """A norm's scale, and its bias where there is one."""
    return as_it_is(f"{ours}/scale", f"{theirs}.weight"), as_it_is(f"{ours}/bias", f"{theirs}.bias")


def joined(ours: Iterable[str], theirs: str, weight: Layout, bias: Layout) -> tuple[Row, Row]:
    """Several products that the file stores as one."""
    return (
        Row(tuple(f"{name}/weight" for name in ours), (f"{theirs}.weight",), weight),
        Row(tuple(f"{name}/bias" for name in ours), (f"{theirs}.bias",), bias),
    )


HEADS = tuple(f"layers_{{i}}/attn/{name}" for name in "qkv")

LLAMA_ATTENTION = (
    *linear("layers_{i}/attn/q", "model.layers.{i}.self_attn.q_proj"),
    *linear("layers_{i}/attn/k", "model.layers.{i}.self_attn.k_proj"),
    *linear("layers_{i}/attn/v", "model.layers.{i}.self_attn.v_proj"),
    *norm("layers_{i}/attn/q_norm", "model.layers.{i}.self_attn.q_norm"),
    *norm("layers_{i}/attn/k_norm", "model.layers.{i}.self_attn.k_norm"),
)

LLAMA_MLP = (
    *linear("layers_{i}/mlp/gate", "model.layers.{i}.mlp.gate_proj"),
    *linear("layers_{i}/mlp/up", "model.layers.{i}.mlp.up_proj"),
)

LLAMA_ENDS = (
    as_it_is("embed", "model.embed_tokens.weight"),
    *linear("layers_{i}/attn/o", "model.layers.{i}.self_attn.o_proj"),
    *norm("final_norm", "model.norm"),
    *linear("output", "lm_head"),
)

LLAMA_DOWN = linear("layers_{i}/mlp/down", "model.layers.{i}.mlp.down_proj")

PRE_NORMS = (
    *norm("layers_{i}/attn_norm", "model.layers.{i}.input_layernorm"),
    *norm("layers_{i}/mlp_norm", "model.layers.{i}.post_attention_layernorm"),
)

LLAMA = (*LLAMA_ENDS, *LLAMA_ATTENTION, *LLAMA_MLP, *LLAMA_DOWN, *PRE_NORMS)
"""Llama, Mistral, Qwen 2, Qwen 3, Gemma."""

MIXTRAL = (
    *LLAMA_ENDS,
    *LLAMA_ATTENTION,
    *PRE_NORMS,
    *linear("layers_{i}/mlp/router", "model.layers.{i}.block_sparse_moe.gate"),
    Row(("layers_{i}/mlp/gate",), ("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",), EXPERTS),
    Row(("layers_{i}/mlp/up",), ("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",), EXPERTS),
    Row(("layers_{i}/mlp/down",), ("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",), EXPERTS),
)

QWEN_EXPERTS = (
    *LLAMA_ENDS,
    *LLAMA_ATTENTION,
    *PRE_NORMS,
    *linear("layers_{i}/mlp/router", "model.layers.{i}.mlp.gate"),
    Row(("layers_{i}/mlp/gate",), ("model.layers.{i}.mlp.experts.{e}.gate_proj.weight",), EXPERTS),
    Row(("layers_{i}/mlp/up",), ("model.layers.{i}.mlp.experts.{e}.up_proj.weight",), EXPERTS),
    Row(("layers_{i}/mlp/down",), ("model.layers.{i}.mlp.experts.{e}.down_proj.weight",), EXPERTS),
)

GEMMA_2 = (
    *LLAMA_ENDS,
    *LLAMA_ATTENTION,
    *LLAMA_MLP,
    *LLAMA_DOWN,
    *norm("layers_{i}/attn_norm", "model.layers.{i}.input_layernorm"),
    *norm("layers_{i}/attn_post_norm", "model.layers.{i}.post_attention_layernorm"),
    *norm("layers_{i}/mlp_norm", "model.layers.{i}.pre_feedforward_layernorm"),
    *norm("layers_{i}/mlp_post_norm", "model.layers.{i}.post_feedforward_layernorm"),
)
"""Gemma 2, Gemma 3, and OLMo 2, which has the norms behind alone."""

PHI_3 = (
    *LLAMA_ENDS,
    *LLAMA_DOWN,
    *PRE_NORMS,
    *joined(HEADS, "model.layers.{i}.self_attn.qkv_proj", JOINED_TRANSPOSED, JOINED_HEADS),
    *joined(
        ("layers_{i}/mlp/gate", "layers_{i}/mlp/up"),
        "model.layers.{i}.mlp.gate_up_proj",
        JOINED_TRANSPOSED,
        JOINED_TRANSPOSED,
    ),
)

GPT_2 = (
    as_it_is("embed", "transformer.wte.weight"),
    as_it_is("position_embed", "transformer.wpe.weight"),
    *norm("layers_{i}/attn_norm", "transformer.h.{i}.ln_1"),
    *joined(HEADS, "transformer.h.{i}.attn.c_attn", JOINED_HEADS, JOINED_HEADS),
    as_it_is("layers_{i}/attn/o/weight", "transformer.h.{i}.attn.c_proj.weight"),
    as_it_is("layers_{i}/attn/o/bias", "transformer.h.{i}.attn.c_proj.bias"),
    *norm("layers_{i}/mlp_norm", "transformer.h.{i}.ln_2"),
    as_it_is("layers_{i}/mlp/up/weight", "transformer.h.{i}.mlp.c_fc.weight"),
    as_it_is("layers_{i}/mlp/up/bias", "transformer.h.{i}.mlp.c_fc.bias"),
    as_it_is("layers_{i}/mlp/down/weight", "transformer.h.{i}.mlp.c_proj.weight"),
    as_it_is("layers_{i}/mlp/down/bias", "transformer.h.{i}.mlp.c_proj.bias"),
    *norm("final_norm", "transformer.ln_f"),
    *linear("output", "lm_head"),
)

GPT_NEOX = (
    as_it_is("embed", "gpt_neox.embed_in.weight"),
    *norm("layers_{i}/attn_norm", "gpt_neox.layers.{i}.input_layernorm"),
    *joined(HEADS, "gpt_neox.layers.{i}.attention.query_key_value", JOINED_BY_HEAD, JOINED_BY_HEAD),
    *linear("layers_{i}/attn/o", "gpt_neox.layers.{i}.attention.dense"),
    *norm("layers_{i}/mlp_norm", "gpt_neox.layers.{i}.post_attention_layernorm"),
    *linear("layers_{i}/mlp/up", "gpt_neox.layers.{i}.mlp.dense_h_to_4h"),
    *linear("layers_{i}/mlp/down", "gpt_neox.layers.{i}.mlp.dense_4h_to_h"),
    *norm("final_norm", "gpt_neox.final_layer_norm"),
    *linear("output", "embed_out"),
)

BERT = (
    as_it_is("embed", "bert.embeddings.word_embeddings.weight"),
    as_it_is("position_embed", "bert.embeddings.position_embeddings.weight"),
    as_it_is("type_embed", "bert.embeddings.token_type_embeddings.weight"),
    *norm("embed_norm", "bert.embeddings.LayerNorm"),
    *linear("layers_{i}/attn/q", "bert.encoder.layer.{i}.attention.self.query"),
    *linear("layers_{i}/attn/k", "bert.encoder.layer.{i}.attention.self.key"),
    *linear("layers_{i}/attn/v", "bert.encoder.layer.{i}.attention.self.value"),
    *linear("layers_{i}/attn/o", "bert.encoder.layer.{i}.attention.output.dense"),
    *norm("layers_{i}/attn_post_norm", "bert.encoder.layer.{i}.attention.output.LayerNorm"),
    *linear("layers_{i}/mlp/up", "bert.encoder.layer.{i}.intermediate.dense"),
    *linear("layers_{i}/mlp/down", "bert.encoder.layer.{i}.output.dense"),
    *norm("layers_{i}/mlp_post_norm", "bert.encoder.layer.{i}.output.LayerNorm"),
    *linear("pooler", "bert.pooler.dense"),
    *linear("transform", "cls.predictions.transform.dense"),
    *norm("transform_norm", "cls.predictions.transform.LayerNorm"),
    *linear("output", "cls.predictions.decoder"),
    as_it_is("output_bias", "cls.predictions.bias"),
)


def _renamed(rows: Iterable[Row], names: dict[str, str]) -> tuple[Row, ...]:
    def rename(name: str) -> str:
        for old, new in names.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    return tuple(replace(row, theirs=tuple(rename(name) for name in row.theirs)) for row in rows)


BARE_BERT = _renamed(BERT, {"bert.": ""})
"""An encoder without an output layer, such as sentence-transformers publishes."""

BARE_GPT_2 = _renamed(GPT_2, {"transformer.": ""})
"""As OpenAI's own weights are published."""

ROBERTA_UNUSED_POSITIONS = 2
"""Positions count from the padding id, 1, plus one."""

ROBERTA = tuple(
    replace(row, layout=skipping_rows(ROBERTA_UNUSED_POSITIONS)) if row.ours == ("position_embed",) else row
    for row in _renamed(
        BERT,
        {
            "bert.": "roberta.",
            "cls.predictions.transform.dense": "lm_head.dense",
            "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
            "cls.predictions.decoder": "lm_head.decoder",
            "cls.predictions.bias": "lm_head.bias",
        },
    )
)

BARE_ROBERTA = _renamed(ROBERTA, {"roberta.": ""})


def expand(rows: Iterable[Row], c: ModelConfig, parameters: set[str]) -> list[Row]:
    """Write out the rows of a model that has these parameters, layer by layer and expert by expert.

    Raises `ValueError` naming a parameter that no row, or more than one, accounts for: a fault of the table.
    """
    expanded: list[Row] = []
    for row in rows:
        layers = range(c.L) if "{i}" in row.ours[0] else range(1)
        for i in layers:
            ours = tuple(name.format(i=i) for name in row.ours)
            if not parameters & set(ours):
                continue
            experts = range(c.E) if "{e}" in row.theirs[0] else range(1)
            theirs = tuple(name.format(i=i, e=e) for name in row.theirs for e in experts)
            expanded.append(Row(ours, theirs, row.layout))
    named = [name for row in expanded for name in row.ours]
    wrong = sorted(set(named) ^ parameters) or [name for name in named if named.count(name) > 1]
    if wrong:
        raise ValueError(f"the table does not account for the parameter {wrong[0]} exactly once")
    return expanded
