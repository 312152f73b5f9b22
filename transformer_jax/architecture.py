"""The shape of a Transformer, as one frozen dataclass: every architecture is a choice of its fields.

Dimensions have one letter each, the same in every signature, einsum and comment:

    B batch    T query length    S key length (of the cache)    V vocabulary    L layers
    D model width    F feed-forward width    N query heads    K key/value heads    G = N / K    H head width
    R rotated entries of a head    E experts

This file knows nothing of arrays, files or devices.
"""

from dataclasses import dataclass, field
from typing import Literal

from transformer_jax.errors import UserError
from transformer_jax.settings import check, check_types

DType = Literal["float32", "bfloat16"]
LayerKind = Literal["global", "local"]

MOST_LAYERS = 4096


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are changed so that a model reaches further than it was first trained to.

    none     as they are
    linear   all divided by `factor` (Chen et al. 2023, "Extending Context Window via Positional Interpolation")
    dynamic  a base that grows with the length of the sequence once that is beyond `original_max_len` ("NTK-aware")
    yarn     the slow ones divided, the fast ones kept, a ramp between (Peng et al. 2023, "YaRN")
    llama3   the same idea with a ramp over wavelengths (Llama 3.1)
    """

    kind: Literal["none", "linear", "dynamic", "yarn", "llama3"] = "none"
    """Which of them."""
    factor: float = 1.0
    """How many times further the model reaches."""
    original_max_len: int | None = None
    """The context that it was first trained to; dynamic, yarn and llama3 need it."""
    low_freq_factor: float = 1.0
    """llama3: frequencies that turn fewer times than this over the original context are divided."""
    high_freq_factor: float = 4.0
    """llama3: frequencies that turn more often than this are kept."""
    beta_fast: float = 32.0
    """yarn: frequencies that turn more often than this over the original context are kept."""
    beta_slow: float = 1.0
    """yarn: frequencies that turn fewer times than this are divided."""
    attention_factor: float | None = None
    """yarn: what queries and keys are multiplied by. None: derived from the factor."""
    mscale: float | None = None
    """yarn: how strongly the derived attention factor grows; counts together with mscale_all_dim alone."""
    mscale_all_dim: float | None = None
    """yarn: the same for what it is divided by."""
    truncate: bool = True
    """yarn: whether the ramp begins and ends at whole entries."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check(self, name, getattr(self, name) > 0, "more than 0")
        check(self, "factor", self.factor >= 1, "at least 1")
        needs = self.kind in ("dynamic", "yarn", "llama3")
        check(
            self,
            "original_max_len",
            (self.original_max_len or 0) > 0 if needs else self.original_max_len is None,
            f"the context that the model was first trained to, for kind = {self.kind!r}" if needs else "null",
        )
        check(
            self,
            "high_freq_factor",
            self.high_freq_factor > self.low_freq_factor,
            f"more than low_freq_factor = {self.low_freq_factor}",
        )
        check(
            self,
            "attention_factor",
            self.attention_factor is None or self.attention_factor > 0,
            "more than 0, or null",
        )


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Transformer."""

    vocab_size: int | None = None
    """Ids that the model knows (V). None: as many as the tokenizer has."""
    vocab_multiple: int = 1
    """The embedding table has a multiple of this many rows, to divide over devices; none beyond V is ever predicted."""
    max_seq_len: int = 256
    """Longest context: the largest position is one less."""
    num_layers: int = 4
    """Blocks (L)."""
    d_model: int = 256
    """Width of the residual stream (D)."""
    d_ff: int = 704
    """Width of the feed-forward layer (F), of each expert where there are experts."""
    num_heads: int = 4
    """Query heads (N)."""
    num_kv_heads: int | None = None
    """Key/value heads (K): 1 is multi-query, N is multi-head, between is grouped-query. None: N."""
    head_dim: int | None = None
    """Width of one head (H), free of d_model. None: d_model / num_heads."""
    attention: Literal["causal", "bidirectional"] = "causal"
    """Who may attend to whom: a decoder is causal, an encoder bidirectional."""
    layer_pattern: tuple[LayerKind, ...] = ("global",)
    """Kinds of layers, repeated until there are L: a global layer sees all that it may, a local one a window of it."""
    window: int | None = None
    """Keys that a query of a local layer may see, its own among them."""
    query_scale: float | None = None
    """Scores are multiplied by it. None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Scores are bent to stay within it: cap tanh(score / cap)."""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMS norm of queries and keys before they are rotated, of each head or of all heads together."""
    positions: Literal["rope", "learned", "sinusoidal", "none"] = "rope"
    """Rotary positions on queries and keys; a learned or a sinusoidal vector added to each embedding; or none."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    local_rope_theta: float | None = None
    """Base of the rotary frequencies of local layers, which are then not scaled. None: as the global ones."""
    rope_fraction: float = 1.0
    """Part of each head that is rotated, from its beginning."""
    rope_interleaved: bool = False
    """Whether a pair of entries stands side by side, (2i, 2i + 1), or half a head apart, (i, i + R/2)."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """How the frequencies are changed for a longer context."""
    residual: Literal["pre", "post", "pre_and_post", "branch", "parallel"] = "pre"
    """Where the norms stand: before each sub-layer f, x + f(norm(x)); after the sum, norm(x + f(x)); before and behind
    the sub-layer, x + norm(f(norm(x))); behind it alone, x + norm(f(x)); or before two sub-layers that read the same
    x, x + attention(norm(x)) + mlp(norm(x))."""
    norm: Literal["rmsnorm", "rmsnorm_plus_one", "layernorm"] = "rmsnorm"
    """Which norm; plus_one multiplies by 1 + its parameter."""
    norm_eps: float = 1e-5
    """Added to the variance inside a norm."""
    embedding_norm: bool = False
    """Whether the embeddings pass a norm before the first block."""
    mlp: Literal["gated", "plain"] = "gated"
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    """Nonlinearity of the feed-forward layer; gelu is the exact one."""
    num_experts: int = 0
    """Feed-forward layers that a router chooses from (E); 0: one layer, without a router."""
    experts_per_token: int = 0
    """Experts that each token passes through."""
    renormalize_experts: bool = True
    """Whether the chosen experts' probabilities are divided by their sum."""
    balance_loss: float = 0.01
    """Where there are experts, weight of the load-balancing loss while training."""
    router_z_loss: float = 0.001
    """Where there are experts, weight of the square of the routers' log-normalizers while training."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Which products of attention add a bias; all includes the output."""
    mlp_bias: bool = False
    """Whether the products of the feed-forward layer add a bias."""
    norm_bias: bool = False
    """Whether layer norms add a bias."""
    output_bias: bool = False
    """Whether the logits add a bias."""
    output_transform: bool = False
    """Whether the hidden state passes a product, the activation and a norm before it becomes logits (BERT)."""
    pooler: bool = False
    """Whether there is a product and a tanh over the hidden state of the first token (BERT)."""
    tie_embeddings: bool = True
    """Whether the output layer is the transposed embedding table."""
    num_token_types: int = 0
    """Rows of a second embedding table, for the kind of each token (BERT); 0: there is none."""
    scale_embeddings: bool = False
    """Whether embeddings are multiplied by sqrt(d_model), rounded to the compute dtype (Gemma)."""
    logit_softcap: float | None = None
    """Logits are bent to stay within it: cap tanh(logit / cap)."""
    dropout: float = 0.0
    """Probability of zeroing an entry of the embedding and of each sub-layer's output while training."""
    attention_dropout: float = 0.0
    """Probability of zeroing an attention weight while training."""
    dtype: DType = "bfloat16"
    """Precision of the computation. Parameters, softmax, norms and rotary angles stay float32."""
    remat: Literal["none", "block"] = "none"
    """block: keep only each block's input for the backward pass and compute the rest again."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_seq_len", "num_layers", "d_model", "d_ff", "num_heads", "rope_theta", "norm_eps"):
            check(self, name, getattr(self, name) > 0, "more than 0")
        for name in ("query_scale", "attention_softcap", "logit_softcap", "local_rope_theta", "window", "head_dim"):
            check(self, name, getattr(self, name) is None or getattr(self, name) > 0, "more than 0, or null")
        for name in ("balance_loss", "router_z_loss"):
            check(self, name, getattr(self, name) >= 0, "at least 0")
        for name in ("dropout", "attention_dropout"):
            check(self, name, 0 <= getattr(self, name) < 1, "at least 0 and less than 1")
        check(self, "num_layers", self.num_layers <= MOST_LAYERS, f"at most {MOST_LAYERS}")
        for name in ("max_seq_len", "d_model", "d_ff", "num_heads", "head_dim", "vocab_size", "window"):
            check(self, name, (getattr(self, name) or 0) < 2**30, "less than 2**30")
        for name in ("vocab_multiple", "num_token_types", "num_experts"):
            check(self, name, getattr(self, name) <= 2**20, "at most 2**20")
        check(self, "vocab_size", self.vocab_size is None or self.vocab_size > 1, "at least 2, or null")
        check(self, "vocab_multiple", self.vocab_multiple > 0, "more than 0")
        check(self, "num_token_types", self.num_token_types >= 0, "at least 0")
        check(self, "norm_bias", self.norm == "layernorm" or not self.norm_bias, "false: an RMS norm has no bias")
        self._check_heads()
        self._check_layers()
        self._check_rope()
        self._check_experts()

    def _check_heads(self) -> None:
        check(
            self,
            "num_kv_heads",
            self.num_kv_heads is None or (self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0),
            f"a positive divisor of num_heads = {self.num_heads}, or null",
        )
        check(
            self,
            "d_model",
            self.head_dim is not None or self.d_model % self.num_heads == 0,
            f"a multiple of num_heads = {self.num_heads}, or an explicit head_dim",
        )
        name = "d_model" if self.head_dim is None else "head_dim"
        check(self, name, self.H <= 2**16, "at most 2**16 features a head")

    def _check_layers(self) -> None:
        check(self, "layer_pattern", len(self.layer_pattern) > 0, "at least one kind")
        local = "local" in self.layer_pattern[: self.num_layers]
        check(
            self,
            "window",
            (self.window is not None) == local,
            "more than 0: there are local layers" if local else "null: layer_pattern gives no local layer",
        )
        check(
            self,
            "attention",
            self.attention == "causal" or not local,
            "'causal': a window looks back in local layers",
        )
        check(
            self,
            "local_rope_theta",
            self.local_rope_theta is None or local,
            "null: layer_pattern gives no local layer",
        )

    def _check_rope(self) -> None:
        if self.positions != "rope":
            for name, plain in (("rope_fraction", 1), ("rope_interleaved", False), ("local_rope_theta", None)):
                check(self, name, getattr(self, name) == plain, f"{plain}: positions are {self.positions!r}")
            check(self, "rope_scaling", self.rope_scaling == RopeScaling(), f"none: positions are {self.positions!r}")
            return
        check(self, "rope_fraction", 0 < self.rope_fraction <= 1, "more than 0 and at most 1")
        if self.R % 2 or self.R == 0:
            what = "head_dim" if self.rope_fraction == 1 else "head_dim * rope_fraction"
            raise UserError(f"ModelConfig.{what} comes to {self.R}; rotary positions need an even number of entries")
        kind = self.rope_scaling.kind
        # Their formulas divide by R - 2 and by log theta.
        if kind == "dynamic" and self.R == 2:
            raise UserError("ModelConfig.rope_scaling is 'dynamic', which needs more than one rotated pair")
        check(self, "rope_theta", kind != "yarn" or self.rope_theta > 1, "more than 1 with YaRN")

    def _check_experts(self) -> None:
        check(self, "num_experts", self.num_experts >= 0, "at least 0")
        check(
            self,
            "experts_per_token",
            0 < self.experts_per_token <= self.num_experts if self.num_experts else self.experts_per_token == 0,
            f"between 1 and num_experts = {self.num_experts}" if self.num_experts else "0: there are no experts",
        )
        if self.num_experts:
            check(self, "mlp", self.mlp == "gated", "'gated': so experts are")
            check(self, "mlp_bias", not self.mlp_bias, "false: experts have no biases")

    @property
    def V(self) -> int:
        if self.vocab_size is None:
            raise UserError("ModelConfig.vocab_size is null; a model can be built once the tokenizer has given it")
        return self.vocab_size

    @property
    def table_rows(self) -> int:
        """V, rounded up to a multiple of vocab_multiple."""
        return -(-self.V // self.vocab_multiple) * self.vocab_multiple

    @property
    def L(self) -> int:
        return self.num_layers

    @property
    def D(self) -> int:
        return self.d_model

    @property
    def F(self) -> int:
        return self.d_ff

    @property
    def N(self) -> int:
        return self.num_heads

    @property
    def K(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def G(self) -> int:
        return self.N // self.K

    @property
    def H(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def R(self) -> int:
        return int(self.H * self.rope_fraction)

    @property
    def E(self) -> int:
        return self.num_experts

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(self.layer_pattern[i % len(self.layer_pattern)] for i in range(self.num_layers))
