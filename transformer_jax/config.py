"""Every setting of a run as frozen dataclasses, validated on construction.

This file knows nothing of arrays, files or devices.
"""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Literal

from transformer_jax.architecture import DType, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.settings import check, check_types

RiskLevel = Literal["token", "sequence", "document"]


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes batches."""

    paths: tuple[str, ...] = ()
    """Text files, folders, globs or JSONL files. None given: the Python standard library's own source."""
    jsonl_field: str = "text"
    """The field of a record, of a JSONL, Parquet or ArrayRecord file, that holds its document: text, or the messages of
    a conversation, of which the assistant's turns alone are learnt."""
    weight_field: str | None = None
    """The field of a record that says how much its document counts in training. None: all count alike."""
    mixture: tuple[float, ...] = ()
    """How often windows are drawn from each of the paths, relative to each other. None given: every window of all of
    them once an epoch."""
    cache: str | None = None
    """The folder where texts are kept once they are tokenized. None: in the user's cache folder."""
    tokenizer: str = "bpe"
    """bytes, bpe (trained on this corpus), the path of a tokenizer.json, or model: that of the model to start from."""
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
        check_types(self)
        for name in ("seq_len", "batch_size"):
            check(self, name, getattr(self, name) > 0, "more than 0")
        check(self, "bpe_vocab_size", 256 < self.bpe_vocab_size <= 2**20, "more than 256, the bytes, and at most 2**20")
        check(self, "holdout", 0 < self.holdout < 1, "more than 0 and less than 1")
        check(self, "workers", self.workers >= 0, "at least 0")
        check(self, "seed", 0 <= self.seed < 2**32, "at least 0 and less than 2**32")
        check(self, "tokenizer", self.tokenizer != "", "bytes, bpe, or the path of a tokenizer.json")
        check(self, "jsonl_field", self.jsonl_field != "", "the name of a field")
        check(self, "weight_field", self.weight_field != "", "the name of a field, or null")
        check(self, "cache", self.cache != "", "the name of a folder, or null")
        if self.mixture:
            sizes = f"a number of more than 0 for each of the {len(self.paths)} DataConfig.paths"
            check(self, "mixture", len(self.mixture) == len(self.paths) and min(self.mixture) > 0, sizes)


GROUPS = ("weight$|mlp/(gate|up|down)$=1,1", "embed$=1,0", "(scale|bias)$=1,0")
"""Matrices decay; tables and vectors do not."""


def parameter_group(text: str) -> tuple[str, float, float]:
    """Read a row of a table of parameter groups: `pattern=rate,decay`, what the learning rate and the weight decay of
    the parameters whose names fit the regular expression are multiplied by. Raises `UserError` for anything else."""
    pattern, _, numbers = text.rpartition("=")
    try:
        rate, decay = map(float, numbers.split(","))
        re.compile(pattern)
    except (ValueError, re.error):
        rate, decay = -1.0, -1.0
    if not (pattern and 0 <= rate < math.inf and 0 <= decay < math.inf):
        raise UserError(
            f"OptimizerConfig.groups: found {text!r}; expected a regular expression over parameter names and two"
            " numbers of at least 0, such as 'embed$=0.5,0': half the learning rate, and no weight decay"
        )
    return pattern, rate, decay


@dataclass(frozen=True)
class OptimizerConfig:
    """How the gradient moves the parameters."""

    kind: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """Which optimizer; muon is for the matrices inside layers, with adamw for the rest."""
    learning_rate: float = 3e-3
    """The peak, reached at the end of the warm-up."""
    warmup_steps: int = 40
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """How it goes on: along half a cosine, or a line, to the final fraction; not at all; stable and then down (wsd); as
    one over the root of the step."""
    final_fraction: float = 0.05
    """The learning rate of the last step as a fraction of the peak; constant and inverse_sqrt have none."""
    decay_fraction: float = 0.2
    """schedule wsd: the share of the steps, at their end, over which the rate falls."""
    beta1: float = 0.9
    """Decay of the mean of the gradient, the momentum; adafactor has none."""
    beta2: float = 0.95
    """Decay of the mean of its square; lion's, of the momentum. adafactor and sgd have none."""
    eps: float = 1e-8
    """Added to the root of the mean square in adamw."""
    first_moment: DType = "float32"
    """Precision that the mean of the gradient is kept in. The mean of its square stays float32: in bfloat16 a decay of
    0.999 would be 1."""
    weight_decay: float = 0.1
    """Decoupled decay of the parameters whose group decays."""
    groups: tuple[str, ...] = GROUPS
    """Rows of pattern=rate,decay: what the learning rate and the weight decay of the parameters whose names fit the
    regular expression are multiplied by. A rate of 0 freezes them. Each parameter fits exactly one."""
    clip_norm: float = 1.0
    """The gradient is scaled down to this global norm when it is longer."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("learning_rate", "eps", "clip_norm"):
            check(self, name, getattr(self, name) > 0, "more than 0")
            check(self, name, getattr(self, name) < 1e30, "less than 1e30")
        for name in ("warmup_steps", "weight_decay"):
            check(self, name, getattr(self, name) >= 0, "at least 0")
        for name in ("beta1", "beta2"):
            check(self, name, 0 <= getattr(self, name) < 1, "at least 0 and less than 1")
        check(self, "final_fraction", 0 <= self.final_fraction <= 1, "between 0 and 1")
        check(self, "decay_fraction", 0 < self.decay_fraction <= 1, "more than 0 and at most 1")
        self._check_used("decay_fraction", self.schedule == "wsd", f"schedule is {self.schedule!r}")
        falls = self.schedule not in ("constant", "inverse_sqrt")
        self._check_used("final_fraction", falls, f"schedule is {self.schedule!r}")
        kind = f"kind is {self.kind!r}"
        self._check_used("beta1", self.kind != "adafactor", kind)
        self._check_used("first_moment", self.kind != "adafactor", kind)
        self._check_used("beta2", self.kind not in ("adafactor", "sgd"), kind)
        self._check_used("eps", self.kind in ("adamw", "muon"), kind)
        check(self, "groups", len(self.groups) > 0, "at least one row")
        for group in self.groups:
            parameter_group(group)

    def _check_used(self, name: str, used: bool, why: str) -> None:
        """Refuse a setting that would be ignored."""
        default = next(field.default for field in dataclasses.fields(self) if field.name == name)
        check(self, name, used or getattr(self, name) == default, f"{default}: OptimizerConfig.{why}")


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is optimised: what a token costs, and what part of the costs counts."""

    predict: Literal["next", "prefix", "masked"] = "next"
    """What is predicted: every next token; every token behind a prefix of random length that sees all of itself; or, by
    an encoder, tokens that are hidden."""
    mask_fraction: float = 0.15
    """predict masked: the share of the tokens that are to be predicted."""
    domain_weights: tuple[float, ...] = ()
    """How much a token counts of the documents of each of DataConfig.paths. None given: all alike."""
    label_smoothing: float = 0.0
    """Part of each target that is spread over the whole vocabulary."""
    focal: float = 0.0
    """gamma: a token counts (1 - p)^gamma times, so that what is known already counts less."""
    z_loss: float = 0.0
    """Weight of the squared log-normalizer, which keeps logits from drifting; it is reported apart."""
    risk: Literal["mean", "quantile", "cvar", "entropic", "dro"] = "mean"
    """What of the distribution of losses: its mean, one quantile, the mean of its tail, its exponential mean, or the
    domains by how badly they do."""
    level: RiskLevel = "token"
    """What the distribution is of: tokens, rows of the batch, or the documents in them."""
    quantile: float = 0.5
    """risk quantile: the share of the losses that lies at or below the one that is optimised."""
    alpha: float = 1.0
    """risk cvar: the share of the losses, the worst, that the mean is taken of; 1 is the mean of all."""
    beta: float = 1.0
    """risk entropic: how strongly a larger loss counts more; towards 0 it is the mean."""
    dro_rate: float = 0.01
    """risk dro: how fast the weights of the domains follow their losses."""

    def __post_init__(self) -> None:
        check_types(self)
        check(self, "mask_fraction", 0 < self.mask_fraction <= 1, "more than 0 and at most 1")
        masked = self.predict == "masked" or self.mask_fraction == 0.15
        check(self, "mask_fraction", masked, f"0.15: ObjectiveConfig.predict is {self.predict!r}")
        for weight in self.domain_weights:
            check(self, "domain_weights", 0 <= weight < 1e30, "numbers of at least 0")
        check(self, "label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and less than 1")
        for name in ("focal", "z_loss"):
            check(self, name, getattr(self, name) >= 0, "at least 0")
        for name in ("quantile", "alpha"):
            check(self, name, 0 < getattr(self, name) <= 1, "more than 0 and at most 1")
        for name in ("beta", "dro_rate"):
            check(self, name, getattr(self, name) > 0, "more than 0")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, risk in (("quantile", "quantile"), ("alpha", "cvar"), ("beta", "entropic"), ("dro_rate", "dro")):
            used = self.risk == risk or getattr(self, name) == defaults[name]
            check(self, name, used, f"{defaults[name]}: ObjectiveConfig.risk is {self.risk!r}")
        plain = self.risk not in ("mean", "dro") or self.level == "token"
        check(self, "level", plain, f"'token': ObjectiveConfig.risk is {self.risk!r}")

    @property
    def is_mean(self) -> bool:
        """Whether every loss counts alike."""
        return self.risk == "mean" or (self.risk == "cvar" and self.alpha == 1)


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and what to show and keep on the way."""

    steps: int = 700
    """Optimizer updates."""
    accumulate: int = 1
    """Parts that a batch is taken in, one after the other, to need less memory; the gradient is the same."""
    ema_decay: float | None = None
    """A running mean of the parameters, which keeps this much of itself at each update, is what is evaluated and what
    the run's model is to every other command. None: there is none."""
    skip_nonfinite: bool = False
    """Whether a step whose loss or gradient is not finite changes nothing. Otherwise it ends the run."""
    skip_spikes: float | None = None
    """A step whose gradient is so many times longer than usual changes nothing, as one that is not finite. None: all
    lengths do."""
    start_from: str | None = None
    """A model whose parameters and tokenizer the run begins with, named as for the other commands; --from for short.
    None: random parameters."""
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
        check_types(self)
        for name in ("steps", "eval_every", "checkpoint_every", "sample_tokens"):
            check(self, name, getattr(self, name) > 0, "more than 0")
        # With one checkpoint alone a damaged file would end the run.
        check(self, "accumulate", self.accumulate > 0, "more than 0")
        if self.ema_decay is not None:
            check(self, "ema_decay", 0 <= self.ema_decay < 1, "at least 0 and less than 1, or null")
        if self.skip_spikes is not None:
            check(self, "skip_spikes", self.skip_spikes > 1, "more than 1, or null")
        check(self, "keep_checkpoints", self.keep_checkpoints >= 2, "at least 2")
        check(self, "seed", 0 <= self.seed < 2**32, "at least 0 and less than 2**32")


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
        check_types(self)
        for name in ("data", "fsdp", "tensor"):
            check(self, name, getattr(self, name) > 0 or getattr(self, name) == -1, "more than 0, or -1 for the rest")
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
        check_types(self)
        check(self, "max_tokens", self.max_tokens > 0, "more than 0")
        check(self, "temperature", 0 <= self.temperature < float("inf"), "at least 0 and finite")
        check(self, "top_k", self.top_k is None or self.top_k > 0, "more than 0, or null")
        check(self, "top_p", 0 <= self.top_p <= 1, "between 0 and 1")
        check(self, "seed", 0 <= self.seed < 2**32, "at least 0 and less than 2**32")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        check_types(self)
        if (self.data.tokenizer == "model") != (self.training.start_from is not None):
            raise UserError(
                f"DataConfig.tokenizer is {self.data.tokenizer!r} and TrainingConfig.start_from"
                f" {self.training.start_from!r}; a run that starts from a model has tokenizer 'model', and no other has"
            )
        if self.data.batch_size % self.training.accumulate:
            raise UserError(
                f"TrainingConfig.accumulate is {self.training.accumulate}; expected a divisor of"
                f" DataConfig.batch_size = {self.data.batch_size}"
            )
        weights, paths = self.objective.domain_weights, self.data.paths
        if weights and len(weights) != len(paths):
            raise UserError(
                f"ObjectiveConfig.domain_weights is {weights}; expected a number for each of the {len(paths)}"
                " DataConfig.paths"
            )
        if self.data.seq_len > self.model.max_seq_len:
            raise UserError(
                f"DataConfig.seq_len is {self.data.seq_len};"
                f" expected at most ModelConfig.max_seq_len = {self.model.max_seq_len}"
            )
