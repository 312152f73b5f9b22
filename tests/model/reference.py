"""A Transformer in plain numpy and float64, one token and one head at a time: what the model must agree with."""

from math import erf
from typing import Any

import numpy as np

from transformer_jax.architecture import ModelConfig
from transformer_jax.model.positions import attention_factor, rope_frequencies

Tree = Any


def forward(c: ModelConfig, params: Tree, tokens: list[int]) -> np.ndarray:
    """Logits [T V] of one unpadded sequence."""
    p = _to_float64(params)
    x = p["embed"][tokens] * (np.sqrt(c.D) if c.scale_embeddings else 1)
    if c.positions == "learned":
        x = x + p["position_embed"][: len(tokens)]
    if c.positions == "sinusoidal":
        for t in range(len(tokens)):
            for i in range(c.D):
                x[t, i] += (np.cos if i % 2 else np.sin)(t / 10_000 ** ((i - i % 2) / c.D))
    if c.num_token_types:
        x = x + p["type_embed"][0]
    if c.embedding_norm:
        x = norm(c, x, p["embed_norm"])
    for layer, kind in enumerate(c.kinds):
        x = block(c, kind, p[f"layers_{layer}"], x)
    if c.residual != "post":
        x = norm(c, x, p["final_norm"])
    if c.output_transform:
        x = norm(c, activation(c, linear(p["transform"], x)), p["transform_norm"])
    logits = x @ (p["embed"].T if c.tie_embeddings else p["output"]["weight"]) + p.get("output_bias", 0)
    logits = logits if c.logit_softcap is None else c.logit_softcap * np.tanh(logits / c.logit_softcap)
    return logits[:, : c.V]


def block(c: ModelConfig, kind: str, p: Tree, x: np.ndarray) -> np.ndarray:
    def attend(x: np.ndarray) -> np.ndarray:
        return attention(c, kind, p["attn"], x)

    def think(x: np.ndarray) -> np.ndarray:
        return experts(c, p["mlp"], x) if c.num_experts else mlp(c, p["mlp"], x)

    if c.residual == "parallel":
        return x + attend(norm(c, x, p["attn_norm"])) + think(norm(c, x, p["mlp_norm"]))
    for name, f in (("attn", attend), ("mlp", think)):
        before, behind = p.get(f"{name}_norm"), p.get(f"{name}_post_norm")
        if c.residual == "pre":
            x = x + f(norm(c, x, before))
        elif c.residual == "post":
            x = norm(c, x + f(x), behind)
        elif c.residual == "pre_and_post":
            x = x + norm(c, f(norm(c, x, before)), behind)
        else:
            x = x + norm(c, f(x), behind)
    return x


def norm(c: ModelConfig, x: np.ndarray, p: Tree, rms: bool = False) -> np.ndarray:
    scale = p["scale"] + (1 if c.norm == "rmsnorm_plus_one" else 0)
    if rms or c.norm != "layernorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * scale
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + c.norm_eps) * scale + p.get("bias", 0)


def linear(p: Tree, x: np.ndarray) -> np.ndarray:
    return x @ p["weight"] + p.get("bias", 0)


def rotate(c: ModelConfig, kind: str, vector: np.ndarray, position: int) -> np.ndarray:
    """Each pair of entries as a complex number, turned by its angle."""
    if c.positions != "rope":
        return vector
    theta = c.local_rope_theta if kind == "local" and c.local_rope_theta else c.rope_theta
    turn = np.exp(1j * position * rope_frequencies(theta, c.R, c.rope_scaling)) * attention_factor(c.rope_scaling)
    half = c.R // 2
    first, second = (slice(0, c.R, 2), slice(1, c.R, 2)) if c.rope_interleaved else (slice(half), slice(half, c.R))
    turned, rotated = (vector[first] + 1j * vector[second]) * turn, vector.copy()
    rotated[first], rotated[second] = turned.real, turned.imag
    return rotated


def attention(c: ModelConfig, kind: str, p: Tree, x: np.ndarray) -> np.ndarray:
    T, H = len(x), c.H
    q, k, v = (linear(p[name], x) for name in "qkv")
    if c.qk_norm == "projection":
        q, k = norm(c, q, p["q_norm"], rms=True), norm(c, k, p["k_norm"], rms=True)
    q, k, v = (a.reshape(T, -1, H) for a in (q, k, v))
    if c.qk_norm == "head":
        q, k = norm(c, q, p["q_norm"], rms=True), norm(c, k, p["k_norm"], rms=True)
    y = np.zeros_like(q)
    for n in range(c.num_heads):
        kv = n * k.shape[1] // c.num_heads
        for t in range(T):
            seen = range(t + 1) if c.attention == "causal" else range(T)
            if kind == "local":
                seen = range(max(0, t + 1 - (c.window or 0)), t + 1)
            scores = np.array([rotate(c, kind, q[t, n], t) @ rotate(c, kind, k[s, kv], s) for s in seen])
            scores = scores * (c.query_scale or 1 / np.sqrt(H))
            if c.attention_softcap:
                scores = c.attention_softcap * np.tanh(scores / c.attention_softcap)
            weights = np.exp(scores - scores.max())
            y[t, n] = weights / weights.sum() @ v[list(seen), kv]
    return linear(p["o"], y.reshape(T, -1))


def activation(c: ModelConfig, x: np.ndarray) -> np.ndarray:
    if c.activation == "silu":
        return x / (1 + np.exp(-x))
    if c.activation == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if c.activation == "gelu":
        return x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2
    return np.maximum(x, 0)


def mlp(c: ModelConfig, p: Tree, x: np.ndarray) -> np.ndarray:
    if c.mlp == "gated":
        return linear(p["down"], activation(c, linear(p["gate"], x)) * linear(p["up"], x))
    return linear(p["down"], activation(c, linear(p["up"], x)))


def experts(c: ModelConfig, p: Tree, x: np.ndarray) -> np.ndarray:
    y = np.zeros_like(x)
    for t, token in enumerate(x):
        logits = linear(p["router"], token)
        probabilities = np.exp(logits) / np.exp(logits).sum()
        chosen = np.argsort(-probabilities)[: c.experts_per_token]
        weights = probabilities[chosen] / (probabilities[chosen].sum() if c.renormalize_experts else 1)
        for weight, e in zip(weights, chosen, strict=True):
            y[t] += weight * ((activation(c, token @ p["gate"][e]) * (token @ p["up"][e])) @ p["down"][e])
    return y


def _to_float64(tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {name: _to_float64(value) for name, value in tree.items()}
    return np.asarray(tree, np.float64)
