"""Offline generation inside a Python program: the server's engine without HTTP."""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

from srt.backend import Backend, cache_dir
from srt.generate_api import (
    AnswerFormat,
    ChunkCursor,
    collect,
    error_of,
    parse_generate_body,
)
from srt.managers.scheduler_handle import SchedulerHandle
from srt.model_files import resolve_model
from srt.server_args import ServerArgs
from srt.tokenizer import Tokenizer

T = TypeVar("T")


class Engine:
    """A scheduler process and, on a thread of this process, what talks to it.

    `Engine(model_path, **server_args)`: the options are those of the server, in Python's spelling.
    Results are those of the server's /generate. Calls are allowed from any thread and any event
    loop; many at once are batched. Close it with `shutdown` or as a context manager; otherwise the
    end of the program does it.
    """

    def __init__(self, model_path: str | None = None, **server_args: Any) -> None:
        """Returns when the model is loaded. ServerArgsError for a wrong option, ModelUnavailable or
        ValueError for a model that cannot be had, RuntimeError if loading fails."""
        self.args = ServerArgs(model_path=model_path, **server_args)
        location = resolve_model(model_path, self.args.revision, cache_dir(self.args))
        self._loop = _new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="regather-engine", daemon=True)
        self._thread.start()
        self._backend: Backend | None = None

        async def start() -> Backend:
            # On the loop's thread, because the process lives no longer than the thread it is from.
            return await Backend.start(self.args, location, SchedulerHandle(self.args, location))

        atexit.register(self.shutdown)
        try:
            self._backend = self._wait(start())
        except BaseException:
            self.shutdown()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        return self._running().manager.tokenizer

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """One result, or a list of them for a list of prompts or n > 1; with `stream` an iterator
        of them that grow (`index` says which, if there are several). `fields` are further fields of
        /generate (rid, priority, extra_key ...).

        Raises RequestError, before anything is computed, for a request that cannot be served; and
        later if the server had to end it. Leaving the iterator early aborts the request."""
        self._running()
        body = _body(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._iterate(body)
        return self._wait(self._generate(body))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """`generate` for asynchronous callers; with `stream`, await it for an async iterator."""
        self._running()
        body = _body(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._async_iterate(body)
        return await self._await(self._generate(body))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End the request `rid`, or the members of the call it names, or all. Unknown ids are
        ignored."""
        manager = self._running().manager
        if abort_all:
            self._loop.call_soon_threadsafe(manager.abort_all)
        else:
            self._loop.call_soon_threadsafe(manager.abort, rid)

    def flush_cache(self, timeout: float = 0.0) -> bool:
        """Drop all cached prefixes, waiting up to `timeout` s for the engine to be idle. Whether it
        was done."""
        return self._wait(self._running().manager.flush_cache(timeout)).success

    def internal_state(self) -> dict[str, Any]:
        """The scheduler's figures."""
        return self._wait(self._running().manager.control.internal_state(10.0))

    def shutdown(self) -> None:
        """End the process and the thread; live requests get an error. May be called twice."""
        atexit.unregister(self.shutdown)
        if not self._thread.is_alive():
            return
        backend, self._backend = self._backend, None
        if backend is not None:
            self._wait(backend.close())
        self._wait(self._loop.shutdown_asyncgens())
        self._wait(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    # --- between the caller's thread and the loop's ---

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _running(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("this Engine has been shut down")
        return self._backend

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the loop and wait here. An exception here (Ctrl-C) cancels it there."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the engine's loop, wait on the caller's. Being cancelled here cancels it there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    # --- on the loop ---

    async def _generate(self, body: dict[str, Any]) -> Any:
        manager = self._running().manager
        call = parse_generate_body(body, time.time())
        async with aclosing(manager.generate(call)) as states:
            return await collect(states, AnswerFormat.of(call, manager.tokenizer))

    async def _chunks(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        manager = self._running().manager
        call = parse_generate_body(body, time.time())
        answer_format = AnswerFormat.of(call, manager.tokenizer)
        cursor = ChunkCursor(self.args.incremental_streaming_output, answer_format)
        async with aclosing(manager.generate(call)) as states:
            async for state in states:
                if error := error_of(state):
                    raise error
                yield cursor.next_object(state)

    def _iterate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        chunks = self._chunks(body)
        try:
            while (chunk := self._wait(_next(chunks))) is not None:
                yield chunk
        finally:
            if self._backend is not None:
                self._wait(_close(chunks))

    async def _async_iterate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        chunks = self._chunks(body)
        try:
            while (chunk := await self._await(_next(chunks))) is not None:
                yield chunk
        finally:
            if self._backend is not None:
                await self._await(_close(chunks))


async def _next(chunks: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    """The next chunk, None at the end."""
    return await anext(chunks, None)


async def _close(chunks: AsyncGenerator[dict[str, Any], None]) -> None:
    await chunks.aclose()


def _body(
    prompt: str | list[str] | None,
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None,
    input_ids: list[int] | list[list[int]] | None,
    stream: bool,
    fields: dict[str, Any],
) -> dict[str, Any]:
    return {
        **fields,
        "text": prompt,
        "input_ids": input_ids,
        "sampling_params": sampling_params,
        "stream": stream,
    }


def _new_event_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
