"""What of a batch is hidden and to be predicted, as pure functions from a batch and a key to a batch.

    next      a  b  c  d  e     every token behind those before it
              b  c  d  e <eot>  the targets

    prefix    a  b  c |d  e     a prefix of random length, which sees all of itself
              .  .  d  e <eot>  no target lies in it

    masked    a  _  c  d  x     some tokens hidden, some of those by a mask, some by another token, some not at all
              .  b  .  .  e     the targets are the hidden tokens themselves

The whole batch is hidden at once, before it is cut into parts or spread over devices, so neither changes what is drawn.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray

from transformer_jax.config import ObjectiveConfig
from transformer_jax.text.pipeline import Batch

Hide = Callable[[Batch, PRNGKeyArray], Batch]

SHOWN_AS_MASK, SHOWN_AS_OTHER = 0.8, 0.1
"""Of the tokens that are to be predicted; the rest is shown as it is."""


class Vocabulary(NamedTuple):
    """What hiding tokens has to know of their ids."""

    size: int
    mask: int
    """Stands in place of a hidden token."""
    control: tuple[int, ...]
    """Tokens that are no text, and never hidden."""


def make_hide(config: ObjectiveConfig, vocabulary: Vocabulary) -> Hide | None:
    """Return the function for what is to be predicted; None where nothing is hidden."""
    if config.predict == "next":
        return None
    if config.predict == "prefix":
        return show_prefix
    never = _table(vocabulary.size, (*vocabulary.control, vocabulary.mask))

    def hide(batch: Batch, key: PRNGKeyArray) -> Batch:
        return mask_tokens(batch, key, config.mask_fraction, vocabulary.mask, never)

    return hide


def _table(size: int, ids: Iterable[int]) -> Bool[Array, " V"]:
    table = np.zeros(size, bool)
    table[[i for i in ids if i < size]] = True
    return jnp.asarray(table)


def show_prefix(batch: Batch, key: PRNGKeyArray) -> Batch:
    """Let a prefix of each document in each window see all of itself, and take its own tokens from the targets.

    Of n inputs 0 to n - 1 are the prefix, all as likely. A prefix of p tokens predicts the one behind it and no other:

        loss_weights[t] = 0 where t < p - 1

    Reference: Raffel et al. 2020, "Exploring the Limits of Transfer Learning", sections 3.2.3 and 3.2.4.
    """
    segments, positions = jnp.asarray(batch.segment_ids), jnp.asarray(batch.positions)
    B, T = segments.shape
    # Segments are numbered from 1 to T at most; 0 is padding.
    lengths = jax.vmap(lambda row: jnp.bincount(row, length=T + 1))(segments)
    prefixes = jnp.floor(jax.random.uniform(key, (B, T + 1)) * lengths).astype(jnp.int32)
    prefix = jnp.take_along_axis(prefixes, segments, axis=1)
    weights = jnp.where(positions < prefix - 1, 0, jnp.asarray(batch.loss_weights))
    return batch._replace(prefix_lengths=prefix, loss_weights=weights)


def mask_tokens(batch: Batch, key: PRNGKeyArray, fraction: float, mask: int, never: Bool[Array, " V"]) -> Batch:
    """Hide a fraction of the tokens: eight in ten behind the mask, one behind any token, one not at all.

    The targets are the tokens themselves; control tokens and padding are never among them.

    Reference: Devlin et al. 2019, "BERT", section 3.1.
    """
    tokens = jnp.asarray(batch.tokens)
    of_chosen, of_shown, of_other = jax.random.split(key, 3)
    chosen = (jax.random.uniform(of_chosen, tokens.shape) < fraction) & ~never[tokens] & (batch.segment_ids > 0)
    shown = jax.random.uniform(of_shown, tokens.shape)
    other = jax.random.randint(of_other, tokens.shape, 0, never.size)
    hidden = jnp.where(shown < SHOWN_AS_MASK, mask, jnp.where(shown < SHOWN_AS_MASK + SHOWN_AS_OTHER, other, tokens))
    return batch._replace(
        tokens=jnp.where(chosen, hidden, tokens),
        targets=tokens,
        loss_weights=jnp.where(chosen, jnp.asarray(batch.loss_weights), 0),
    )
