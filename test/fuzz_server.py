"""The real HTTP server before a fake scheduler, in a thread, for clients that are synchronous."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fake_scheduler import RunningServer, serving_fake
from hypothesis import HealthCheck, Phase, settings


def fuzz_settings(num_examples: int) -> settings:
    """The same examples each time, and nothing kept."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def fuzzed_server(ipc_dir: Path, **args: Any) -> Iterator[RunningServer]:
    """Its `url` is all that may be used from other threads; at the end nothing may be live."""
    started = threading.Event()
    found: list[RunningServer] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving_fake(ipc_dir, **args) as http:
            found.append(http)
            started.set()
            await stop.wait()
            assert http.manager.num_live == 0

    errors: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            errors.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait(20)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive(), "the server hangs"
        loop.close()
    assert not errors, errors


def exchange(
    url: str, method: str, path: str, data: bytes | None, headers: dict[str, str]
) -> tuple[int, bytes]:
    """Status and body of one answer, which must come within 10 s."""
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)) as connection:
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        return response.status, response.read()
