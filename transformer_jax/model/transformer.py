"""The Transformer: embeddings, the stack of blocks, logits; and `build(config) -> Model`, which all else takes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from transformer_jax.architecture import LayerKind, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.block import Block, Context, Linear, Norm, Weight, declare
from transformer_jax.model.cache import KVCache, empty_cache, write_positions
from transformer_jax.model.experts import Routing
from transformer_jax.model.layers import ACTIVATIONS, dropout
from transformer_jax.model.masks import MaskSpec, may_attend
from transformer_jax.model.output import OutputLayer, logits_of
from transformer_jax.model.positions import Rotation, last_positions, rotation, sinusoids
from transformer_jax.sharding import constrain

Params = Any
AnyArray = Array | np.ndarray


class Output(NamedTuple):
    """What the trunk makes of its tokens."""

    hidden: Float[Array, "B T D"]
    """The residual stream after the last block and its norm."""
    cache: Any
    """The cache with the new tokens in it; None when there was none."""
    routing: Routing | None = None
    """What the routers did, layer by layer; None in a model without experts."""


class Model(NamedTuple):
    """A language model as pure functions: the waist between mathematics and everything that uses it."""

    init: Callable[..., Params]
    """init(key) -> params, all float32."""
    trunk: Callable[..., Output]
    """trunk(params, tokens[B T], positions[B T], *, segment_ids=None, token_types=None, prefix_lengths=None,
    cache=None, dropout_key=None, in_order=False) -> (hidden[B T D], cache, routing). A token sees the whole of the
    first `prefix_lengths`[B T] tokens of its sequence. With `in_order` the caller promises that the tokens of a segment
    lie in the order of their positions: the mask of a decoder is then triangular, and what lies beyond its diagonal is
    not computed. The caller sees to it that ids, positions and types are ones that the model has, because an index past
    a table's end is clamped by JAX; training, `generate` and `embed` do."""
    unembed: Callable[..., Array]
    """unembed(params, hidden[... D]) -> logits[... V], float32."""
    init_cache: Callable[[int, int], KVCache]
    """init_cache(batch, length) -> an empty cache. Raises `UserError` for a model that is not causal."""
    logical_axes: Callable[[], Any]
    """logical_axes() -> for each parameter, the names of its dimensions as a PartitionSpec."""
    vocab_size: int
    max_seq_len: int
    pool: Callable[..., Array] | None = None
    """pool(params, hidden[... D]) -> [... D], BERT's layer over the first token; None where there is none."""
    before_logits: Callable[..., tuple[Array, OutputLayer]] | None = None
    """before_logits(params, hidden[... D]) -> ([... D], output layer), what `unembed` makes logits of, with rows of the
    vocabulary behind V that are no ids; None in a model that has no such layer."""


def check_options(
    c: ModelConfig, segment_ids: Any, token_types: Any, prefix_lengths: Any, cache: KVCache | None
) -> None:
    """Raise `ValueError` for options of the trunk that do not go together, or not with this model."""
    if cache is not None and segment_ids is not None:
        raise ValueError("a cache holds one sequence a row: segment_ids cannot be used with it")
    if token_types is not None and not c.num_token_types:
        raise ValueError("ModelConfig.num_token_types is 0: token_types cannot be used with this model")
    if prefix_lengths is not None and c.attention != "causal":
        raise ValueError("a bidirectional model sees everything: prefix_lengths cannot be used with it")


class Transformer(nn.Module):
    """Embeddings, L blocks, the last norm, and what makes logits of it."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        normal = nn.initializers.truncated_normal(c.D**-0.5)
        self.table = declare(self, "embed", normal, ("vocab", "embed"), (c.table_rows, c.D))
        if c.positions == "learned":
            axes = ("positions", "embed")
            self.position_table = declare(self, "position_embed", normal, axes, (c.max_seq_len, c.D))
        if c.num_token_types:
            axes = ("token_types", "embed")
            self.type_table = declare(self, "type_embed", normal, axes, (c.num_token_types, c.D))
        if c.embedding_norm:
            self.embed_norm = Norm(c)
        block = nn.remat(Block) if c.remat == "block" else Block
        self.layers = [block(c, kind) for kind in c.kinds]
        if c.residual != "post":
            self.final_norm = Norm(c)
        if c.output_transform:
            self.transform, self.transform_norm = Linear(c.D, ("embed", "embed_out"), use_bias=c.output_bias), Norm(c)
        if c.pooler:
            self.pooler = Linear(c.D, ("embed", "embed_out"), use_bias=True)
        if not c.tie_embeddings:
            self.output = Weight((c.D, c.table_rows), ("embed", "vocab"))
        if c.output_bias:
            self.bias = declare(self, "output_bias", nn.initializers.zeros, ("vocab",), (c.table_rows,))

    def embed(self, tokens: Array, positions: Array, token_types: Array | None, key: PRNGKeyArray | None) -> Array:
        c = self.config
        x = self.table[tokens].astype(c.dtype)
        if c.scale_embeddings:
            x = x * jnp.asarray(c.D**0.5, c.dtype)
        if c.positions == "learned":
            x = x + self.position_table[jnp.maximum(positions, 0)].astype(c.dtype)
        if c.positions == "sinusoidal":
            x = x + sinusoids(positions, c.D).astype(c.dtype)
        if c.num_token_types:
            types = jnp.zeros_like(tokens) if token_types is None else token_types
            x = x + self.type_table[types].astype(c.dtype)
        if c.embedding_norm:
            x = self.embed_norm(x)
        return dropout(constrain(x, ("batch", "seq", None)), c.dropout, key)

    def context(
        self,
        positions: Array,
        k_positions: Array,
        segment_ids: Array | None,
        prefix_lengths: Array | None,
        triangular: bool,
    ) -> Context:
        c = self.config
        may: dict[LayerKind, Array] = {}
        turned: dict[LayerKind, Rotation] = {}
        last = last_positions(positions, k_positions, segment_ids)
        for kind in dict.fromkeys(c.kinds):
            spec = MaskSpec(causal=c.attention == "causal", window=c.window if kind == "local" else None)
            may[kind] = may_attend(spec, positions, k_positions, segment_ids, segment_ids, prefix_lengths)
            if c.positions == "rope":
                turned[kind] = rotation(c, positions, last, local=kind == "local")
        return Context(may, turned, positions, triangular)

    def __call__(
        self,
        tokens: Int[AnyArray, "B T"],
        positions: Int[AnyArray, "B T"],
        *,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        token_types: Int[AnyArray, "B T"] | None = None,
        prefix_lengths: Int[AnyArray, "B T"] | None = None,
        cache: KVCache | None = None,
        dropout_key: PRNGKeyArray | None = None,
        in_order: bool = False,
    ) -> Output:
        check_options(self.config, segment_ids, token_types, prefix_lengths, cache)
        # NumPy's arrays will do, also outside jit.
        ids, at = jnp.asarray(tokens), jnp.asarray(positions)
        kinds, segments, prefixes = (
            None if option is None else jnp.asarray(option) for option in (token_types, segment_ids, prefix_lengths)
        )
        c = self.config
        keys = [None] * (c.L + 1) if dropout_key is None else list(jax.random.split(dropout_key, c.L + 1))
        x = self.embed(ids, at, kinds, keys[-1])
        k_positions = at if cache is None else write_positions(cache.positions, at)
        triangular = in_order and c.attention == "causal" and cache is None and prefix_lengths is None
        context = self.context(at, k_positions, segments, prefixes, triangular)
        written, routings = [], []
        for index, layer in enumerate(self.layers):
            cached = None if cache is None else (cache.k[index], cache.v[index])
            x, kv, routing = layer(x, context, cached, keys[index])
            written.append(kv)
            routings.append(routing)
        hidden = x if c.residual == "post" else self.final_norm(x)
        if cache is not None:
            cache = KVCache(tuple(k for k, _ in written), tuple(v for _, v in written), k_positions)
        return Output(hidden, cache, jax.tree.map(lambda *layers: jnp.stack(layers), *routings) if c.E else None)

    def before_logits(self, hidden: Float[Array, "*rows D"]) -> tuple[Float[Array, "*rows D"], OutputLayer]:
        c = self.config
        if c.output_transform:
            hidden = self.transform_norm(ACTIVATIONS[c.activation](self.transform(hidden)))
        return hidden, OutputLayer(
            table=self.table if c.tie_embeddings else None,
            weight=None if c.tie_embeddings else self.output(),
            bias=self.bias if c.output_bias else None,
            softcap=c.logit_softcap,
        )

    def unembed(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        c = self.config
        features, layer = self.before_logits(hidden)
        logits = logits_of(layer, features)
        return logits if c.table_rows == c.V else logits[..., : c.V]

    def pool(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return jnp.tanh(self.pooler(hidden))

    def everything(self, tokens: Int[Array, "B T"]) -> Array:
        """Touch every parameter once, so that `init` declares them all."""
        hidden = self(tokens, jnp.zeros_like(tokens)).hidden
        return self.unembed(hidden) if not self.config.pooler else self.unembed(self.pool(hidden))


def _init_boxed(module: Transformer, key: PRNGKeyArray) -> Any:
    """Make the parameters, each with the names of its dimensions."""
    return module.init(key, jnp.zeros((1, 1), jnp.int32), method="everything")["params"]


def _declared(c: ModelConfig) -> Any:
    """The shape of each parameter, with the names of its dimensions.

    Layers at the same place of the pattern are alike, so one of each is traced: of 30 layers, that takes a second.
    """
    pattern = min(c.L, len(c.layer_pattern))
    traced = dict(
        jax.eval_shape(
            lambda key: _init_boxed(Transformer(dataclasses.replace(c, num_layers=pattern)), key), jax.random.key(0)
        )
    )
    layers = [traced.pop(f"layers_{i}") for i in range(pattern)]
    return traced | {f"layers_{i}": layers[i % pattern] for i in range(c.L)}


def param_shapes(c: ModelConfig) -> Params:
    """The shapes of what `init` makes, at once however many layers there are."""
    return jax.eval_shape(nn.unbox, _declared(c))


def build(config: ModelConfig) -> Model:
    """Turn a config into a model. Raises `UserError` when `vocab_size` is not known yet."""
    module = Transformer(config)

    def apply(params: Params, *arguments: Any, **options: Any) -> Any:
        return module.apply({"params": params}, *arguments, **options)

    def init(key: PRNGKeyArray) -> Params:
        return nn.unbox(_init_boxed(module, key))

    def trunk(params: Params, tokens: AnyArray, positions: AnyArray, **options: Any) -> Output:
        return apply(params, tokens, positions, **options)

    def unembed(params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        return apply(params, hidden, method="unembed")

    def init_cache(batch: int, length: int) -> KVCache:
        if config.attention != "causal":
            raise UserError("ModelConfig.attention is 'bidirectional'; continuing a text needs 'causal'")
        return empty_cache(config.L, batch, config.K, length, config.H, config.dtype)

    def logical_axes() -> Any:
        return nn.get_partition_spec(_declared(config))

    def before_logits(params: Params, hidden: Float[Array, "*rows D"]) -> tuple[Float[Array, "*rows D"], OutputLayer]:
        return apply(params, hidden, method="before_logits")

    def pool(params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return apply(params, hidden, method="pool")

    return Model(
        init,
        trunk,
        unembed,
        init_cache,
        logical_axes,
        vocab_size=config.V,
        max_seq_len=config.max_seq_len,
        pool=pool if config.pooler else None,
        before_logits=before_logits,
    )


def cast_matrices(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Store the matrices in the compute dtype: decoding gives the same numbers and reads fewer bytes."""
    return jax.tree.map(lambda param: param.astype(dtype) if param.ndim >= 2 else param, params)
