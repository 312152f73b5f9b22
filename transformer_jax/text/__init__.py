"""Strings to batches of tokens: tokenizers, corpora, and the stream of packed windows."""
