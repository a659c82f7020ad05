from __future__ import annotations

import asyncio
import json

import pytest
from fake_scheduler import ids, serving_fake

from bench.bench_frontend import word_tokenizer
from bench.frontend_client import _all, _request


@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
def test_the_client_counts_every_chunk_of_every_request(tmp_path, route):
    async def scenario():
        async with serving_fake(tmp_path, lambda request: ids("ab")) as http:
            port = int(http.url.rpartition(":")[2])
            num_chunks, num_requests = await _all(port, _request(port, route, 2), 3, 2)
            assert num_requests == 6
            # Two tokens a request; the server may have merged them into one chunk.
            assert 6 <= num_chunks <= 12

    asyncio.run(scenario())


def test_marks_split_between_reads_are_counted_once():
    """The client against a server that sends a byte at a time."""

    async def scenario():
        events = [f"data: {json.dumps({'n': n})}\n\n".encode() for n in range(5)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in [*events, b"data: [DONE]\n\n"])

        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            for i in range(len(body)):
                writer.write(body[i : i + 1])
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await _all(port, _request(port, "/generate", 5), 2, 1) == (10, 2)
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())


def test_every_token_of_the_bench_shows_at_once():
    tokenizer = word_tokenizer()
    assert tokenizer.decode([5, 6]).split() == ["word5", "word6"]
    assert tokenizer.encode("word7") == [0]  # no word of the vocabulary is a prompt's
