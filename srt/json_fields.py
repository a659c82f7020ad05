"""Fields of a JSON object, checked for their type, with refusals that name the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from srt.request_error import RequestError

T = TypeVar("T")
D = TypeVar("D")

# What SGLang's schema errors call a type.
_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "i64",
    str: "a string",
    list: "a sequence",
    dict: "a map",
}


def optional(body: Mapping[str, Any], name: str, kind: type[T], default: D) -> T | D:
    """`body[name]`, which must be a `kind`, or `default` if it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:  # not isinstance: JSON's true is no integer
        raise type_error(value, _KINDS[kind], name)
    return value


def seconds(body: Mapping[str, Any], name: str) -> float | None:
    """`body[name]`, a number of seconds above 0, or None if it is missing or null."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise type_error(value, "f64", name)
    if not 0 < value < math.inf:
        raise RequestError(
            f"{name} must be a number of seconds above 0, got {value!r:.50}.", param=name
        )
    return float(value)


def type_error(value: Any, expected: str, name: str | None) -> RequestError:
    """The refusal of a value of the wrong JSON type; `name` None: the whole body."""
    field = "" if name is None else f" for `{name}`"
    message = f"invalid type: {_describe(value)}, expected {expected}{field}"
    return RequestError(message, param=name, is_schema=True)


def refuse_unsupported(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """RequestError if one of `names` asks for something. Any "off" value is fine, since clients
    send those all the time; anything else is refused rather than ignored."""
    for name in names:
        if not _is_off(body.get(name)):
            raise RequestError(f"{name} is not supported by this server yet.", param=name)


def token_ids(value: Any, name: str) -> list[int]:
    """`value` as a list of integers; whether they are in the vocabulary is checked later."""
    if not isinstance(value, list):
        raise type_error(value, "a list of token ids", name)
    for token_id in value:
        if type(token_id) is not int:
            raise type_error(token_id, "a token id", name)
    return value


def check_vocabulary(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """RequestError for an id that is no token's, before it is looked up anywhere."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    bad = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
    raise RequestError(
        f"{name} holds token id {bad}, which is outside the vocabulary of {vocab_size} tokens "
        f"(ids 0 to {vocab_size - 1}).",
        param=name,
    )


def _is_off(value: Any) -> bool:
    """Whether a value asks for nothing: null, false, 0, empty, or a list of such."""
    return not value or (isinstance(value, list) and all(_is_off(v) for v in value))


def _describe(value: Any) -> str:
    """A JSON value in the words of SGLang's schema errors."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value}`"
    if isinstance(value, str):
        return f'string "{value[:100]}"'
    return "sequence" if isinstance(value, list) else "map"
