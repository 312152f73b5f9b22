"""What this machine can do at most, measured: the figures that a rate is a fraction of."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer_jax.config import DType


def matmul_peak(dtype: DType) -> float:
    """Measure FLOP/s of a large square matrix product on all local devices together."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    a = jnp.ones((size, size), dtype)
    seconds = best_seconds(jax.jit(lambda a: a @ a), a)
    return 2 * size**3 / seconds * _independent_devices()


def read_bandwidth() -> float:
    """Measure bytes a second of reading an array too large for any cache, on all local devices together."""
    x = jnp.ones(2**26, jnp.float32)
    return x.nbytes / best_seconds(jax.jit(jnp.sum), x) * _independent_devices()


def best_seconds(function: Callable[..., object], *arguments: object, repeat: int = 7) -> float:
    """Time a call after one to warm up. The least of several: other work on the machine can only add."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def _independent_devices() -> int:
    # Simulated CPU devices share the same cores.
    return 1 if jax.default_backend() == "cpu" else jax.local_device_count()
