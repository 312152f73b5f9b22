"""Which parameters are trained how: a table of patterns over their names, of which exactly one fits each."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from transformer_jax.config import parameter_group
from transformer_jax.errors import UserError


class GroupRow(NamedTuple):
    """A row of the table, with what it says of a model."""

    pattern: str
    learning_rate: float
    """What the learning rate is multiplied by; 0 freezes."""
    weight_decay: float
    """What the weight decay is multiplied by."""
    names: list[str]
    """The parameters that the pattern fits."""
    numbers: int
    """How many numbers they have."""


def group_table(groups: Sequence[str], params: Any) -> list[GroupRow]:
    """Find the parameters of each group.

    Raises `UserError` naming a parameter that no pattern fits, or more than one.
    """
    sizes = {name: leaf.size for name, leaf in _by_name(params).items()}
    table = []
    for text in groups:
        pattern, rate, decay = parameter_group(text)
        names = [name for name in sizes if re.search(pattern, name)]
        table.append(GroupRow(pattern, rate, decay, names, sum(sizes[name] for name in names)))
    for name in sizes:
        fitting = [row.pattern for row in table if name in row.names]
        if len(fitting) != 1:
            found = " and ".join(map(repr, fitting)) or "none"
            raise UserError(f"OptimizerConfig.groups: the parameter {name} is matched by {found}; expected one pattern")
    return table


def multipliers(groups: Sequence[str], params: Any) -> tuple[Any, Any]:
    """For each parameter, what its learning rate and its weight decay are multiplied by."""
    of_name: Mapping[str, GroupRow] = {name: row for row in group_table(groups, params) for name in row.names}
    rows = [of_name[name] for name in _by_name(params)]
    structure = jax.tree.structure(params)
    return (
        jax.tree.unflatten(structure, [row.learning_rate for row in rows]),
        jax.tree.unflatten(structure, [row.weight_decay for row in rows]),
    )


def _by_name(params: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
