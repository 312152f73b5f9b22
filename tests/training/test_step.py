import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.architecture import ModelConfig
from transformer_jax.config import MeshConfig, ObjectiveConfig, OptimizerConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import build
from transformer_jax.sharding import batch_sharding, make_mesh, param_shardings, use_mesh
from transformer_jax.text.pipeline import Batch
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import (
    StepConfig,
    batch_losses,
    compile_train_step,
    init_state,
    make_train_step,
)

C = ModelConfig(
    vocab_size=32, max_seq_len=16, num_layers=2, d_model=16, d_ff=32, num_heads=4, num_kv_heads=2, dtype="float32"
)
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=0), steps=100)


def a_batch(B=8, T=16, seed=0):
    stream = np.random.default_rng(seed).integers(0, 32, (B, T + 1)).astype(np.int32)
    positions = np.tile(np.r_[np.arange(10), np.arange(T - 10)].astype(np.int32), (B, 1))
    segments = np.tile(np.r_[np.full(10, 1), np.full(T - 10, 2)].astype(np.int32), (B, 1))
    return Batch(
        stream[:, :-1], stream[:, 1:], positions, segments, np.ones((B, T), np.float32), np.zeros_like(segments)
    )


@functools.cache
def train_step(c):
    return jax.jit(make_train_step(build(c), OPTIMIZER))


def run(c, batches, state=None):
    if state is None:
        state = init_state(build(c), OPTIMIZER, jax.random.key(0))
    losses = []
    for batch in batches:
        state, metrics = train_step(c)(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def test_learns_a_batch_by_heart():
    state, losses = run(C, [a_batch()] * 60)
    assert losses[0] == pytest.approx(np.log(32), abs=0.8)
    assert losses[-1] < 0.3
    assert state.step == 60


def test_padding_weighs_nothing():
    whole = a_batch(B=4)
    padded = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x)]), whole)
    padded.positions[4:] = -1
    a, b = run(C, [whole] * 2), run(C, [padded] * 2)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a[0].params, b[0].params)


@pytest.mark.slow
def test_dropout_is_new_in_each_step_and_the_same_in_each_run():
    c = dataclasses.replace(C, dropout=0.5)
    frozen = make_optimizer(OptimizerConfig(learning_rate=1e-30), steps=100)
    step = jax.jit(make_train_step(build(c), frozen))

    def losses():
        state = init_state(build(c), frozen, jax.random.key(0))
        for _ in range(3):
            state, metrics = step(state, a_batch())
            yield float(metrics["loss"])

    first = list(losses())
    assert len(set(first)) == 3
    assert first == list(losses())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 4, 2)], ids=str)
def test_sharded_is_single_device(sizes, dtype):
    """Three steps on a data x fsdp x tensor mesh against one device."""
    c = dataclasses.replace(C, dtype=dtype)
    batches = [a_batch(seed=seed) for seed in range(3)]
    _, expected = run(c, batches)
    mesh = make_mesh(MeshConfig(*sizes))
    model = build(c)
    with use_mesh(mesh):
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        shardings = param_shardings(mesh, model.logical_axes(), shapes)
        state = init_state(model, OPTIMIZER, jax.random.key(0))
        state = state._replace(params=jax.device_put(state.params, shardings))
        q = state.params["layers_0"]["attn"]["q"]["weight"]
        assert q.addressable_shards[0].data.size == q.size // (sizes[1] * sizes[2])
        step = jax.jit(make_train_step(model, OPTIMIZER))
        for batch, loss in zip(batches, expected, strict=True):
            state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh, 8)))
            assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5 if dtype == "float32" else 2e-2)


def test_meshes_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="the mesh is data 3 x fsdp 1 x tensor 1, but there are 8 devices"):
        make_mesh(MeshConfig(data=3))
    with pytest.raises(UserError, match="data -1 x fsdp 3 x tensor 1"):
        make_mesh(MeshConfig(fsdp=3))
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=8))
    odd = build(dataclasses.replace(C, vocab_size=33))
    shapes = jax.eval_shape(odd.init, jax.random.key(0))
    with pytest.raises(UserError, match=r"embed of shape \(33, 16\) cannot be split: 33 .* tensor of size 8"):
        param_shardings(mesh, odd.logical_axes(), shapes)
    with pytest.raises(UserError, match="batch_size is 6; expected a multiple of data x fsdp = 8"):
        batch_sharding(make_mesh(MeshConfig()), 6)


def test_packed_documents_cost_what_they_cost_alone():
    """One window of two documents, and the two alone, padded."""
    packed = a_batch(B=1)
    alone = [jax.tree.map(np.zeros_like, packed) for _ in range(2)]
    for document, columns in zip(alone, (slice(0, 10), slice(10, 16)), strict=True):
        document.positions[:] = -1
        for whole, part in zip(packed[:6], document[:6], strict=True):
            part[:, : whole[:, columns].shape[1]] = whole[:, columns]
    params = build(C).init(jax.random.key(0))
    loss = jax.jit(lambda batch: jnp.sum(batch_losses(build(C), params, batch)[0].nll * batch.loss_weights))
    assert float(loss(packed)) == pytest.approx(sum(float(loss(document)) for document in alone), rel=1e-6)


def unchanged(after, before):
    """Whether a step left all as it was but its own number."""
    assert after.step == before.step + 1
    after, before = (state._replace(step=0, key=0) for state in (after, before))
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, after, before)))


def test_the_loss_is_the_weighted_mean_and_a_batch_without_targets_changes_nothing():
    """Neither parameters, which would decay, nor moments, nor the schedule."""
    batch = a_batch()
    light = batch._replace(loss_weights=batch.loss_weights / 1000)
    assert run(C, [light])[1] == pytest.approx(run(C, [batch])[1], rel=1e-5)
    state, _ = run(C, [batch] * 2)
    after, metrics = train_step(C)(state, batch._replace(loss_weights=batch.loss_weights * 0))
    assert (metrics["loss"], metrics["grad_norm"], metrics["updates"]) == (0, 0, 2)
    assert unchanged(after, state)


def uneven(seed=0):
    """Eight rows with 1 to 16 targets, and one with none."""
    batch = a_batch(seed=seed)
    counts = np.array([1, 3, 7, 16, 0, 2, 11, 5])
    return batch._replace(loss_weights=(np.arange(16) < counts[:, None]).astype(np.float32))


SPLITS = {
    "mean": (C, StepConfig()),
    "smoothed": (C, StepConfig(ObjectiveConfig(label_smoothing=0.1, z_loss=1e-2, focal=1.5))),
    "tail of documents": (C, StepConfig(ObjectiveConfig(risk="cvar", alpha=0.4, level="document"))),
    "entropic": (C, StepConfig(ObjectiveConfig(risk="entropic"))),
    "experts": (dataclasses.replace(C, num_experts=4, experts_per_token=2), StepConfig(balance=0.5, router_z=0.1)),
}


@pytest.mark.parametrize(
    "name", ["mean", *(pytest.param(name, marks=pytest.mark.slow) for name in SPLITS if name != "mean")]
)
def test_taken_in_parts_is_taken_at_once(name):
    """Gradients, by the first moments of two steps, and all figures; the parts have targets in any number, or none."""
    c, config = SPLITS[name]
    model = build(c)

    def two_steps(accumulate):
        step = jax.jit(make_train_step(model, OPTIMIZER, config._replace(accumulate=accumulate)))
        state = init_state(model, OPTIMIZER, jax.random.key(0), config)
        figures = []
        for seed in range(2):
            state, metrics = step(state, uneven(seed))
            figures.append(metrics)
        return optax.tree.get(state.opt_state, "mu"), figures

    moments, figures = two_steps(1)
    for accumulate in (2, 8) if name == "mean" else (4,):
        parts_moments, parts_figures = two_steps(accumulate)
        assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(assert_close, parts_moments, moments)
        jax.tree.map(assert_close, parts_figures, figures)


def test_a_step_that_is_not_usual_is_skipped_whole():
    """A batch whose gradient is not finite, and one whose is too long; the figures say so and the run goes on."""
    model, config = build(C), StepConfig(ema_decay=0.9, skip_spikes=3.0)
    step = jax.jit(make_train_step(model, OPTIMIZER, config))
    state = init_state(model, OPTIMIZER, jax.random.key(0), config)
    endless = a_batch()._replace(loss_weights=np.full((8, 16), np.inf, np.float32))
    # The mean would not show it: a row that weighs less than nothing turns and stretches the gradient.
    weights = np.ones((8, 16), np.float32)
    weights[1:] = -0.14
    long = a_batch()._replace(loss_weights=weights)
    for number in range(25):
        state, metrics = step(state, a_batch(seed=number))
        if number == 3:
            after, metrics = step(state, endless)
            assert unchanged(after, state)
            assert metrics["updates"] == 4
            # There is no usual length yet.
            assert not unchanged(step(state, long)[0], state)
    after, metrics = step(state, long)
    assert float(metrics["grad_norm"]) > 3
    assert unchanged(after, state)
    assert not unchanged(step(after, a_batch(seed=25))[0], after)


def test_the_running_mean_of_the_parameters_is_that_of_numpy():
    model, config = build(C), StepConfig(ema_decay=0.75)
    step = jax.jit(make_train_step(model, OPTIMIZER, config))
    state = init_state(model, OPTIMIZER, jax.random.key(0), config)
    mean = np.asarray(state.params["embed"], np.float64)
    for seed in range(3):
        state, _ = step(state, a_batch(seed=seed))
        mean = 0.75 * mean + 0.25 * np.asarray(state.params["embed"], np.float64)
    assert state.ema is not None
    np.testing.assert_allclose(state.ema["embed"], mean, rtol=1e-6)


@pytest.mark.slow
def test_the_worst_domain_is_learnt_sooner():
    """Seven rows that say one thing over and over, and a last one that does not: its loss falls faster."""
    model, batch = build(C), a_batch()
    domains = np.zeros((8, 16), np.int32)
    domains[7] = 1
    batch = batch._replace(domains=domains)
    batch.tokens[:7] = batch.targets[:7] = 5
    ends = []
    for objective in (ObjectiveConfig(), ObjectiveConfig(risk="dro", dro_rate=0.5)):
        config = StepConfig(objective, domains=2)
        step = jax.jit(make_train_step(model, OPTIMIZER, config))
        state = init_state(model, OPTIMIZER, jax.random.key(0), config)
        for _ in range(25):
            state, _ = step(state, batch)
        losses = batch_losses(model, state.params, batch)[0].nll
        ends.append(float(losses[7].mean()))
    assert ends[1] < 0.8 * ends[0]


@pytest.mark.slow
def test_experts_are_balanced_when_balance_weighs():
    """A router whose first expert is favoured, trained with and without the loss; the loss itself is told apart."""
    c = dataclasses.replace(C, num_experts=4, experts_per_token=1)
    model = build(c)
    start = init_state(model, OPTIMIZER, jax.random.key(0))
    for layer in range(2):
        router = start.params[f"layers_{layer}"]["mlp"]["router"]
        router["weight"] = router["weight"].at[:, 0].add(1.0)
    ends = []
    for weights in (StepConfig(), StepConfig(balance=1.0, router_z=0.1)):
        step = jax.jit(make_train_step(model, OPTIMIZER, weights))
        state, metrics = step(start, a_batch())
        for _ in range(29):
            state, metrics = step(state, a_batch())
        ends.append({name: float(value) for name, value in metrics.items()})
    assert ends[1]["router_balance"] < 1.1 < ends[0]["router_balance"]
    assert ends[1]["router_z"] < ends[0]["router_z"]
    assert ends[1]["loss"] < np.log(32)


@pytest.mark.slow
def test_numpy_arrays_will_do_outside_jit():
    state = init_state(build(C), OPTIMIZER, jax.random.key(0))
    _, metrics = make_train_step(build(C), OPTIMIZER)(state, a_batch())
    assert float(metrics["loss"]) == pytest.approx(run(C, [a_batch()])[1][0], rel=1e-5)


def test_the_compiled_step_uses_up_its_state():
    state = init_state(build(C), OPTIMIZER, jax.random.key(0))
    compile_train_step(build(C), OPTIMIZER, "float32")(state, a_batch())
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_a_donated_state_gives_the_same_numbers():
    donating = jax.jit(make_train_step(build(C), OPTIMIZER), donate_argnums=0)
    state = init_state(build(C), OPTIMIZER, jax.random.key(0))
    kept, _ = run(C, [a_batch()] * 2)
    before = state
    for _ in range(2):
        state, _ = donating(state, a_batch())
    assert before.params["embed"].is_deleted()
    np.testing.assert_array_equal(state.params["embed"], kept.params["embed"])


def test_step_and_key_are_part_of_the_state():
    state, _ = run(C, [a_batch()])
    assert state.step.dtype == jnp.int32
    assert jax.random.key_data(state.key).dtype == jnp.uint32
