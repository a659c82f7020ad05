"""CASES H44 and H50 on a real server: too many streams at once, and a polite end."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aiohttp
import psutil
import pytest
from real_server import GREEDY, RealServer, at_once, serve, start, wait_until

NUM_STREAMS = 900


@pytest.fixture
def narrow(tiny_folder: Path) -> Iterator[RealServer]:
    """A server with room for 1024 descriptors and a short queue."""
    options = ("--max-running-requests", "16", "--max-queued-requests", "32")
    server = start(tiny_folder, "--max-total-tokens", "4096", *options, max_descriptors=1024)
    yield from serve(server)


async def many_streams(server: RealServer) -> Counter[int]:
    """How often each status came. Streams run to their end."""
    url = f"http://127.0.0.1:{server.port}/generate"
    params = {**GREEDY, "max_new_tokens": 200, "ignore_eos": True}
    body = {"text": "x", "sampling_params": params, "stream": True}

    async def one(http: aiohttp.ClientSession) -> int:
        async with http.post(url, json=body) as response:
            text = await response.text()
            if response.status == 200:
                assert text.endswith("data: [DONE]\n\n")
            else:
                assert int(response.headers["Retry-After"]) >= 1
            return response.status

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        return Counter(await asyncio.gather(*(one(http) for _ in range(NUM_STREAMS))))


@pytest.mark.slow
def test_more_streams_than_the_queue_holds_are_refused_and_leave_nothing(
    narrow: RealServer,
) -> None:
    """H44: 900 at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * NUM_STREAMS:
        pytest.skip(f"needs {2 * NUM_STREAMS} descriptors for its clients, may have {hard}")
    narrow.ids("x", max_new_tokens=1)
    process = psutil.Process(narrow.process.pid)
    before = process.num_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * NUM_STREAMS), hard))
    try:
        statuses = asyncio.run(many_streams(narrow))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(statuses) == {200, 503}
    assert statuses[200] >= 16 + 32
    narrow.wait_idle(30)
    wait_until(lambda: process.num_fds() <= before + 2, "the descriptors of the clients", 10)
    assert "Traceback" not in narrow.log


@pytest.mark.slow
def test_a_polite_end_lets_running_requests_finish(tiny_folder: Path) -> None:
    """H50: 10 streams, SIGTERM, a request meanwhile."""
    server = start(tiny_folder, "--max-total-tokens", "8192", "--decode-log-interval", "5")
    try:
        server.wait_ready()
        children = psutil.Process(server.process.pid).children(recursive=True)
        params = {**GREEDY, "max_new_tokens": 600, "ignore_eos": True}

        def stream(number: int) -> int:
            last = None
            for chunk in server.stream("/generate", text=f"{number}", sampling_params=params):
                last = chunk
            assert last is not None
            return int(last["meta_info"]["completion_tokens"])

        def end() -> int:
            wait_until(lambda: server.state["num_running_reqs"] == 10, "ten running requests")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/health")[0] == 503, "the drain")
            return server.post("/generate", text="late", sampling_params=params)[0]

        *lengths, late = at_once(*(partial(stream, i) for i in range(10)), end)
        assert lengths == [600] * 10 and late == 503
        assert server.process.wait(30) == 0
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
        assert list(server.log_file.parent.glob("regather-*")) == []
    finally:
        server.stop()
