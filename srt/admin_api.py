"""The routes of an operator: caches, aborts, pauses, settings, and where every request stands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from aiohttp import web

from srt.http_json import json_response, read_json
from srt.json_fields import optional, type_error
from srt.managers.tokenizer_manager import TokenizerManager
from srt.request_error import RequestError

MAX_JOURNAL_RECORDS = 10_000
PAUSE_MODES = ("abort", "in_place", "retract")

_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


class AdminRoutes:
    def __init__(self, get_manager: Callable[[], TokenizerManager]) -> None:
        self._get_manager = get_manager

    def add_to(self, router: web.UrlDispatcher) -> None:
        for method in ("GET", "POST"):
            router.add_route(method, "/flush_cache", self.flush_cache)
        router.add_post("/abort_request", self.abort_request)
        router.add_post("/pause_generation", self.pause_generation)
        router.add_post("/continue_generation", self.continue_generation)
        router.add_get("/v1/scheduler", self.scheduler_settings, allow_head=False)
        router.add_patch("/v1/scheduler", self.change_scheduler)
        router.add_post("/set_internal_state", self.set_internal_state)
        router.add_get("/get_internal_state", self.internal_state, allow_head=False)
        router.add_get("/v1/requests", self.list_requests, allow_head=False)
        router.add_get("/v1/requests/{rid:.+}", self.one_request, allow_head=False)
        router.add_get("/v1/journal", self.journal, allow_head=False)

    async def flush_cache(self, request: web.Request) -> web.Response:
        timeout = _seconds(request.query.get("timeout", "0"), "timeout")
        out = await self._get_manager().flush_cache(timeout)
        if out.success:
            return web.Response(text=_FLUSHED)
        return web.Response(text=f"Flush cache failed.\n{out.message}\n", status=400)

    async def abort_request(self, request: web.Request) -> web.Response:
        """`{"rid": id}` or `{"abort_all": true}`. An id that is not live is ignored."""
        body = await _read_object(request)
        rid = optional(body, "rid", str, "")
        if optional(body, "abort_all", bool, False):
            self._get_manager().abort_all()
        elif rid:
            self._get_manager().abort(rid)
        return web.Response()

    # --- pause ---

    async def pause_generation(self, request: web.Request) -> web.Response:
        """`{"mode": ...}`: `in_place` keeps the live requests and their memory for
        /continue_generation, `retract` keeps them without memory (/flush_cache then works), `abort`
        (the default, as in SGLang) ends them. New requests wait."""
        body = await _read_object(request) if request.body_exists else {}
        mode = optional(body, "mode", str, "abort")
        if mode not in PAUSE_MODES:
            raise RequestError(
                f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode[:50]!r}.", param="mode"
            )
        await self._get_manager().pause(abort=mode == "abort", retract=mode == "retract")
        message = "Generation paused successfully."
        return json_response({"message": message, "status": "ok", "mode": mode})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await self._get_manager().resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    # --- settings ---

    async def scheduler_settings(self, request: web.Request) -> web.Response:
        """The settings that may change while serving, as they are now."""
        return json_response(await self._get_manager().change_settings({}))

    async def change_scheduler(self, request: web.Request) -> web.Response:
        """Change some of them, all or none; the answer is how they all are now."""
        values = await _read_object(request)
        return json_response(await self._get_manager().change_settings(_scalars(values)))

    async def set_internal_state(self, request: web.Request) -> web.Response:
        """The same under SGLang's name: `{"server_args": {...}}`."""
        body = await _read_object(request)
        values = optional(body, "server_args", dict, None)
        if values is None:
            raise RequestError("server_args is missing.", param="server_args")
        settings = await self._get_manager().change_settings(_scalars(values))
        return json_response({"updated": True, "server_args": settings})

    # --- what goes on ---

    async def internal_state(self, request: web.Request) -> web.Response:
        """The scheduler's own figures; waits for the end of the pass that runs."""
        return json_response(await self._get_manager().control.internal_state(None))

    async def list_requests(self, request: web.Request) -> web.Response:
        """Where every live request stands and what a waiting one waits for. Never any text."""
        return json_response({"requests": await self._get_manager().requests()})

    async def one_request(self, request: web.Request) -> web.Response:
        rid = request.match_info["rid"]
        found = await self._get_manager().requests(rid)
        if not found:
            raise RequestError(f"There is no live request {rid[:200]!r}.", status=404, param="rid")
        return json_response({"requests": found})

    async def journal(self, request: web.Request) -> web.Response:
        """The last scheduling decisions, oldest first."""
        last = request.query.get("last", "100")
        if not (last.isascii() and last.isdigit() and 0 < int(last[:10]) <= MAX_JOURNAL_RECORDS):
            raise RequestError(
                f"last must be an integer in [1, {MAX_JOURNAL_RECORDS}], got {last[:50]!r}.",
                param="last",
            )
        return json_response({"records": await self._get_manager().control.journal(int(last))})


async def _read_object(request: web.Request) -> dict[str, Any]:
    body = await read_json(request)
    if not isinstance(body, dict):
        raise type_error(body, "a map", None)
    return body


def _scalars(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as a client sent them. No setting is a list or a map, and one that is nested deeply
    could not cross to the scheduler."""
    for name, value in values.items():
        if isinstance(value, (list, dict)):
            raise type_error(value, "a number, a string or null", name[:100])
    return values


def _seconds(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise RequestError(
            f"{name} must be a number of seconds of at least 0, got {text[:50]!r}.", param=name
        )
    return value
