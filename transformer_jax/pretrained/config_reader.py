"""Reading a config.json so that nothing in it is overlooked, and what all families call by the same names."""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from transformer_jax.architecture import ModelConfig
from transformer_jax.errors import UserError

REQUIRED: Any = object()

WRONG_KINDS = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError)
"""What Python says when a file has a list where a number belongs, and the like."""

SIZES = {
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
}
"""Fields of `ModelConfig` by the names that most families have for them."""

WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "_sliding_window_pattern",
        "add_cross_attention",
        "architectures",
        "attn_implementation",
        "attn_pdrop",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "classifier_dropout",
        "classifier_dropout_prob",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "max_length",
        "model_type",
        "n_ctx",
        "n_special",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "position_embedding_type",
        "predict_special_tokens",
        "pretraining_tp",
        "problem_type",
        "reorder_and_upcast_attn",
        "resid_pdrop",
        "return_dict",
        "router_jitter_noise",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
        "use_return_dict",
    }
)
"""Settings that change nothing about what a model computes when it is not being trained."""


WITHOUT_EFFECT_WHEN_FALSE = frozenset(
    {
        "attention.scale",
        "attention.sliding_window",
        "attention_bias",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "clean_up_tokenization_spaces",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "embedding_dropout",
        "encoder_no_repeat_ngram_size",
        "expert_count",
        "expert_shared_count",
        "expert_used_count",
        "is_encoder_decoder",
        "leading_dense_block_count",
        "min_length",
        "mlp_bias",
        "mlp_only_layers",
        "no_repeat_ngram_size",
        "output_scores",
        "pooling_type",
        "pruned_heads",
        "qkv_bias",
        "quantization_config",
        "remove_invalid_values",
        "return_dict_in_generate",
        "rope.scaling.finetuned",
        "sliding_window",
        "suppress_tokens",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "use_bfloat16",
        "use_bidirectional_attention",
        "use_sliding_window",
    }
)
"""Settings that ask for something when they are true, or more than 0; of any other, false may ask for something too."""


class Settings:
    """The settings of a config.json; each is taken once, and what is left in the end is refused."""

    def __init__(self, tree: Mapping[str, Any], where: str, tensors: Collection[str] = ()) -> None:
        self._tree, self._where = tree, where
        self.tensors = frozenset(tensors)
        """Names of the tensors that the config describes: some settings follow from what is there."""
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a setting, or the default where it is absent or null."""
        self._taken.add(name)
        value = self._tree.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise UserError(f"{self._where}: the setting {name!r} is missing")
        return default

    def size(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a setting that counts something, or the default."""
        return self._positive(name, default, "a whole number", (int,))

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a setting that something is computed from, or the default."""
        return self._positive(name, default, "a number", (int, float))

    def _positive(self, name: str, default: Any, what: str, kinds: Collection[type]) -> Any:
        value = self.take(name, default)
        if value is default:
            return value
        if float not in kinds and type(value) is float and value.is_integer():
            value = int(value)
        if type(value) not in kinds or not 0 < value <= sys.float_info.max:
            raise self.refuse(name, f"{what} of more than 0")
        return value

    def take_unless_absent(self, name: str, default: Any) -> Any:
        """The value of a setting, which may be null; the default where it is absent."""
        self._taken.add(name)
        return self._tree.get(name, default)

    def expect(self, name: str, *values: Any) -> None:
        """Refuse a setting unless it is absent, null, or one of the values that this version can honour."""
        found = self.take(name, None)
        if found is not None and found not in values:
            expected = " or ".join(repr(value) for value in values) or "null"
            raise UserError(f"{self._where}: {name} is {found!r}; this version can honour {expected} alone")

    def refuse(self, name: str, expected: str) -> UserError:
        """The error about a setting whose value cannot be honoured."""
        return UserError(f"{self._where}: {name} is {self._tree.get(name)!r}; expected {expected}")

    def within(self, prefix: str) -> "Settings":
        """The settings whose names begin with a prefix, without it."""
        return Settings(
            {name.removeprefix(prefix): value for name, value in self._tree.items() if name.startswith(prefix)},
            self._where,
            self.tensors,
        )

    def section(self, name: str) -> "Settings | None":
        """A setting that is itself a mapping of settings."""
        value = self.take(name, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(name, "an object")
        return Settings(value, f"{self._where}: {name}")

    def __contains__(self, name: str) -> bool:
        return self._tree.get(name) is not None

    def finish(self) -> None:
        """Refuse what nobody took, unless it is known to be without effect, or is null."""
        for name, value in self._tree.items():
            harmless = WITHOUT_EFFECT if value else WITHOUT_EFFECT | WITHOUT_EFFECT_WHEN_FALSE
            if value is not None and name not in self._taken | harmless:
                raise UserError(
                    f"{self._where}: {name} is {value!r}, a setting that this version does not know; remove it from the"
                    " file if it changes nothing about what the model computes"
                )


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Their names of activations to ours."""

THEIR_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def read_activation(settings: Settings, name: str, default: str) -> str:
    found = settings.take(name, default)
    if not isinstance(found, str) or found not in ACTIVATIONS:
        raise settings.refuse(name, "one of " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS[found]


def read_dtype(settings: Settings) -> str:
    """bfloat16 where the weights are; everything else computes in float32."""
    found = settings.take("dtype", settings.take("torch_dtype", "float32"))
    return "bfloat16" if found == "bfloat16" else "float32"


def read_sizes(settings: Settings) -> dict[str, Any]:
    """The fields of SIZES, and the precision."""
    return {ours: settings.size(theirs) for ours, theirs in SIZES.items()} | {"dtype": read_dtype(settings)}


def write_sizes(c: ModelConfig) -> dict[str, Any]:
    """The same for a config.json, with the activation."""
    sizes = {theirs: getattr(c, ours) for ours, theirs in SIZES.items()}
    return sizes | {"vocab_size": c.table_rows, "hidden_act": THEIR_ACTIVATIONS[c.activation], "dtype": c.dtype}
