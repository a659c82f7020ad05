"""The server of a sweep: a running one whose setting is changed, or a new one for each value."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.option_fields import flag
from bench.options import Options
from bench.server_routes import ASK_TIMEOUT, ServerError, get_json, request_headers

# A model may have to be fetched and loaded before the server answers.
START_SECONDS = 600.0
STOP_SECONDS = 40.0
POLL_SECONDS = 0.2
LOG_TAIL_LINES = 5


@asynccontextmanager
async def launched(arguments: Sequence[str], log: Path) -> AsyncIterator[str]:
    """`python -m launch_server ARGUMENTS` on a free port, its output in `log`; yields the URL once
    it serves. ServerError, with the end of the log, if it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "launch_server", *arguments, f"--port={port}"]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            await _wait_until_up(url, server, shlex.join(command), log)
            yield url
        finally:
            server.terminate()
            try:
                await asyncio.to_thread(server.wait, STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


async def _wait_until_up(
    url: str, server: subprocess.Popen[bytes], command: str, log: Path
) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS
    async with aiohttp.ClientSession(timeout=ASK_TIMEOUT) as http:
        while server.poll() is None and loop.time() < deadline:
            with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                async with http.get(f"{url}/v1/models") as response:
                    # 401 is an answer, too: the load generator brings the key.
                    if response.status in (200, 401):
                        return
            await asyncio.sleep(POLL_SECONDS)
    how = f"was not up after {START_SECONDS:g} s"
    if server.poll() is not None:
        how = f"ended with exit code {server.returncode}"
    tail = " | ".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
    raise ServerError(f"{command} {how}: {tail or 'it printed nothing'}")


async def patch_setting(options: Options, name: str, value: Any) -> None:
    """Change one setting of the running server. ServerError with its words if it refuses."""
    url = f"{options.url}/v1/scheduler"
    headers = request_headers(options)
    try:
        async with (
            aiohttp.ClientSession(timeout=ASK_TIMEOUT, headers=headers) as http,
            http.patch(url, json={name: value}) as response,
        ):
            if response.status == 200:
                return
            text = (await response.text())[:500]
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise ServerError(f"PATCH {url}: {type(error).__name__}: {error}") from error
    raise ServerError(
        f"PATCH {url} with {name}={value} was answered {response.status}: {text} "
        f"(a server of its own for each value: --sweep-launch)"
    )


async def scheduler_state(options: Options) -> dict[str, Any]:
    """The scheduler's own figures by /server_info; empty where the server has none."""
    headers = request_headers(options)
    async with aiohttp.ClientSession() as http:
        info = await get_json(http, f"{options.url}/server_info", headers)
    states = (info or {}).get("internal_states")
    is_known = isinstance(states, list) and states and isinstance(states[0], dict)
    return states[0] if states and is_known else {}


def launch_arguments(template: str, settings: dict[str, Any]) -> list[str]:
    """The command line of a server: what the user wrote, and the settings of this value."""
    return [*shlex.split(template), *(f"{flag(name)}={value}" for name, value in settings.items())]
