from __future__ import annotations

import asyncio
import logging

import pytest
from fake_scheduler import VOCAB_SIZE, events_of, http_bytes, ids, serving_fake, until

from srt.managers.io_struct import AbortReq
from srt.slow_clients import MIN_BYTES, SlowClients

# Much more than fits into the buffers on the way: a choice has a token a pass, a chunk 500 bytes.
NUM_CHOICES = 32
ENDLESS = {"ignore_eos": True, "n": NUM_CHOICES, "max_new_tokens": 100}
STREAMS = [
    ("/generate", {"text": "x", "stream": True, "sampling_params": ENDLESS}),
    ("/v1/completions", {"prompt": "x", "stream": True, **ENDLESS, "max_tokens": 100}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "stream": True, **ENDLESS},
    ),
]
SMALL = 4096


def buffered(http):
    return sum(t.get_write_buffer_size() for t in http.server.connections.transports)


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_that_nobody_reads_holds_little_and_is_ended(
    tmp_path, caplog, path, body, incremental
):
    async def scenario():
        args = {"slow_client_timeout": 0.4, "incremental_streaming_output": incremental}
        async with serving_fake(tmp_path, passes=0, send_buffer=SMALL, **args) as http:
            _, writer = await http.connect(http_bytes(path, body), SMALL)
            await until(lambda: len(http.fake.live) == NUM_CHOICES)
            largest = 0
            for _ in range(60):
                http.fake.passes_left += 1
                await asyncio.sleep(0.001)
                largest = max(largest, buffered(http))
            assert 0 < largest < 200_000
            await until(lambda: http.manager.num_live == 0)
            await until(lambda: not http.fake.live)
            assert len(http.fake.of_type(AbortReq)) == NUM_CHOICES
            await until(lambda: not http.server.connections.transports)
            metrics = (await http.get("/metrics"))[1]
            assert "regather:slow_clients_total{" in metrics
            [line] = [line for line in metrics.splitlines() if "slow_clients_total{" in line]
            assert line.endswith(" 1.0")
            writer.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    [record] = [r for r in caplog.records if "Hung up" in r.message]
    assert "--slow-client-timeout" in record.message and "127.0.0.1:" in record.message


@pytest.mark.parametrize("incremental", [False, True])
def test_a_reader_that_pauses_gets_all_tokens_in_fewer_chunks(tmp_path, incremental):
    async def scenario():
        args = {"incremental_streaming_output": incremental}
        async with serving_fake(tmp_path, passes=0, send_buffer=SMALL, **args) as http:
            path, body = STREAMS[0]
            reader, writer = await http.connect(http_bytes(path, body, "Connection: close"), SMALL)
            await until(lambda: len(http.fake.live) == NUM_CHOICES)
            http.fake.passes_left = 100
            await until(lambda: not http.fake.live)
            answer = (await asyncio.wait_for(reader.read(), 30)).split(b"\r\n\r\n", 1)[1]
            writer.close()
            events = events_of(unchunked(answer).decode())
            assert len(events) < NUM_CHOICES * 100 / 2
            ids_of = {i: [] for i in range(NUM_CHOICES)}
            for event in events:
                new = event["output_ids"]
                ids_of[event["index"]] = ids_of[event["index"]] + new if incremental else new
            expected = ids("abcdefghijklmnopqrstuvwxyz" * 4)[:100]
            assert all(got == expected for got in ids_of.values())
            assert http.server.slow_clients.num_ended == 0

    asyncio.run(scenario())


def unchunked(data):
    """A body without the framing of its chunks."""
    parts = []
    while data:
        size, rest = data.split(b"\r\n", 1)
        parts.append(rest[: int(size, 16)])
        data = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def test_a_plain_answer_that_nobody_reads_does_not_stay(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, send_buffer=SMALL, slow_client_timeout=0.3) as http:
            body = {"tokens": [[i % VOCAB_SIZE for i in range(1000)]] * 100}
            _, writer = await http.connect(http_bytes("/v1/detokenize", body), SMALL)
            await until(lambda: buffered(http) > 0)
            await until(lambda: not http.server.connections.transports)
            assert http.server.slow_clients.num_ended == 1
            writer.close()

    asyncio.run(scenario())


def test_a_client_that_waits_for_its_turn_is_not_slow(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0, slow_client_timeout=0.1) as http:
            body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
            asked = asyncio.create_task(http.post("/generate", body))
            await asyncio.sleep(0.4)
            http.fake.passes_left = 2
            assert (await asked)[0] == 200

    asyncio.run(scenario())


class Line:
    """A transport as SlowClients sees it."""

    def __init__(self, size):
        self.size, self.is_aborted = size, False

    def get_write_buffer_size(self):
        return self.size

    def get_extra_info(self, name):
        return None

    def abort(self):
        self.is_aborted = True


@pytest.mark.parametrize(
    ("sizes", "is_aborted"),
    [
        ([100] * 9, True),
        ([100] * 8, False),
        ([1_000_000 - 100 * i for i in range(9)], True),  # a trickle
        ([1_000_000 - MIN_BYTES // 4 * i for i in range(40)], False),  # slow, but fast enough
        ([100_000, 0, *[100_000] * 8], False),  # it had read everything
        ([100_000, *range(100_000, 800_000, 100_000)], False),
    ],
)
def test_who_reads_too_little_for_the_whole_timeout_is_hung_up_on(sizes, is_aborted):
    line = Line(0)
    clients = SlowClients(8.0, lambda: [line])
    for second, size in enumerate(sizes):
        line.size = size
        clients.look(float(second))
    assert line.is_aborted is is_aborted
    assert clients.num_ended == is_aborted
