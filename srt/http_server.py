"""The HTTP routes: bodies to calls of the TokenizerManager, states to responses and streams."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import math
import shlex
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import hdrs, web

from srt import __version__
from srt.generate_api import ChunkCursor, collect, error_of, parse_generate_body
from srt.http_json import TENANT_HEADER, error_response, json_response, read_json
from srt.managers.req_state import ReqState
from srt.managers.request_preparer import GenerateReqInput
from srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from srt.openai_api import OpenAIRoutes
from srt.request_error import RequestError
from srt.server_args import ServerArgs
from srt.sse import open_stream
from srt.tokenize_api import TokenizeRoutes

logger = logging.getLogger(__name__)

# A body of 64 MiB holds a prompt of some ten million tokens; more is a mistake or an attack.
MAX_BODY_BYTES = 64 * 2**20
# When the server closes, handlers that have not ended may still write what they have.
CLOSE_SECONDS = 5.0
HEALTH_GENERATE_SECONDS = 20.0
# /server_info is read inside benchmarks' timed sections, so it does not wait for a long pass.
INTERNAL_STATE_SECONDS = 1.0
MAX_JOURNAL_RECORDS = 10_000

_ALWAYS_OPEN = ("/health", "/ready", "/metrics")
_WHILE_STARTING = frozenset({"/", "/health", "/health_generate", "/ready", "/ping"})
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# What clients call the default model: its name on the hub, where they find its tokenizer.
DEFAULT_MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def served_model_name(args: ServerArgs) -> str:
    return args.served_model_name or args.model_path or DEFAULT_MODEL_NAME


class HttpServer:
    """The application. It can answer from the first moment: 503 until `open` is called."""

    def __init__(self, args: ServerArgs) -> None:
        self.args = args
        self.model_name = served_model_name(args)
        self.started_time = time.time()
        self._manager: TokenizerManager | None = None
        self.app = web.Application(middlewares=[self._frame], client_max_size=MAX_BODY_BYTES)
        self.app.on_response_prepare.append(_allow_any_origin)
        self._add_routes()

    def _add_routes(self) -> None:
        add = self.app.router.add_route
        for method in (hdrs.METH_POST, hdrs.METH_PUT):
            add(method, "/generate", self.generate)
        add("GET", "/", self.greet)
        for path in ("/health", "/ready"):
            add("GET", path, self.health)
        add("GET", "/health_generate", self.health_generate)
        add("GET", "/ping", self.ping)
        for path in ("/model_info", "/get_model_info"):
            add("GET", path, self.model_info)
        for path in ("/server_info", "/get_server_info"):
            add("GET", path, self.server_info)
        add("GET", "/v1/models", self.list_models)
        add("GET", "/v1/models/{model_id:.+}", self.one_model)
        for method in ("GET", "POST"):
            add(method, "/flush_cache", self.flush_cache)
        add("POST", "/abort_request", self.abort_request)
        add("GET", "/v1/requests", self.list_requests)
        add("GET", "/v1/requests/{rid:.+}", self.one_request)
        add("GET", "/v1/journal", self.journal)
        OpenAIRoutes(self.model_name, lambda: self.manager).add_to(self.app.router)
        TokenizeRoutes(lambda: self.manager).add_to(self.app.router)

    def runner(self) -> web.AppRunner:
        """What serves the application: no access log, and a client that goes away cancels its
        handler, which aborts its request."""
        return web.AppRunner(
            self.app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS
        )

    def open(self, manager: TokenizerManager) -> None:
        """Start to serve requests with `manager`, whose scheduler is ready."""
        self._manager = manager

    @property
    def manager(self) -> TokenizerManager:
        if self._manager is None:
            raise RequestError("The server is still starting.", status=503)
        return self._manager

    @property
    def status(self) -> ServerStatus:
        return ServerStatus.STARTING if self._manager is None else self._manager.status

    @web.middleware
    async def _frame(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every route: the key, the start-up gate, and errors in the documented shape."""
        if request.method == hdrs.METH_OPTIONS:
            return web.Response(headers=_PREFLIGHT_HEADERS)
        if not self._is_authorized(request):
            return json_response({"error": "Unauthorized"}, status=401)
        try:
            if self.status is ServerStatus.STARTING and request.path not in _WHILE_STARTING:
                raise RequestError("The server is still starting.", status=503)
            return await handler(request)
        except RequestError as error:
            return error_response(error, request.path)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return error_response(_from_http_exception(error, request), request.path)
        except ConnectionResetError:
            raise  # the client left; nobody reads an answer
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            internal = RequestError("Internal server error.", status=500)
            return error_response(internal, request.path)

    def _is_authorized(self, request: web.Request) -> bool:
        key = self.args.api_key
        if key is None or request.path.startswith(_ALWAYS_OPEN):
            return True
        given = request.headers.get(hdrs.AUTHORIZATION, "")
        return hmac.compare_digest(given.encode(errors="replace"), f"Bearer {key}".encode())

    # --- /generate ---

    async def generate(self, request: web.Request) -> web.StreamResponse:
        arrival_time = time.time()
        tenant = request.headers.get(TENANT_HEADER)
        call = parse_generate_body(await read_json(request), arrival_time, tenant)
        async with aclosing(self.manager.generate(call)) as states:
            if call.stream:
                return await self._stream(request, states)
            return json_response(await collect(states))

    async def _stream(
        self, request: web.Request, states: AsyncIterator[ReqState]
    ) -> web.StreamResponse:
        cursor = ChunkCursor(self.args.incremental_streaming_output)
        # The first state before the first header, so that a refusal still has its HTTP status.
        state = await anext(states)
        if error := error_of(state):
            raise error
        async with open_stream(request) as stream:
            await stream.send(cursor.next_object(state))
            async for state in states:
                await stream.send(cursor.next_object(state))
            await stream.send_done()
        return stream.response

    # --- health and information ---

    async def greet(self, request: web.Request) -> web.Response:
        return json_response("regather is running")

    async def ping(self, request: web.Request) -> web.Response:
        return web.Response()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.status is ServerStatus.UP else 503)

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 only if a token really came out of the model in time."""
        call = GenerateReqInput(
            prompts=[[0]],
            sampling_params=[{"max_new_tokens": 1, "temperature": 0.0}],
            rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
        )
        try:
            await asyncio.wait_for(self._generate_once(call), HEALTH_GENERATE_SECONDS)
        except (asyncio.TimeoutError, RequestError) as error:
            logger.warning("Health check failed: %s", error or "no token in time")
            return web.Response(status=503)
        return web.Response()

    async def _generate_once(self, call: GenerateReqInput) -> None:
        async with aclosing(self.manager.generate(call)) as states:
            await collect(states)

    async def model_info(self, request: web.Request) -> web.Response:
        config = self.manager.model_config
        path = self.args.model_path or DEFAULT_MODEL_NAME
        return json_response(
            {
                "model_path": path,
                "served_model_name": self.model_name,
                "tokenizer_path": self.args.tokenizer_path or path,
                "is_generation": True,
                "preferred_sampling_params": self.args.preferred_sampling_params,
                "weight_version": "default",
                "load_format": self.args.load_format,
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": config.model_type,
                "architectures": list(config.architectures),
                "context_length": self.manager.context_len,
                "vocab_size": config.vocab_size,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        limits = self.manager.limits
        arguments = self._public_arguments()
        state = {
            **arguments,
            "effective_max_running_requests_per_dp": limits.max_running_requests,
            "memory_usage": {**limits.memory, "token_capacity": limits.max_total_num_tokens},
            "dp_size": 1,
            **await self.manager.internal_state(INTERNAL_STATE_SECONDS),
        }
        return json_response(
            {
                **arguments,
                "launch_command": _launch_command(self.args),
                "scheduler_info": {
                    "max_total_num_tokens": limits.max_total_num_tokens,
                    "max_req_input_len": limits.max_req_input_len,
                    "max_running_requests": limits.max_running_requests,
                    "chunked_prefill_size": limits.chunked_prefill_size,
                    "max_prefill_tokens": limits.max_prefill_tokens,
                    "context_len": limits.context_len,
                },
                "startup_time": self.started_time,
                "kv_events": None,
                "version": __version__,
                "frontend": "aiohttp",
                "internal_states": [state],
            }
        )

    def _public_arguments(self) -> dict[str, Any]:
        """All server arguments, with what must not leave the server masked and paths filled in."""
        path = self.args.model_path or DEFAULT_MODEL_NAME
        arguments = {
            f.name: value if f.repr or value is None else "****"
            for f in dataclasses.fields(self.args)
            for value in [getattr(self.args, f.name)]
        }
        arguments.update(
            model_path=path,
            tokenizer_path=self.args.tokenizer_path or path,
            served_model_name=self.model_name,
        )
        return arguments

    async def list_models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: web.Request) -> web.Response:
        model_id = request.match_info["model_id"]
        if model_id == self.model_name:
            return json_response(self._model_card())
        message = f"The model '{model_id[:200]}' does not exist"
        error = {
            "message": message,
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return json_response({"object": "error", **error, "error": error}, status=404)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": int(self.started_time),
            "owned_by": "sglang",  # clients that talk to SGLang recognise the dialect by this
            "root": self.model_name,
            "parent": None,
            "max_model_len": self.manager.context_len,
        }

    # --- administration ---

    async def flush_cache(self, request: web.Request) -> web.Response:
        out = await self.manager.flush_cache(_seconds(request.query.get("timeout", "0"), "timeout"))
        if out.success:
            return web.Response(text=_FLUSHED)
        return web.Response(text=f"Flush cache failed.\n{out.message}\n", status=400)

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        if not isinstance(body, dict):
            raise RequestError("The body must be a JSON object with rid or abort_all.")
        rid, abort_all = body.get("rid"), body.get("abort_all")
        if rid is not None and not isinstance(rid, str):
            raise RequestError("rid must be a string.", param="rid")
        if abort_all is not None and not isinstance(abort_all, bool):
            raise RequestError("abort_all must be a boolean.", param="abort_all")
        if abort_all:
            self.manager.abort_all()
        elif rid:
            self.manager.abort(rid)
        return web.Response()

    async def list_requests(self, request: web.Request) -> web.Response:
        """Where every live request stands and what a waiting one waits for. Never any text."""
        return json_response({"requests": await self.manager.requests()})

    async def one_request(self, request: web.Request) -> web.Response:
        rid = request.match_info["rid"]
        found = await self.manager.requests(rid)
        if not found:
            raise RequestError(f"There is no live request {rid[:200]!r}.", status=404, param="rid")
        return json_response({"requests": found})

    async def journal(self, request: web.Request) -> web.Response:
        """The last scheduling decisions, oldest first."""
        last = request.query.get("last", "100")
        if not (last.isascii() and last.isdigit() and 0 < int(last[:10]) <= MAX_JOURNAL_RECORDS):
            raise RequestError(
                f"last must be an integer in [1, {MAX_JOURNAL_RECORDS}], got {last[:50]!r}.",
                param="last",
            )
        return json_response({"records": await self.manager.journal(int(last))})


_PREFLIGHT_HEADERS = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "*",
    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: "*, Authorization",
    hdrs.ACCESS_CONTROL_MAX_AGE: "600",
}


async def _allow_any_origin(request: web.Request, response: web.StreamResponse) -> None:
    # Without credentials: a page may talk to the server with a key it has, not with a cookie.
    response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*"


def _from_http_exception(error: web.HTTPException, request: web.Request) -> RequestError:
    path = request.path[:200]
    message = {
        404: f"There is no route {request.method} {path}.",
        405: f"{path} does not take {request.method}.",
        413: f"The body is larger than the limit of {MAX_BODY_BYTES} bytes.",
    }.get(error.status, error.reason)
    return RequestError(message, status=error.status)


def _seconds(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise RequestError(
            f"{name} must be a number of seconds of at least 0, got {text[:50]!r}.", param=name
        )
    return value


def _launch_command(args: ServerArgs) -> str:
    masked = dataclasses.replace(args, api_key=None)
    return shlex.join([sys.executable, "-m", "launch_server", *masked.to_cli()])
