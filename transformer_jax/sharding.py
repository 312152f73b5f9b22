"""Which device holds which part of what: meshes, and the rules from logical names of dimensions to mesh axes.

Nothing else names a mesh axis. A model names the dimensions of its parameters ("embed", "heads", ...); the rules here
say over which axis of the mesh each is split, and XLA derives the communication.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import MeshConfig
from transformer_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    ("batch", ("data", "fsdp")),
    ("seq", None),
    ("positions", None),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange the devices, all of them unless given, into a data x fsdp x tensor mesh.

    Raises `UserError` when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        wanted = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
        raise UserError(f"the mesh is {wanted}, but there are {len(devices)} devices; set one size to -1 for the rest")
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


@contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Let `constrain` split activations over the mesh in everything that is traced within."""
    with jax.set_mesh(mesh):
        yield


def constrain(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Split an activation as the rules say for its dimensions' names; without a mesh in use, do nothing.

    A dimension that does not divide, such as the batch of a single prompt, stays whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    axes = tuple(dict(RULES)[name] if name else None for name in names)
    shares = [math.prod(mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ())) for axis in axes]
    whole = [axis if size % share == 0 else None for axis, size, share in zip(axes, x.shape, shares, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*whole))


def param_shardings(mesh: Mesh, logical_axes: Any, shapes: Any) -> Any:
    """Say for each parameter where its parts lie.

    Raises `UserError` naming the parameter whose dimension does not divide over its mesh axis.
    """
    shardings = nn.logical_to_mesh_sharding(logical_axes, mesh, RULES)

    def check(path: Any, sharding: NamedSharding, shape: jax.ShapeDtypeStruct) -> NamedSharding:
        for size, axis in zip(shape.shape, sharding.spec, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise UserError(
                    f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')} of shape {shape.shape} cannot"
                    f" be split: {size} does not divide over mesh axis {axis} of size {mesh.shape[axis]};"
                    " choose another mesh or size (ModelConfig.vocab_size may be larger than the tokenizer's)"
                )
        return sharding

    return jax.tree_util.tree_map_with_path(check, shardings, shapes)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, batch_size: int, setting: str = "DataConfig.batch_size") -> NamedSharding:
    """Rows split over the axes that share the batch. Raises `UserError` naming the setting when they do not divide."""
    shares = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % shares:
        raise UserError(f"{setting} is {batch_size}; expected a multiple of data x fsdp = {shares}")
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def on_mesh(mesh: Mesh, logical_axes: Any, shapes: Any) -> Any:
    """The same shapes, each split over the devices as `param_shardings` says."""
    shardings = param_shardings(mesh, logical_axes, shapes)
    return jax.tree.map(
        lambda shape, at: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=at), shapes, shardings
    )


def on_first_device(shapes: Any) -> Any:
    """The same shapes, each whole on the first device of this process."""
    here = replicated(make_mesh(MeshConfig(), jax.local_devices()[:1]))
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=here), shapes)
