"""One request's sampling knobs, parsed from JSON and validated with the messages clients know."""

from __future__ import annotations

import difflib
import math
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from srt.stop_regex import compile_stop_regex

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 4096  # of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 8192
MAX_N = 128
# Below this a temperature is greedy decoding, as in SGLang.
GREEDY_TEMPERATURE = 1e-6

# In the order in which SGLang lists them to a client that sent an unknown one.
NAMES = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
)
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
BOOL_NAMES = (
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
)
INT32_NAMES = ("min_new_tokens", "top_k", "n", "stream_interval")
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}", re.ASCII)
UNSUPPORTED_NAMES = (*_GRAMMARS, "choice", "custom_params", "beam_width", "watermark")

# Names of other APIs that users write here.
_FOREIGN_NAMES = {
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "best_of": "n",
    "stop_sequences": "stop",
    "response_format": "json_schema",
}


class Limits(NamedTuple):
    """What a number may be: `low` to `high`, or `also`. `words` say so to a client."""

    words: str
    low: float
    high: float = sys.float_info.max
    is_low_out: bool = False  # it must be above `low`
    also: float | None = None

    def hold(self, value: float) -> bool:
        # Written so that NaN fails.
        is_above = value > self.low if self.is_low_out else value >= self.low
        return (is_above and value <= self.high) or value == self.also


LIMITS = {
    "max_new_tokens": Limits("at least 0", 0),
    "min_new_tokens": Limits("at least 0", 0),
    "temperature": Limits("a non-negative finite number", 0),
    "top_p": Limits("in (0, 1]", 0, 1, is_low_out=True),
    "top_k": Limits("-1 (disable) or at least 1", 1, also=-1),
    "min_p": Limits("in [0, 1]", 0, 1),
    "frequency_penalty": Limits("in [-2, 2]", -2, 2),
    "presence_penalty": Limits("in [-2, 2]", -2, 2),
    "repetition_penalty": Limits("in (0, 2] (1.0 = no penalty)", 0, 2, is_low_out=True),
    "n": Limits(f"in [1, {MAX_N}]", 1, MAX_N),
    "stream_interval": Limits("at least 1", 1),
}


class SamplingParamsError(ValueError):
    """A value is out of its range; the message is for the client."""


class SamplingSchemaError(SamplingParamsError):
    """A name is unknown or a value has the wrong type; the message is for the client."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Validated knobs of one request. `max_new_tokens` None means "until the context ends"; the
    tokenizer manager replaces it by a number, and `sampling_seed` None by a random seed, before the
    request crosses to the scheduler, so that a resumed request samples what it would have sampled.

    `parse` and `check_vocab` validate; the constructor trusts its caller."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None
    stream_interval: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether every token is simply the most likely one."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalty(self) -> bool:
        """Whether earlier tokens change a token's likelihood."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any] | None, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """The knobs of the JSON object `raw`. A name that is missing or null takes its value from
        `defaults` (same names), then from the class; only an explicit null `max_new_tokens` has a
        meaning of its own. Empty stop strings are dropped: they would end every request at once,
        and clients send them to say "none".

        Raises SamplingSchemaError for unknown names and wrong types, SamplingParamsError for values
        out of range or features this server does not have."""
        if raw is None:
            raw = {}
        if not isinstance(raw, Mapping):
            raise SamplingSchemaError(
                f"invalid type: {_json_type(raw)}, expected struct SamplingParams"
            )
        values = {name: value for name, value in (defaults or {}).items() if value is not None}
        if values.get("top_k") == 0:
            values["top_k"] = -1  # what generation_config.json files write for "off"
        values.update({name: value for name, value in raw.items() if value is not None})
        if "max_new_tokens" in raw:
            values["max_new_tokens"] = raw["max_new_tokens"]
        for name in (*raw, *values):
            if name not in NAMES:
                raise SamplingSchemaError(_unknown_name_message(str(name)))
        _refuse_unsupported(values)
        typed = {
            name: _typed(name, v) for name, v in values.items() if name not in UNSUPPORTED_NAMES
        }
        params = cls(**typed)
        params._check_ranges()
        return params

    def check_vocab(self, vocab_size: int) -> None:
        """Raise SamplingParamsError for a token id that the model does not have: on the device it
        would index out of bounds."""
        for token_id in self.logit_bias or ():
            if not 0 <= token_id < vocab_size:
                raise SamplingParamsError(
                    f"logit_bias must has keys in [0, {vocab_size - 1}], got {token_id}."
                )
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise SamplingParamsError(
                    f"stop_token_ids must be in [0, {vocab_size - 1}], got {token_id}."
                )

    def _check_ranges(self) -> None:
        if self.max_new_tokens is not None:
            _require(self.max_new_tokens >= 0, "max_new_tokens", "at least 0", self.max_new_tokens)
            _require(
                0 <= self.min_new_tokens <= self.max_new_tokens,
                "min_new_tokens",
                f"in [0, max_new_tokens({self.max_new_tokens})]",
                self.min_new_tokens,
            )
        for name, limits in LIMITS.items():
            value = getattr(self, name)
            if value is not None:
                _require(limits.hold(value), name, limits.words, value)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise SamplingParamsError(
                f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(self.stop)}"
            )
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise SamplingParamsError(
                f"stop must have strings of at most {MAX_STOP_CHARS} characters, got {longest}."
            )
        self._check_stop_regex()
        for token_id, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias):
                raise SamplingParamsError(
                    f"logit_bias must have finite values, got {bias} for token {token_id}."
                )

    def _check_stop_regex(self) -> None:
        if len(self.stop_regex) > MAX_STOP_STRINGS:
            raise SamplingParamsError(
                f"at most {MAX_STOP_STRINGS} stop regexes are allowed, got {len(self.stop_regex)}"
            )
        for pattern in self.stop_regex:
            try:
                compile_stop_regex(pattern)
            except ValueError as error:
                raise SamplingParamsError(str(error)) from error


def _require(holds: bool, name: str, what: str, value: float) -> None:
    if not holds:
        raise SamplingParamsError(f"{name} must be {what}, got {value}.")


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    given = [
        name for name in UNSUPPORTED_NAMES if values.get(name) not in (None, "", False, [], {})
    ]
    if sum(name in _GRAMMARS for name in given) > 1:
        raise SamplingParamsError(
            "Only one of json_schema, regex, ebnf, or structural_tag can be set."
        )
    if given:
        raise SamplingParamsError(f"{given[0]} is not supported by this server yet.")


def _typed(name: str, value: Any) -> Any:
    """`value`, of whatever JSON type, as the struct's field `name` holds it."""
    if name in BOOL_NAMES:
        return _checked(name, value, isinstance(value, bool), "a boolean")
    if name in INT32_NAMES or name == "sampling_seed":
        return _integer(name, value, bits=32 if name in INT32_NAMES else 64)
    if name == "max_new_tokens":
        return None if value is None else _integer(name, value, bits=32)
    if name in ("stop", "stop_regex"):
        strings = [value] if isinstance(value, str) else _list(name, value)
        for item in strings:
            _checked(name, item, isinstance(item, str), "a string")
        return tuple(item for item in strings if item)
    if name == "stop_token_ids":
        items = _list(name, value)
        _check_count(name, len(items), MAX_STOP_TOKEN_IDS, "ids")
        return tuple(dict.fromkeys(_integer(name, item, bits=64) for item in items))
    if name == "logit_bias":
        _checked(name, value, isinstance(value, Mapping), "a map")
        _check_count(name, len(value), MAX_LOGIT_BIAS, "tokens")
        return _logit_bias(value) or None
    return _number(name, value)


def _checked(name: str, value: Any, is_type: bool, expected: str) -> Any:
    if not is_type:
        raise SamplingSchemaError(
            f"invalid type: {_json_type(value)}, expected {expected} for `{name}`"
        )
    return value


def _check_count(name: str, count: int, limit: int, what: str) -> None:
    """Before each member is looked at, which takes a microsecond."""
    if count > limit:
        raise SamplingParamsError(f"{name} must have at most {limit} {what}, got {count}.")


def _list(name: str, value: Any) -> Sequence[Any]:
    return typing.cast(
        "Sequence[Any]", _checked(name, value, isinstance(value, (list, tuple)), "a sequence")
    )


def _integer(name: str, value: Any, bits: int) -> int:
    # A JSON integer: neither 8.0 nor true.
    is_int = isinstance(value, int) and not isinstance(value, bool)
    number = int(_checked(name, value, is_int, f"i{bits}"))
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise SamplingSchemaError(
            f"invalid value: {_json_type(value)}, expected i{bits} for `{name}`"
        )
    return number


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _checked(name, value, is_number, "f64")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # out of every range


def _logit_bias(value: Mapping[Any, Any]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token_id = _token_id(key)
        if token_id in biases:
            raise SamplingParamsError(f"logit_bias must name token {token_id} once.")
        biases[token_id] = _number("logit_bias", bias)
    return biases


def _token_id(key: Any) -> int:
    """A key of logit_bias: JSON only has strings there, Python callers may use integers."""
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
        return int(key)
    shown = _shorten(str(key))
    raise SamplingParamsError(f"logit_bias must have token ids as keys, got {shown!r}.")


def _json_type(value: Any) -> str:
    """What serde, whose messages SGLang's clients know, calls a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`" if value.bit_length() <= 64 else "integer beyond 64 bits"
    if isinstance(value, float):
        return f"floating point `{value}`"
    if isinstance(value, str):
        return f'string "{_shorten(value)}"'
    return "map" if isinstance(value, Mapping) else "sequence"


def _unknown_name_message(name: str) -> str:
    near = difflib.get_close_matches(name, NAMES, n=1)
    meant = _FOREIGN_NAMES.get(name, near[0] if near else None)
    hint = f"; did you mean `{meant}`?" if meant else ""
    expected = ", ".join(f"`{known}`" for known in NAMES)
    return f"unknown field `{_shorten(name)}`, expected one of {expected}{hint}"


def _shorten(text: str) -> str:
    # An error must not echo a large body.
    return text if len(text) <= 64 else text[:61] + "..."
