"""Hangs up on clients that connect and do not finish the head of a request in time.

A few thousand clients that send a byte a minute (the attack called Slowloris) would else hold every
descriptor. Idle keep-alive connections have a limit of their own, in aiohttp.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from aiohttp import web


class HeaderTimers:
    """Of all connections, found by the transport that a request came through."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._by_transport: dict[int, _TimedProtocol] = {}

    def wrap(self, factory: Callable[[], asyncio.BaseProtocol]) -> asyncio.Protocol:
        """What loop.create_server needs to serve a new connection."""
        return _TimedProtocol(cast("asyncio.Protocol", factory()), self.timeout, self._by_transport)

    def on_request(self, request: web.Request) -> None:
        """The head of a request is whole."""
        timed = self._by_transport.get(id(request.transport))
        if timed is not None:
            timed.num_open += 1
            timed.disarm()

    def on_answered(self, request: web.Request) -> None:
        timed = self._by_transport.get(id(request.transport))
        if timed is not None:
            timed.num_open -= 1


class _TimedProtocol(asyncio.Protocol):
    """Stands between a connection and the protocol that serves it. The time for a head runs from
    the connection's start, and later from the first byte after an answer."""

    def __init__(
        self,
        protocol: asyncio.Protocol,
        timeout: float,
        by_transport: dict[int, _TimedProtocol],
    ) -> None:
        self.num_open = 0  # requests without an answer
        self._protocol = protocol
        self._timeout = timeout
        self._by_transport = by_transport
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._by_transport[id(transport)] = self
        self._arm(self._transport)
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and not self.num_open and self._transport is not None:
            self._arm(self._transport)
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.disarm()
        self._by_transport.pop(id(self._transport), None)
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def _arm(self, transport: asyncio.Transport) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout, transport.abort)
