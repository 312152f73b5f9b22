"""Every setting of a run as frozen dataclasses, validated on construction, and the presets that fill them.

Dimensions have one letter each, the same in every signature, einsum and comment:

    B batch    T query length    S key length (of the cache)    V vocabulary    L layers
    D model width    F feed-forward width    N query heads    K key/value heads    G = N / K    H head width

This file knows nothing of arrays, files or devices.
"""

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from transformer_jax.errors import UserError

DType = Literal["float32", "bfloat16"]
C = TypeVar("C")


def _check(config: object, name: str, holds: bool, expected: str) -> None:
    """Raise a `UserError` naming the field and its value unless `holds`."""
    if not holds:
        raise UserError(f"{type(config).__name__}.{name} is {getattr(config, name)!r}; expected {expected}")


def _check_types(config: Any) -> None:
    """Raise a `UserError` naming the first field whose value is not of its annotated type."""
    for name, annotation in typing.get_type_hints(type(config)).items():
        _check(config, name, _is_instance(getattr(config, name), annotation), _describe(annotation))


def _is_instance(value: Any, annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return value in arguments
    if origin in (types.UnionType, typing.Union):
        return any(_is_instance(value, option) for option in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_instance(item, arguments[0]) for item in value)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _describe(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(option) for option in arguments)
    if origin is tuple:
        return f"a list of {_describe(arguments[0])}"
    names = {int: "an integer", float: "a finite number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Transformer."""

    vocab_size: int | None = None
    """Rows of the embedding table (V). None: as many as the tokenizer has."""
    max_seq_len: int = 256
    """Longest context: the largest position is one less."""
    num_layers: int = 4
    """Blocks (L)."""
    d_model: int = 256
    """Width of the residual stream (D)."""
    d_ff: int = 704
    """Width of the feed-forward layer (F)."""
    num_heads: int = 4
    """Query heads (N)."""
    num_kv_heads: int | None = None
    """Key/value heads (K): 1 is multi-query, N is multi-head, between is grouped-query. None: N."""
    head_dim: int | None = None
    """Width of one head (H), free of d_model. None: d_model / num_heads."""
    attention: Literal["causal", "bidirectional"] = "causal"
    """Who may attend to whom: a decoder is causal, an encoder bidirectional."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary positions on queries and keys, or a learned vector added to each embedding."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before each sub-layer and after the last block."""
    norm_eps: float = 1e-5
    """Added to the variance inside a norm."""
    mlp: Literal["gated", "plain"] = "gated"
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    """Nonlinearity of the feed-forward layer; gelu is the exact one."""
    use_bias: bool = False
    """Whether products, and layer norms, add a bias."""
    tie_embeddings: bool = True
    """Whether the output layer is the transposed embedding table."""
    dropout: float = 0.0
    """Probability of zeroing an entry of the embedding and of each sub-layer's output while training."""
    dtype: DType = "bfloat16"
    """Precision of the computation. Parameters, softmax, norms and rotary angles stay float32."""
    remat: Literal["none", "block"] = "none"
    """block: keep only each block's input for the backward pass and compute the rest again."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("max_seq_len", "num_layers", "d_model", "d_ff", "num_heads", "rope_theta", "norm_eps"):
            _check(self, name, getattr(self, name) > 0, "more than 0")
        _check(self, "vocab_size", self.vocab_size is None or self.vocab_size > 1, "at least 2, or null")
        _check(self, "dropout", 0 <= self.dropout < 1, "at least 0 and less than 1")
        _check(
            self,
            "num_kv_heads",
            self.num_kv_heads is None or (self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0),
            f"a positive divisor of num_heads = {self.num_heads}, or null",
        )
        if self.head_dim is None:
            _check(
                self,
                "d_model",
                self.d_model % self.num_heads == 0,
                f"a multiple of num_heads = {self.num_heads}, or an explicit head_dim",
            )
        else:
            _check(self, "head_dim", self.head_dim > 0, "more than 0, or null")
        if self.positions == "rope" and self.H % 2:
            raise UserError(f"ModelConfig.head_dim comes to {self.H}; rotary positions need an even one")

    @property
    def V(self) -> int:
        if self.vocab_size is None:
            raise UserError("ModelConfig.vocab_size is null; a model can be built once the tokenizer has given it")
        return self.vocab_size

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


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes batches."""

    paths: tuple[str, ...] = ()
    """Text files, folders, globs or JSONL files. None given: the Python standard library's own source."""
    jsonl_field: str = "text"
    """The field of a JSONL line that holds its document."""
    tokenizer: str = "bpe"
    """bytes, bpe (trained on this corpus), or the path of a tokenizer.json."""
    bpe_vocab_size: int = 2048
    """Vocabulary of the tokenizer that bpe trains."""
    holdout: float = 0.03
    """Fraction of the documents that is kept for evaluation and never trained on."""
    seq_len: int = 256
    """Tokens in one packed window (T)."""
    batch_size: int = 8
    """Windows in one step (B), over all devices."""
    workers: int = 0
    """Processes that prepare batches beside the training process. The stream does not depend on it."""
    seed: int = 0
    """Order of the windows."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("seq_len", "batch_size"):
            _check(self, name, getattr(self, name) > 0, "more than 0")
        _check(
            self, "bpe_vocab_size", 256 < self.bpe_vocab_size <= 2**20, "more than 256, the bytes, and at most 2**20"
        )
        _check(self, "holdout", 0 < self.holdout < 1, "more than 0 and less than 1")
        _check(self, "workers", self.workers >= 0, "at least 0")
        _check(self, "seed", 0 <= self.seed < 2**32, "at least 0 and less than 2**32")
        _check(self, "tokenizer", self.tokenizer != "", "bytes, bpe, or the path of a tokenizer.json")
        _check(self, "jsonl_field", self.jsonl_field != "", "the name of a field")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with gradient clipping and a learning rate that warms up linearly, then falls along a cosine."""

    learning_rate: float = 3e-3
    """The peak, reached at the end of the warm-up."""
    warmup_steps: int = 40
    """Steps over which the learning rate rises from 0."""
    final_fraction: float = 0.05
    """The learning rate of the last step as a fraction of the peak."""
    beta1: float = 0.9
    """Decay of the mean of the gradient."""
    beta2: float = 0.95
    """Decay of the mean of its square."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.1
    """Decoupled decay of the matrices; vectors and embeddings are not decayed."""
    clip_norm: float = 1.0
    """The gradient is scaled down to this global norm when it is longer."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("learning_rate", "eps", "clip_norm"):
            _check(self, name, getattr(self, name) > 0, "more than 0")
        for name in ("warmup_steps", "weight_decay"):
            _check(self, name, getattr(self, name) >= 0, "at least 0")
        for name in ("beta1", "beta2"):
            _check(self, name, 0 <= getattr(self, name) < 1, "at least 0 and less than 1")
        _check(self, "final_fraction", 0 <= self.final_fraction <= 1, "between 0 and 1")


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and what to show and keep on the way."""

    steps: int = 700
    """Optimizer updates."""
    seed: int = 0
    """Initial parameters and dropout."""
    eval_every: int = 175
    """Steps between evaluations on held-out text; the last step is always evaluated."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept."""
    sample_prompt: str = "def"
    """The beginning of the text that each evaluation continues."""
    sample_tokens: int = 96
    """The length of that continuation."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("steps", "eval_every", "checkpoint_every", "sample_tokens"):
            _check(self, name, getattr(self, name) > 0, "more than 0")
        # With one checkpoint alone a damaged file would end the run.
        _check(self, "keep_checkpoints", self.keep_checkpoints >= 2, "at least 2")
        _check(self, "seed", 0 <= self.seed < 2**32, "at least 0 and less than 2**32")


@dataclass(frozen=True)
class MeshConfig:
    """How many devices share each kind of work; their product is the number of devices. One may be -1: the rest."""

    data: int = -1
    """Devices that each take a part of the batch."""
    fsdp: int = 1
    """Devices that take a part of the batch and hold a part of every parameter."""
    tensor: int = 1
    """Devices that each compute a part of every head group and feed-forward layer."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("data", "fsdp", "tensor"):
            _check(self, name, getattr(self, name) > 0 or getattr(self, name) == -1, "more than 0, or -1 for the rest")
        if (self.data, self.fsdp, self.tensor).count(-1) > 1:
            raise UserError(f"MeshConfig is {self}; at most one size may be -1")


@dataclass(frozen=True)
class DecodingConfig:
    """How the next token is chosen."""

    max_tokens: int = 128
    """Longest continuation."""
    temperature: float = 0.8
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int | None = None
    """Only the k most likely tokens may be drawn. None: no limit."""
    top_p: float = 0.95
    """Only the most likely tokens that together reach this probability may be drawn; 1 is no limit."""
    seed: int = 0
    """The same seed and prompt give the same continuation, whatever shares the batch."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check(self, "max_tokens", self.max_tokens > 0, "more than 0")
        _check(self, "temperature", 0 <= self.temperature < float("inf"), "at least 0 and finite")
        _check(self, "top_k", self.top_k is None or self.top_k > 0, "more than 0, or null")
        _check(self, "top_p", 0 <= self.top_p <= 1, "between 0 and 1")
        _check(self, "seed", 0 <= self.seed < 2**32, "at least 0 and less than 2**32")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        _check_types(self)
        if self.data.seq_len > self.model.max_seq_len:
            raise UserError(
                f"DataConfig.seq_len is {self.data.seq_len};"
                f" expected at most ModelConfig.max_seq_len = {self.model.max_seq_len}"
            )


def to_json(config: Any) -> str:
    """Write a config as JSON, one field a line; `from_json` reads it back equal."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(kind: type[C], text: str) -> C:
    """Read what `to_json` wrote. Raises `UserError` naming an unknown field, a missing section or a bad value."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{kind.__name__}: not JSON ({error})") from None
    return _from_tree(kind, tree, kind.__name__)


def _from_tree(kind: Any, tree: Any, where: str) -> Any:
    if not isinstance(tree, Mapping):
        raise UserError(f"{where}: found {tree!r}; expected an object")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(tree) - set(hints))
    if unknown:
        raise UserError(f"{where}: unknown field {unknown[0]!r}; expected some of {', '.join(hints)}")
    values = {}
    for name, value in tree.items():
        if dataclasses.is_dataclass(hints[name]):
            values[name] = _from_tree(hints[name], value, f"{where}.{name}")
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    config = kind(**values)
    missing = [name for name in hints if name not in tree]
    if missing:
        raise UserError(f"{where}: the field {missing[0]!r} is missing")
    return config


def differences(ours: Any, theirs: Any) -> list[str]:
    """List the leaves in which two configs of one kind differ, as `section.field: ours | theirs`."""

    def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in tree.items():
            found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
        return found

    a, b = leaves(dataclasses.asdict(ours)), leaves(dataclasses.asdict(theirs))
    return [f"{name}: {a[name]!r} | {b[name]!r}" for name in a if a[name] != b[name]]
