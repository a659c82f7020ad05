from __future__ import annotations

import asyncio

import pytest
from fake_scheduler import http_bytes, ids, serving_fake, until

BODY = {"text": "x", "sampling_params": {"max_new_tokens": 3}}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_client_that_has_sent_its_last_byte_gets_its_answer(tmp_path, seconds):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            reader, writer = await http.connect(http_bytes("/generate", BODY))
            writer.write_eof()
            await until(lambda: bool(http.fake.live))
            await asyncio.sleep(seconds)
            http.fake.passes_left = 3
            answer = await asyncio.wait_for(reader.read(), 10)  # to the end: it hangs up then
            while answer.startswith(CONTINUE):
                answer = answer[len(CONTINUE) :]
            assert answer.startswith(b"HTTP/1.1 200 ") and b'"text":"abc"' in answer
            writer.close()

    asyncio.run(scenario())


def test_a_stream_goes_on_when_its_client_has_sent_its_last_byte(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            reader, writer = await http.connect(http_bytes("/generate", {**BODY, "stream": True}))
            await until(lambda: bool(http.fake.live))
            http.fake.passes_left = 1
            await reader.readuntil(b"data: ")
            writer.write_eof()
            await asyncio.sleep(0.1)
            http.fake.passes_left = 2
            rest = await asyncio.wait_for(reader.read(), 10)
            assert b'"text":"abc"' in rest and b"data: [DONE]\n\n" in rest
            assert b"100 Continue" not in rest
            assert rest.endswith(b"0\r\n\r\n")
            writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_passes", [0, 1])
def test_a_client_that_is_gone_is_told_from_one_that_listens(tmp_path, stream, num_passes):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            _, writer = await http.connect(http_bytes("/generate", {**BODY, "stream": stream}))
            await until(lambda: bool(http.fake.live))
            http.fake.passes_left = num_passes
            await until(lambda: http.fake.num_passes == num_passes)
            writer.close()
            await until(lambda: not http.fake.live and http.manager.num_live == 0)
            await until(lambda: not http.server.connections.transports)

    asyncio.run(scenario())


def test_a_client_of_http_1_0_that_closes_its_side_is_gone(tmp_path):
    """Nothing could be sent to it before its answer that it need not take for the answer."""

    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            data = http_bytes("/generate", BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
            reader, writer = await http.connect(data)
            await until(lambda: bool(http.fake.live))
            writer.write_eof()
            await until(lambda: not http.fake.live)
            assert await reader.read() == b""
            writer.close()

    asyncio.run(scenario())


def test_a_body_that_ends_too_soon_starts_nothing(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            reader, writer = await http.connect(http_bytes("/generate", BODY)[:-1])
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 10)
            assert not http.fake.received and not http.server.connections.transports
            writer.close()

    asyncio.run(scenario())


def test_the_answer_to_what_came_before_is_unharmed_by_the_end(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            reader, writer = await http.connect(http_bytes("/tokenize", {"prompt": "a"}))
            assert (await reader.readuntil(b"}")).endswith(b'"max_model_len":200}')
            writer.write(http_bytes("/tokenize", {"prompt": "b"}))
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 10)
            assert f'"tokens":{ids("b")}'.replace(" ", "").encode() in answer
            writer.close()

    asyncio.run(scenario())


def test_one_connection_too_many_is_turned_away_and_room_is_found_again(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, max_connections=2) as http:
            await until(lambda: not http.server.connections.transports)
            held = [await http.connect(b"") for _ in range(2)]
            await until(lambda: len(http.server.connections.transports) == 2)
            reader, writer = await http.connect(http_bytes("/generate", BODY))
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 1\r\n" in answer
            assert answer.endswith(b"Too many connections.")
            writer.close()
            for _, open_writer in held:
                open_writer.close()
            await until(lambda: not http.server.connections.transports)
            assert (await http.post("/generate", BODY))[0] == 200

    asyncio.run(scenario())
