"""Log-probabilities in the forms of the OpenAI API: of /v1/completions and of chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from srt.json_fields import optional
from srt.logprob_options import LogprobOptions
from srt.managers.detokenizer import Detokenizer
from srt.managers.io_struct import TokenLogprobs
from srt.managers.req_state import ReqState
from srt.request_error import RequestError
from srt.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 20


def completion_options(body: Mapping[str, Any], echo: bool) -> LogprobOptions | None:
    """`logprobs`: so many alternatives a token; of the prompt too if that is echoed."""
    num_top = optional(body, "logprobs", int, None)
    if num_top is None:
        return None
    _check_count("logprobs", num_top)
    return LogprobOptions(start=0 if echo else -1, num_top=num_top)


def chat_options(body: Mapping[str, Any]) -> LogprobOptions | None:
    """`logprobs`, true or false, and `top_logprobs`, so many alternatives a token."""
    wanted = optional(body, "logprobs", bool, False)
    num_top = optional(body, "top_logprobs", int, 0)
    _check_count("top_logprobs", num_top)
    if num_top and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return LogprobOptions(num_top=num_top) if wanted else None


def _check_count(name: str, value: int) -> None:
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name} must be in [0, {MAX_TOP_LOGPROBS}], got {value}.", param=name)


class CompletionLogprobs:
    """Of one choice of /v1/completions, part by part. `text_offset` counts characters of the
    choice's text; with an echo the prompt's tokens come first."""

    def __init__(self, tokenizer: Tokenizer, echo: bool) -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._count = 0  # tokens told about
        self._offset = 0
        self._detokenizer: Detokenizer | None = None

    def next(self, state: ReqState) -> dict[str, Any]:
        """What came since the last call."""
        if self._detokenizer is None:
            params = state.request.sampling_params
            self._detokenizer = Detokenizer(
                self._tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        known = [*state.input_logprobs, *state.output_logprobs]
        if not self._echo:
            known = state.output_logprobs
        new, self._count = known[self._count :], len(known)
        text = self._tokenizer.token_text
        offsets = []
        for position in new:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(position.token_id))
        return {
            "text_offset": offsets,
            "token_logprobs": [position.logprob for position in new],
            "tokens": [text(position.token_id) for position in new],
            "top_logprobs": [self._alternatives(position) for position in new],
        }

    def _alternatives(self, position: TokenLogprobs) -> dict[str, float] | None:
        """The likeliest tokens and the token itself, by text: of tokens with the same text, the
        likeliest. None for the first prompt token."""
        if position.logprob is None:
            return None
        found: dict[str, float] = {}
        for logprob, token_id in [*(position.top or ()), (position.logprob, position.token_id)]:
            found.setdefault(self._tokenizer.token_text(token_id), logprob)
        return found


class ChatLogprobs:
    """Of one choice of /v1/chat/completions, part by part."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._count = 0  # tokens told about

    def next(self, state: ReqState) -> dict[str, Any] | None:
        """What came since the last call; None if that is nothing."""
        new, self._count = state.output_logprobs[self._count :], len(state.output_logprobs)
        if not new:
            return None
        return {"content": [self._position(position) for position in new], "refusal": None}

    def _position(self, position: TokenLogprobs) -> dict[str, Any]:
        top: Sequence[tuple[float, int]] = position.top or ()
        return {
            **self._token(position.logprob, position.token_id),
            "top_logprobs": [self._token(logprob, token_id) for logprob, token_id in top],
        }

    def _token(self, logprob: float | None, token_id: int) -> dict[str, Any]:
        data = self._tokenizer.token_as_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(data),
        }
