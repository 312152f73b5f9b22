"""The keys and values of tokens that have been seen, as an immutable value.

Slot p of a row holds the token at position p, and nothing else says where a token is: no cursor, no length. Padding is
position -1 and is never written. A write past the end would be dropped, so whoever chooses positions checks them
against `length` beforehand, on the host.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class KVCache(NamedTuple):
    """Keys and values of L layers for B rows of S slots; 2 L B K S H numbers."""

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]
    positions: Int[Array, "B S"]
    """The position that a slot holds: its own number, or -1 while it is empty."""

    @property
    def length(self) -> int:
        return self.positions.shape[1]


def empty_cache(L: int, B: int, K: int, S: int, H: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """Make a cache of zeros in which every slot is empty."""

    def layers() -> tuple[Array, ...]:
        return tuple(jnp.zeros((B, K, S, H), dtype) for _ in range(L))

    return KVCache(layers(), layers(), jnp.full((B, S), -1, jnp.int32))


def write(
    buffer: Float[Array, "B K S H"], new: Float[Array, "B T K H"], positions: Int[Array, "B T"]
) -> Float[Array, "B K S H"]:
    """Store each token's vector in the slot of its position; padding (-1) is dropped."""
    slots = _slots(positions, buffer.shape[2])
    written = jax.vmap(lambda row, values, slot: row.at[:, slot].set(values.swapaxes(0, 1), mode="drop"))(
        buffer, new.astype(buffer.dtype), slots
    )
    # Without the barrier XLA fuses the write of a single row into each of its readers, and copies the buffer for it.
    return jax.lax.optimization_barrier(written)


def write_positions(buffer: Int[Array, "B S"], positions: Int[Array, "B T"]) -> Int[Array, "B S"]:
    """Record which slots hold a token from now on."""
    slots = _slots(positions, buffer.shape[1])
    return jax.vmap(lambda row, values, slot: row.at[slot].set(values, mode="drop"))(buffer, positions, slots)


def _slots(positions: Array, S: int) -> Array:
    # A negative index would count from the end; one past the end is what "drop" drops.
    return jnp.where(positions < 0, S, positions)
