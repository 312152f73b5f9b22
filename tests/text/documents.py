"""Documents, and windows of them, from plain strings."""

from collections.abc import Sequence

from transformer_jax.text.pipeline import Windows, make_windows
from transformer_jax.text.records import Document
from transformer_jax.text.tokenizer import Tokenizer, byte_tokenizer
from transformer_jax.text.tokens import tokenize


def documents(texts: Sequence[str], domains: Sequence[int] | None = None) -> list[Document]:
    return [Document(f"file {i}", text, 0 if domains is None else domains[i]) for i, text in enumerate(texts)]


def windows_of(
    texts: Sequence[str], seq_len: int, domains: Sequence[int] | None = None, tokenizer: Tokenizer | None = None
) -> Windows:
    return make_windows(tokenize(documents(texts, domains), tokenizer or byte_tokenizer()), seq_len)
