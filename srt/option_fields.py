"""Options as fields of a dataclass: what one says about itself, and which values it takes."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any

_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    str: "a non-empty string",
    bool: "true or false",
}


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """An option. `low` and `high` are inclusive; `aliases` are further flags for it; a `secret`
    is left out of `repr`, which ends up in logs."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "aliases": aliases}
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True)
class FieldSpec:
    """An option with its type taken apart; `optional` if None is a value."""

    name: str
    type: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    aliases: tuple[str, ...]


def field_specs(owner: type) -> dict[str, FieldSpec]:
    """Every option of the dataclass `owner`, by name."""
    hints = typing.get_type_hints(owner)
    specs = {}
    for f in dataclasses.fields(owner):
        members = typing.get_args(hints[f.name]) or (hints[f.name],)
        kind = next(m for m in members if m is not type(None))
        specs[f.name] = FieldSpec(
            f.name, kind, type(None) in members, default=f.default, **f.metadata
        )
    return specs


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def describe_values(spec: FieldSpec) -> str:
    if spec.choices:
        return "one of " + ", ".join(spec.choices)
    text = _TYPE_NAMES[spec.type]
    if spec.low is not None and spec.high is not None:
        return f"{text} in [{spec.low}, {spec.high}]"
    return text if spec.low is None else f"{text} of at least {spec.low}"


def is_valid(spec: FieldSpec, value: Any) -> bool:
    if value is None:
        return spec.optional
    if spec.type is bool:
        return isinstance(value, bool)
    if spec.type is str:
        if not isinstance(value, str):
            return False
        return value in spec.choices if spec.choices else value != ""
    accepted = (int, float) if spec.type is float else (int,)
    if not isinstance(value, accepted) or isinstance(value, bool):
        return False
    low = -math.inf if spec.low is None else spec.low
    high = math.inf if spec.high is None else spec.high
    return low <= value <= high and value not in (math.inf, -math.inf)
