"""What every settings class shares: checks that name the field and its value, and reading and writing JSON."""

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from transformer_jax.errors import UserError

C = TypeVar("C")


def check(config: object, name: str, holds: bool, expected: str) -> None:
    """Raise a `UserError` naming the field and its value unless `holds`."""
    if not holds:
        raise UserError(f"{type(config).__name__}.{name} is {getattr(config, name)!r}; expected {expected}")


def check_types(config: Any) -> None:
    """Raise a `UserError` naming the first field whose value is not of its annotated type."""
    for name, annotation in typing.get_type_hints(type(config)).items():
        check(config, name, _is_instance(getattr(config, name), annotation), _describe(annotation))


def _is_instance(value: Any, annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return value in arguments
    if origin in (types.UnionType, typing.Union):
        return any(_is_instance(value, option) for option in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_instance(item, arguments[0]) for item in value)
    if annotation is float:
        # JAX takes an integer for one of 32 bits.
        most = 2**31 - 1 if isinstance(value, int) else sys.float_info.max
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= most
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _describe(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(option) for option in arguments)
    if origin is tuple:
        return f"a list of {_describe(arguments[0])}"
    names = {int: "an integer", float: "a finite number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def to_json(config: Any) -> str:
    """Write a config as JSON, one field a line; `from_json` reads it back equal."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(kind: type[C], text: str) -> C:
    """Read what `to_json` wrote. Raises `UserError` naming an unknown field, a missing section or a bad value."""
    return _from_tree(kind, parse_object(text, kind.__name__), kind.__name__)


def parse_object(content: str | bytes, where: str = "") -> dict[str, Any]:
    """Read a JSON object. Raises `UserError` for anything else, and for a name that is given twice.

    Python itself would take the last of the two.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            raise ValueError("a name stands twice in an object")
        return tree

    prefix = f"{where}: " if where else ""
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        tree = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{prefix}not JSON ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{prefix}found {text[:40]}; expected an object")
    return tree


def _from_tree(kind: Any, tree: Any, where: str) -> Any:
    if not isinstance(tree, Mapping):
        raise UserError(f"{where}: found {tree!r}; expected an object")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(tree) - set(hints))
    if unknown:
        raise UserError(f"{where}: unknown field {unknown[0]!r}; expected some of {', '.join(hints)}")
    values = {}
    for name, value in tree.items():
        if dataclasses.is_dataclass(hints[name]):
            values[name] = _from_tree(hints[name], value, f"{where}.{name}")
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    config = kind(**values)
    missing = [name for name in hints if name not in tree]
    if missing:
        raise UserError(f"{where}: the field {missing[0]!r} is missing")
    return config


def differences(ours: Any, theirs: Any) -> list[str]:
    """List the leaves in which two configs of one kind differ, as `section.field: ours | theirs`."""

    def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in tree.items():
            found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
        return found

    a, b = leaves(dataclasses.asdict(ours)), leaves(dataclasses.asdict(theirs))
    return [f"{name}: {a[name]!r} | {b[name]!r}" for name in a if a[name] != b[name]]
