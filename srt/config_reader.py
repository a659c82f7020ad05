"""Reads a model's config dict with errors that name the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigReader:
    """A config dict that says which key is missing or of the wrong type, and remembers what was
    read, so that an override nobody reads is an error and not a surprise."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.raw = raw
        self.defaults = defaults
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `key`; a missing key and null are the same, as they are in published configs."""
        self.seen.add(key)
        value = self.raw.get(key)
        return self.defaults.get(key, default) if value is None else value

    def convert(self, key: str, value: Any, to: Callable[[Any], T]) -> T:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if to is int and not (number and value == int(value)):
            raise ValueError(f"model config: {key} must be an integer, got {value!r}")
        if to is float and not number:
            raise ValueError(f"model config: {key} must be a number, got {value!r}")
        if to is bool and not isinstance(value, bool):
            raise ValueError(f"model config: {key} must be true or false, got {value!r}")
        return to(value)

    def need(self, key: str, to: Callable[[Any], T]) -> T:
        value = self.get(key)
        if value is None:
            raise ValueError(f"model config: required key {key!r} is missing")
        return self.convert(key, value, to)

    def optional(self, key: str, to: Callable[[Any], T], default: T) -> T:
        value = self.get(key)
        return default if value is None else self.convert(key, value, to)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.need(key, int) if default is None else self.optional(key, int, default)
        if value < 1:
            raise ValueError(f"model config: {key} must be at least 1, got {value}")
        return value
