from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.config import GROUPS, OptimizerConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import param_shapes
from transformer_jax.pretrained.huggingface import config_of_folder
from transformer_jax.training.optimizer import learning_rate, make_optimizer
from transformer_jax.training.parameter_groups import group_table

FIXTURES = Path(__file__).parent.parent / "pretrained" / "fixtures"


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    schedule = learning_rate(OptimizerConfig(learning_rate=0.1, warmup_steps=10, final_fraction=0.2), steps=110)
    expected = {1: 0.01, 5: 0.05, 10: 0.1, 60: 0.06, 110: 0.02}
    for update, rate in expected.items():
        assert schedule(update - 1) == pytest.approx(rate, rel=1e-5), update


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_a_run_shorter_than_its_warm_up_still_learns(steps):
    schedule = learning_rate(OptimizerConfig(learning_rate=0.1, warmup_steps=20), steps)
    assert [np.asarray(schedule(count)).item() for count in range(steps)] == pytest.approx(
        [0.1 * (count + 1) / steps for count in range(steps)]
    )


def test_two_updates_agree_with_the_paper_in_numpy():
    config = OptimizerConfig(
        learning_rate=0.1, warmup_steps=0, final_fraction=1.0, clip_norm=0.5, weight_decay=0.3, beta1=0.8, beta2=0.9
    )
    optimizer = make_optimizer(config, steps=10)
    params = {"embed": jnp.full((2, 2), 2.0), "q": {"weight": jnp.full((2, 2), 1.0)}, "norm": {"scale": jnp.ones(2)}}
    decay = {"embed": 0, "q": {"weight": 0.3}, "norm": {"scale": 0}}
    state, gradients = optimizer.init(params), []
    expected = jax.tree.map(np.asarray, params)
    for step in (1, 2):
        scale = 0.1 * step
        gradients.append(
            jax.tree.map(lambda p, s=scale: s * np.arange(p.size, dtype=np.float32).reshape(p.shape), params)
        )
        updates, state = optimizer.update(gradients[-1], state, params)
        params = optax.apply_updates(params, updates)
    expected = jax.tree.map(by_hand, expected, decay, *map(clipped, gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, expected)


SCHEDULES: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    "constant": ({}, {1: 0.01, 10: 0.1, 60: 0.1, 110: 0.1}),
    "linear": ({"final_fraction": 0.2}, {5: 0.05, 10: 0.1, 60: 0.06, 110: 0.02}),
    "wsd": ({"final_fraction": 0.2, "decay_fraction": 0.5}, {5: 0.05, 10: 0.1, 55: 0.1, 83: 0.0592727, 110: 0.02}),
    "inverse_sqrt": ({}, {5: 0.05, 10: 0.1, 40: 0.05, 90: 0.1 / 3}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_what_they_say(name):
    settings, expected = SCHEDULES[name]
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=10, **({"schedule": name} | settings))
    schedule = learning_rate(config, steps=110)
    for update, rate in expected.items():
        assert np.asarray(schedule(update - 1)).item() == pytest.approx(rate, rel=1e-5), update


PARAMS: Any = {
    "embed": jnp.asarray([[2.0, -1.0], [0.5, 3.0]]),
    "layers_0": {"q": {"weight": jnp.asarray([[1.0, -2.0, 0.3], [0.2, 0.5, -1.0]])}, "norm": {"scale": jnp.ones(2)}},
}
GRADIENT: Any = jax.tree.map(lambda p: 0.1 * (p + 0.3), PARAMS)


def moved(steps: int = 2, start: Any = None, gradient: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Each parameter's change after some steps of the same gradient, at a rate of 0.1 and without decay."""
    plain = {"learning_rate": 0.1, "warmup_steps": 0, "schedule": "constant", "clip_norm": 1e9, "weight_decay": 0.0}
    optimizer = make_optimizer(OptimizerConfig(**(plain | settings)), steps=10)
    start, gradient = (PARAMS, GRADIENT) if start is None else (start, gradient)
    params, state = start, optimizer.init(start)
    for _ in range(steps):
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda new, old: np.asarray(new - old), params, start), state


def test_sgd_has_a_momentum():
    change, _ = moved(kind="sgd", beta1=0.5)
    jax.tree.map(lambda c, g: np.testing.assert_allclose(c, -0.1 * (g + 1.5 * g), rtol=1e-5), change, GRADIENT)


def test_lion_moves_by_signs():
    change, _ = moved(kind="lion")
    jax.tree.map(lambda c, g: np.testing.assert_allclose(c, -0.2 * np.sign(g), rtol=1e-5), change, GRADIENT)


def test_adafactor_moves_by_the_size_of_what_it_moves():
    """The first step: the gradient over its root mean square by entries, here all 1, times the parameter's."""
    change, _ = moved(steps=1, kind="adafactor")

    def check(c, p, g):
        size = max(np.sqrt(np.mean(np.square(p))), 1e-3)
        np.testing.assert_allclose(c, -0.1 * np.sign(g) * size, rtol=1e-4)

    jax.tree.map(check, change, PARAMS, GRADIENT)


def test_muon_turns_matrices_in_layers_and_leaves_the_rest_to_adamw():
    """Newton and Schulz's five steps bring singular values near 1: 0.7 to 1.2, by the cited paper's coefficients."""
    change, _ = moved(steps=1, kind="muon", beta1=0.95)
    direction = -np.asarray(change["layers_0"]["q"]["weight"]) / (0.1 * 0.2 * 3**0.5)
    u, _, vt = np.linalg.svd(np.asarray(GRADIENT["layers_0"]["q"]["weight"]), full_matrices=False)
    singular = np.diag(u.T @ direction @ vt.T)
    assert ((singular > 0.6) & (singular < 1.25)).all()
    np.testing.assert_allclose(u @ np.diag(singular) @ vt, direction, atol=1e-4)
    adamw, _ = moved(steps=1)
    np.testing.assert_allclose(change["embed"], adamw["embed"], rtol=1e-6)
    np.testing.assert_allclose(change["layers_0"]["norm"]["scale"], adamw["layers_0"]["norm"]["scale"], rtol=1e-6)


def test_muon_takes_experts_one_by_one_and_no_router():
    rng = np.random.default_rng(0)
    router, up = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 2), (2, 3, 4)))
    together: Any = {"layers_0": {"mlp": {"router": {"weight": router}, "up": up}}}
    alone: Any = {"layers_0": {"mlp": {"router": {"weight": router}, "up": up[1]}}}
    found, expected = (moved(1, p, p, kind="muon", clip_norm=1e9)[0]["layers_0"]["mlp"] for p in (together, alone))
    np.testing.assert_allclose(found["up"][1], expected["up"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["router"]["weight"], -0.1 * np.sign(router), rtol=1e-4)


def test_only_the_first_moment_may_be_kept_in_bfloat16():
    """The mean of the square has a decay of 0.999, which bfloat16 rounds to 1; the first stalls within a rounding."""
    change, state = moved(steps=100, first_moment="bfloat16", beta2=0.999)
    assert {x.dtype for x in jax.tree.leaves(optax.tree.get(state, "mu"))} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(optax.tree.get(state, "nu"))} == {jnp.dtype("float32")}
    expected, _ = moved(steps=100, beta2=0.999)
    jax.tree.map(lambda c, e: np.testing.assert_allclose(c, e, rtol=0.06), change, expected)


def test_groups_freeze_slow_and_decay():
    groups = ("embed$=0,1", "scale$=0.5,0", "weight$=1,2")
    change, _ = moved(steps=1, groups=groups, weight_decay=0.3)
    plain, _ = moved(steps=1)
    assert not change["embed"].any()
    norm, weight = change["layers_0"]["norm"]["scale"], change["layers_0"]["q"]["weight"]
    np.testing.assert_allclose(norm, 0.5 * plain["layers_0"]["norm"]["scale"], rtol=1e-6)
    decay = 0.1 * 0.6 * np.asarray(PARAMS["layers_0"]["q"]["weight"])
    np.testing.assert_allclose(weight, plain["layers_0"]["q"]["weight"] - decay, rtol=1e-5)


@pytest.mark.parametrize(
    "name", sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "config.json").exists())
)
def test_every_parameter_of_every_family_is_in_one_group_and_matrices_decay(name):
    shapes = param_shapes(config_of_folder(FIXTURES / name))
    table = group_table(GROUPS, shapes)
    assert sum(row.numbers for row in table) == sum(x.size for x in jax.tree.leaves(shapes))
    decaying = [name for row in table if row.weight_decay for name in row.names]
    leaves = {jax.tree_util.keystr(at, simple=True, separator="/"): x for at, x in jax.tree.leaves_with_path(shapes)}
    assert set(decaying) == {name for name, x in leaves.items() if x.ndim >= 2 and not name.endswith("embed")}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (("embed$=1,1",), "the parameter layers_0/norm/scale is matched by none; expected one pattern"),
        ((".=1,1", "embed$=1,1"), "the parameter embed is matched by '.' and 'embed$'"),
        (("embed$",), "found 'embed$'; expected a regular expression over parameter names and two numbers"),
        (("(=1,1",), r"found '\(=1,1'"),
        (("a=1,-1",), "found 'a=1,-1'"),
        (("a=nan,1",), "found 'a=nan,1'"),
        ((), "groups is .*; expected at least one row"),
    ],
)
def test_a_table_that_is_not_one_is_refused(groups, message):
    with pytest.raises(UserError, match=message.replace("$", r"\$")):
        group_table(OptimizerConfig(groups=groups).groups, PARAMS)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "sgd", "beta2": 0.9},
        {"kind": "lion", "eps": 1e-6},
        {"kind": "adafactor", "beta1": 0.5},
        {"kind": "adafactor", "first_moment": "bfloat16"},
        {"schedule": "constant", "final_fraction": 0.5},
        {"decay_fraction": 0.5},
    ],
    ids=str,
)
def test_a_setting_that_would_be_ignored_is_refused(settings):
    with pytest.raises(UserError, match=r"expected .*: OptimizerConfig\.(kind|schedule) is"):
        OptimizerConfig(**settings)


def clipped(gradient):
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda g: g * min(1, 0.5 / norm), gradient)


def by_hand(p, decay, *gradients):
    m = v = 0
    for step, g in enumerate(gradients, 1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        p = p - 0.1 * (m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.9**step)) + 1e-8) + decay * p)
    return p
