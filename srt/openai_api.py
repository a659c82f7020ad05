"""The OpenAI routes: /v1/completions and /v1/chat/completions, plain and streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web

from srt.chat_prompt import chat_input_ids
from srt.generate_api import cache_namespace, error_of
from srt.http_json import apart_if_large, json_response, read_json, tenant_of
from srt.json_fields import (
    check_vocabulary,
    optional,
    refuse_unsupported,
    seconds,
    token_ids,
    type_error,
)
from srt.logprob_options import LogprobOptions
from srt.managers.req_state import ReqState
from srt.managers.request_preparer import GenerateReqInput
from srt.managers.tokenizer_manager import TokenizerManager
from srt.openai_logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_options,
    completion_options,
)
from srt.request_error import RequestError
from srt.sse import open_stream

# Sampling parameters that have the same name and meaning here and on /generate.
_SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "custom_params",
)
_OTHER_NAMES = {
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",  # vLLM's name
}
_UNSUPPORTED = (
    "suffix",
    "lora_path",
    "session_params",
    "return_hidden_states",
    "return_token_ids",
    "return_cached_tokens_details",
)


class OpenAIRoutes:
    def __init__(self, model_name: str, get_manager: Callable[[], TokenizerManager]) -> None:
        self._model_name = model_name
        self._get_manager = get_manager

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/completions", self.completions)
        router.add_post("/v1/chat/completions", self.chat_completions)
        router.add_post("/v1/embeddings", self.embeddings)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrival_time = time.time()
        body = await _read_object(request)
        prompts = _completion_prompts(body)
        echoes = [""] * len(prompts)
        manager = self._get_manager()
        tokenizer = manager.tokenizer
        echo = optional(body, "echo", bool, False)
        if echo:
            for prompt in prompts:
                if not isinstance(prompt, str):
                    check_vocabulary(prompt, manager.model_config.vocab_size, "prompt")
            echoes = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
        logprobs = completion_options(body, echo)
        call = _call(body, prompts, tenant_of(request), arrival_time, logprobs)
        make_logprobs = partial(CompletionLogprobs, tokenizer, echo) if logprobs else None
        return await self._answer(request, body, call, CompletionShape(echoes, make_logprobs))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        arrival_time = time.time()
        body = await _read_object(request)
        _refuse_tools(body)
        tokenizer = self._get_manager().tokenizer
        logprobs = chat_options(body)
        prompt = await apart_if_large(request, chat_input_ids, tokenizer, body)
        call = _call(body, [prompt], tenant_of(request), arrival_time, logprobs)
        make_logprobs = partial(ChatLogprobs, tokenizer) if logprobs else None
        return await self._answer(request, body, call, ChatShape(make_logprobs))

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        raise RequestError(
            f"The model {self._model_name!r} generates text; it is no embedding model.",
            param="model",
        )

    async def _answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        call: GenerateReqInput,
        shape: CompletionShape | ChatShape,
    ) -> web.StreamResponse:
        options = optional(body, "stream_options", dict, {})
        default = self._get_manager().args.stream_response_default_include_usage
        include_usage = optional(options, "include_usage", bool, default)
        always_usage = optional(options, "continuous_usage_stats", bool, False)
        reply = {
            "id": call.rid,
            "object": shape.chunk_object if call.stream else shape.object,
            "created": int(call.arrival_time),
            "model": optional(body, "model", str, self._model_name),
        }
        num_choices = call.sampling_params[0]["n"]
        usage = UsageCount(num_choices)
        async with aclosing(self._get_manager().generate(call)) as states:
            if not call.stream:
                choices = []
                async for state in states:
                    if error := error_of(state):
                        raise error
                    usage.see(state)
                    choices.append(shape.choice(state, state.index // num_choices))
                choices.sort(key=lambda choice: choice["index"])
                metadata = {"weight_version": "default"}
                return json_response(
                    {**reply, "choices": choices, "usage": usage.object(), "metadata": metadata}
                )
            # The first state before the first header, so that a refusal still has its HTTP status.
            first = await anext(states)
            if error := error_of(first):
                raise error
            sent: dict[int, int] = {}  # choice -> characters of its text that are out
            async with open_stream(request) as stream:
                async for state in _chain(first, states):
                    usage.see(state)
                    if error := error_of(state):
                        await stream.send({"error": error.body()["error"]})
                        break
                    counts = usage.object() if always_usage else None
                    is_first = state.index not in sent
                    delta = state.text[sent.get(state.index, 0) :]
                    sent[state.index] = len(state.text)
                    await stream.send(
                        *(
                            {**reply, "choices": [choice], "usage": counts}
                            for choice in shape.chunks(
                                state, state.index // num_choices, delta, is_first
                            )
                        )
                    )
                else:
                    if include_usage:
                        await stream.send({**reply, "choices": [], "usage": usage.object()})
                await stream.send_done()
            return stream.response


class UsageCount:
    """Token counts of a call, over the states seen so far. A prompt counts once, however many
    choices it has."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices  # of each prompt
        self._states: dict[int, ReqState] = {}

    def see(self, state: ReqState) -> None:
        self._states[state.index] = state

    def object(self) -> dict[str, Any]:
        # Of each prompt the first choice that was seen; they have the same prompt.
        of_prompt = {s.index // self._num_choices: s for s in reversed(self._states.values())}
        prompt_tokens = sum(len(s.request.input_ids) for s in of_prompt.values())
        completion_tokens = sum(len(s.output_ids) for s in self._states.values())
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(s.cached_tokens for s in of_prompt.values())
            },
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        }


class CompletionShape:
    """Choices of /v1/completions. `echoes` is text to put before each prompt's output."""

    object = chunk_object = "text_completion"

    def __init__(
        self, echoes: list[str], make_logprobs: Callable[[], CompletionLogprobs] | None
    ) -> None:
        self._echoes = echoes
        self._make_logprobs = make_logprobs  # None: nobody asks
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice

    def choice(self, state: ReqState, prompt_index: int) -> dict[str, Any]:
        return self._choice(state, self._echoes[prompt_index] + state.text)

    def chunks(
        self, state: ReqState, prompt_index: int, delta: str, is_first: bool
    ) -> list[dict[str, Any]]:
        """One chunk with the new text."""
        return [self._choice(state, self._echoes[prompt_index] + delta if is_first else delta)]

    def _choice(self, state: ReqState, text: str) -> dict[str, Any]:
        logprobs = None
        if self._make_logprobs is not None:
            if state.index not in self._logprobs:
                self._logprobs[state.index] = self._make_logprobs()
            logprobs = self._logprobs[state.index].next(state)
        return {"index": state.index, "text": text, "logprobs": logprobs, **_finish(state)}


class ChatShape:
    """Choices of /v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, make_logprobs: Callable[[], ChatLogprobs] | None) -> None:
        self._make_logprobs = make_logprobs  # None: nobody asks
        self._logprobs: dict[int, ChatLogprobs] = {}  # by choice

    def _new_logprobs(self, state: ReqState) -> dict[str, Any] | None:
        if self._make_logprobs is None:
            return None
        if state.index not in self._logprobs:
            self._logprobs[state.index] = self._make_logprobs()
        return self._logprobs[state.index].next(state)

    def choice(self, state: ReqState, prompt_index: int) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": state.text,
            "reasoning_content": None,
            "tool_calls": None,
        }
        logprobs = self._new_logprobs(state)
        return {"index": state.index, "message": message, "logprobs": logprobs, **_finish(state)}

    def chunks(
        self, state: ReqState, prompt_index: int, delta: str, is_first: bool
    ) -> list[dict[str, Any]]:
        """The role when the first output arrives (clients time their first token by it), the new
        text, and the end in a chunk of its own."""
        deltas: list[dict[str, Any]] = []
        if is_first:
            deltas.append({"role": "assistant", "content": "", "reasoning_content": None})
        logprobs = self._new_logprobs(state)
        if delta or logprobs:
            deltas.append({"content": delta})
        running = {"logprobs": None, "finish_reason": None, "matched_stop": None}
        chunks = [
            {"index": state.index, "delta": delta_object, **running} for delta_object in deltas
        ]
        if logprobs:
            chunks[-1]["logprobs"] = logprobs
        if state.finish_reason is not None:
            chunks.append({"index": state.index, "delta": {}, "logprobs": None, **_finish(state)})
        return chunks


def _finish(state: ReqState) -> dict[str, Any]:
    reason = state.finish_reason
    return {
        "finish_reason": None if reason is None else reason.type.value,
        "matched_stop": None if reason is None else reason.matched,
    }


async def _chain(first: ReqState, rest: AsyncIterator[ReqState]) -> AsyncIterator[ReqState]:
    yield first
    async for state in rest:
        yield state


async def _read_object(request: web.Request) -> dict[str, Any]:
    body = await read_json(request)
    if not isinstance(body, dict):
        raise type_error(body, "a map", None)
    refuse_unsupported(body, _UNSUPPORTED)
    response_format = optional(body, "response_format", dict, {})
    if response_format.get("type", "text") != "text":
        kind = str(response_format["type"])[:50]
        raise RequestError(
            f"response_format {kind!r} is not supported by this server yet.",
            param="response_format",
        )
    return body


def _refuse_tools(body: dict[str, Any]) -> None:
    choice = body.get("tool_choice")
    if body.get("tools"):
        if choice != "none":
            raise RequestError("tools are not supported by this server yet.", param="tools")
    elif choice == "required":
        message = "Tools cannot be empty if tool choice is set to required."
        raise RequestError(message, param="tools")
    elif choice not in (None, "auto", "none"):
        raise RequestError(
            f"tool_choice is {choice!r:.100}, but there are no tools.", param="tools"
        )


def _completion_prompts(body: dict[str, Any]) -> list[str | list[int]]:
    """The prompts of a body: a text, ids, or a list of either."""
    prompt = body.get("prompt")
    if prompt is None or prompt == "" or prompt == []:
        raise RequestError("Prompt cannot be empty", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise type_error(prompt, "a string or a list", "prompt")
    if isinstance(prompt[0], str):
        for text in prompt:
            if not isinstance(text, str):
                raise type_error(text, "a string", "prompt")
            if not text:
                raise RequestError("Prompt cannot be empty", param="prompt")
        return prompt
    return [
        token_ids(ids, "prompt") for ids in (prompt if isinstance(prompt[0], list) else [prompt])
    ]


def _call(
    body: dict[str, Any],
    prompts: list[str | list[int]],
    tenant: str | None,
    arrival_time: float,
    logprobs: LogprobOptions | None,
) -> GenerateReqInput:
    """The call of a body. Without a limit, or with null, a completion may fill the context."""
    limit = body.get("max_completion_tokens")
    name = "max_completion_tokens" if limit is not None else "max_tokens"
    max_new_tokens = optional(body, name, int, None)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise RequestError(f"{name} must be positive, got {max_new_tokens}.", param=name)
    raw = {theirs: body[theirs] for theirs in _SAME_NAMES if body.get(theirs) is not None}
    for theirs, ours in _OTHER_NAMES.items():
        if body.get(theirs) is not None:
            raw[ours] = body[theirs]
    raw["n"] = optional(body, "n", int, 1)
    raw["max_new_tokens"] = max_new_tokens
    rid = optional(body, "rid", str, "") or uuid.uuid4().hex
    return GenerateReqInput(
        prompts=prompts,
        sampling_params=[raw] * len(prompts),
        is_batch=len(prompts) > 1,
        stream=optional(body, "stream", bool, False),
        rid=rid,
        priority=optional(body, "priority", int, None),
        tenant=optional(body, "user", str, tenant),
        extra_key=cache_namespace(body),
        logprobs=[logprobs] * len(prompts),
        queue_timeout=seconds(body, "queue_timeout"),
        timeout=seconds(body, "timeout"),
        arrival_time=arrival_time,
    )
