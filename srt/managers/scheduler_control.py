"""Questions and orders to the scheduler beside the requests, each with its answer awaited."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

from srt.managers.io_struct import (
    ControlOut,
    FlushCacheOut,
    FlushCacheReq,
    InternalStateOut,
    InternalStateReq,
    JournalReq,
    PauseReq,
    ProfileOptions,
    RequestsReq,
    SchedulerInput,
    StartProfileReq,
    StopProfileReq,
    UpdateSchedulerReq,
)
from srt.request_error import RequestError

logger = logging.getLogger(__name__)

ControlReply = FlushCacheOut | InternalStateOut | ControlOut
_Question = (
    FlushCacheReq
    | InternalStateReq
    | JournalReq
    | PauseReq
    | RequestsReq
    | StartProfileReq
    | StopProfileReq
    | UpdateSchedulerReq
)


class SchedulerControl:
    """The scheduler answers between two passes, in the order of the questions."""

    def __init__(self, send: Callable[[SchedulerInput], None]) -> None:
        self._send = send
        self._ids = count()
        # Asked and not answered, in the order of asking.
        self._waiting: dict[int, asyncio.Future[ControlReply]] = {}
        self._questions: dict[int, _Question] = {}
        # What the scheduler was told and a new one has to be told again.
        self._paused = False
        self._changed: dict[str, Any] = {}
        self._is_flushing = False
        self._last_state: dict[str, Any] = {}
        self._failure: str | None = None

    def on_reply(self, reply: ControlReply) -> None:
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def brief(self) -> None:
        """A new scheduler has taken the place of one that died: bring it to where that one was, and
        ask again what that one did not answer."""
        if self._changed:
            self._send(UpdateSchedulerReq(next(self._ids), dict(self._changed)))
        if self._paused:
            self._send(PauseReq(next(self._ids), True))
        for question in self._questions.values():
            self._send(question)

    def fail(self, message: str) -> None:
        """The scheduler is gone: no question will be answered any more."""
        self._failure = message
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RequestError(message, status=503))

    async def flush_cache(self, timeout: float) -> FlushCacheOut:
        """Drop the cached prefixes; with a `timeout`, wait that many seconds for the server to be
        idle first."""
        if self._is_flushing:
            return FlushCacheOut(-1, False, "Another flush_cache is already in progress.")
        self._is_flushing = True
        try:
            out = await self._ask(FlushCacheReq(next(self._ids), timeout))
        finally:
            self._is_flushing = False
        assert isinstance(out, FlushCacheOut), f"asked to flush, got {type(out).__name__}"
        return out

    async def internal_state(self, timeout: float | None) -> dict[str, Any]:
        """The scheduler's own figures. If a pass takes longer than `timeout` s, those of the last
        time, marked `"is_stale": True`."""
        try:
            out = await asyncio.wait_for(self._ask(InternalStateReq(next(self._ids))), timeout)
        except asyncio.TimeoutError:
            return {**self._last_state, "is_stale": True}
        assert isinstance(out, InternalStateOut), f"asked for state, got {type(out).__name__}"
        self._last_state = out.state
        return out.state

    async def journal(self, last: int) -> list[dict[str, Any]]:
        """The last records of the journal, oldest first."""
        records: list[dict[str, Any]] = await self._result(JournalReq(next(self._ids), last))
        return records

    async def requests(self, rid: str | None = None) -> list[dict[str, Any]]:
        """Where every live request stands, or the one with this scheduler id."""
        views: list[dict[str, Any]] = await self._result(RequestsReq(next(self._ids), rid))
        return views

    async def pause(self, paused: bool, retract: bool = False) -> None:
        """Stop choosing passes, or go on. Requests keep their memory."""
        await self._result(PauseReq(next(self._ids), paused, retract))
        self._paused = paused
        logger.info("Generation %s", "paused" if paused else "continued")

    async def change_settings(self, values: dict[str, Any]) -> dict[str, Any]:
        """Change all of `values` or none, and return all settings. RequestError says what is
        wrong."""
        settings: dict[str, Any] = await self._result(UpdateSchedulerReq(next(self._ids), values))
        self._changed.update(values)
        return settings

    async def start_profile(self, options: ProfileOptions) -> None:
        """RequestError if one is going on."""
        await self._result(StartProfileReq(next(self._ids), options))

    async def stop_profile(self) -> str:
        """The path of the trace. RequestError if there is none."""
        path: str = await self._result(StopProfileReq(next(self._ids)))
        return path

    async def _result(self, message: _Question) -> Any:
        out = await self._ask(message)
        assert isinstance(out, ControlOut), f"asked a question, got {type(out).__name__}"
        if out.error is not None:
            raise RequestError(out.error)
        return out.result

    async def _ask(self, message: _Question) -> ControlReply:
        if self._failure is not None:
            raise RequestError(self._failure, status=503)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = future
        self._questions[message.id] = message
        self._send(message)
        try:
            return await future
        finally:
            del self._waiting[message.id], self._questions[message.id]
