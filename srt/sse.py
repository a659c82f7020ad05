"""Server-sent events: one `data:` line of JSON each, and `data: [DONE]` at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web


class EventStream:
    """An open stream. Sending waits while the client is slow; nothing is queued here."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response

    async def send(self, *values: Any) -> None:
        """One event a value, all in one write."""
        await self.response.write(
            b"".join([b"data: " + orjson.dumps(value) + b"\n\n" for value in values])
        )

    async def send_done(self) -> None:
        await self.response.write(b"data: [DONE]\n\n")


@asynccontextmanager
async def open_stream(request: web.Request) -> AsyncIterator[EventStream]:
    """Send the headers of a 200, run the body of the `async with`, end the response. A client that
    goes away in the middle ends the body quietly; the caller's own cleanup aborts the request."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold the tokens back
        }
    )
    await response.prepare(request)
    try:
        yield EventStream(response)
        await response.write_eof()
    except ConnectionResetError:
        return
