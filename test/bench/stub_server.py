"""A server that speaks SGLang's and OpenAI's routes and misbehaves in one chosen way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

from aiohttp import web

# What each misbehaviour is; "ok" is none. A token is one character, so counts are plain to see.
MODES = {
    "ok": "cumulative text, counts, finish reason, [DONE]",
    "error_event": "HTTP 200 and an error event in the stream",
    "error_named": "the same, and only the field event says that it is an error",
    "error_field": "the same in a field `error`, as llama.cpp once had it",
    "http_400": "refused with 400",
    "http_503": "refused with 503",
    "no_key": "401 for whoever asks for the models",
    "comments": "comment lines between the events, as keep-alives",
    "event_lines": "event:, id: and retry: fields before data",
    "crlf": "lines end in CR LF",
    "incremental": "text pieces are deltas on /generate",
    "no_completion_tokens": "no token count anywhere",
    "unasked_usage": "a usage chunk without choices that nobody asked for",
    "no_finish_reason": "the key finish_reason is missing",
    "short": "ends properly after 5 tokens",
    "empty": "ends properly without any token",
    "truncated": "ends after 3 tokens without a proper end",
    "broken": "the connection breaks after 3 tokens",
    "abort": "finish reason abort after 3 tokens",
    "abort_word": "the same, and on /generate the reason is only a word",
    "cancelled": "finish reason cancelled after 3 tokens",
    "nan": "finish reason says NaN happened",
    "web_page": "a page of HTML with status 200, as a login in front of it would",
    "not_text": "numbers where text belongs",
    "malformed": "an event that is not JSON",
    "whole": "answers a streaming request with one JSON document",
    "stall": "never answers",
    "stall_midway": "falls silent after 3 tokens",
    "no_text": "counts every token and sends no text at all",
    "silent_tail": "sends no text after the first token, and the finish reason 0.1 s later",
    "lost_text": "counts every token but sends the text of the first only",
}
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def word(length: int) -> str:
    return "".join(ALPHABET[i % len(ALPHABET)] for i in range(length))


class StubServer:
    """Listens on a free port in a thread of its own, since the load generator also asks it things
    outside any event loop. `requests` holds (path, body, headers) of every POST."""

    def __init__(self, mode: str = "ok", *, tokenize: bool = True, pace: float = 0.0) -> None:
        assert mode in MODES, mode
        self.mode = mode
        self.pace = pace  # seconds between two tokens
        self.tokenize = tokenize
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.url = ""
        self.settings: dict[str, Any] = {"max_running_requests": 8, "schedule_policy": "fcfs"}
        self.patches: list[dict[str, Any]] = []
        self.is_profiling = False
        self.num_cut_off = 0  # streams whose client left before their end
        self.num_scrapes = 0  # each shows 3 more retractions
        self.ready = threading.Event()
        self.arrived = threading.Condition()

    def __enter__(self) -> StubServer:
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)
        self.thread.start()
        assert self.ready.wait(10), "the stub did not start"
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)
        assert not self.thread.is_alive(), "the stub did not stop"

    async def serve(self) -> None:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.get("/v1/models", self.models),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.get("/metrics", self.metrics),
                web.post("/tokenize", self.do_tokenize),
                web.post("/detokenize", self.do_detokenize),
                web.post("/flush_cache", self.flush),
                web.post("/start_profile", self.profile),
                web.post("/stop_profile", self.profile),
                web.patch("/v1/scheduler", self.change_settings),
                web.post("/generate", self.generate),
                web.post("/v1/completions", self.generate),
                web.post("/v1/chat/completions", self.generate),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.05)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.ready.set()
        await self.stop.wait()
        await runner.cleanup()

    def sent(self, path: str) -> list[dict[str, Any]]:
        return [body for seen, body, _ in self.requests if seen == path]

    def wait_for_posts(self, path: str, num: int) -> None:
        with self.arrived:
            came = self.arrived.wait_for(lambda: len(self.sent(path)) >= num, timeout=10)
        assert came, f"{len(self.sent(path))} of {num} posts to {path} came"

    async def note(self, request: web.Request) -> dict[str, Any]:
        body = json.loads(await request.read() or b"{}")
        with self.arrived:
            self.requests.append((request.path, body, dict(request.headers)))
            self.arrived.notify_all()
        return body

    async def models(self, request: web.Request) -> web.Response:
        if self.mode == "no_key":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "stub-model"}]})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/nowhere/stub.gguf", "tokenizer_path": None})

    async def server_info(self, request: web.Request) -> web.Response:
        state = {"settings": self.settings, "recomputed_tokens": 5 * self.num_scrapes}
        return web.json_response({"version": "stub", "internal_states": [state]})

    async def change_settings(self, request: web.Request) -> web.Response:
        values = json.loads(await request.read())
        self.patches.append(values)
        if not values.keys() <= self.settings.keys():
            error = f"unknown field {next(iter(values))!r}"
            return web.json_response({"error": error}, status=400)
        self.settings.update(values)
        return web.json_response(self.settings)

    async def do_tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenize:
            return web.json_response({"error": "no such route"}, status=404)
        body = await self.note(request)
        return web.json_response({"tokens": [ord(c) for c in body["prompt"]]})

    async def do_detokenize(self, request: web.Request) -> web.Response:
        body = await self.note(request)
        return web.json_response({"text": "".join(chr(t) for t in body["tokens"])})

    async def metrics(self, request: web.Request) -> web.Response:
        self.num_scrapes += 1
        name = "sglang:num_retracted_requests_total"
        text = f'# TYPE {name} counter\n{name}{{tp_rank="0"}} {3.0 * self.num_scrapes}\n'
        gauges = {"num_running_reqs": 2, "num_queue_reqs": 3, "token_usage": 0.5}
        for gauge, value in gauges.items():
            text += f'# TYPE sglang:{gauge} gauge\nsglang:{gauge}{{tp_rank="0"}} {value}\n'
        return web.Response(text=text)

    async def flush(self, request: web.Request) -> web.Response:
        await self.note(request)
        return web.Response(text="Cache flushed.\n")

    async def profile(self, request: web.Request) -> web.Response:
        """Start and stop by turns."""
        await self.note(request)
        wanted = {"/start_profile": False, "/stop_profile": True}[request.path]
        if self.is_profiling is not wanted:
            return web.Response(status=400, text="not now")
        self.is_profiling = not wanted
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.note(request)
        if self.mode in ("http_400", "http_503"):
            status = int(self.mode[-3:])
            return web.json_response(
                {"error": {"message": f"refused with {status}"}}, status=status
            )
        if self.mode == "stall":
            await self.stop.wait()
        if not body["stream"] or self.mode == "whole":
            return web.json_response(self.whole(request.path, body))
        if self.mode == "web_page":
            return web.Response(text="<html>Who are you?</html>", content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self.send_events(request, response, body)
        except ConnectionResetError:
            self.num_cut_off += 1
        return response

    async def send_events(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any]
    ) -> None:
        for event in self.events(request.path, body):
            await response.write(self.dressed(event))
            if self.pace:
                await asyncio.sleep(self.pace)
            if self.mode == "silent_tail" and event == "":
                await asyncio.sleep(0.1)
            if self.mode == "broken" and event == "":
                request.transport.abort()
                return
            if self.mode == "stall_midway" and event == "":
                await self.stop.wait()
        await response.write_eof()

    def dressed(self, event: str) -> bytes:
        if event == "":  # only a mark for generate()
            return b""
        text = f"data: {event}\n\n"
        if event.startswith('{"message"'):
            text = f"error: {event}\n\n" if self.mode == "error_field" else f"event: error\n{text}"
        if self.mode == "comments":
            text = f": ping\n\n{text}"
        elif self.mode == "event_lines":
            text = f"event: message\nid: 7\nretry: 10\n{text}"
        elif self.mode == "crlf":
            text = text.replace("\n", "\r\n")
        return text.encode()

    def requested(self, path: str, body: dict[str, Any]) -> int:
        if path == "/generate":
            return int(body["sampling_params"]["max_new_tokens"])
        return int(body.get("max_tokens") or body["max_completion_tokens"])

    def events(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        if self.mode == "error_event":
            yield json.dumps({"error": {"message": "prompt too long", "code": 400}})
            yield "[DONE]"
            return
        if self.mode in ("error_named", "error_field"):
            yield json.dumps(self.openai_chunk(path, body, 1, last=False))
            yield json.dumps({"message": "out of memory"})
            yield "[DONE]"
            return
        if self.mode == "malformed":
            yield '{"text": "a'
            return
        length = self.requested(path, body)
        length = {"short": min(5, length), "empty": 0}.get(self.mode, length)
        early = self.mode in (
            "truncated", "broken", "abort", "abort_word", "cancelled", "stall_midway", "nan",
        )  # fmt: skip
        length = 3 if early else length
        make = self.native_chunk if path == "/generate" else self.openai_chunk
        for produced in range(1, length + 1):
            if self.mode == "silent_tail" and produced == length:
                yield ""
            yield json.dumps(make(path, body, produced, last=produced == length and not early))
        if self.mode in ("broken", "stall_midway"):
            yield ""
        if self.mode == "truncated":
            return
        if self.mode in ("abort", "abort_word", "cancelled", "nan"):
            yield json.dumps(self.bad_end(path))
        if path != "/generate":
            asked = (body.get("stream_options") or {}).get("include_usage")
            if self.mode == "unasked_usage" or (asked and self.mode != "no_completion_tokens"):
                yield json.dumps({"choices": [], "usage": self.usage(body, length)})
        elif self.mode == "unasked_usage":
            yield json.dumps({"choices": [], "usage": {"completion_tokens": length}})
        yield "[DONE]"

    def bad_end(self, path: str) -> dict[str, Any]:
        if self.mode == "nan":
            finish: Any = {"type": "stop", "matched": "NaN happened"}
        elif self.mode == "abort_word":
            finish = "abort"
        elif self.mode == "cancelled":
            finish = {"type": "cancelled"}
        else:
            finish = {"type": "abort", "message": "Aborted by the scheduler"}
        if path == "/generate":
            return {"text": word(3), "meta_info": {"completion_tokens": 3, "finish_reason": finish}}
        reason = "cancelled" if self.mode == "cancelled" else "abort"
        return {"choices": [{"index": 0, "text": "", "finish_reason": reason}]}

    def usage(self, body: dict[str, Any], produced: int) -> dict[str, Any]:
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        details = {"cached_tokens": 1}
        return {
            "prompt_tokens": len(prompt), "completion_tokens": produced,
            "prompt_tokens_details": details,
        }  # fmt: skip

    def native_chunk(
        self, path: str, body: dict[str, Any], produced: int, last: bool
    ) -> dict[str, Any]:
        text = word(produced)
        if self.mode == "incremental":
            text = text[-1]
        elif self.mode == "lost_text":
            text = text[0]
        meta: dict[str, Any] = {
            "prompt_tokens": len(body.get("text") or body["input_ids"]),
            "completion_tokens": produced, "cached_tokens": 2, "num_retractions": 1,
            "finish_reason": {"type": "length", "length": produced} if last else None,
        }  # fmt: skip
        if self.mode == "no_completion_tokens":
            del meta["completion_tokens"]
        if self.mode == "no_finish_reason":
            del meta["finish_reason"]
        return {"text": text, "meta_info": meta}

    def openai_chunk(
        self, path: str, body: dict[str, Any], produced: int, last: bool
    ) -> dict[str, Any]:
        text: Any = word(produced)[-1]
        if (self.mode in ("lost_text", "silent_tail") and produced > 1) or self.mode == "no_text":
            text = ""
        elif self.mode == "not_text":
            text = produced
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
        if self.mode == "no_finish_reason":
            del choice["finish_reason"]
        if path.endswith("/chat/completions"):
            role = {"role": "assistant"} if produced == 1 else {}
            choice["delta"] = {**role, "content": text}
        else:
            choice["text"] = text
        return {"choices": [choice], "usage": None}

    def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        length = self.requested(path, body)
        if path == "/generate":
            return {**self.native_chunk(path, body, length, last=True), "text": word(length)}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if path.endswith("/chat/completions"):
            choice["message"] = {"role": "assistant", "content": word(length)}
        else:
            choice["text"] = word(length)
        return {"choices": [choice], "usage": self.usage(body, length)}
