"""Hangs up on clients that do not read what they asked for.

While a client does not read, its stream waits: news is not queued (see ClientCall), and one chunk,
cut when it can be sent, carries all that has come meanwhile. So what a client can make the server
hold is its answer so far and some 128 KiB of it in the connection's buffers. This ends that too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# What a client must read within the timeout while there is something to read. Slower lines than
# this (270 bytes/s with the default of 60 s) carry no conversation.
MIN_BYTES = 16 * 1024
# Looks at all connections within the timeout.
_LOOKS = 8


@dataclass
class _Backlog:
    """Bytes of one connection that its client has not taken, and what it took since `since`."""

    size: int
    since: float  # time.monotonic() seconds
    num_taken: int = 0


class SlowClients:
    """Looks at the connections' buffers every now and then. Only reading counts, so a client that
    waits for its turn is never slow."""

    def __init__(
        self, timeout: float, transports: Callable[[], Iterable[asyncio.Transport]]
    ) -> None:
        self.num_ended = 0
        self._timeout = timeout
        self._transports = transports
        self._backlogs: dict[asyncio.Transport, _Backlog] = {}

    async def watch(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._timeout / _LOOKS)
            self.look(loop.time())

    def look(self, now: float) -> None:
        """Hang up on those whose time is over at `now`. What the server adds to a buffer between
        two looks hides as much of what the client took; a stream adds at most 128 KiB and one
        chunk before it waits, so that happens once."""
        before, self._backlogs = self._backlogs, {}
        for transport in self._transports():
            size = transport.get_write_buffer_size()
            if not size:
                continue
            backlog = before.get(transport) or _Backlog(size, now)
            backlog.num_taken += max(0, backlog.size - size)
            backlog.size = size
            if backlog.num_taken >= MIN_BYTES:
                backlog.since, backlog.num_taken = now, 0
            if now - backlog.since < self._timeout:
                self._backlogs[transport] = backlog
            else:
                self._hang_up(transport, size)

    def _hang_up(self, transport: asyncio.Transport, size: int) -> None:
        self.num_ended += 1
        logger.warning(
            "Hung up on %s, which read less than %d bytes in %g s (--slow-client-timeout). "
            "#unread-bytes: %d",
            _address(transport),
            MIN_BYTES,
            self._timeout,
            size,
        )
        transport.abort()  # which cancels the handler, which aborts the request


def _address(transport: asyncio.Transport) -> str:
    peer = transport.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) >= 2 else "a client"
