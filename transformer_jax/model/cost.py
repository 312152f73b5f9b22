"""Parameters, FLOPs and bytes of a model in closed form, from its config alone."""

from transformer_jax.config import ModelConfig


def num_params(c: ModelConfig) -> int:
    """Count the parameters: embeddings, L blocks, the last norm and, when it is not tied, the output layer."""
    bias = 1 if c.use_bias else 0
    norm = c.D * (2 if c.norm == "layernorm" and c.use_bias else 1)
    heads = (c.N + 2 * c.K) * c.H
    attention = c.D * heads + c.N * c.H * c.D + bias * (heads + c.D)
    mlp = (3 if c.mlp == "gated" else 2) * c.D * c.F + bias * ((2 if c.mlp == "gated" else 1) * c.F + c.D)
    embeddings = c.V * c.D * (1 if c.tie_embeddings else 2) + (c.max_seq_len * c.D if c.positions == "learned" else 0)
    return embeddings + c.L * (attention + mlp + 2 * norm) + norm


def product_params(c: ModelConfig) -> int:
    """Count the parameters that multiply activations: all but norms, biases and tables that are only looked up."""
    attention = c.D * (c.N + 2 * c.K) * c.H + c.N * c.H * c.D
    return c.V * c.D + c.L * (attention + (3 if c.mlp == "gated" else 2) * c.D * c.F)


def train_flops(c: ModelConfig, B: int, T: int) -> int:
    """FLOPs of one training step, a multiply-add being two.

        B T (6 P + 12 L N H T),    P = product_params

    Forward is a third of it. The whole T x T square of attention is counted, as is usual, also where half is masked.

    Reference: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    return B * T * (6 * product_params(c) + 12 * c.L * c.N * c.H * T)


def cache_bytes(c: ModelConfig, B: int, S: int) -> int:
    """Bytes of a KV cache of S slots for B rows: 2 L B K S H numbers of the compute dtype."""
    return 2 * c.L * B * c.K * S * c.H * (2 if c.dtype == "bfloat16" else 4)
