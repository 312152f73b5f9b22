"""The Transformer: blocks, the stack, and `build(config) -> Model`, the record of pure functions everything else takes.

    h = x + attention(norm(x))        y = h + mlp(norm(h))

The Linen modules here are shells: they declare parameters with their logical axes and call the free functions of this
folder. Nothing is stored in a module, nothing is random without a key, and the cache is an argument and a result.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import attend
from transformer_jax.model.cache import KVCache, empty_cache, write, write_positions
from transformer_jax.model.layers import ACTIVATIONS, dropout, gated, layer_norm, product, product_with_table, rms_norm
from transformer_jax.model.masks import MaskSpec, may_attend
from transformer_jax.model.positions import Rotation, rotate, rotation
from transformer_jax.sharding import constrain

Params = Any


class Model(NamedTuple):
    """A language model as pure functions: the waist between mathematics and everything that uses it."""

    init: Callable[..., Params]
    """init(key) -> params, all float32."""
    trunk: Callable[..., tuple[Array, KVCache | None]]
    """trunk(params, tokens[B T], positions[B T], *, segment_ids=None, cache=None, dropout_key=None, in_order=False)
    -> (hidden[B T D], cache). With `in_order` the caller promises that the tokens of a segment lie in the order of
    their positions: the mask of a decoder is then triangular, and what lies beyond its diagonal is not computed."""
    unembed: Callable[..., Array]
    """unembed(params, hidden[... D]) -> logits[... V], float32."""
    init_cache: Callable[[int, int], KVCache]
    """init_cache(batch, length) -> an empty cache."""
    logical_axes: Callable[[], Any]
    """logical_axes() -> for each parameter, the names of its dimensions as a PartitionSpec."""
    vocab_size: int
    max_seq_len: int


def declare(module: nn.Module, name: str, initialise: Any, axes: tuple[str, ...], shape: tuple[int, ...]) -> Array:
    """Describe a parameter once: its name, how it begins, and the names and lengths of its dimensions."""
    return cast(Array, module.param(name, nn.with_logical_partitioning(initialise, axes), shape))


class Norm(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        scale = declare(self, "scale", nn.initializers.ones, ("embed",), (c.D,))
        if c.norm == "rmsnorm":
            return rms_norm(x, scale, c.norm_eps)
        bias = declare(self, "bias", nn.initializers.zeros, ("embed",), (c.D,)) if c.use_bias else None
        return layer_norm(x, scale, bias, c.norm_eps)


class Linear(nn.Module):
    """y = x w (+ b). The standard deviation of w is `gain` / sqrt(fan in)."""

    features: int
    axes: tuple[str, str]
    use_bias: bool
    gain: float = 1.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        fan_in = x.shape[-1]
        normal = nn.initializers.truncated_normal(self.gain * fan_in**-0.5)
        y = product(x, declare(self, "weight", normal, self.axes, (fan_in, self.features)))
        if self.use_bias:
            y = y + declare(self, "bias", nn.initializers.zeros, self.axes[1:], (self.features,)).astype(y.dtype)
        return y


@struct.dataclass
class Context:
    """What every layer of one call shares: who may see whom, where tokens stand, and where they are cached."""

    may: Bool[Array, "B T S"]
    positions: Int[Array, "B T"]
    rotation: Rotation | None
    triangular: bool = struct.field(pytree_node=False)
    """Whether nobody may see a later slot of the row."""


class Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Array, context: Context, cached: tuple[Array, Array] | None
    ) -> tuple[Array, tuple[Array, Array]]:
        c = self.config
        rows = x.shape[:2]
        q = Linear(c.N * c.H, ("embed", "heads"), c.use_bias, name="q")(x).reshape(*rows, c.N, c.H)
        k = Linear(c.K * c.H, ("embed", "kv_heads"), c.use_bias, name="k")(x).reshape(*rows, c.K, c.H)
        v = Linear(c.K * c.H, ("embed", "kv_heads"), c.use_bias, name="v")(x).reshape(*rows, c.K, c.H)
        if context.rotation is not None:
            q, k = rotate(q, context.rotation), rotate(k, context.rotation)
        if cached is None:
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        else:
            k, v = write(cached[0], k, context.positions), write(cached[1], v, context.positions)
        y = attend(q, k, v, context.may, context.triangular).reshape(*rows, c.N * c.H)
        return Linear(c.D, ("heads", "embed"), c.use_bias, (2 * c.L) ** -0.5, name="o")(y), (k, v)


class MLP(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        hidden = Linear(c.F, ("embed", "mlp"), c.use_bias, name="up")(x)
        if c.mlp == "gated":
            hidden = gated(Linear(c.F, ("embed", "mlp"), c.use_bias, name="gate")(x), hidden, c.activation)
        else:
            hidden = ACTIVATIONS[c.activation](hidden)
        return Linear(c.D, ("mlp", "embed"), c.use_bias, (2 * c.L) ** -0.5, name="down")(hidden)


class Block(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Array, context: Context, cached: tuple[Array, Array] | None, dropout_key: PRNGKeyArray | None
    ) -> tuple[Array, tuple[Array, Array]]:
        c = self.config
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        attention, kv = Attention(c, name="attn")(Norm(c, name="attn_norm")(x), context, cached)
        h = x + dropout(attention, c.dropout, keys[0])
        y = h + dropout(MLP(c, name="mlp")(Norm(c, name="mlp_norm")(h)), c.dropout, keys[1])
        return constrain(y, ("batch", "seq", None)), kv


class Transformer(nn.Module):
    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        normal = nn.initializers.truncated_normal(c.D**-0.5)
        self.table = declare(self, "embed", normal, ("vocab", "embed"), (c.V, c.D))
        if c.positions == "learned":
            axes = ("positions", "embed")
            self.position_table = declare(self, "position_embed", normal, axes, (c.max_seq_len, c.D))
        block = nn.remat(Block) if c.remat == "block" else Block
        self.layers = [block(c) for _ in range(c.L)]
        self.final_norm = Norm(c)
        if not c.tie_embeddings:
            self.output = Linear(c.V, ("embed", "vocab"), use_bias=False)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        dropout_key: PRNGKeyArray | None = None,
        in_order: bool = False,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        c = self.config
        x = self.table[tokens].astype(c.dtype)
        if c.positions == "learned":
            x = x + self.position_table[jnp.maximum(positions, 0)].astype(c.dtype)
        x = constrain(x, ("batch", "seq", None))
        keys = [None] * (c.L + 1) if dropout_key is None else list(jax.random.split(dropout_key, c.L + 1))
        x = dropout(x, c.dropout, keys[-1])

        k_positions = positions if cache is None else write_positions(cache.positions, positions)
        spec = MaskSpec(causal=c.attention == "causal")
        context = Context(
            may=may_attend(spec, positions, k_positions, segment_ids, segment_ids),
            positions=positions,
            rotation=rotation(positions, c.H, c.rope_theta) if c.positions == "rope" else None,
            triangular=in_order and spec.causal and cache is None,
        )
        written = []
        for index, layer in enumerate(self.layers):
            cached = None if cache is None else (cache.k[index], cache.v[index])
            x, kv = layer(x, context, cached, keys[index])
            written.append(kv)
        hidden = self.final_norm(x)
        if cache is None:
            return hidden, None
        return hidden, KVCache(tuple(k for k, _ in written), tuple(v for _, v in written), k_positions)

    def unembed(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        logits = product_with_table(hidden, self.table) if self.config.tie_embeddings else self.output(hidden)
        return logits.astype(jnp.float32)

    def everything(self, tokens: Int[Array, "B T"]) -> Array:
        """Touch every parameter once, so that `init` declares them all."""
        hidden, _ = self(tokens, jnp.zeros_like(tokens))
        return self.unembed(hidden)


def build(config: ModelConfig) -> Model:
    """Turn a config into a model. Raises `UserError` when `vocab_size` is not known yet."""
    module = Transformer(config)
    tokens = jnp.zeros((1, 1), jnp.int32)

    def boxed(key: PRNGKeyArray) -> Any:
        return module.init(key, tokens, method="everything")["params"]

    def apply(params: Params, *arguments: Any, **options: Any) -> Any:
        return module.apply({"params": params}, *arguments, **options)

    def init(key: PRNGKeyArray) -> Params:
        return nn.unbox(boxed(key))

    def trunk(
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        dropout_key: PRNGKeyArray | None = None,
        in_order: bool = False,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        if cache is not None and segment_ids is not None:
            raise ValueError("a cache holds one sequence a row: segment_ids cannot be used with it")
        return apply(params, tokens, positions, segment_ids, cache, dropout_key, in_order)

    def unembed(params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        return apply(params, hidden, method="unembed")

    def init_cache(batch: int, length: int) -> KVCache:
        return empty_cache(config.L, batch, config.K, length, config.H, config.dtype)

    def logical_axes() -> Any:
        return nn.get_partition_spec(jax.eval_shape(boxed, jax.random.key(0)))

    return Model(init, trunk, unembed, init_cache, logical_axes, config.V, config.max_seq_len)


def cast_matrices(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Store the matrices in the compute dtype: decoding gives the same numbers and reads fewer bytes."""
    return jax.tree.map(lambda param: param.astype(dtype) if param.ndim >= 2 else param, params)
