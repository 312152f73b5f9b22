"""This machine: what it is told before work begins, and what it can do at most, which a rate is a fraction of."""

import ctypes
import glob
import os
import platform
import re
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.architecture import DType


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it frees, instead of handing it back to the kernel.

    XLA's CPU backend takes the buffers of every program run from malloc and frees them again. By default glibc gives
    large ones back to the kernel, which then clears each page anew at the next run: up to a third of a training step.
    The process stays as large as it once was. Without glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8
        for option, value in ((trim_threshold, 2**31 - 1), (mmap_threshold, 2**31 - 1), (arena_max, 1)):
            mallopt(option, value)


def cache_folder(name: str) -> Path | None:
    """Make a folder of ours in the user's cache folder; None where that cannot be."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transformer_jax" / name
        folder.mkdir(parents=True, exist_ok=True)
    # Path.home raises RuntimeError for a user without a home.
    except (OSError, RuntimeError):
        return None
    return folder


def remember_compilations() -> None:
    """Keep what is compiled for the next process: in JAX_COMPILATION_CACHE_DIR, else in the user's cache folder.

    Where that folder cannot be made, everything is compiled anew each time.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder is None:
        folder = cache_folder("compiled")
        if folder is None:
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    warnings.showwarning = _forget_damaged(Path(folder), warnings.showwarning)


def _forget_damaged(folder: Path, show: Callable[..., None]) -> Callable[..., None]:
    """Remove an entry of the cache instead of showing JAX's warning that it cannot be read.

    JAX writes entries in place and never over one another, so it would warn at every run of one that a kill or a full
    disk has cut short. Now it compiles that program anew and keeps it whole.
    """

    def mend_or_show(message: Warning | str, *where: Any, **more: Any) -> None:
        damaged = re.match(r"Error reading persistent compilation cache entry for '([^']+)'", str(message))
        if damaged is None:
            show(message, *where, **more)
            return
        with suppress(OSError):
            for entry in folder.glob(f"{glob.escape(damaged[1])}-*"):
                entry.unlink(missing_ok=True)

    return mend_or_show


def training_options(dtype: DType) -> dict[str, bool]:
    """Say how XLA should compile a training step: with oneDNN's products, in bfloat16 on an x86 CPU.

    They make the step a tenth faster there, and 2 % slower in float32.
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {"xla_cpu_use_onednn": True} if dtype == "bfloat16" and x86 and jax.default_backend() == "cpu" else {}


def num_cores() -> int:
    """Cores that this process may use, where the system can tell, and not all that the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of all local devices together: their own where they have some, else the machine's."""
    own = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    return sum(own) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def matmul_peak(dtype: DType) -> float:
    """Measure FLOP/s of a large square matrix product on all local devices together."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    a = jnp.ones((size, size), dtype)
    seconds = best_seconds(jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32)), a)
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
