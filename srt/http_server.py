"""The HTTP routes: bodies to calls of the TokenizerManager, states to responses and streams."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

from aiohttp import hdrs, web

from srt.admin_api import AdminRoutes
from srt.connections import Connections
from srt.generate_api import (
    AnswerFormat,
    ChunkCursor,
    collect,
    error_of,
    parse_generate_body,
)
from srt.host_limits import descriptor_limit
from srt.http_auth import Keys
from srt.http_json import (
    BODY_TIMEOUT,
    KEY_OWNER,
    error_response,
    json_response,
    read_json,
    tenant_of,
)
from srt.http_metrics import HttpMetrics
from srt.info_api import InfoRoutes, served_model_name
from srt.malformed_http import connection_logger
from srt.managers.req_state import ReqState
from srt.managers.request_preparer import GenerateReqInput
from srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from srt.openai_api import OpenAIRoutes
from srt.openapi_document import OpenApiRoute
from srt.profile_api import ProfileRoutes
from srt.request_error import RequestError
from srt.server_args import ServerArgs
from srt.slow_clients import SlowClients
from srt.sse import open_stream
from srt.tokenize_api import TokenizeRoutes

logger = logging.getLogger(__name__)

# When the server closes, handlers that have not ended may still write what they have.
CLOSE_SECONDS = 5.0
OWN_DESCRIPTORS = 128  # files, and sockets to the scheduler
HEALTH_GENERATE_SECONDS = 20.0

_WHILE_STARTING = frozenset(
    {"/", "/health", "/health_generate", "/ready", "/ping", "/metrics", "/openapi.json"}
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """The application. It can answer from the first moment: 503 until `open` is called."""

    def __init__(self, args: ServerArgs) -> None:
        """ValueError if the file of keys is no such."""
        self.args = args
        self.model_name = served_model_name(args)
        self.keys = Keys(args)
        self._origins = frozenset(map(str.strip, args.cors_allow_origins.split(",")))
        self._manager: TokenizerManager | None = None
        self.app = web.Application(middlewares=[self._frame], client_max_size=args.max_body_bytes)
        max_connections = args.max_connections or _room_for_connections()
        self.connections = Connections(args.header_timeout, max_connections)
        self.slow_clients = SlowClients(
            args.slow_client_timeout, lambda: self.connections.transports
        )
        self.metrics = HttpMetrics(self.model_name, lambda: self._manager, self.slow_clients)
        self.app[BODY_TIMEOUT] = args.body_timeout
        self.app[KEY_OWNER] = self.keys.owner
        self.app.on_response_prepare.append(self._allow_origin)
        self.app.on_response_prepare.append(self.connections.on_answer_begins)
        self._add_routes()

    def _add_routes(self) -> None:
        add = self.app.router.add_route
        for method in (hdrs.METH_POST, hdrs.METH_PUT):
            add(method, "/generate", self.generate)
        # Load balancers probe with HEAD, too.
        for method in (hdrs.METH_GET, hdrs.METH_HEAD):
            add(method, "/", self.greet)
            for path in ("/health", "/ready"):
                add(method, path, self.health)
            add(method, "/ping", self.ping)
        add("GET", "/health_generate", self.health_generate)
        add("GET", "/metrics", self.metrics.serve)
        InfoRoutes(self.args, lambda: self.manager, self.metrics.labels).add_to(self.app.router)
        AdminRoutes(lambda: self.manager).add_to(self.app.router)
        ProfileRoutes(lambda: self.manager).add_to(self.app.router)
        OpenAIRoutes(self.model_name, lambda: self.manager).add_to(self.app.router)
        TokenizeRoutes(lambda: self.manager).add_to(self.app.router)
        OpenApiRoute().add_to(self.app.router)

    @asynccontextmanager
    async def listening(
        self, listener: socket.socket, tls: ssl.SSLContext | None = None, backlog: int = 128
    ) -> AsyncIterator[None]:
        """Serve whoever connects to `listener`; at the end, hang up. `backlog`: connections that
        the system holds until they are accepted. There is no access log, and a client that goes
        away cancels its handler, which aborts its request."""
        runner = web.AppRunner(
            self.app,
            logger=connection_logger(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_SECONDS,
        )
        await runner.setup()
        connection = runner.server
        assert connection is not None, "it is set up"
        acceptor = await asyncio.get_running_loop().create_server(
            lambda: self.connections.wrap(connection),
            sock=listener,
            ssl=tls,
            backlog=backlog,
        )
        watching = asyncio.create_task(self.slow_clients.watch())
        try:
            yield
        finally:
            acceptor.close()
            await runner.cleanup()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

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
        """Around every route: the counts, and what its connection knows of it."""
        self.connections.on_request(request)
        key = self.metrics.on_request(request)
        try:
            response = await self._answer(request, handler)
            self.metrics.on_response(key, response.status)
            return response
        finally:
            self.metrics.on_end(key)
            self.connections.on_answered(request)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The keys, the start-up gate, and errors in the documented shape."""
        if request.method == hdrs.METH_OPTIONS:
            return web.Response(headers=_PREFLIGHT_HEADERS)
        if not self.keys.allows(request):
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
            return error_response(self._from_http_exception(error, request), request.path)
        except ConnectionResetError:
            # The client left before its answer began. Nobody reads this one, but an exception would
            # be logged as our failure.
            return web.Response(status=499, reason="Client Closed Request")
        except Exception:
            logger.exception("%s %s failed", request.method[:20], request.raw_path[:200])
            internal = RequestError("Internal server error.", status=500)
            return error_response(internal, request.path)

    def _from_http_exception(self, error: web.HTTPException, request: web.Request) -> RequestError:
        path = request.path[:200]
        message = {
            404: f"There is no route {request.method[:20]} {path}.",
            405: f"{path} does not take {request.method[:20]}.",
            413: f"The body is larger than the limit of {self.args.max_body_bytes} bytes "
            "(--max-body-bytes).",
        }.get(error.status, error.reason)
        return RequestError(message, status=error.status)

    async def _allow_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        # Without credentials: a page may talk to the server with a key it has, not with a cookie.
        origin = request.headers.get(hdrs.ORIGIN)
        if "*" in self._origins:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*"
        elif origin is not None and origin in self._origins:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.VARY] = hdrs.ORIGIN

    # --- /generate ---

    async def generate(self, request: web.Request) -> web.StreamResponse:
        arrival_time = time.time()
        call = parse_generate_body(await read_json(request), arrival_time, tenant_of(request))
        answer_format = AnswerFormat.of(call, self.manager.tokenizer)
        async with aclosing(self.manager.generate(call)) as states:
            if call.stream:
                return await self._stream(request, states, answer_format)
            return json_response(await collect(states, answer_format))

    async def _stream(
        self, request: web.Request, states: AsyncIterator[ReqState], answer_format: AnswerFormat
    ) -> web.StreamResponse:
        cursor = ChunkCursor(self.args.incremental_streaming_output, answer_format, as_json=True)
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
            is_probe=True,
        )
        try:
            await asyncio.wait_for(self._generate_once(call), HEALTH_GENERATE_SECONDS)
        except (asyncio.TimeoutError, RequestError) as error:
            logger.warning("Health check failed: %s", error or "no token in time")
            return web.Response(status=503)
        return web.Response()

    async def _generate_once(self, call: GenerateReqInput) -> None:
        async with aclosing(self.manager.generate(call)) as states:
            await collect(states, AnswerFormat())


def _room_for_connections() -> int:
    limit = descriptor_limit()
    return limit - min(OWN_DESCRIPTORS, limit // 4)


_PREFLIGHT_HEADERS = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "*",
    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: "*, Authorization",
    hdrs.ACCESS_CONTROL_MAX_AGE: "600",
}
