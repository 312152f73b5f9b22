"""Any model to a folder that transformers loads, or to a GGUF file that llama.cpp loads."""

import dataclasses
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from transformer_jax.architecture import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Params
from transformer_jax.pretrained.gguf_export import GGUFType, save_gguf
from transformer_jax.pretrained.huggingface import save_folder
from transformer_jax.pretrained.pooling import Pooling
from transformer_jax.text.tokenizer import Tokenizer

Stored = Literal["float32", "bfloat16", "float16", "q8_0"]
GGUF_TYPES: dict[Stored, GGUFType] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}


def convert(
    to: Path,
    c: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    dtype: Stored,
    *,
    prefer: str | None = None,
    pooling: Pooling | None = None,
) -> None:
    """Write a GGUF file where the name ends in .gguf, else a folder; of several families, `prefer`.

    `pooling` is how an encoder makes one vector of a text, where that is known.

    Raises `UserError` when nothing published computes this model exactly, and when there is something at `to`.
    """
    if not to.name:
        raise UserError(f"{to} exists already; name a folder or a file to make")
    # A matrix whose rows do not divide into blocks of q8_0 is stored in float16.
    held = "float16" if dtype == "q8_0" else dtype
    # XLA's CPU backend leaves NaN out of a maximum.
    largest = [float(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)).max()) for x in jax.tree.leaves(params)]
    wrong = [x for x in largest if x > float(jnp.finfo(held).max)]
    if wrong:
        raise UserError(
            f"a parameter is {wrong[0]:g} or no number, and {held} holds numbers of up to {jnp.finfo(held).max:g} alone"
        )
    c, params = without_padding(c, params)
    if to.suffix.lower() == ".gguf":
        save_gguf(to, c, params, tokenizer, GGUF_TYPES[dtype], pooling)
        return
    if dtype == "q8_0":
        raise UserError("q8_0 is a type of GGUF files; name a file that ends in .gguf, or choose another dtype")
    stored = jax.tree.map(lambda x: x.astype(dtype), params)
    save_folder(to, c, stored, tokenizer, prefer=prefer, dtype=dtype, pooling=pooling)


def without_padding(c: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Cut the rows of the vocabulary that no id has: another program would take them for ids."""
    if c.table_rows == c.V:
        return c, params
    cut = {**params, "embed": params["embed"][: c.V]}
    if "output" in params:
        cut["output"] = {"weight": params["output"]["weight"][:, : c.V]}
    if "output_bias" in params:
        cut["output_bias"] = params["output_bias"][: c.V]
    return dataclasses.replace(c, vocab_multiple=1), cut
