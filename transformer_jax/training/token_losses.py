"""What each token costs: its negative log-likelihood and what is wanted beside it, a part of the vocabulary at a time.

A batch has B T V logits, by far the largest array of a training step where the vocabulary is large. So where they are
many, they are made in parts of the vocabulary, forwards and once more backwards, and never all held:

    forwards     z_i = h w_i for the ids i of a part
                 m <- max(m', z),  s <- s e^(m' - m) + sum_i e^(z_i - m),  log-normalizer = m + log s in the end
    backwards    p_i = e^(z_i - log-normalizer)
                 dz_i = d_nll (p_i - [i = target]) + d_log-normalizer p_i + d_uniform (p_i - 1/V)

What is held grows with the tokens and not with the vocabulary; the products of the last layer are made four times
instead of three.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.model.output import OutputLayer, add_to_part, logits_of, part
from transformer_jax.model.transformer import Model, Params

MOST_LOGITS = 2**24
"""Logits that are held at once, 64 MiB; a batch that has more takes the vocabulary in parts."""


class TokenLosses(NamedTuple):
    """Of each token; what has no target has figures too, which its weight of 0 leaves out."""

    nll: Float[Array, "*rows"]
    """log sum_v exp(logit_v) - logit_target, in nats."""
    log_normalizer: Float[Array, "*rows"]
    """log sum_v exp(logit_v)."""
    uniform: Float[Array, "*rows"]
    """log sum_v exp(logit_v) - mean_v logit_v: the cross-entropy of a target that is any id alike."""


def token_losses(
    model: Model,
    params: Params,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    most_logits: int = MOST_LOGITS,
) -> TokenLosses:
    """Compare what the model expects after each token with the token that came."""
    V = model.vocab_size
    if model.before_logits is None or targets.size * V <= most_logits:
        return losses_of_logits(model.unembed(params, hidden), targets)
    features, layer = model.before_logits(params, hidden)
    losses = _by_parts(
        V, max(1, most_logits // targets.size), features.reshape(targets.size, -1), layer, targets.ravel()
    )
    return TokenLosses(*(loss.reshape(targets.shape) for loss in losses))


def losses_of_logits(logits: Float[Array, "*rows V"], targets: Int[Array, "*rows"]) -> TokenLosses:
    """The same of logits that are all there."""
    # A comparison instead of a look-up: the gradient of a look-up is a scatter, which is slow on CPU and TPU.
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return TokenLosses(log_normalizer - target_logits, log_normalizer, log_normalizer - jnp.mean(logits, axis=-1))


class _Part(NamedTuple):
    """The ids of one part. The last part begins early enough to be whole, and leaves out what the one before had."""

    first: Array
    """The first id of the layer's part."""
    begin: Array
    """The first id that counts."""


def _parts(V: int, most: int) -> tuple[_Part, int]:
    count = -(-V // most)
    size = -(-V // count)
    begin = np.arange(count) * size
    return _Part(jnp.asarray(np.minimum(begin, V - size)), jnp.asarray(begin)), size


def _logits_of_part(
    layer: OutputLayer, features: Array, which: _Part, size: int
) -> tuple[Float[Array, "N _"], Int[Array, " _"]]:
    ids = which.first + jnp.arange(size)
    logits = logits_of(part(layer, which.first, size), features)
    return jnp.where(ids >= which.begin, logits, -jnp.inf), ids


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_parts(
    V: int, most: int, features: Float[Array, "N D"], layer: OutputLayer, targets: Int[Array, " N"]
) -> TokenLosses:
    """Take at most `most` of the V ids at once."""
    parts, size = _parts(V, most)

    def add(sums: tuple[Array, ...], which: _Part) -> tuple[tuple[Array, ...], None]:
        largest, scaled, target, total = sums
        logits, ids = _logits_of_part(layer, features, which, size)
        counts = ids >= which.begin
        larger = jnp.maximum(largest, jnp.max(logits, axis=-1))
        scaled = scaled * jnp.exp(largest - larger) + jnp.sum(jnp.exp(logits - larger[:, None]), axis=-1)
        target = target + jnp.sum(jnp.where((ids == targets[:, None]) & counts, logits, 0), axis=-1)
        return (larger, scaled, target, total + jnp.sum(jnp.where(counts, logits, 0), axis=-1)), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    (largest, scaled, target, total), _ = jax.lax.scan(
        add, (jnp.full_like(zeros, -jnp.inf), zeros, zeros, zeros), parts
    )
    log_normalizer = largest + jnp.log(scaled)
    return TokenLosses(log_normalizer - target, log_normalizer, log_normalizer - total / V)


def _forward(
    V: int, most: int, features: Array, layer: OutputLayer, targets: Array
) -> tuple[TokenLosses, tuple[Array, OutputLayer, Array, Array]]:
    losses = _by_parts(V, most, features, layer, targets)
    return losses, (features, layer, targets, losses.log_normalizer)


def _backward(
    V: int, most: int, kept: tuple[Array, OutputLayer, Array, Array], wanted: TokenLosses
) -> tuple[Array, OutputLayer, None]:
    features, layer, targets, log_normalizer = kept
    parts, size = _parts(V, most)
    of_probability = (wanted.nll + wanted.log_normalizer + wanted.uniform)[:, None]

    def add(sums: tuple[Array, OutputLayer], which: _Part) -> tuple[tuple[Array, OutputLayer], None]:
        logits, back = jax.vjp(
            lambda features, piece: logits_of(piece, features), features, part(layer, which.first, size)
        )
        ids = which.first + jnp.arange(size)
        dlogits = of_probability * jnp.exp(logits - log_normalizer[:, None]) - wanted.uniform[:, None] / V
        dlogits = dlogits - jnp.where(ids == targets[:, None], wanted.nll[:, None], 0)
        dfeatures, dpiece = back(jnp.where(ids >= which.begin, dlogits, 0))
        return (sums[0] + dfeatures.astype(jnp.float32), add_to_part(sums[1], which.first, dpiece, size)), None

    zeros = jax.tree.map(jnp.zeros_like, layer)
    (dfeatures, dlayer), _ = jax.lax.scan(add, (jnp.zeros(features.shape, jnp.float32), zeros), parts)
    return dfeatures.astype(features.dtype), dlayer, None


_by_parts.defvjp(_forward, _backward)
