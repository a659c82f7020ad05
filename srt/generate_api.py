"""The JSON of /generate: a body to a GenerateReqInput, a request's state to a response object."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from srt.json_fields import optional, refuse_unsupported, seconds, token_ids, type_error
from srt.logprob_format import GrowingLists, LogprobFormat
from srt.logprob_options import parse_logprob_options
from srt.managers.io_struct import FinishReason, FinishType
from srt.managers.req_state import ReqState
from srt.managers.request_preparer import GenerateReqInput
from srt.request_error import RequestError
from srt.tokenizer import Tokenizer

# Features of the wire format that this server does not have.
_UNSUPPORTED = (
    "return_hidden_states",
    "return_routed_experts",
    "return_sampling_mask",
    "return_entropy",
    "lora_path",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
    "custom_logit_processor",
    "input_embeds",
)


def parse_generate_body(
    body: Any, arrival_time: float, tenant: str | None = None
) -> GenerateReqInput:
    """Check the JSON value of a /generate request. RequestError names the field at fault. `tenant`
    is whom it counts for unless its field `user` says it."""
    if not isinstance(body, dict):
        raise type_error(body, "struct GenerateRequest", None)
    refuse_unsupported(body, _UNSUPPORTED)
    prompts, is_batch = _prompts(body)
    rid, rids = _rids(body.get("rid"), len(prompts) if is_batch else None)
    return GenerateReqInput(
        prompts=prompts,
        sampling_params=_sampling_params(body.get("sampling_params"), len(prompts), is_batch),
        is_batch=is_batch,
        stream=optional(body, "stream", bool, False),
        rid=rid,
        rids=rids,
        priority=optional(body, "priority", int, None),
        tenant=optional(body, "user", str, tenant),
        extra_key=cache_namespace(body),
        logprobs=parse_logprob_options(body, len(prompts), is_batch),
        text_in_logprobs=optional(body, "return_text_in_logprobs", bool, False),
        prompt_ids_in_answer=optional(body, "return_prompt_token_ids", bool, False),
        queue_timeout=seconds(body, "queue_timeout"),
        timeout=seconds(body, "timeout"),
        arrival_time=arrival_time,
    )


def cache_namespace(body: dict[str, Any]) -> str | None:
    """The prefix-cache namespace a body asks for by `cache_salt` and `extra_key`; requests of
    different namespaces share no cached prefix."""
    salt = optional(body, "cache_salt", str, "")
    key = optional(body, "extra_key", str, "")
    return salt + key or None


def response_object(
    state: ReqState,
    text: str,
    output_ids: list[int],
    logprobs: Mapping[str, Any],
    weight_version: str = "default",
) -> dict[str, Any]:
    """What a client gets for one request: `text`, `output_ids` and lists of `logprobs` as given
    (all of them, or what is new), and the state's numbers, which are always of the whole
    request."""
    meta: dict[str, Any] = {
        "id": state.rid,
        "finish_reason": None,
        "prompt_tokens": len(state.request.input_ids),
        "completion_tokens": len(state.output_ids),
        "cached_tokens": state.cached_tokens,
        "cached_tokens_details": {"device": state.cached_tokens, "host": 0},
        "num_retractions": state.num_retractions,
        "recomputed_tokens": state.recomputed_tokens,
        "reasoning_tokens": 0,
        "weight_version": weight_version,
        "dp_rank": None,
        "queue_time": state.queue_time,
        **logprobs,
    }
    if state.request.return_logprob:
        meta["output_token_logprobs_length"] = len(state.output_logprobs)
    if state.first_token_time is not None:
        meta["first_token_latency"] = state.first_token_time - state.created_time
    if state.finish_reason is not None:
        assert state.finished_time is not None, f"{state.rid} ended at no time"
        meta["finish_reason"] = finish_reason_object(state.finish_reason, len(state.output_ids))
        meta["e2e_latency"] = state.finished_time - state.created_time
        meta["response_sent_to_client_ts"] = time.time()
    return {"text": text, "output_ids": output_ids, "meta_info": meta}


def finish_reason_object(reason: FinishReason, completion_tokens: int) -> dict[str, Any]:
    """The client's form of a finish reason."""
    if reason.type is FinishType.STOP:
        return {"type": "stop", "matched": reason.matched}
    if reason.type is FinishType.LENGTH:
        return {"type": "length", "length": completion_tokens}
    return {
        "type": "abort",
        "message": reason.message or "Aborted",
        "status_code": reason.status_code,
        "err_type": reason.err_type,
    }


def error_of(state: ReqState) -> RequestError | None:
    """The HTTP error of a request that the server, not its client, ended; None for any other."""
    reason = state.finish_reason
    if reason is None or reason.type is not FinishType.ABORT or reason.status_code is None:
        return None
    return RequestError(reason.message or "Aborted", reason.status_code, err_type=reason.err_type)


@dataclass(frozen=True)
class AnswerFormat:
    """What the answers to a call show beside text, ids and numbers."""

    logprobs: LogprobFormat = field(default_factory=LogprobFormat)
    prompt_ids: bool = False

    @classmethod
    def of(cls, call_input: GenerateReqInput, tokenizer: Tokenizer) -> AnswerFormat:
        text_of = tokenizer.token_text if call_input.text_in_logprobs else None
        return cls(LogprobFormat(text_of), call_input.prompt_ids_in_answer)


async def collect(states: AsyncIterator[ReqState], answer_format: AnswerFormat) -> Any:
    """The final response of a call: one object, or a list in the order of the prompts. RequestError
    if the server ended any of them."""
    objects: dict[int, dict[str, Any]] = {}
    is_list = False
    async for state in states:
        if state.finish_reason is None:
            continue
        if error := error_of(state):
            raise error
        answer = response_object(
            state, state.text, state.output_ids, answer_format.logprobs.fields(state)
        )
        if answer_format.prompt_ids:
            answer["prompt_token_ids"] = state.request.input_ids
        objects[state.index] = answer
        is_list = state.is_member
    return [objects[i] for i in sorted(objects)] if is_list else objects[0]


class ChunkCursor:
    """Which part of each choice's output a stream has sent, and so what its next chunk holds."""

    def __init__(
        self, is_incremental: bool, answer_format: AnswerFormat, as_json: bool = False
    ) -> None:
        """With `as_json` lists that are repeated in every chunk come as rendered JSON."""
        self._is_incremental = is_incremental
        self._logprobs = answer_format.logprobs
        self._prompt_ids = answer_format.prompt_ids
        self._as_json = as_json
        self._sent: dict[int, _Sent] = {}  # by choice

    def next_object(self, state: ReqState) -> dict[str, Any]:
        """The response object of one chunk: everything so far, or what is new if incremental. It
        holds copies of what goes on growing."""
        sent = self._sent.setdefault(state.index, _Sent())
        text, ids = state.text, state.output_ids[:]
        if self._is_incremental:
            text, ids = text[sent.chars :], ids[sent.ids :]
        chunk = response_object(state, text, ids, self._lists(state, sent))
        # Clients read them off the first chunk or the last; in all, a long prompt would be most of
        # the stream.
        if self._prompt_ids and (sent.is_new or state.finish_reason is not None):
            chunk["prompt_token_ids"] = state.request.input_ids
        sent.note(state)
        if state.is_member:
            chunk["index"] = state.index
        return chunk

    def _lists(self, state: ReqState, sent: _Sent) -> Mapping[str, Any]:
        if not state.request.return_logprob:
            return {}
        if not self._is_incremental and not self._as_json:
            return self._logprobs.fields(state)
        new = self._logprobs.fields(state, sent.inputs, sent.outputs)
        return new if self._is_incremental else sent.lists.extend(new)


@dataclass
class _Sent:
    """What chunks of one choice have held."""

    chars: int = 0
    ids: int = 0
    inputs: int = 0  # logprobs of the prompt
    outputs: int = 0  # logprobs of outputs
    lists: GrowingLists = field(default_factory=GrowingLists)
    is_new: bool = True

    def note(self, state: ReqState) -> None:
        self.is_new = False
        self.chars, self.ids = len(state.text), len(state.output_ids)
        self.inputs, self.outputs = len(state.input_logprobs), len(state.output_logprobs)


def _prompts(body: dict[str, Any]) -> tuple[list[str | list[int]], bool]:
    """The prompts of a body, and whether it holds a list of them."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        problem = "" if text is None else " Only one of text and input_ids may be given."
        raise RequestError(f"Either text, input_ids or input_embeds should be provided.{problem}")
    if text is not None:
        if isinstance(text, str):
            return [text], False
        if not isinstance(text, list):
            raise type_error(text, "a string or a list of strings", "text")
        for member in text:
            if not isinstance(member, str):
                raise type_error(member, "a string", "text")
        if not text:
            raise RequestError("text cannot be an empty list.", param="text")
        return list(text), True
    if not ids and isinstance(ids, list):
        raise RequestError("input_ids cannot be empty.", param="input_ids")
    if isinstance(ids, list) and isinstance(ids[0], list):
        return [token_ids(member, "input_ids") for member in ids], True
    return [token_ids(ids, "input_ids")], False


def _sampling_params(raw: Any, num_prompts: int, is_batch: bool) -> list[dict[str, Any]]:
    """One dict of raw parameters a prompt."""
    if isinstance(raw, list) and is_batch:
        if len(raw) != num_prompts:
            raise RequestError(
                f"sampling_params has {len(raw)} members for {num_prompts} prompts.",
                param="sampling_params",
            )
        members = raw
    else:
        members = [raw] * num_prompts
    for member in members:
        if member is not None and not isinstance(member, dict):
            raise type_error(member, "struct SamplingParams", "sampling_params")
    return [member or {} for member in members]


def _rids(raw: Any, num_prompts: int | None) -> tuple[str | None, list[str] | None]:
    """The base id and the member ids of a body; `num_prompts` is None unless it is a batch."""
    if raw is None:
        return None, None
    if isinstance(raw, str):
        if not raw:
            raise RequestError("rid cannot be an empty string.", param="rid")
        return raw, None
    if not isinstance(raw, list) or num_prompts is None:
        raise type_error(raw, "a string" if num_prompts is None else "a string or a list", "rid")
    if len(raw) != num_prompts:
        raise RequestError(f"rid has {len(raw)} members for {num_prompts} prompts.", param="rid")
    for member in raw:
        if not isinstance(member, str) or not member:
            raise type_error(member, "a non-empty string", "rid")
    return None, list(raw)
