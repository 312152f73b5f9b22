"""The families of published models: how to recognise one, and what describes it."""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from transformer_jax.architecture import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.pretrained import decoders, encoders, names
from transformer_jax.pretrained.config_reader import WRONG_KINDS, Settings
from transformer_jax.pretrained.names import Row

Tree = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How one kind of published model is described and stored."""

    model_type: str
    """What its config.json calls itself."""
    architecture: str
    """The class of transformers that computes it."""
    rows: tuple[Row, ...]
    """Which tensor is which parameter."""
    read: Callable[[Settings], Tree]
    """From a config.json to fields of `ModelConfig`."""
    write: Callable[[ModelConfig], Tree]
    """From a model of this family to a config.json, without the names of the family."""


FAMILIES = (
    Family("llama", "LlamaForCausalLM", names.LLAMA, decoders.read_llama, decoders.write_llama),
    Family("mistral", "MistralForCausalLM", names.LLAMA, decoders.read_mistral, decoders.write_mistral),
    Family("mixtral", "MixtralForCausalLM", names.MIXTRAL, decoders.read_mixtral, decoders.write_mixtral),
    Family("qwen2", "Qwen2ForCausalLM", names.LLAMA, decoders.read_qwen2, decoders.write_qwen2),
    Family("qwen3", "Qwen3ForCausalLM", names.LLAMA, decoders.read_qwen3, decoders.write_qwen3),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", names.QWEN_EXPERTS, decoders.read_qwen3_moe, decoders.write_qwen3_moe),
    Family("gemma", "GemmaForCausalLM", names.LLAMA, decoders.read_gemma, decoders.write_gemma),
    Family("gemma2", "Gemma2ForCausalLM", names.GEMMA_2, decoders.read_gemma2, decoders.write_gemma2),
    Family("gemma3_text", "Gemma3ForCausalLM", names.GEMMA_2, decoders.read_gemma3, decoders.write_gemma3),
    Family("phi3", "Phi3ForCausalLM", names.PHI_3, decoders.read_phi3, decoders.write_mistral),
    Family("gpt_neox", "GPTNeoXForCausalLM", names.GPT_NEOX, decoders.read_neox, decoders.write_neox),
    Family("olmo2", "Olmo2ForCausalLM", names.GEMMA_2, decoders.read_olmo2, decoders.write_llama),
    Family("gpt2", "GPT2LMHeadModel", names.GPT_2, decoders.read_gpt2, decoders.write_gpt2),
    Family("gpt2", "GPT2Model", names.BARE_GPT_2, decoders.read_gpt2, decoders.write_gpt2),
    Family("bert", "BertForMaskedLM", names.BERT, encoders.read_bert, encoders.write_bert),
    Family("bert", "BertModel", names.BARE_BERT, encoders.read_bert, encoders.write_bare_bert),
    Family("roberta", "RobertaForMaskedLM", names.ROBERTA, encoders.read_roberta, encoders.write_roberta),
    Family("roberta", "RobertaModel", names.BARE_ROBERTA, encoders.read_roberta, encoders.write_bare_roberta),
)


def family_of(tree: Tree, where: str, tensors: Collection[str]) -> Family:
    """Recognise the family of a config.json with its tensors. Raises `UserError` naming one that is not known."""
    candidates = [family for family in FAMILIES if family.model_type == tree.get("model_type")]
    for family in candidates:
        # Some publish the trunk alone, whose tensors then lack a prefix.
        if family.rows[0].theirs[0] in tensors:
            return family
    if candidates:
        return candidates[0]
    known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
    raise UserError(f"{where}: model_type is {tree.get('model_type')!r}; expected one of {known}")


def read_config(family: Family, tree: Tree, where: str, tensors: Collection[str] = ()) -> ModelConfig:
    """Turn a config.json into a `ModelConfig`. Raises `UserError` naming what cannot be honoured."""
    settings = Settings(tree, where, tensors)
    try:
        config = ModelConfig(**family.read(settings))
    except UserError as error:
        raise UserError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    except WRONG_KINDS as error:
        raise UserError(f"{where}: a setting has a value of the wrong kind ({error})") from None
    settings.finish()
    return canonical(config)


def write_config(c: ModelConfig, prefer: str | None = None) -> tuple[Family, Tree]:
    """Find a family that computes exactly this model, of several the one of model_type `prefer`, with its config.json.

    Raises `UserError` when there is none: nothing is ever approximated.
    """
    wanted = computes(canonical(dataclasses.replace(c, vocab_size=c.table_rows, vocab_multiple=1)))
    for family in sorted(FAMILIES, key=lambda family: family.model_type != prefer):
        tensors = [row.theirs[0] for row in family.rows if _has(c, row)]
        try:
            tree = {"architectures": [family.architecture], "model_type": family.model_type} | family.write(c)
            if computes(read_config(family, tree, "config.json", tensors)) == wanted:
                return family, tree
        except UserError:
            continue
    raise UserError(
        "no family of published models computes this one exactly, so there is no config.json for it;"
        f" the families are {', '.join(family.architecture for family in FAMILIES)}"
    )


def computes(c: ModelConfig) -> ModelConfig:
    """The config without what counts while a model is trained alone."""
    return dataclasses.replace(c, dropout=0.0, attention_dropout=0.0, balance_loss=0.0, router_z_loss=0.0, remat="none")


def _has(c: ModelConfig, row: Row) -> bool:
    """Whether the model has the optional part of an encoder that a row belongs to."""
    part = row.ours[0].partition("/")[0]
    return {"pooler": c.pooler, "transform": c.output_transform, "output_bias": c.output_bias}.get(part, False)


def canonical(c: ModelConfig) -> ModelConfig:
    """The same model, each setting that follows from others left to them, so that equal models are equal configs."""
    kinds = c.kinds
    period = next(n for n in range(1, c.L + 1) if all(kinds[i] == kinds[i % n] for i in range(c.L)))
    return dataclasses.replace(
        c,
        num_kv_heads=None if c.K == c.N else c.K,
        head_dim=None if c.N * c.H == c.D else c.H,
        query_scale=None if c.query_scale is None or abs(c.query_scale * c.H**0.5 - 1) < 1e-12 else c.query_scale,
        layer_pattern=kinds[:period],
    )
