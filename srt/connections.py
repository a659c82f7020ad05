"""What the server does with a connection by itself: turn away one too many, hang up on one that
does not finish the head of a request in time, and go on with one whose client has only said that it
will send no more.

A few thousand clients that send a byte a minute (the attack called Slowloris) would else hold every
descriptor. Idle keep-alive connections have a limit of their own, in aiohttp.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

from aiohttp import HttpVersion11, web
from aiohttp.web_protocol import RequestHandler

# A client that shut down its sending side and one that is gone look the same until something is
# sent: the system of the second one then resets the connection. So something is sent, seldom, that
# any client of HTTP/1.1 skips. Seconds until the first time, doubled up to the last.
FIRST_PROBE_SECONDS = 0.02
MAX_PROBE_SECONDS = 1.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: text/plain\r\nContent-Length: 21\r\n\r\nToo many connections."
)
_EMPTY_LINE = b"\n"  # between the events of a stream; an event needs a line before it


class Connections:
    """All of them, found by the transport that a request came through."""

    def __init__(self, header_timeout: float, max_connections: int) -> None:
        self.header_timeout = header_timeout
        self._max_connections = max_connections
        self._by_transport: dict[int, _Connection] = {}

    def wrap(self, factory: Callable[[], RequestHandler]) -> asyncio.Protocol:
        """What loop.create_server needs to serve a new connection."""
        if len(self._by_transport) >= self._max_connections:
            return _TurnedAway()
        return _Connection(factory(), self.header_timeout, self._by_transport)

    @property
    def transports(self) -> Iterable[asyncio.Transport]:
        """Of the connections that are open now."""
        return [connection.transport for connection in self._by_transport.values()]

    def on_request(self, request: web.Request) -> None:
        """The head of a request is whole."""
        connection = self._by_transport.get(id(request.transport))
        if connection is not None:
            connection.request = request
            connection.disarm()

    async def on_answer_begins(self, request: web.Request, response: web.StreamResponse) -> None:
        """A handler of aiohttp's signal on_response_prepare."""
        connection = self._by_transport.get(id(request.transport))
        # An answer that is no stream begins when its handler has returned.
        if connection is not None and connection.request is request:
            connection.stream = response

    def on_answered(self, request: web.Request) -> None:
        connection = self._by_transport.get(id(request.transport))
        if connection is not None:
            connection.request = connection.stream = None


class _TurnedAway(asyncio.Protocol):
    """Answers without reading anything: the descriptor is needed again at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        transport.write(_TOO_MANY)
        transport.close()


class _Connection(asyncio.Protocol):
    """Stands between a connection and the protocol that serves it. The time for a head runs from
    the connection's start, and later from the first byte after an answer."""

    transport: asyncio.Transport

    def __init__(
        self,
        protocol: RequestHandler,
        header_timeout: float,
        by_transport: dict[int, _Connection],
    ) -> None:
        self.request: web.Request | None = None  # the one without an answer
        self.stream: web.StreamResponse | None = None  # the answer to it, once that has begun
        self._protocol = protocol
        self._header_timeout = header_timeout
        self._by_transport = by_transport
        self._head_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None  # once the client has ended
        self._probe: asyncio.Task[None] | None = None

    def disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._by_transport[id(transport)] = self
        self._arm()
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and self.request is None:
            self._arm()
        self._protocol.data_received(data)

    def eof_received(self) -> bool:
        """True keeps the connection open for an answer. TLS does not: its end is an end."""
        self._protocol.eof_received()
        if self.transport.get_extra_info("ssl_object") is not None:
            return False
        self.disarm()
        self._look_later(FIRST_PROBE_SECONDS)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.disarm()
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._by_transport.pop(id(self.transport), None)
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def _arm(self) -> None:
        later = asyncio.get_running_loop().call_later
        self._head_timer = later(self._header_timeout, self.transport.abort)

    # --- after the client's end ---

    def _look_later(self, seconds: float) -> None:
        later = asyncio.get_running_loop().call_later
        self._look_timer = later(seconds, self._look, seconds)

    def _look(self, waited: float) -> None:
        """Is anybody there? Without a whole request there is nobody to answer."""
        request = self.request
        is_whole = request is not None and request.content.is_eof()
        if request is None or not is_whole or request.version < HttpVersion11:
            self.transport.close()
            return
        self._protocol.close()  # when it has answered
        if self.stream is None:
            self.transport.write(_CONTINUE)
        elif self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(_write_empty_line(self.stream))
        self._look_later(min(2 * waited, MAX_PROBE_SECONDS))


async def _write_empty_line(stream: web.StreamResponse) -> None:
    try:
        await stream.write(_EMPTY_LINE)
    except (ConnectionError, RuntimeError):
        return  # the client is gone, or the stream has just ended: what we wanted to know
