"""Transformers as pure JAX functions: train by teacher forcing, decode through an immutable KV cache.

Settings are imported at once; a name that needs JAX is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

from transformer_jax.architecture import ModelConfig
from transformer_jax.config import RunConfig
from transformer_jax.errors import UserError
from transformer_jax.presets import preset

if TYPE_CHECKING:
    from transformer_jax.decoding.generate import generate
    from transformer_jax.model.transformer import Model, build
    from transformer_jax.training.open_model import open_model

__version__ = "0.1.0"

__all__ = ["Model", "ModelConfig", "RunConfig", "UserError", "build", "generate", "open_model", "preset"]

_HOMES = {
    "Model": "transformer_jax.model.transformer",
    "build": "transformer_jax.model.transformer",
    "generate": "transformer_jax.decoding.generate",
    "open_model": "transformer_jax.training.open_model",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
