"""A model and its tokenizer written as a GGUF file that llama.cpp loads."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from transformer_jax.architecture import ModelConfig, RopeScaling
from transformer_jax.errors import UserError
from transformer_jax.model.positions import rope_frequencies
from transformer_jax.model.transformer import Params
from transformer_jax.pretrained.extra import load_extra
from transformer_jax.pretrained.families import canonical, computes, write_config
from transformer_jax.pretrained.gguf import (
    ARCHITECTURES,
    LLAMA_3_SCALINGS,
    MIXTRAL,
    ROPE_FACTORS,
    Architecture,
    read_config,
)
from transformer_jax.pretrained.gguf_file import GGUFFile, GGUFTensor
from transformer_jax.pretrained.gguf_tokenizer_export import describe_tokenizer
from transformer_jax.pretrained.huggingface import tensors_of
from transformer_jax.pretrained.names import expand
from transformer_jax.pretrained.parameters import by_path
from transformer_jax.pretrained.pooling import Pooling, number_of_pooling
from transformer_jax.settings import differences
from transformer_jax.text.tokenizer import Tokenizer

Tree = dict[str, Any]
GGUFType = Literal["F32", "F16", "BF16", "Q8_0"]


def save_gguf(
    path: Path,
    c: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    kind: GGUFType = "F32",
    pooling: Pooling | None = None,
) -> None:
    """Write a model, matrices in the type given and vectors in float32, as a new file.

    `pooling` is how an encoder makes one vector of a text, where that is known.
    Raises `UserError` when llama.cpp has no architecture that computes this model exactly, or when the file exists.
    """
    if path.exists():
        raise UserError(f"{path} exists already; name a file to make")
    name, architecture = _find(c)
    settings = _settings(name, c, pooling)
    _check_same(name, architecture, settings, c)
    settings |= describe_tokenizer(tokenizer, c.table_rows)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(temporary, name, settings, architecture, c, params, kind)
        temporary.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); make room, or choose another") from None
    finally:
        temporary.unlink(missing_ok=True)


def _find(c: ModelConfig) -> tuple[str, Architecture]:
    """The architecture of the model's family."""
    family, _ = write_config(c)
    if family.model_type == MIXTRAL.family:
        return "llama", MIXTRAL
    for name, architecture in ARCHITECTURES.items():
        if architecture.family == family.model_type:
            return name, architecture
    raise UserError(f"llama.cpp has no architecture for {family.architecture} that this version writes")


def _settings(name: str, c: ModelConfig, pooling: Pooling | None) -> Tree:
    eps = "layer_norm_epsilon" if c.norm == "layernorm" else "layer_norm_rms_epsilon"
    rope = {
        "rope.freq_base": float(c.rope_theta),
        "rope.dimension_count": c.R,
        **_scaling(c.rope_scaling),
    }
    optional = {
        "attention.sliding_window": c.window,
        "attn_logit_softcapping": c.attention_softcap,
        "final_logit_softcapping": c.logit_softcap,
        "expert_count": c.E or None,
        "expert_used_count": c.experts_per_token or None,
        "expert_feed_forward_length": c.F if name == "qwen3moe" else None,
        "attention.causal": False if c.attention == "bidirectional" else None,
        "pooling_type": None if pooling is None else number_of_pooling(pooling),
        "use_parallel_residual": c.residual == "parallel" if name == "gptneox" else None,
    }
    settings = {
        "context_length": c.max_seq_len,
        "embedding_length": c.D,
        "block_count": c.L,
        "feed_forward_length": c.F,
        "vocab_size": c.table_rows,
        "attention.head_count": c.N,
        "attention.head_count_kv": c.K,
        "attention.key_length": c.H,
        "attention.value_length": c.H,
        f"attention.{eps}": float(c.norm_eps),
        **(rope if c.positions == "rope" else {}),
        **{setting: value for setting, value in optional.items() if value is not None},
    }
    # Beside the tokenizer's settings, though it is the model that has the table.
    types = {"tokenizer.ggml.token_type_count": c.num_token_types} if c.num_token_types else {}
    return {f"{name}.{setting}": value for setting, value in settings.items()} | types


def _scaling(scaling: RopeScaling) -> Tree:
    if scaling.kind in ("linear", "yarn"):
        original = (
            {"rope.scaling.original_context_length": scaling.original_max_len} if scaling.original_max_len else {}
        )
        return {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor), **original}
    return {}


ADDED_AS_IT_IS = ("token_types.weight",)
"""Tensors that llama.cpp adds to its own float32 without looking at their type."""

WITH_BIASES = ("llama", "qwen2", "gpt2", "gptneox", "bert")
NEVER_TIED = ("olmo2", "gptneox")
"""Architectures of llama.cpp that know biases of attention, and that want an output layer of their own."""


def _check_same(name: str, architecture: Architecture, settings: Tree, c: ModelConfig) -> None:
    """Refuse a model that the file would not describe exactly, by reading what is about to be written."""
    if c.attention_bias != "none" and name not in WITH_BIASES:
        raise UserError(f"llama.cpp's {name} has no biases in attention")
    if c.output_transform:
        raise UserError(f"llama.cpp's {name} makes vectors of texts and has no output layer, as this model does")
    if c.tie_embeddings and name in NEVER_TIED:
        raise UserError(f"llama.cpp's {name} has an output layer of its own, and this model's is its embedding table")
    # Vectors and tables that the reader looks for, not to read them but to see whether they are there.
    present: dict[str, tuple[int, ...]] = {"token_embd.weight": (c.table_rows, c.D)}
    if not c.tie_embeddings:
        present["output.weight"] = (c.table_rows, c.D)
    if c.attention_bias != "none":
        present["blk.0.attn_q.bias"] = (c.N * c.H,)
    if c.attention_bias == "all":
        present["blk.0.attn_output.bias"] = (c.D,)
    if c.num_token_types:
        present["token_types.weight"] = (c.num_token_types, c.D)
    if c.pooler:
        present["cls.weight"] = (c.D, c.D)
    tensors = {tensor: GGUFTensor(Path(), None, shape, 0, 0) for tensor, shape in present.items()}
    file = GGUFFile({"general.architecture": name, **settings}, tensors)
    wanted = dataclasses.replace(c, vocab_size=c.table_rows, vocab_multiple=1, dtype="float32")
    wanted = computes(canonical(wanted))
    if wanted.rope_scaling in LLAMA_3_SCALINGS:
        wanted = dataclasses.replace(wanted, rope_scaling=RopeScaling())
    found = computes(dataclasses.replace(read_config(architecture, file, Path("the file")), dtype="float32"))
    if found != wanted:
        changed = "; ".join(differences(wanted, found))
        raise UserError(f"llama.cpp's {name} does not compute this model exactly (the model's | the file's): {changed}")


def _write(
    path: Path, name: str, settings: Tree, architecture: Architecture, c: ModelConfig, params: Params, kind: GGUFType
) -> None:
    gguf = load_extra("gguf")
    quants = load_extra("gguf.quants")

    def kind_of(name: str, shape: tuple[int, ...]) -> Any:
        chosen = gguf.GGMLQuantizationType[kind if len(shape) > 1 and name not in ADDED_AS_IT_IS else "F32"]
        fits = not shape or shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0] == 0
        return chosen if fits else gguf.GGMLQuantizationType.F16

    writer = gguf.GGUFWriter(path, name)
    for setting, value in settings.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(setting, value)
    # A dictionary would come back sorted, and the numbers must follow in the order of the names.
    shapes = jax.eval_shape(lambda params: [array for _, array in tensors_of(architecture.rows, c, params)], params)
    names = [name for row in expand(architecture.rows, c, set(by_path(params))) for name in row.theirs]
    factors = _factors(c)
    for tensor, array in [*factors.items(), *zip(names, shapes, strict=True)]:
        stored = kind_of(tensor, array.shape)
        shape = quants.quant_shape_to_byte_shape(array.shape, stored)
        writer.add_tensor_info(tensor, shape, np.dtype(np.uint8), math.prod(shape), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, array in [*factors.items(), *tensors_of(architecture.rows, c, params)]:
        writer.write_tensor_data(quants.quantize(np.asarray(array, np.float32), kind_of(tensor, array.shape)))
    writer.close()


def _factors(c: ModelConfig) -> dict[str, np.ndarray]:
    if c.rope_scaling not in LLAMA_3_SCALINGS:
        return {}
    plain = rope_frequencies(c.rope_theta, c.R, RopeScaling())
    return {ROPE_FACTORS: (plain / rope_frequencies(c.rope_theta, c.R, c.rope_scaling)).astype(np.float32)}
