"""Any model to a folder that transformers loads, or to a GGUF file that llama.cpp loads."""

from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from transformer_jax.architecture import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Params
from transformer_jax.pretrained.gguf_export import GGUFType, save_gguf
from transformer_jax.pretrained.huggingface import save_folder
from transformer_jax.text.tokenizer import Tokenizer

Stored = Literal["float32", "bfloat16", "float16", "q8_0"]
GGUF_TYPES: dict[Stored, GGUFType] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}


def convert(
    to: Path, c: ModelConfig, params: Params, tokenizer: Tokenizer, dtype: Stored, *, prefer: str | None = None
) -> None:
    """Write a GGUF file where the name ends in .gguf, else a folder; of several families, `prefer`.

    Raises `UserError` when nothing published computes this model exactly, and when there is something at `to`.
    """
    if to.suffix == ".gguf":
        save_gguf(to, c, params, tokenizer, GGUF_TYPES[dtype])
        return
    if dtype == "q8_0":
        raise UserError("q8_0 is a type of GGUF files; name a file that ends in .gguf, or choose another dtype")
    if dtype == "float16":
        largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(params))
        if largest > float(jnp.finfo(jnp.float16).max):
            raise UserError(f"a parameter is {largest:g}, more than float16 can hold; choose bfloat16")
    stored = jax.tree.map(lambda x: x.astype(dtype), params)
    save_folder(to, c, stored, tokenizer, prefer=prefer, dtype=dtype)
