"""Parameters that speak: from logits to tokens, from prompts to completions, from a file to a file."""
