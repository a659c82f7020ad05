"""The client process of bench_frontend: raw sockets, since it must not be slower than the
server."""

from __future__ import annotations

import asyncio
import json
from multiprocessing.connection import Connection

_FIELDS = {"/generate": "text", "/v1/completions": "prompt"}


def run_client(
    parent: Connection, port: int, route: str, streams: int, tokens: int, rounds: int
) -> None:
    """Say ready, wait for the word, and tell how many chunks and requests there were."""
    parent.send("ready")
    parent.recv()
    parent.send(asyncio.run(_all(port, _request(port, route, tokens), streams, rounds)))
    parent.close()


def _request(port: int, route: str, tokens: int) -> bytes:
    prompt = {_FIELDS[route]: "word1 word2", "stream": True}
    if route == "/generate":
        body = {**prompt, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    else:
        body = {**prompt, "max_tokens": tokens, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


async def _all(port: int, request: bytes, streams: int, rounds: int) -> tuple[int, int]:
    counts = await asyncio.gather(*(_one(port, request, rounds) for _ in range(streams)))
    return sum(counts), streams * rounds


async def _one(port: int, request: bytes, rounds: int) -> int:
    """Chunks of one connection, `[DONE]` not counted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    num_chunks = 0
    for _ in range(rounds):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head[:200]
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            assert data, "the server closed the connection"
            # A mark that two reads share is counted with the second of them.
            seen = tail[-5:] + data
            num_chunks += seen.count(b"data: ") - tail[-5:].count(b"data: ")
            tail = seen[-16:]
        num_chunks -= 1
    writer.close()
    return num_chunks
