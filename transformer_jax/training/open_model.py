"""Any model by its name, ready to use: a run of ours, or what somebody else has published."""

from pathlib import Path
from typing import NamedTuple

from transformer_jax.architecture import DType, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Model, Params, build
from transformer_jax.pretrained.parameters import Report, no_report
from transformer_jax.pretrained.pooling import Pooling
from transformer_jax.pretrained.source import config_of_published, load_published, pooling_of_published
from transformer_jax.sharding import Mesh
from transformer_jax.text.tokenizer import Tokenizer
from transformer_jax.training.folder import is_run, open_trained, recorded_config


class Opened(NamedTuple):
    """A model, ready to use."""

    config: ModelConfig
    model: Model
    params: Params
    """Matrices in the compute dtype."""
    tokenizer: Tokenizer
    family: str | None
    """What a published model's config.json calls its kind."""


def config_of_model(name: str | Path) -> ModelConfig:
    """Read the shape of any such model, without its parameters."""
    return recorded_config(Path(name)).model if is_run(Path(name)) else config_of_published(str(name))


def pooling_of_model(name: str | Path) -> Pooling:
    """Tell how such a model makes one vector of a text: as what was published says, and else the mean."""
    return "mean" if is_run(Path(name)) else pooling_of_published(str(name))


def open_model(
    name: str | Path, dtype: DType | None = None, *, mesh: Mesh | None = None, report: Report = no_report
) -> Opened:
    """Open the folder of a run, a published folder, a GGUF file, a package, or a name on Hugging Face's hub.

    `dtype` is the precision to compute in, by default the model's own. The parameters are split over the `mesh`, or
    else lie whole on the first device. `report` is told how many of how many numbers of a published model have been
    read. Raises `UserError` naming what is wrong with it.
    """
    if is_run(Path(name)):
        trained = open_trained(Path(name), dtype, mesh)
        return Opened(trained.config.model, trained.model, trained.params, trained.tokenizer, None)
    found = load_published(str(name), dtype, mesh, report)
    if found.tokenizer is None:
        raise UserError(f"{name} has no tokenizer.json; put the model's own there")
    if found.tokenizer.vocab_size > found.config.V:
        raise UserError(
            f"{name}: the tokenizer has {found.tokenizer.vocab_size} ids, and the model {found.config.V}: it is not the"
            " model's own"
        )
    return Opened(found.config, build(found.config), found.params, found.tokenizer, found.family)
