"""The open connection to one scheduler process: what goes to it in order, what comes from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from srt.managers.io_struct import SchedulerInput, SchedulerOutput
from srt.managers.ipc import FrontendChannel

logger = logging.getLogger(__name__)


class SchedulerLink:
    """Opened for each scheduler process anew, so nothing that an earlier one said can arrive after
    its end. What is sent while it is closed is dropped: whoever opens it says again what matters.
    """

    def __init__(
        self, on_message: Callable[[SchedulerOutput], None], on_broken: Callable[[str], None]
    ) -> None:
        """`on_broken` gets an error after which the scheduler would never be heard again."""
        self._on_message = on_message
        self._on_broken = on_broken
        self._channel: FrontendChannel | None = None
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    def open(self, channel: FrontendChannel) -> None:
        """Needs a running event loop. The channel is closed with the link."""
        assert self._channel is None, "opened twice"
        self._channel = channel
        self._outbox = asyncio.Queue()
        self._tasks = [
            asyncio.create_task(self._guard(self._send_loop(channel)), name="to-scheduler"),
            asyncio.create_task(self._guard(self._receive_loop(channel)), name="from-scheduler"),
        ]

    def send(self, message: SchedulerInput) -> None:
        """Never waits, so it can be called while a request is being cancelled; keeps the order.
        What cannot be encoded is an error here, where it is still known whose it is."""
        if self._channel is not None:
            self._outbox.put_nowait(self._channel.encode(message))

    async def close(self) -> None:
        """Twice is fine."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        channel.close()

    async def _guard(self, loop: Coroutine[Any, Any, None]) -> None:
        try:
            await loop
        except Exception as error:
            logger.exception("The connection to the scheduler broke")
            self._on_broken(f"The connection to the scheduler broke: {error}")

    async def _send_loop(self, channel: FrontendChannel) -> None:
        while True:
            await channel.send(await self._outbox.get())

    async def _receive_loop(self, channel: FrontendChannel) -> None:
        while True:
            self._on_message(await channel.recv())
