"""Rotary settings of a config.json, in the schema of transformers 5 and in the older one."""

from typing import Any

from transformer_jax.architecture import ModelConfig, RopeScaling
from transformer_jax.pretrained.config_reader import Settings

Tree = dict[str, Any]

KINDS = {"default": "none", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "llama3": "llama3"}
"""Their names of rope types to ours."""

THEIR_KINDS = {ours: theirs for theirs, ours in KINDS.items()}

OF_KIND = {
    "none": (),
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
"""Settings that a kind has besides its factor and the original context; they have the same names here and there."""


def read_rope(settings: Settings, *, theta: float = 10_000.0, fraction: float | None = None) -> Tree:
    """The rotary fields of a `ModelConfig`. Raises `UserError` for a type or a setting that is not known.

    `theta` is the family's own base. `fraction` is the part of a head that is rotated unless the file says otherwise;
    without it the family rotates all.
    """
    longest = settings.size("max_position_embeddings")
    theta = settings.take("rope_theta", theta)
    part = 1.0 if fraction is None else settings.take("partial_rotary_factor", fraction)
    local_theta = settings.take("rope_local_base_freq", None)
    settings.expect("rope_interleaved", False)
    rope = settings.section("rope_parameters")
    rope = settings.section("rope_scaling") if rope is None else rope
    if rope is not None and "full_attention" in rope:
        local, rope_global = rope.section("sliding_attention"), rope.section("full_attention")
        rope.finish()
        if local is not None:
            local.expect("rope_type", "default")
            local_theta = local.take("rope_theta", local_theta)
            local.finish()
        if rope_global is not None:
            # transformers looks for it outside, where it would count for both kinds of layers.
            rope_global.expect("truncate", True)
        rope = rope_global
    scaling, reach = RopeScaling(), longest
    if rope is not None:
        theta = rope.take("rope_theta", theta)
        if fraction is None:
            rope.expect("partial_rotary_factor", 1.0)
        part = rope.take("partial_rotary_factor", part)
        scaling, reach = _read_scaling(rope, longest)
        rope.finish()
    return {
        "max_seq_len": reach,
        "rope_theta": theta,
        "local_rope_theta": local_theta,
        "rope_fraction": part,
        "rope_scaling": scaling,
    }


def _read_scaling(rope: Settings, longest: int) -> tuple[RopeScaling, int]:
    """The scaling, and the context that the model then reaches."""
    name = rope.take("rope_type", rope.take("type", "default"))
    if not isinstance(name, str) or name not in KINDS:
        raise rope.refuse("rope_type" if "rope_type" in rope else "type", "one of " + ", ".join(KINDS))
    kind: Any = KINDS[name]
    original = rope.size("original_max_position_embeddings", longest)
    if kind == "none":
        return RopeScaling(), longest
    given = {field: rope.take(field, None) for field in OF_KIND[kind]}
    settings: Tree = {field: value for field, value in given.items() if value is not None}
    if kind == "linear":
        return RopeScaling(kind, rope.take("factor")), longest
    if kind == "dynamic":
        # The config gives the context that the model was trained to; the factor says how far it then reaches.
        factor = rope.number("factor")
        return RopeScaling(kind, factor, longest), int(longest * factor)
    # The context of the config is already the scaled one.
    factor = rope.number("factor", longest / original) if kind == "yarn" else rope.number("factor")
    return RopeScaling(kind, float(factor), original, **settings), longest


def write_rope(c: ModelConfig) -> Tree:
    """The rotary settings of a config.json, in the schema of transformers 5; `max_position_embeddings` among them."""
    scaling = c.rope_scaling
    rope: Tree = {"rope_type": THEIR_KINDS[scaling.kind], "rope_theta": c.rope_theta}
    longest = c.max_seq_len
    if scaling.kind != "none":
        rope["factor"] = scaling.factor
    if scaling.kind == "dynamic":
        longest = scaling.original_max_len or longest
    elif scaling.original_max_len is not None:
        rope["original_max_position_embeddings"] = scaling.original_max_len
    for name in OF_KIND[scaling.kind]:
        value = getattr(scaling, name)
        if value is not None:
            rope[name] = value
    rope["partial_rotary_factor"] = c.rope_fraction
    if c.local_rope_theta is not None:
        local = {"rope_type": "default", "rope_theta": c.local_rope_theta}
        return {
            "rope_parameters": {"full_attention": rope, "sliding_attention": local},
            "max_position_embeddings": longest,
        }
    return {"rope_parameters": rope, "max_position_embeddings": longest}
