"""What is asked of the server before and after a run, and never during it."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import aiohttp

from bench.options import Options

# A question to the server outside the run; it answers or it is not there.
ASK_TIMEOUT = aiohttp.ClientTimeout(total=10)
READY_POLL_S = 0.5
PROFILE_WRITE_S = 300.0
RETRACTION_COUNTERS = ("sglang:num_retracted_requests_total", "vllm:num_preemptions_total")


class ServerError(RuntimeError):
    """The server is not there or refuses what the run needs; the message says which and where."""


def request_headers(options: Options) -> dict[str, str]:
    """The keys are in the environment under the names that the clients of these servers use."""
    headers = {"Content-Type": "application/json"}
    if os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
    elif os.environ.get("API_KEY"):
        headers["Authorization"] = os.environ["API_KEY"]
    return {**headers, **options.headers}


async def get_json(
    http: aiohttp.ClientSession, url: str, headers: dict[str, str]
) -> dict[str, Any] | None:
    """The object at `url`, None when there is none (not every server has every route)."""
    try:
        async with http.get(url, headers=headers, timeout=ASK_TIMEOUT) as response:
            body = await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
        return None
    return body if isinstance(body, dict) else None


async def retraction_counter(
    http: aiohttp.ClientSession, url: str, headers: dict[str, str]
) -> int | None:
    """Retractions since the server's start by its /metrics, None where it does not say."""
    try:
        async with http.get(f"{url}/metrics", headers=headers, timeout=ASK_TIMEOUT) as response:
            text = await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
        return None
    return read_retractions(text)


async def profile(http: aiohttp.ClientSession, options: Options, headers: dict[str, str]) -> None:
    """Have the server trace its passes from now on. Raises ServerError."""
    wishes = {
        "output_dir": options.profile_output_dir,
        "num_steps": options.profile_num_steps,
        "activities": list(options.profile_activities),
    }
    body = {name: value for name, value in wishes.items() if value is not None}
    await _order(http, f"{options.url}/start_profile", body, headers, ASK_TIMEOUT)


async def stop_profile(
    http: aiohttp.ClientSession, options: Options, headers: dict[str, str]
) -> list[str]:
    """Have the trace written. Notes for the report: the run is over, so its figures are kept."""
    timeout = aiohttp.ClientTimeout(total=PROFILE_WRITE_S)
    try:
        await _order(http, f"{options.url}/stop_profile", {}, headers, timeout)
    except ServerError as error:
        return [str(error)]
    return []


async def _order(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    headers: dict[str, str],
    timeout: aiohttp.ClientTimeout,
) -> None:
    try:
        async with http.post(url, json=body, headers=headers, timeout=timeout) as response:
            if response.status == 200:
                return
            problem = f"HTTP {response.status}: {(await response.text())[:200]}"
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise ServerError(f"--profile: POST {url}: {problem}")


def read_retractions(metrics: str) -> int | None:
    """The sum over all label sets of a retraction counter in the Prometheus text format."""
    values = []
    for row in metrics.splitlines():
        name = row.partition("{")[0].partition(" ")[0]
        if name in RETRACTION_COUNTERS:
            try:
                values.append(float(row.rpartition("}")[2].removeprefix(name).split()[0]))
            except (ValueError, IndexError):
                return None
    return int(sum(values)) if values else None


async def wait_until_ready(
    http: aiohttp.ClientSession, options: Options, headers: dict[str, str]
) -> str | None:
    """Poll GET /v1/models; the first model's name, None if it names none. Raises ServerError."""
    url, last = f"{options.url}/v1/models", "no answer"
    deadline = time.monotonic() + options.ready_check_timeout_sec
    while True:
        try:
            async with http.get(url, headers=headers, timeout=ASK_TIMEOUT) as response:
                if response.status == 200:
                    body = await response.json(content_type=None)
                    return first_model(body)
                last = f"HTTP {response.status}"
                if response.status in (401, 403):  # waiting does not help
                    raise ServerError(
                        f"GET {url} was answered {response.status}: put the server's key into the "
                        "environment as OPENAI_API_KEY, or pass --header"
                    )
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
            last = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            if options.ready_check_timeout_sec == 0:
                return None  # not to be waited for: the run will tell
            raise ServerError(
                f"GET {url} was not ready within --ready-check-timeout-sec "
                f"{options.ready_check_timeout_sec}: {last}"
            )
        await asyncio.sleep(min(READY_POLL_S, deadline - time.monotonic()))


def first_model(body: Any) -> str | None:
    models = body.get("data") if isinstance(body, dict) else None
    if isinstance(models, list) and models and isinstance(models[0], dict):
        name = models[0].get("id")
        return name if isinstance(name, str) else None
    return None


async def flush_cache(
    http: aiohttp.ClientSession, options: Options, headers: dict[str, str]
) -> list[str]:
    """Notes for the report. Raises ServerError when the cache is not empty now."""
    backend = options.api
    assert backend.flush_path is not None, "check() let a backend without the route pass"
    url = f"{options.url}{backend.flush_path}"
    timeout = aiohttp.ClientTimeout(total=options.flush_cache_timeout + 10)
    wait = {"timeout": str(options.flush_cache_timeout)}
    try:
        async with http.post(url, params=wait, headers=headers, timeout=timeout) as response:
            text = (await response.text())[:200]
            if response.status == 200:
                return []
            if response.status == 404 and backend.flush_may_be_missing:
                return [f"the cache was not flushed: POST {url} is 404"]
            problem = f"HTTP {response.status}: {text}"
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise ServerError(f"--flush-cache: POST {url}: {problem}")
