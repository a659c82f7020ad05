"""The server that chaos.py torments: its start, its processes, and whether its books balance."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.server_routes import ASK_TIMEOUT, ServerError

START_SECONDS = 600.0
STOP_SECONDS = 60.0
IDLE_SECONDS = 60.0
POLL_SECONDS = 0.1
CLOSE_SECONDS = 5.0
# A connection pool and a log may hold a few more or fewer.
FEW_DESCRIPTORS = 8


@dataclass(frozen=True)
class Footprint:
    """What the main process holds, and the resident bytes of it and of its scheduler."""

    descriptors: int
    main_rss: int
    scheduler_rss: int


class ChaosServer:
    def __init__(self, process: subprocess.Popen[bytes], url: str, folder: Path) -> None:
        self.url = url
        self._process = process
        self._folder = folder
        self._main = psutil.Process(process.pid)
        self.exit_code: int | None = None

    @property
    def scheduler(self) -> psutil.Process | None:
        """None while it is being replaced."""
        with contextlib.suppress(psutil.Error):
            children = [c for c in self._main.children() if c.status() != psutil.STATUS_ZOMBIE]
            return children[0] if len(children) == 1 else None
        return None

    @property
    def log(self) -> str:
        return (self._folder / "log.txt").read_text(errors="replace")

    def hit(self, number: int) -> float | None:
        """Send the scheduler a signal; the time of it, None if there is none to hit."""
        scheduler = self.scheduler
        if scheduler is None:
            return None
        with contextlib.suppress(psutil.Error):
            scheduler.send_signal(number)
            return time.monotonic()
        return None

    def footprint(self) -> Footprint:
        scheduler = self.scheduler
        return Footprint(
            self._main.num_fds(),
            self._main.memory_info().rss,
            0 if scheduler is None else scheduler.memory_info().rss,
        )

    async def get(self, http: aiohttp.ClientSession, path: str) -> Any:
        """The JSON at `path`; None if the server does not answer with 200."""
        try:
            async with http.get(self.url + path, timeout=ASK_TIMEOUT) as response:
                return await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
            return None

    async def wait_up(self, http: aiohttp.ClientSession) -> None:
        """ServerError, with the end of the log, if it does not come up."""
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                async with http.get(self.url + "/health", timeout=ASK_TIMEOUT) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(POLL_SECONDS)
        raise ServerError(f"the server did not come up: {' | '.join(self.log.splitlines()[-5:])}")

    async def wait_idle(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        """The state once nobody runs or waits, or what it is after IDLE_SECONDS."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            info = await self.get(http, "/server_info")
            state: dict[str, Any] = (info or {}).get("internal_states", [{"is_stale": True}])[0]
            is_idle = "is_stale" not in state and not (
                state["num_running_reqs"] or state["num_waiting_reqs"]
            )
            if is_idle or time.monotonic() > deadline:
                return state
            await asyncio.sleep(POLL_SECONDS)

    async def leaks(self, http: aiohttp.ClientSession, before: Footprint) -> list[str]:
        """What did not come back, in words; `before` is the footprint when it was idle."""
        state = await self.wait_idle(http)
        if "is_stale" in state:
            return ["the scheduler does not answer"]
        found = []
        for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens"):
            if state[name]:
                found.append(f"{name} is {state[name]}")
        if state["num_locked_tokens"]:
            found.append(f"{state['num_locked_tokens']} cached tokens are locked")
        free = state["num_free_tokens"] + state["num_cached_tokens"]
        if free != state["max_total_num_tokens"]:
            found.append(f"{free} of {state['max_total_num_tokens']} slots are free or cached")
        if state["free_rows"] != state["max_running_requests"]:
            found.append(f"{state['free_rows']} of {state['max_running_requests']} rows are free")
        listed = await self.get(http, "/v1/requests")
        if listed is None or listed.get("requests"):
            found.append(f"/v1/requests lists {listed}")
        loads = await self.get(http, "/v1/loads")
        if loads is None:
            found.append("/v1/loads does not answer")
        found += await self._live_by_metrics(http)
        # Connections whose clients have just left take a moment.
        deadline = time.monotonic() + CLOSE_SECONDS
        while True:
            descriptors = self.footprint().descriptors
            if descriptors <= before.descriptors + FEW_DESCRIPTORS or time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_SECONDS)
        if descriptors > before.descriptors + FEW_DESCRIPTORS:
            found.append(f"{descriptors} descriptors are open, {before.descriptors} were")
        folders = list(self._folder.glob("regather-*"))
        if folders:
            found.append(f"{len(folders)} folders of sockets are left")
        return found

    async def _live_by_metrics(self, http: aiohttp.ClientSession) -> list[str]:
        async with http.get(self.url + "/metrics", timeout=ASK_TIMEOUT) as response:
            lines = (await response.text()).splitlines()
        live = [line for line in lines if line.startswith("regather:live_requests")]
        return [line for line in live if float(line.rpartition(" ")[2])]

    def stop(self) -> list[str]:
        """End it as an operator would; what went wrong with that, in words."""
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return [f"the server did not end within {STOP_SECONDS:g} s of SIGTERM"]
        return [] if code == 0 else [f"the server ended with exit code {code}"]

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def chaos_server(arguments: Sequence[str], port: int) -> AsyncIterator[ChaosServer]:
    """`python -m launch_server ARGUMENTS` (port 0: a free one) with a temporary folder of its own,
    once it is up."""
    if not port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    command = [sys.executable, "-m", "launch_server", *arguments, f"--port={port}"]
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": name}
            )
        server = ChaosServer(process, f"http://127.0.0.1:{port}", folder)
        try:
            async with aiohttp.ClientSession() as http:
                await server.wait_up(http)
            yield server
        finally:
            server.kill()
