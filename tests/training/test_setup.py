"""The state that a run begins with when it starts from a model: that model's parameters, where the run has them."""

import dataclasses
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.architecture import ModelConfig
from transformer_jax.config import DataConfig, MeshConfig, OptimizerConfig, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import build
from transformer_jax.pretrained.convert import convert
from transformer_jax.sharding import make_mesh
from transformer_jax.text.pipeline import make_batches
from transformer_jax.text.tokenizer import byte_tokenizer
from transformer_jax.training.folder import open_run
from transformer_jax.training.open_model import open_model
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.setup import _make_init, set_up
from transformer_jax.training.step import StepConfig

C = ModelConfig(vocab_size=320, max_seq_len=32, num_layers=1, d_model=32, d_ff=64, num_heads=4, dtype="float32")
MESH = MeshConfig(data=1, fsdp=4, tensor=2)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 9)
    (tmp_path / "run").mkdir()
    data = DataConfig(paths=(str(tmp_path / "text"),), tokenizer="bytes", seq_len=32, batch_size=8, holdout=0.2)
    return open_run(tmp_path / "run", RunConfig(model=C, data=data, mesh=MESH))


@pytest.mark.slow
def test_a_run_starts_with_the_parameters_of_a_model_where_it_wants_them(run, tmp_path):
    mesh = make_mesh(MESH)
    params = build(C).init(jax.random.key(7))
    convert(tmp_path / "model", C, params, byte_tokenizer(), "float32")
    opened = open_model(tmp_path / "model", "float32", mesh=mesh)
    setup, plain = set_up(run, mesh, lambda: opened.params), set_up(run, mesh)
    state, begun = setup.init(), plain.init()
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    # Nothing had to be moved.
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(opened.params), strict=True)
    assert all(
        [shard.data.unsafe_buffer_pointer() for shard in one.addressable_shards]
        == [shard.data.unsafe_buffer_pointer() for shard in other.addressable_shards]
        for one, other in pairs
    )
    # All else is as in any new run, and in the same places.
    rest, others = (jax.tree.leaves(x._replace(params=None, key=jax.random.key_data(x.key))) for x in (state, begun))
    jax.tree.map(np.testing.assert_array_equal, rest, others)
    shardings = [jax.tree.map(lambda x: x.sharding, x) for x in (state, begun, setup.shapes)]
    assert shardings[0] == shardings[1] == shardings[2]
    # The step uses the parameters up, and the file's arrays that they lie in with them.
    with closing(make_batches(setup.train, 8, seed=0)) as batches:
        stepped, metrics = setup.train_step(state, setup.place_batch(next(batches)))
    assert jnp.isfinite(metrics["loss"])
    assert opened.params["embed"].is_deleted()
    assert stepped.params["embed"].sharding == begun.params["embed"].sharding


def test_a_model_of_another_shape_is_refused(run):
    other = build(dataclasses.replace(C, d_ff=48)).init(jax.random.key(0))
    with pytest.raises(UserError, match="ModelConfig differs in shape"):
        set_up(run, make_mesh(MESH), lambda: other).init()


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_what_an_optimizer_keeps_is_split_as_its_parameter(kind):
    """Whatever it wraps it in; Adafactor's rows and columns, which are short, are whole."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    model = build(C)
    optimizer = make_optimizer(OptimizerConfig(kind=kind), steps=3)
    shapes = jax.eval_shape(_make_init(model, optimizer, 0, mesh, StepConfig(ema_decay=0.9)))
    table = shapes.params["embed"]
    split = [x for x in jax.tree.leaves(shapes.opt_state) if x.shape == table.shape]
    assert len(split) == {"adamw": 2, "adafactor": 1, "lion": 1, "muon": 2, "sgd": 1}[kind]
    for x in (*split, shapes.ema["embed"]):
        assert x.sharding == table.sharding
        assert not x.sharding.is_fully_replicated
