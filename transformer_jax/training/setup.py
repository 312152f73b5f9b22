"""From a run's folder to the functions and texts that it trains with."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from transformer_jax.config import GROUPS, RunConfig
from transformer_jax.decoding.prefill import check_prompt
from transformer_jax.errors import UserError
from transformer_jax.machine import memory_bytes
from transformer_jax.model.cost import num_params
from transformer_jax.model.transformer import Model, Params, build, param_shapes
from transformer_jax.report import make_table
from transformer_jax.sharding import Mesh, batch_sharding, param_shardings, replicated
from transformer_jax.text.corpus import CompressedSizes
from transformer_jax.text.pipeline import Batch, Windows, cut_conversations, make_windows
from transformer_jax.text.tokens import Tokens
from transformer_jax.training.evaluation import EvalStep, make_eval_step
from transformer_jax.training.folder import Run, mask_token
from transformer_jax.training.masking import Vocabulary, make_hide
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.parameter_groups import group_table
from transformer_jax.training.step import StepConfig, TrainState, TrainStep, compile_train_step, init_state


class Setup(NamedTuple):
    """What does not change while a run trains."""

    config: RunConfig
    run: Run
    model: Model
    train: tuple[Windows, ...]
    """Of all text together, or of each corpus of a mixture."""
    heldout: Windows
    compressors: CompressedSizes
    """Of the held-out text."""
    shapes: Any
    """Of the state, with the devices that hold each array."""
    init: Callable[[], TrainState]
    """Makes the state before the first step, each array on the devices that hold it from then on."""
    train_step: TrainStep
    """Uses up the state that it is given."""
    eval_step: EvalStep
    place_batch: Callable[[Batch], Batch]
    """Puts the rows of a batch where they belong."""


BYTES_PER_PARAMETER = 16
"""Of training: the value, its gradient and two moments, all float32."""


def set_up(run: Run, mesh: Mesh, own_params: Callable[[], Params] | None = None) -> Setup:
    """Build everything that a run needs; `own_params` gives those of the model which it starts from, on the mesh.

    Raises `UserError` for settings that do not fit each other, or the text.
    """
    config = run.config
    if config.objective.risk == "dro" and len(config.data.paths) < 2:
        raise UserError(
            "ObjectiveConfig.risk is 'dro', over domains; name several DataConfig.paths, each of which is one"
        )
    _check_memory(config)
    model = build(config.model)
    if config.model.attention == "causal":
        check_prompt(model, run.tokenizer.begin(config.training.sample_prompt))
    train, heldout = _train_windows(config, run.text.train), make_windows(run.text.heldout, config.data.seq_len)
    _warn_of_loss(run)
    group_table(config.optimizer.groups, param_shapes(config.model))
    optimizer = make_optimizer(config.optimizer, config.training.steps)
    rows = batch_sharding(mesh, config.data.batch_size)
    part = config.data.batch_size // config.training.accumulate
    batch_sharding(mesh, part, "DataConfig.batch_size / TrainingConfig.accumulate")
    step = step_config(config)
    vocabulary = Vocabulary(config.model.V, mask_token(run.tokenizer), tuple(run.tokenizer.control_tokens.values()))
    hide = make_hide(config.objective, vocabulary)
    init = _make_init(model, optimizer, config.training.seed, mesh, step)
    shapes = jax.eval_shape(init)
    return Setup(
        config=config,
        run=run,
        model=model,
        train=train,
        heldout=heldout,
        compressors=run.text.compressors,
        shapes=shapes,
        init=init if own_params is None else _starting_from(own_params, init, shapes),
        train_step=compile_train_step(model, optimizer, config.model.dtype, step, hide),
        # A prefix of no tokens is one that the model has been trained with, and bits per byte are of the whole text.
        eval_step=jax.jit(make_eval_step(model, hide if config.objective.predict == "masked" else None)),
        place_batch=lambda batch: jax.device_put(batch, rows),
    )


def step_config(config: RunConfig) -> StepConfig:
    """What of a run's settings the step takes."""
    c, training = config.model, config.training
    return StepConfig(
        objective=config.objective,
        balance=c.balance_loss if c.num_experts else 0.0,
        router_z=c.router_z_loss if c.num_experts else 0.0,
        accumulate=training.accumulate,
        ema_decay=training.ema_decay,
        skip_nonfinite=training.skip_nonfinite,
        skip_spikes=training.skip_spikes,
        domains=max(1, len(config.data.paths)),
    )


def _train_windows(config: RunConfig, tokens: Tokens) -> tuple[Windows, ...]:
    """Cut the text to train on into windows. Raises `UserError` for a text that is shorter than one."""
    data, number = config.data, len(config.data.paths)
    parts = [tokens.of_domain(domain) for domain in range(number)] if data.mixture else [tokens]
    for part, path in zip(parts, data.paths if data.mixture else ["training"], strict=True):
        if len(part.stream) <= data.seq_len:
            raise UserError(
                f"the {path} text is {len(part.stream)} tokens long and one window needs {data.seq_len + 1};"
                " give more text, or make DataConfig.seq_len smaller"
            )
    return tuple(make_windows(part, data.seq_len, config.objective.domain_weights, weighted=True) for part in parts)


def _warn_of_loss(run: Run) -> None:
    """Say so when bits per byte would look better than they are: a text that is lost costs a model nothing."""
    if run.text.lost:
        warnings.warn(
            f"the tokenizer does not give back {run.text.lost} of the {len(run.text.heldout.starts)} held-out documents"
            " as they were: bits per byte leave out what it loses, and cannot be compared",
            stacklevel=2,
        )


def _check_memory(config: RunConfig) -> None:
    """Refuse what cannot fit: the state and its gradients, and the least of a batch that a backward pass keeps."""
    c, B, T = config.model, config.data.batch_size, config.data.seq_len
    params, kept = num_params(c), c.L * B * T * c.D * (2 if c.dtype == "bfloat16" else 4)
    least, most = BYTES_PER_PARAMETER * params + kept, memory_bytes() * jax.process_count()
    if least > most:
        raise UserError(
            f"training {params:,} parameters on batches of {B} x {T} tokens takes more than {least / 1e9:,.0f} GB of"
            f" memory; found {most / 1e9:,.0f} GB: lower DataConfig.batch_size or the sizes of ModelConfig"
        )


def _make_init(
    model: Model, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh, step: StepConfig
) -> Callable[[], TrainState]:
    def init() -> TrainState:
        return init_state(model, optimizer, jax.random.key(seed), step)

    shapes = jax.eval_shape(init)
    params = param_shardings(mesh, model.logical_axes(), shapes.params)
    whole = replicated(mesh)
    moments = _moment_shardings(shapes.opt_state, shapes.params, params, whole)
    kept: Any = jax.tree.map(lambda _: whole, shapes)
    ema = None if shapes.ema is None else params
    shardings: Any = kept._replace(params=params, opt_state=moments, ema=ema)
    return jax.jit(init, out_shardings=shardings)


def _moment_shardings(moments: Any, shapes: Params, shardings: Any, whole: Any) -> Any:
    """Split what an optimizer keeps as its parameter is, where it has its name and shape; the rest is small."""
    leaves = jax.tree.leaves_with_path(shapes)
    known = {
        (_dict_keys(path), shape.shape): at
        for (path, shape), at in zip(leaves, jax.tree.leaves(shardings), strict=True)
    }
    return jax.tree_util.tree_map_with_path(lambda path, x: known.get((_dict_keys(path), x.shape), whole), moments)


def _dict_keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys in which a path ends: within what an optimizer keeps, they are the parameter's own."""
    ends = itertools.takewhile(lambda entry: isinstance(entry, jax.tree_util.DictKey), reversed(path))
    return tuple(entry.key for entry in ends)


def _starting_from(
    own_params: Callable[[], Params], init: Callable[[], TrainState], shapes: Any
) -> Callable[[], TrainState]:
    """Make the state before the first step with parameters that are there already."""

    def rest() -> TrainState:
        # What is not returned is not computed: no second set of parameters is made.
        return init()._replace(params=None, ema=None)

    def begin() -> TrainState:
        params = own_params()
        theirs, ours = (jax.tree.map(lambda x: x.shape, tree) for tree in (params, shapes.params))
        if theirs != ours:
            raise UserError("ModelConfig differs in shape from the model that TrainingConfig.start_from names")
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        state = jax.jit(rest, out_shardings=shardings._replace(params=None, ema=None))()
        # They are there already, unless the caller has put them elsewhere.
        params = jax.device_put(params, shardings.params)
        return state._replace(params=params, ema=None if shapes.ema is None else jax.tree.map(jnp.copy, params))

    return begin


def describe(setup: Setup, mesh: Mesh, console: Console) -> None:
    """Say what is trained on what."""
    config, (train, heldout, *_) = setup.config, setup.run.text
    skipped = len(setup.run.survey.skipped)
    left_out = f" {skipped} file{'s' if skipped > 1 else ''} that are not text were left out." if skipped else ""
    cut = sum(map(cut_conversations, setup.train))
    left_out += f" {cut:,} conversations are longer than DataConfig.seq_len and lose their end." if cut else ""
    if config.optimizer.groups != GROUPS:
        rows = [
            [row.pattern, f"{row.learning_rate:g}", f"{row.weight_decay:g}", str(len(row.names)), f"{row.numbers:,}"]
            for row in group_table(config.optimizer.groups, setup.shapes.params)
        ]
        columns = ["pattern", "learning rate x", "weight decay x", "parameters", "numbers"]
        console.print(make_table("Parameter groups", columns, rows))
    console.print(
        f"Text: {len(train.starts):,} documents, {train.num_bytes / 1e6:.1f} MB, {len(train.stream) - 1:,}"
        f" tokens to train on; {len(heldout.starts):,} documents, {heldout.num_bytes / 1e6:.2f} MB held out."
        f"{left_out}\n"
        f"Model: {num_params(config.model):,} parameters, {config.model.L} layers of width {config.model.D},"
        f" {config.model.V:,} tokens ({config.data.tokenizer}), {config.model.dtype},"
        f" on {mesh.size} {jax.default_backend()} device{'s' if mesh.size > 1 else ''}.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
