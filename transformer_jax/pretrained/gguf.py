"""GGUF files, as llama.cpp reads them: one file with a model's shape, its parameters and its tokenizer."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.architecture import DType, ModelConfig, RopeScaling
from transformer_jax.errors import UserError
from transformer_jax.model.positions import rope_frequencies
from transformer_jax.pretrained import gguf_names
from transformer_jax.pretrained.config_reader import WRONG_KINDS, Settings
from transformer_jax.pretrained.families import canonical
from transformer_jax.pretrained.gguf_file import GGUFFile, GGUFTensor, open_gguf
from transformer_jax.pretrained.gguf_tokenizer import read_gguf_tokenizer
from transformer_jax.pretrained.huggingface import Pretrained
from transformer_jax.pretrained.names import Row
from transformer_jax.pretrained.parameters import Report, match, no_report, read_params
from transformer_jax.sharding import Mesh

Tree = dict[str, Any]

ROPE_FACTORS = "rope_freqs.weight"
"""By what each frequency is divided: how a file says that it scales as Llama 3 does."""

LLAMA_3_SCALINGS = tuple(RopeScaling("llama3", factor=factor, original_max_len=8192) for factor in (8.0, 32.0))
"""Those of Llama 3.1 and of Llama 3.2."""


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures."""

    family: str
    """What a config.json would call it."""
    rows: tuple[Row, ...]
    fields: Callable[[Settings, Tree], Tree]
    """Fields of `ModelConfig` besides those that all architectures write alike."""


def _plain(settings: Settings, fields: Tree) -> Tree:
    return {}


def _experts(settings: Settings, fields: Tree) -> Tree:
    return {
        "num_experts": settings.take("expert_count"),
        "experts_per_token": settings.take("expert_used_count"),
        "d_ff": settings.take("expert_feed_forward_length", fields["d_ff"]),
    }


def _qwen2(settings: Settings, fields: Tree) -> Tree:
    return {"attention_bias": "qkv"}


def _qwen3(settings: Settings, fields: Tree) -> Tree:
    return {"qk_norm": "head"}


def _qwen3_moe(settings: Settings, fields: Tree) -> Tree:
    return {"qk_norm": "head"} | _experts(settings, fields)


def _gemma(settings: Settings, fields: Tree) -> Tree:
    return {"norm": "rmsnorm_plus_one", "activation": "gelu_tanh", "scale_embeddings": True}


def _gemma2(settings: Settings, fields: Tree) -> Tree:
    return _gemma(settings, fields) | {
        "residual": "pre_and_post",
        "window": settings.take("attention.sliding_window", 4096),
        "layer_pattern": ("local", "global"),
        "attention_softcap": settings.take("attn_logit_softcapping", 50.0),
        "logit_softcap": settings.take("final_logit_softcapping", 30.0),
        # llama.cpp knows the largest model, whose scale is another, by its layers.
        "query_scale": (fields["d_model"] / fields["num_heads"]) ** -0.5 if fields["num_layers"] == 46 else None,
    }


def _gemma3(settings: Settings, fields: Tree) -> Tree:
    return _gemma(settings, fields) | {
        "residual": "pre_and_post",
        "qk_norm": "head",
        "window": settings.take("attention.sliding_window"),
        # Neither is in the file: llama.cpp too knows them by the name of the architecture.
        "layer_pattern": ("local",) * 5 + ("global",),
        "local_rope_theta": 10_000.0,
        "query_scale": (fields["d_model"] / fields["num_heads"]) ** -0.5 if fields["num_layers"] == 62 else None,
    }


def _olmo2(settings: Settings, fields: Tree) -> Tree:
    return {"residual": "branch", "qk_norm": "projection"}


def _with_layer_norm(activation: str) -> Tree:
    return {
        "norm": "layernorm",
        "norm_bias": True,
        "mlp": "plain",
        "mlp_bias": True,
        "attention_bias": "all",
        "activation": activation,
    }


def _bert(settings: Settings, fields: Tree) -> Tree:
    return _with_layer_norm("gelu") | {
        "positions": "learned",
        "residual": "post",
        "embedding_norm": True,
        "pooler": "cls.weight" in settings.tensors,
    }


def _gpt2(settings: Settings, fields: Tree) -> Tree:
    return _with_layer_norm("gelu_tanh") | {"positions": "learned"}


def _neox(settings: Settings, fields: Tree) -> Tree:
    parallel = settings.take("use_parallel_residual", True)
    return _with_layer_norm("gelu") | {"residual": "parallel" if parallel else "pre"}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", gguf_names.LLAMA, _plain),
    "qwen2": Architecture("qwen2", gguf_names.QWEN, _qwen2),
    "qwen3": Architecture("qwen3", gguf_names.QWEN, _qwen3),
    "qwen3moe": Architecture("qwen3_moe", gguf_names.QWEN_EXPERTS, _qwen3_moe),
    "gemma": Architecture("gemma", gguf_names.GEMMA, _gemma),
    "gemma2": Architecture("gemma2", gguf_names.GEMMA, _gemma2),
    "gemma3": Architecture("gemma3_text", gguf_names.GEMMA, _gemma3),
    "olmo2": Architecture("olmo2", gguf_names.OLMO_2, _olmo2),
    "phi3": Architecture("phi3", gguf_names.PHI_3, _plain),
    "gpt2": Architecture("gpt2", gguf_names.JOINED, _gpt2),
    "gptneox": Architecture("gpt_neox", gguf_names.JOINED, _neox),
    "bert": Architecture("bert", gguf_names.BERT, _bert),
}

MIXTRAL = Architecture("mixtral", gguf_names.MIXTRAL, _experts)
"""Llama with experts, under the same name."""


def load_gguf(
    path: Path, dtype: DType | None = None, mesh: Mesh | None = None, report: Report = no_report
) -> Pretrained:
    """Read the model of a file, straight onto the mesh or the first device.

    Matrices are kept in the precision that the model computes in, float32 by default. Raises `UserError` naming the
    file, and the tensor or the setting, that cannot be honoured.
    """
    file = open_gguf(path)
    architecture = _architecture(file, path)
    config = read_config(architecture, file, path)
    config = dataclasses.replace(config, dtype=dtype or "float32")
    tensors = {name: tensor for name, tensor in file.tensors.items() if name != ROPE_FACTORS}
    matched = match(architecture.rows, config, tensors, path)
    # Before the parameters, which then reuse the memory that making it took.
    tokenizer = read_gguf_tokenizer(file.settings, path)
    file.settings.clear()
    return Pretrained(config, read_params(matched, mesh, report), architecture.family, tokenizer)


def config_of_gguf(path: Path) -> ModelConfig:
    """Read the shape of a file's model, without its parameters."""
    file = open_gguf(path)
    return dataclasses.replace(read_config(_architecture(file, path), file, path), dtype="float32")


def _architecture(file: GGUFFile, path: Path) -> Architecture:
    name = file.settings.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(f"{path}: general.architecture is {name!r}; expected one of {', '.join(ARCHITECTURES)}")
    return MIXTRAL if name == "llama" and file.settings.get("llama.expert_count") else ARCHITECTURES[name]


def read_config(architecture: Architecture, file: GGUFFile, path: Path) -> ModelConfig:
    """Turn a file's settings into a `ModelConfig`. Raises `UserError` naming what cannot be honoured."""
    name = file.settings["general.architecture"]
    settings = Settings(file.settings, str(path), file.tensors).within(f"{name}.")
    try:
        fields = _read_sizes(settings, file, path)
        fields |= architecture.fields(settings, fields)
        config = ModelConfig(**fields)
    except UserError as error:
        raise UserError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None
    except WRONG_KINDS as error:
        raise UserError(f"{path}: a setting has a value of the wrong kind ({error})") from None
    settings.finish()
    return canonical(_scaled(config, file.tensors, path))


def _read_sizes(settings: Settings, file: GGUFFile, path: Path) -> Tree:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise UserError(f"{path}: the tensor 'token_embd.weight' is missing, or is no table")
    settings.expect("vocab_size", table.shape[0])
    # How vectors are made of what is computed is no part of the model (pooling.py).
    settings.take("pooling_type", None)
    types = file.tensors.get("token_types.weight")
    heads = settings.size("attention.head_count")
    width = settings.size("embedding_length")
    head = settings.size("attention.key_length", max(1, width // heads))
    settings.expect("attention.value_length", head)
    eps = settings.number("attention.layer_norm_rms_epsilon", settings.number("attention.layer_norm_epsilon", 1e-5))
    return {
        "vocab_size": table.shape[0],
        "max_seq_len": settings.size("context_length"),
        "num_layers": settings.size("block_count"),
        "d_model": width,
        "d_ff": settings.size("feed_forward_length", 1),
        "num_heads": heads,
        "num_kv_heads": settings.take("attention.head_count_kv", heads),
        "head_dim": head,
        "attention": "causal" if settings.take("attention.causal", True) else "bidirectional",
        "num_token_types": types.shape[0] if types is not None and len(types.shape) == 2 else 0,
        "norm_eps": float(f"{eps:.6g}"),
        "tie_embeddings": "output.weight" not in file.tensors,
        "attention_bias": _biases(file.tensors),
        "rope_theta": settings.take("rope.freq_base", 10_000.0),
        "rope_fraction": _fraction(settings.size("rope.dimension_count", head), head),
        "rope_scaling": _read_scaling(settings),
    }


def _fraction(rotated: int, head: int) -> float:
    """The fraction of a head that comes to so many entries, though the product is cut to a whole number."""
    fraction = rotated / head
    return fraction if int(head * fraction) == rotated else math.nextafter(fraction, math.inf)


def _biases(tensors: Mapping[str, GGUFTensor]) -> str:
    if "blk.0.attn_output.bias" in tensors:
        return "all"
    return "qkv" if "blk.0.attn_q.bias" in tensors else "none"


def _read_scaling(settings: Settings) -> RopeScaling:
    kind = settings.take("rope.scaling.type", "linear")
    factor = settings.number("rope.scaling.factor", 1.0)
    original = settings.take("rope.scaling.original_context_length", None)
    if kind == "none" or factor == 1:
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "yarn":
        return RopeScaling("yarn", factor, original)
    raise settings.refuse("rope.scaling.type", "one of none, linear, yarn")


def _scaled(c: ModelConfig, tensors: Mapping[str, GGUFTensor], path: Path) -> ModelConfig:
    """The config with the scaling that its tensor of factors, where there is one, amounts to."""
    if ROPE_FACTORS not in tensors:
        return c
    factors = tensors[ROPE_FACTORS].read()
    plain = rope_frequencies(c.rope_theta, c.R, RopeScaling())
    for scaling in LLAMA_3_SCALINGS:
        expected = plain / rope_frequencies(c.rope_theta, c.R, scaling)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-5):
            return dataclasses.replace(c, rope_scaling=scaling)
    raise UserError(f"{path}: the tensor {ROPE_FACTORS!r} is not the scaling of Llama 3.1 or 3.2")
