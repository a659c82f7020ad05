"""The fields of /generate that ask for probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srt.json_fields import token_ids, type_error
from srt.request_error import RequestError

# Alternatives a position can name.
MAX_TOP_LOGPROBS = 128
# Ids of token_ids_logprob.
MAX_TOKEN_IDS = 1024


@dataclass(frozen=True)
class LogprobOptions:
    """What one prompt asks for. `start`: the first prompt token to tell about; -1: none."""

    start: int = -1
    num_top: int = 0
    token_ids: list[int] | None = None

    def check(self, prompt_len: int, vocab_size: int) -> None:
        """RequestError for what this prompt and vocabulary do not have."""
        if self.start > prompt_len:
            raise RequestError(
                f"logprob_start_len ({self.start}) is higher than the prompt's length "
                f"({prompt_len} tokens).",
                param="logprob_start_len",
            )
        for token_id in self.token_ids or ():
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"token_ids_logprob holds token id {token_id}, which is outside the "
                    f"vocabulary of {vocab_size} tokens.",
                    param="token_ids_logprob",
                )


def parse_logprob_options(
    body: Mapping[str, Any], num_prompts: int, is_batch: bool
) -> list[LogprobOptions | None]:
    """One for each prompt, None for those that ask for nothing. Each field may be one value for all
    prompts or a list with one for each."""

    def each(name: str, default: Any, is_list: bool = False) -> list[Any]:
        value = body.get(name)
        value = default if value is None else value
        # A list of numbers is one value of token_ids_logprob, and a list of values of the others.
        spread = isinstance(value, list) and not (
            is_list and all(not isinstance(member, list) and member is not None for member in value)
        )
        if not spread:
            return [value] * num_prompts
        if not is_batch:
            raise type_error(value, "one value for one prompt", name)
        if len(value) != num_prompts:
            raise RequestError(
                f"{name} has {len(value)} members for {num_prompts} prompts.", param=name
            )
        return [default if member is None else member for member in value]

    fields = zip(
        each("return_logprob", False),
        each("logprob_start_len", -1),
        each("top_logprobs_num", 0),
        each("token_ids_logprob", None, is_list=True),
        strict=True,
    )
    return [_options(*values) for values in fields]


def _options(wanted: Any, start: Any, num_top: Any, ids: Any) -> LogprobOptions | None:
    if type(wanted) is not bool:
        raise type_error(wanted, "a boolean", "return_logprob")
    _check_int("logprob_start_len", start, -1, None)
    _check_int("top_logprobs_num", num_top, 0, MAX_TOP_LOGPROBS)
    ids = None if ids is None else token_ids(ids, "token_ids_logprob")
    if ids is not None and len(ids) > MAX_TOKEN_IDS:
        raise RequestError(
            f"token_ids_logprob must have at most {MAX_TOKEN_IDS} ids, got {len(ids)}.",
            param="token_ids_logprob",
        )
    if not wanted:
        return None
    return LogprobOptions(start, num_top, ids)


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    if type(value) is not int:
        raise type_error(value, "i64", name)
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise RequestError(f"{name} must be {limits}, got {value}.", param=name)
