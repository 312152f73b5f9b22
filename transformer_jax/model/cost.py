"""Parameters, FLOPs and bytes of a model in closed form, from its config alone."""

from transformer_jax.architecture import ModelConfig


def num_params(c: ModelConfig) -> int:
    """Count the parameters: embeddings, L blocks, the last norm and what makes logits of it."""
    norm = c.D * (2 if c.norm_bias else 1)
    norms_of_block = {"pre": 2, "post": 2, "pre_and_post": 4, "branch": 2, "parallel": 2}[c.residual]
    attention = _attention(c) + _attention_vectors(c)
    mlp = _mlp(c) * max(c.E, 1) + c.D * c.E + (((c.F * (2 if c.mlp == "gated" else 1)) + c.D) if c.mlp_bias else 0)
    tables = c.table_rows + (c.max_seq_len if c.positions == "learned" else 0) + c.num_token_types
    output = (0 if c.tie_embeddings else c.table_rows * c.D) + (c.table_rows if c.output_bias else 0)
    if c.output_transform:
        output += c.D * c.D + (c.D if c.output_bias else 0) + norm
    output += c.D * c.D + c.D if c.pooler else 0
    ends = norm * ((c.residual != "post") + c.embedding_norm)
    return tables * c.D + c.L * (attention + mlp + norms_of_block * norm) + ends + output


def product_params(c: ModelConfig) -> int:
    """Count the parameters that multiply a token: all but norms, biases, tables only looked up, experts not chosen."""
    mlp = _mlp(c) * (c.experts_per_token if c.E else 1) + c.D * c.E
    return c.table_rows * c.D + (c.D * c.D if c.output_transform else 0) + c.L * (_attention(c) + mlp)


def train_flops(c: ModelConfig, B: int, T: int) -> int:
    """FLOPs of one training step, a multiply-add being two.

        B T (6 P + 12 N H sum_layers min(T, window)),    P = product_params

    Forward is a third of it. The whole T x T square of attention is counted, as is usual, also where half is masked.

    Reference: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    seen = sum(min(T, c.window) if c.window is not None and kind == "local" else T for kind in c.kinds)
    return B * T * (6 * product_params(c) + 12 * c.N * c.H * seen)


def cache_bytes(c: ModelConfig, B: int, S: int) -> int:
    """Bytes of a KV cache of S slots for B rows: 2 L B K S H numbers of the compute dtype."""
    return 2 * c.L * B * c.K * S * c.H * (2 if c.dtype == "bfloat16" else 4)


def _attention(c: ModelConfig) -> int:
    return c.D * (c.N + 2 * c.K) * c.H + c.N * c.H * c.D


def _attention_vectors(c: ModelConfig) -> int:
    biases = {"none": 0, "qkv": (c.N + 2 * c.K) * c.H, "all": (c.N + 2 * c.K) * c.H + c.D}[c.attention_bias]
    return biases + {"none": 0, "head": 2 * c.H, "projection": (c.N + c.K) * c.H}[c.qk_norm]


def _mlp(c: ModelConfig) -> int:
    return (3 if c.mlp == "gated" else 2) * c.D * c.F
