"""What each server API wants in a request, and what its answers mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import orjson

from bench.metrics import Status
from bench.sessions import Prompt, Turn

if TYPE_CHECKING:
    from bench.options import Options

# An error body can be a whole HTML page; a report wants its first words.
MAX_ERROR_CHARS = 500
MAX_HEAD_BYTES = 120
# Reasons that no finished answer has; a client's own abort is never seen by the client.
FAILED_REASONS = ("abort", "aborted", "cancelled", "canceled", "error")


class ApiKind(Enum):
    """The three shapes of request and answer."""

    GENERATE = "generate"  # SGLang's own
    COMPLETIONS = "completions"  # OpenAI
    CHAT = "chat"  # OpenAI


@dataclass(frozen=True)
class Backend:
    """One server to drive. `flush_path` empties its prefix cache, None where nothing does."""

    name: str
    kind: ApiKind
    path: str
    default_port: int
    flush_path: str | None = None
    flush_may_be_missing: bool = False


def _backends() -> dict[str, Backend]:
    completions, chat = "/v1/completions", "/v1/chat/completions"
    flush = "/flush_cache"
    # vLLM has the route only in its development mode.
    vllm: dict[str, Any] = {"flush_path": "/reset_prefix_cache", "flush_may_be_missing": True}
    known = [
        Backend("sglang", ApiKind.GENERATE, "/generate", 30000, flush),
        Backend("sglang-oai", ApiKind.COMPLETIONS, completions, 30000, flush),
        Backend("sglang-oai-chat", ApiKind.CHAT, chat, 30000, flush),
        Backend("vllm", ApiKind.COMPLETIONS, completions, 8000, **vllm),
        Backend("vllm-chat", ApiKind.CHAT, chat, 8000, **vllm),
        Backend("llama.cpp", ApiKind.COMPLETIONS, completions, 8080),
        Backend("llama.cpp-chat", ApiKind.CHAT, chat, 8080),
        Backend("lmdeploy", ApiKind.COMPLETIONS, completions, 23333),
        Backend("lmdeploy-chat", ApiKind.CHAT, chat, 23333),
    ]
    return {backend.name: backend for backend in known}


BACKENDS = _backends()


def build_body(options: Options, model: str, prompt: Prompt, turn: Turn) -> dict[str, Any]:
    """The request body: what the options say, over it the keys of this one request (tools and the
    like of a recorded one), over that --extra-request-body."""
    stream = not options.disable_stream
    ignore_eos = not options.disable_ignore_eos
    body: dict[str, Any]
    if options.api.kind is ApiKind.GENERATE:
        sampling: dict[str, Any] = {
            "temperature": options.temperature,
            "max_new_tokens": turn.output_len,
            "ignore_eos": ignore_eos,
        }
        if options.top_p != 1.0:
            sampling["top_p"] = options.top_p
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": sampling,
            "stream": stream,
            "return_logprob": options.return_logprob,
            "logprob_start_len": options.logprob_start_len,
            "return_routed_experts": options.return_routed_experts,
        }
        if options.top_logprobs_num:
            body["top_logprobs_num"] = options.top_logprobs_num
        if options.token_ids_logprob:
            body["token_ids_logprob"] = list(options.token_ids_logprob)
    else:
        body = {
            "model": model,
            "stream": stream,
            "temperature": options.temperature,
            "ignore_eos": ignore_eos,
        }
        if options.api.kind is ApiKind.CHAT:
            body["messages"] = prompt
            body["max_completion_tokens"] = turn.output_len
        else:
            body["prompt"] = prompt
            body["max_tokens"] = turn.output_len
        if options.api.name.startswith(("llama.cpp", "lmdeploy")):
            body["max_tokens"] = turn.output_len  # they know the older name in every release
        if stream:
            # The server's own count of tokens comes only if asked for.
            body["stream_options"] = {"include_usage": True}
        if options.top_p != 1.0:
            body["top_p"] = options.top_p
    return {**body, **turn.extra, **options.extra_body}


class TextAssembler:
    """Joins streamed text that is either cumulative (each piece holds all so far; SGLang's default)
    or incremental, without being told which. Pieces that extend each other are taken as cumulative
    until one does not; only their lengths are kept, since each was a prefix of the last."""

    def __init__(self) -> None:
        self.last = ""
        self.lengths: list[int] = []
        self.pieces: list[str] | None = None  # not None once the stream is known as incremental

    def push(self, text: str) -> None:
        if self.pieces is None and not text.startswith(self.last):
            self.pieces = [self.last[:length] for length in self.lengths]
        if self.pieces is not None:
            self.pieces.append(text)
            return
        self.lengths.append(len(text))
        self.last = text

    def become_incremental(self) -> None:
        if self.pieces is None:
            self.pieces = [self.last[:length] for length in self.lengths]

    @property
    def text(self) -> str:
        return self.last if self.pieces is None else "".join(self.pieces)


@dataclass
class Answer:
    """What one response has told so far. `tokens` is None as long as the server gave no count."""

    tokens: int | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    retractions: int | None = None
    finish_reason: str | None = None
    head: bytes = b""  # how the body begins, to be shown if it holds no answer
    has_output: bool = False
    done: bool = False  # saw [DONE], or the body was one whole JSON document
    failure: tuple[str, str] | None = None  # kind, message
    assembler: TextAssembler = field(default_factory=TextAssembler)

    @property
    def text(self) -> str:
        return self.assembler.text

    def keep_head(self, block: bytes) -> None:
        self.head = self.head or block[:MAX_HEAD_BYTES]

    def finish(self, reason: str, message: Any = None) -> None:
        self.finish_reason = reason
        if reason in FAILED_REASONS:
            self.fail("abort", str(message or f"finish_reason {reason}"))

    def fail(self, kind: str, message: str) -> None:
        """The first failure is the cause; what follows from it is noise."""
        if self.failure is None:
            self.failure = (kind, message[:MAX_ERROR_CHARS])


def error_message(event: dict[str, Any]) -> str | None:
    """The message of an error object in any of the shapes servers use: {"error": {"message"}},
    {"error": "text"}, or flat {"object": "error", "message"}. None if this is no error."""
    error = event.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or orjson.dumps(error).decode())
    if error:
        return str(error)
    if event.get("object") == "error":
        return str(event.get("message"))
    return None


def as_count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_generate(event: dict[str, Any], answer: Answer) -> bool:
    """One chunk or the whole answer of /generate. Returns whether it brought new output."""
    meta = event.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    text = event.get("text")
    text = text if isinstance(text, str) else ""
    before, old_text = answer.tokens, answer.assembler.last
    count = as_count(meta.get("completion_tokens"))
    if count is not None:
        answer.tokens = max(count, answer.tokens or 0)
    for name, key in (
        ("input_tokens", "prompt_tokens"),
        ("cached_tokens", "cached_tokens"),
        ("retractions", "num_retractions"),
    ):
        value = as_count(meta.get(key))
        if value is not None:
            setattr(answer, name, value)
    ids = event.get("output_ids")
    if isinstance(ids, list) and count is not None and len(ids) < count:
        answer.assembler.become_incremental()
    if text:
        answer.assembler.push(text)
    finish = meta.get("finish_reason")
    if isinstance(finish, dict):
        answer.finish(str(finish.get("type")), finish.get("message"))
        if finish.get("matched") == "NaN happened":
            answer.fail("nan", "the server stopped the answer: NaN happened")
    elif isinstance(finish, str):
        answer.finish(finish)
    if count is not None:
        return count > (before or 0)
    return bool(text) and (answer.assembler.pieces is not None or text != old_text)


def read_usage(event: dict[str, Any], answer: Answer) -> None:
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return
    tokens = as_count(usage.get("completion_tokens"))
    if tokens is not None:
        answer.tokens = max(tokens, answer.tokens or 0)
    inputs = as_count(usage.get("prompt_tokens"))
    if inputs is not None:
        answer.input_tokens = inputs
    details = usage.get("prompt_tokens_details")
    cached = as_count(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is not None:
        answer.cached_tokens = cached


def choice_text(choice: dict[str, Any]) -> str:
    """Everything a choice adds that the model produced: text, content, reasoning, a refusal, tool
    calls. TypeError for anything but text where text belongs."""
    message = choice.get("delta") or choice.get("message")
    if not isinstance(message, dict):
        return "" + (choice.get("text") or "")
    text = "".join(
        message.get(key) or "" for key in ("reasoning_content", "reasoning", "content", "refusal")
    )
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def read_openai(event: dict[str, Any], answer: Answer) -> bool:
    """One chunk or the whole answer of the two OpenAI routes. Returns whether it brought output. A
    chunk without choices is the usage, asked for or not; a chunk with only a role is no token."""
    before = answer.tokens
    read_usage(event, answer)
    brought = False
    for choice in event.get("choices") or []:
        text = choice_text(choice)
        if text:
            # Deltas by definition, so a repeated word must not pass for a cumulative text.
            answer.assembler.become_incremental()
            answer.assembler.push(text)
            brought = True
        if choice.get("finish_reason"):
            answer.finish(str(choice["finish_reason"]))
    # With continuous usage a token whose text is held back is seen by its count.
    counted = before is not None and answer.tokens is not None and answer.tokens > before
    return brought or (counted and bool(event.get("choices")))


READERS: dict[ApiKind, Callable[[dict[str, Any], Answer], bool]] = {
    ApiKind.GENERATE: read_generate,
    ApiKind.COMPLETIONS: read_openai,
    ApiKind.CHAT: read_openai,
}


def read_event(kind: ApiKind, data: bytes, answer: Answer) -> bool:
    """Take one JSON document (an event's data or a whole body). Never raises for what a server
    sent: what cannot be understood is the answer's failure. Returns whether it brought new
    output."""
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        answer.fail("malformed", f"not JSON ({error}): {data[:80]!r}")
        return False
    if not isinstance(event, dict):
        answer.fail("malformed", f"not a JSON object: {data[:80]!r}")
        return False
    message = error_message(event)
    if message is not None:
        answer.fail("error_event", message)
        return False
    try:
        brought = READERS[kind](event, answer)
    except (TypeError, AttributeError) as error:
        answer.fail("malformed", f"unexpected shape ({error}): {data[:80]!r}")
        return False
    answer.has_output = answer.has_output or brought
    return brought


def judge(
    answer: Answer, requested: int, ignore_eos: bool
) -> tuple[Status, str | None, str | None]:
    """(status, failure kind, message) of an answer whose bytes have ended. An answer needs a proper
    end ([DONE], a finish reason, or all its tokens) and at least one token."""
    if answer.failure is not None:
        return Status.ERROR, *answer.failure
    produced = answer.tokens
    if not answer.has_output and not produced:
        body = f"the body begins {answer.head!r}" if answer.head else "the body is empty"
        return Status.ERROR, "empty", f"the answer ended without a single token; {body}"
    ended = answer.done or answer.finish_reason is not None
    if not ended and (produced is None or produced < requested):
        return Status.ERROR, "truncated", "the stream ended without [DONE] or a finish reason"
    if ignore_eos:
        too_few = produced is not None and produced < requested
        if too_few or (produced is None and answer.finish_reason == "stop"):
            return Status.SHORT, None, None
    return Status.OK, None, None
