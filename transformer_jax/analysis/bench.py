"""Rates of training and decoding beside what this machine can do at most, measured in the same run.

A machine that is shared runs slower at times, so compare figures of one run with each other, and trust fractions more
than rates. Weights are random: rates do not depend on their values.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.architecture import DType, ModelConfig
from transformer_jax.config import DecodingConfig, RunConfig
from transformer_jax.decoding.generate import DecodeState, decode
from transformer_jax.decoding.sampling import sampling_params
from transformer_jax.machine import matmul_peak, read_bandwidth
from transformer_jax.model.cost import cache_bytes, product_params, train_flops
from transformer_jax.model.transformer import build, cast_matrices
from transformer_jax.text.pipeline import Batch
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import compile_train_step, init_state

Row = dict[str, Any]

BYTE_VOCABULARY = 257
"""Of a model whose preset leaves the vocabulary to a tokenizer."""


def bench_train(run: RunConfig, dtypes: Sequence[DType], steps: int) -> list[Row]:
    """Time training steps; a row for each dtype, with the median of `steps` after two to warm up."""
    B, T = run.data.batch_size, run.data.seq_len
    rows = []
    for dtype in dtypes:
        c = _with(run.model, dtype)
        peak = matmul_peak(dtype)
        seconds = statistics.median(_train_seconds(c, run, steps))
        peak = max(peak, matmul_peak(dtype))
        flops = train_flops(c, B, T) / seconds
        rows.append(
            {
                "dtype": dtype,
                "batch": B,
                "seq_len": T,
                "ms_per_step": seconds * 1e3,
                "tokens_per_s": B * T / seconds,
                "gflops_per_s": flops / 1e9,
                "matmul_peak_gflops_per_s": peak / 1e9,
                "of_matmul_peak": flops / peak,
            }
        )
    return rows


def _train_seconds(c: ModelConfig, run: RunConfig, steps: int) -> list[float]:
    model, optimizer = build(c), make_optimizer(run.optimizer, steps + 2)
    state = jax.jit(lambda: init_state(model, optimizer, jax.random.key(0)))()
    train_step = compile_train_step(model, optimizer, c.dtype)
    rng = np.random.default_rng(0)
    B, T = run.data.batch_size, run.data.seq_len
    times = []
    for _ in range(steps + 2):
        batch = _random_batch(rng, c.V, B, T)
        start = time.perf_counter()
        state, metrics = train_step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    return times[2:]


def _random_batch(rng: np.random.Generator, V: int, B: int, T: int) -> Batch:
    stream = rng.integers(0, V, (B, T + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    ones = np.ones((B, T), np.int32)
    weights, domains = ones.astype(np.float32), np.zeros_like(ones)
    return Batch(*map(jnp.asarray, (stream[:, :-1], stream[:, 1:], positions, ones, weights, domains)))


def bench_decode(
    model_config: ModelConfig, dtypes: Sequence[DType], batches: Sequence[int], context: int, steps: int
) -> list[Row]:
    """Time greedy decoding steps in a cache of `context` slots that is full up to the last `steps`.

    A step must read every matrix and the cache once; the rate of those bytes is beside the read bandwidth.
    """
    rows = []
    for dtype in dtypes:
        c = _with(model_config, dtype)
        model = build(c)
        params = jax.jit(lambda c=c, model=model: cast_matrices(model.init(jax.random.key(0)), c.dtype))()
        weights = product_params(c) * jnp.dtype(dtype).itemsize
        for B in batches:
            bandwidth = read_bandwidth()
            seconds = _decode_seconds(model, params, B, context, steps)
            bandwidth = max(bandwidth, read_bandwidth())
            rate = (weights + cache_bytes(c, B, context)) / seconds
            rows.append(
                {
                    "dtype": dtype,
                    "batch": B,
                    "context": context,
                    "ms_per_step": seconds * 1e3,
                    "tokens_per_s": B / seconds,
                    "gbytes_per_s": rate / 1e9,
                    "read_bandwidth_gbytes_per_s": bandwidth / 1e9,
                    "of_read_bandwidth": rate / bandwidth,
                }
            )
    return rows


def _decode_seconds(model: Any, params: Any, B: int, context: int, steps: int) -> float:
    """The median time of one step over a few blocks of `steps`."""

    def begin() -> DecodeState:
        start = context - steps
        cache = model.init_cache(B, context)
        slots = jnp.arange(context)
        cache = cache._replace(positions=jnp.broadcast_to(jnp.where(slots < start, slots, -1), (B, context)))
        return DecodeState(
            cache=cache,
            tokens=jnp.ones(B, jnp.int32),
            positions=jnp.full(B, start, jnp.int32),
            last_positions=jnp.full(B, context, jnp.int32),
            keys=jax.random.split(jax.random.key(0), B),
            sampling=sampling_params([DecodingConfig(temperature=0.0)] * B),
        )

    times = []
    for _ in range(4):
        state = jax.block_until_ready(begin())
        start = time.perf_counter()
        jax.block_until_ready(decode(model, params, state, steps=steps))
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times[1:])


def _with(c: ModelConfig, dtype: DType) -> ModelConfig:
    return dataclasses.replace(c, dtype=dtype, vocab_size=c.vocab_size or BYTE_VOCABULARY)
