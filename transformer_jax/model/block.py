"""One layer: norms, attention and a feed-forward layer around the residual stream, in the order the config asks for.

    h = x + attention(norm(x))        y = h + mlp(norm(h))

The Linen modules here are shells: they declare parameters with their logical axes and call the free functions of this
folder. Nothing is stored in a module, nothing is random without a key, and the cache is an argument and a result.
"""

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from transformer_jax.architecture import LayerKind, ModelConfig
from transformer_jax.model.attention import attend
from transformer_jax.model.cache import write
from transformer_jax.model.experts import Routing, observe, pass_through_experts, route
from transformer_jax.model.layers import ACTIVATIONS, dropout, gated, layer_norm, product, rms_norm
from transformer_jax.model.positions import Rotation, rotate
from transformer_jax.sharding import constrain


def declare(module: nn.Module, name: str, initialise: Any, axes: tuple[str, ...], shape: tuple[int, ...]) -> Array:
    """Describe a parameter once: its name, how it begins, and the names and lengths of its dimensions."""
    return cast(Array, module.param(name, nn.with_logical_partitioning(initialise, axes), shape))


class Norm(nn.Module):
    """The norm that the config asks for, or an RMS norm where there is no other."""

    config: ModelConfig
    axis: str = "embed"
    rms: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c, shape = self.config, x.shape[-1:]
        if c.norm == "rmsnorm_plus_one":
            return rms_norm(x, 1 + declare(self, "scale", nn.initializers.zeros, (self.axis,), shape), c.norm_eps)
        scale = declare(self, "scale", nn.initializers.ones, (self.axis,), shape)
        if c.norm == "rmsnorm" or self.rms:
            return rms_norm(x, scale, c.norm_eps)
        bias = declare(self, "bias", nn.initializers.zeros, (self.axis,), shape) if c.norm_bias else None
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


class Weight(nn.Module):
    """A `Linear`'s weight [I O], for whoever multiplies with it elsewhere."""

    shape: tuple[int, int]
    axes: tuple[str, str]

    @nn.compact
    def __call__(self) -> Array:
        return declare(self, "weight", nn.initializers.truncated_normal(self.shape[0] ** -0.5), self.axes, self.shape)


@struct.dataclass
class Context:
    """What every layer of one call shares: who may see whom, where tokens stand, and where they are cached."""

    may: dict[LayerKind, Bool[Array, "B T S"]]
    """For each kind of layer."""
    rotation: dict[LayerKind, Rotation]
    """For each kind of layer; empty without rotary positions."""
    positions: Int[Array, "B T"]
    triangular: bool = struct.field(pytree_node=False)
    """Whether nobody may see a later slot of the row."""


class Attention(nn.Module):
    """Queries, keys and values of x; `attend`; and the product that leads back to the width of the stream."""

    config: ModelConfig
    kind: LayerKind

    @nn.compact
    def __call__(
        self,
        x: Array,
        context: Context,
        cached: tuple[Array, Array] | None,
        dropout_key: PRNGKeyArray | None,
    ) -> tuple[Array, tuple[Array, Array]]:
        c = self.config
        rows, has_bias = x.shape[:2], c.attention_bias != "none"
        q = Linear(c.N * c.H, ("embed", "heads"), has_bias, name="q")(x)
        k = Linear(c.K * c.H, ("embed", "kv_heads"), has_bias, name="k")(x)
        v = Linear(c.K * c.H, ("embed", "kv_heads"), has_bias, name="v")(x)
        if c.qk_norm == "projection":
            q, k = Norm(c, "heads", rms=True, name="q_norm")(q), Norm(c, "kv_heads", rms=True, name="k_norm")(k)
        q, k, v = q.reshape(*rows, c.N, c.H), k.reshape(*rows, c.K, c.H), v.reshape(*rows, c.K, c.H)
        if c.qk_norm == "head":
            q, k = Norm(c, "head", rms=True, name="q_norm")(q), Norm(c, "head", rms=True, name="k_norm")(k)
        if context.rotation:
            by = context.rotation[self.kind]
            q, k = rotate(q, by, c.rope_interleaved), rotate(k, by, c.rope_interleaved)
        if cached is None:
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        else:
            k, v = write(cached[0], k, context.positions), write(cached[1], v, context.positions)
        y = attend(
            q,
            k,
            v,
            context.may[self.kind],
            c.H**-0.5 if c.query_scale is None else c.query_scale,
            triangular=context.triangular,
            softcap=c.attention_softcap,
            dropout_rate=c.attention_dropout,
            dropout_key=dropout_key,
        ).reshape(*rows, c.N * c.H)
        o = Linear(c.D, ("heads", "embed"), c.attention_bias == "all", (2 * c.L) ** -0.5, name="o")
        return o(y), (k, v)


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        hidden = Linear(c.F, ("embed", "mlp"), c.mlp_bias, name="up")(x)
        if c.mlp == "gated":
            hidden = gated(Linear(c.F, ("embed", "mlp"), c.mlp_bias, name="gate")(x), hidden, c.activation)
        else:
            hidden = ACTIVATIONS[c.activation](hidden)
        return Linear(c.D, ("mlp", "embed"), c.mlp_bias, (2 * c.L) ** -0.5, name="down")(hidden)


class Experts(nn.Module):
    """A router, and E gated feed-forward layers of which each token passes a few."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, real: Bool[Array, "B T"]) -> tuple[Array, Routing]:
        c = self.config
        rows = x.reshape(-1, c.D)
        logits = Linear(c.E, ("embed", "expert"), use_bias=False, name="router")(rows).astype(jnp.float32)
        weights, ids = route(logits, c.experts_per_token, c.renormalize_experts)

        def matrices(name: str, axes: tuple[str, str, str], shape: tuple[int, int], gain: float) -> Array:
            normal = nn.initializers.truncated_normal(gain * shape[0] ** -0.5)
            return declare(self, name, normal, axes, (c.E, *shape))

        gate = matrices("gate", ("expert", "embed", "mlp"), (c.D, c.F), 1.0)
        up = matrices("up", ("expert", "embed", "mlp"), (c.D, c.F), 1.0)
        down = matrices("down", ("expert", "mlp", "embed"), (c.F, c.D), (2 * c.L) ** -0.5)
        y = pass_through_experts(rows, weights, ids, gate, up, down, c.activation)
        return y.reshape(x.shape), observe(logits, ids, real.reshape(-1))


class Block(nn.Module):
    """Attention and a feed-forward layer around the residual stream, norms where `ModelConfig.residual` puts them.

    Reference: Vaswani et al. 2017, section 3.1 (post); Xiong et al. 2020, "On Layer Normalization in the Transformer
    Architecture", figure 1 (pre); Wang and Komatsuzaki 2021, "GPT-J-6B" (parallel); Gemma Team 2024, "Gemma 2", table 1
    (pre and post); OLMo Team 2024, "2 OLMo 2 Furious", section 3 (branch).
    """

    config: ModelConfig
    kind: LayerKind

    @nn.compact
    def __call__(
        self, x: Array, context: Context, cached: tuple[Array, Array] | None, dropout_key: PRNGKeyArray | None
    ) -> tuple[Array, tuple[Array, Array], Routing | None]:
        c = self.config
        keys = [None] * 3 if dropout_key is None else list(jax.random.split(dropout_key, 3))
        norm_before = c.residual in ("pre", "pre_and_post", "parallel")
        norm_behind = c.residual in ("pre_and_post", "branch")

        def enter(x: Array, name: str) -> Array:
            return Norm(c, name=f"{name}_norm")(x) if norm_before else x

        def leave(x: Array, y: Array, name: str, key: PRNGKeyArray | None) -> Array:
            y = Norm(c, name=f"{name}_post_norm")(y) if norm_behind else y
            total = x + dropout(y, c.dropout, key)
            return Norm(c, name=f"{name}_post_norm")(total) if c.residual == "post" else total

        y, kv = Attention(c, self.kind, name="attn")(enter(x, "attn"), context, cached, keys[2])
        h = leave(x, y, "attn", keys[0])
        entering = enter(x if c.residual == "parallel" else h, "mlp")
        routing = None
        if c.E:
            y, routing = Experts(c, name="mlp")(entering, context.positions >= 0)
        else:
            y = MLP(c, name="mlp")(entering)
        return constrain(leave(h, y, "mlp", keys[1]), ("batch", "seq", None)), kv, routing
