"""A Transformer in plain numpy and float64, one token and one head at a time: what the model must agree with."""

from typing import Any

import numpy as np

from transformer_jax.config import ModelConfig

Tree = Any


def forward(c: ModelConfig, params: Tree, tokens: list[int]) -> np.ndarray:
    """Logits [T V] of one unpadded sequence."""
    p = _to_float64(params)
    x = p["embed"][tokens]
    if c.positions == "learned":
        x = x + p["position_embed"][: len(tokens)]
    for layer in range(c.num_layers):
        block = p[f"layers_{layer}"]
        x = x + attention(c, block["attn"], norm(c, x, block["attn_norm"]))
        x = x + mlp(c, block["mlp"], norm(c, x, block["mlp_norm"]))
    x = norm(c, x, p["final_norm"])
    return x @ p["embed"].T if c.tie_embeddings else x @ p["output"]["weight"]


def norm(c: ModelConfig, x: np.ndarray, p: Tree) -> np.ndarray:
    if c.norm == "rmsnorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * p["scale"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + c.norm_eps) * p["scale"] + p.get("bias", 0)


def linear(p: Tree, x: np.ndarray) -> np.ndarray:
    return x @ p["weight"] + p.get("bias", 0)


def rotate(c: ModelConfig, vector: np.ndarray, position: int) -> np.ndarray:
    """Each pair (i, i + H/2) as a complex number, turned by its angle."""
    half = len(vector) // 2
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * c.rope_theta ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag])


def attention(c: ModelConfig, p: Tree, x: np.ndarray) -> np.ndarray:
    T, H = len(x), c.H
    q, k, v = (linear(p[name], x).reshape(T, -1, H) for name in "qkv")
    y = np.zeros_like(q)
    for n in range(c.num_heads):
        kv = n * k.shape[1] // c.num_heads
        for t in range(T):
            seen = range(t + 1) if c.attention == "causal" else range(T)
            turn = rotate if c.positions == "rope" else lambda c, vector, position: vector
            scores = np.array([turn(c, q[t, n], t) @ turn(c, k[s, kv], s) for s in seen]) / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            y[t, n] = weights / weights.sum() @ v[list(seen), kv]
    return linear(p["o"], y.reshape(T, -1))


def activation(c: ModelConfig, x: np.ndarray) -> np.ndarray:
    if c.activation == "silu":
        return x / (1 + np.exp(-x))
    if c.activation == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if c.activation == "gelu":
        from math import erf

        return x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2
    return np.maximum(x, 0)


def mlp(c: ModelConfig, p: Tree, x: np.ndarray) -> np.ndarray:
    if c.mlp == "gated":
        return linear(p["down"], activation(c, linear(p["gate"], x)) * linear(p["up"], x))
    return linear(p["down"], activation(c, linear(p["up"], x)))


def _to_float64(tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {name: _to_float64(value) for name, value in tree.items()}
    return np.asarray(tree, np.float64)
