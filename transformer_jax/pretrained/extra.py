"""Packages that reading and writing published models needs besides those that everything needs."""

import importlib
from typing import Any

from transformer_jax.errors import UserError


def load_extra(module: str) -> Any:
    """Import a module of the extra `pretrained`. Raises `UserError` saying how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"published models need another package ({error}); pip install -e '.[pretrained]'") from None
