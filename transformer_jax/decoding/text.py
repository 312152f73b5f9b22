"""One prompt as text, continued as text, piece by piece."""

from collections.abc import Iterator, Sequence
from typing import Any

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.generate import stream
from transformer_jax.decoding.prefill import check_prompt
from transformer_jax.model.transformer import Model, Params
from transformer_jax.text.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def stream_text(
    model: Model, params: Params, tokenizer: Tokenizer, tokens: Sequence[int], settings: DecodingConfig
) -> Iterator[str]:
    """Continue a prompt, given as its ids; the pieces joined are the continuation decoded as a whole.

    Raises `UserError` when the prompt does not fit into the context.
    """
    check_prompt(model, tokens)
    choice: dict[str, Any] = {
        "stop_ids": tokenizer.stop_ids,
        "vocab_limit": min(tokenizer.vocab_size, model.vocab_size),
    }
    written: list[int] = []
    shown = ""
    for (piece,) in stream(model, params, [tokens], settings, **choice):
        written += piece.tokens
        text = tokenizer.decode_after(tokens, written)
        if piece.finish_reason is None:
            # The bytes of a character can be spread over tokens; until the last one comes they decode to this.
            text = text.rstrip(UNFINISHED)
        yield text.removeprefix(shown)
        shown = text
