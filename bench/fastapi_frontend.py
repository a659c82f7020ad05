"""The front end's streams through FastAPI and uvicorn, for bench_frontend to compare with.

Everything behind the route is ours: what differs is the framework.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orjson
import uvicorn
from fastapi import Body, FastAPI
from fastapi.responses import StreamingResponse

from srt.generate_api import AnswerFormat, ChunkCursor, parse_generate_body
from srt.managers.tokenizer_manager import TokenizerManager


def make_app(manager: TokenizerManager) -> FastAPI:
    app = FastAPI()

    async def generate(body: dict[str, Any]) -> StreamingResponse:
        call = parse_generate_body(body, time.time())
        cursor = ChunkCursor(False, AnswerFormat(), as_json=True)

        async def chunks() -> AsyncIterator[bytes]:
            async with aclosing(manager.generate(call)) as states:
                async for state in states:
                    yield b"data: " + orjson.dumps(cursor.next_object(state)) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    # Not as a decorator: FastAPI reads annotations at run time, and these are strings.
    generate.__annotations__["body"] = dict[str, Any]
    generate.__defaults__ = (Body(),)
    app.post("/generate", response_model=None)(generate)
    return app


@asynccontextmanager
async def listening(manager: TokenizerManager, listener: socket.socket) -> AsyncIterator[None]:
    """Serve whoever connects to `listener`."""
    config = uvicorn.Config(
        make_app(manager), loop="none", http="httptools", log_level="error", access_log=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        await serving
