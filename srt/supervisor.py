"""Replaces a scheduler process that died or hangs, and lets every request go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from srt.crash_dump import write_crash_dump
from srt.managers.black_box import BlackBoxReader
from srt.managers.ipc import FrontendChannel
from srt.managers.quarantine import Quarantine
from srt.managers.scheduler_handle import SchedulerHandle
from srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Restarts count against --max-restarts for so long.
RESTART_WINDOW_SECONDS = 300.0
# Before a restart, by how many there were in the window; the last one from then on.
BACKOFF_SECONDS = (0.0, 0.0, 1.0, 2.0, 5.0)
# A process that dies of an error says so before it exits; this long its message may take.
LAST_WORDS_SECONDS = 0.3
# For the stacks of a process that hangs to be written.
STACKS_SECONDS = 0.5
# Between two looks at the heartbeat, and at a suspect on trial.
LOOK_SECONDS = 0.5
TRIAL_LOOK_SECONDS = 0.05
# A replacement may take so many times as long to load as the first scheduler did (its files are in
# the page cache by then, but the machine may be busy), and at least so many seconds.
LOAD_TIME_FACTOR = 10.0
MIN_LOAD_SECONDS = 60.0
# Passes that the log shows of a scheduler that died.
SHOWN_PASSES = 5


class Supervisor:
    """Owns the scheduler process. A failure while the first one starts is the server's; a later one
    is an event: the process is replaced, and every live request is submitted again with what its
    client has had. Whoever seems to cause the crashes is ended (see Quarantine)."""

    def __init__(
        self, args: ServerArgs, manager: TokenizerManager, scheduler: SchedulerHandle
    ) -> None:
        """Needs a running event loop."""
        self._args = args
        self._manager = manager
        self._scheduler = scheduler
        self._black_box = BlackBoxReader(scheduler.black_box)
        self._quarantine = Quarantine()
        self._restarts: list[float] = []  # time.monotonic() of those in the window
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._begun = time.monotonic()
        self._load_timeout = args.load_timeout
        manager.on_lost = self._on_lost
        self._watch(scheduler)

    def start(self) -> None:
        """The first scheduler is ready: from now on it is replaced."""
        if self._load_timeout is None:
            first = time.monotonic() - self._begun
            self._load_timeout = max(MIN_LOAD_SECONDS, LOAD_TIME_FACTOR * first)
        self._task = asyncio.create_task(self._run(), name="supervisor")

    async def close(self) -> None:
        """End the process and do not replace it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._scheduler.stop()
        self._black_box.close()

    # --- how a loss is noticed ---

    def _watch(self, scheduler: SchedulerHandle) -> None:
        later = asyncio.get_running_loop().call_later

        def on_exit(description: str) -> None:
            later(LAST_WORDS_SECONDS, on_exit_told, description)

        def on_exit_told(description: str) -> None:
            if scheduler is self._scheduler:
                self._on_lost(description)

        scheduler.watch(on_exit)

    def _on_lost(self, description: str) -> None:
        if self._task is None:
            self._manager.fail(description)
        elif not self._lost.done():
            self._lost.set_result(description)

    async def _next_loss(self) -> str:
        """Wait for one; look after the heartbeat and the suspects meanwhile."""
        while True:
            is_trial = self._quarantine.on_trial is not None or bool(self._quarantine.held)
            look = TRIAL_LOOK_SECONDS if is_trial else LOOK_SECONDS
            await asyncio.wait({self._lost}, timeout=look)
            if self._lost.done():
                return self._lost.result()
            if is_trial:
                self._try_next()
            silence = time.monotonic() - self._black_box.last_beat()
            if silence > self._args.watchdog_timeout:
                await self._dump_stacks()
                return (
                    f"The scheduler loop has not turned for {silence:.1f} s "
                    f"(--watchdog-timeout {self._args.watchdog_timeout:g})."
                )

    async def _dump_stacks(self) -> None:
        """Have the process write the stacks of its threads to its standard error, our own."""
        if hasattr(signal, "SIGUSR1"):
            logger.error("The scheduler hangs; its threads are at:")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._scheduler.process.pid, signal.SIGUSR1)
            await asyncio.sleep(STACKS_SECONDS)

    def _try_next(self) -> None:
        rid = self._quarantine.next_trial(self._manager.num_outputs())
        if rid is not None:
            self._manager.resubmit_one(rid)

    # --- what is done about it ---

    async def _run(self) -> None:
        try:
            await self._clear_folder()
            while self._manager.status is not ServerStatus.DEAD:
                await self._replace(await self._next_loss())
        except Exception as error:
            logger.exception("The supervisor failed")
            self._manager.fail(f"The scheduler could not be replaced: {error}")

    async def _replace(self, description: str) -> None:
        now = time.monotonic()
        self._restarts = [then for then in self._restarts if now - then < RESTART_WINDOW_SECONDS]
        logger.error("%s", description)
        passes, members = self._black_box.passes(), self._black_box.rids()
        for each in passes[-SHOWN_PASSES:]:
            logger.error("Before that: %s", each)
        if len(self._restarts) >= self._args.max_restarts:
            self._give_up(description, passes)
            return
        await self._manager.disconnect()
        self._black_box.close()
        await asyncio.to_thread(self._scheduler.stop, 0.0)
        for rid in self._quarantine.on_crash(members, self._manager.num_outputs()):
            logger.error("Request %s is ended: the scheduler crashes with it", rid)
            self._manager.quarantine(rid)
        await asyncio.sleep(BACKOFF_SECONDS[min(len(self._restarts), len(BACKOFF_SECONDS) - 1)])
        self._restarts.append(now)
        self._lost = asyncio.get_running_loop().create_future()
        scheduler = self._scheduler = self._scheduler.another()
        self._black_box = BlackBoxReader(scheduler.black_box)
        self._watch(scheduler)
        ready = self._manager.connect(FrontendChannel(scheduler.ipc_dir))
        outcomes: set[asyncio.Future[Any]] = {ready, self._lost}
        await asyncio.wait(
            outcomes, timeout=self._load_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if not ready.done():
            # The next turn of the loop sees that it died while it loaded, or hangs there.
            if not self._lost.done():
                await self._dump_stacks()
                self._on_lost(
                    f"The new scheduler was not ready after {self._load_timeout:.1f} s "
                    "(--load-timeout)."
                )
            return
        count = self._manager.resubmit(self._quarantine.held)
        logger.warning(
            "The scheduler was replaced in %.1f s; %d requests go on", time.monotonic() - now, count
        )
        await self._clear_folder()

    async def _clear_folder(self) -> None:
        """Once both sockets are connected and the black box is mapped nobody needs their names any
        more. So a `kill -9`, after which nobody could, leaves nothing to remove. An answer shows
        that they are connected."""
        state = asyncio.create_task(self._manager.control.internal_state(None))
        outcomes: set[asyncio.Future[Any]] = {state, self._lost}
        await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        if state.done():
            self._scheduler.clear_folder()
        state.cancel()
        await asyncio.gather(state, return_exceptions=True)

    def _give_up(self, description: str, passes: list[dict[str, object]]) -> None:
        folder = self._args.crash_dump_folder
        try:
            path = write_crash_dump(
                None if folder is None else Path(folder),
                description,
                passes,
                self._manager.unfinished_states(),
            )
            logger.error("What was going on is in %s", path)
        except OSError as error:
            logger.error("The crash dump cannot be written: %s", error)
        if self._restarts:
            description += (
                f" It was replaced {len(self._restarts)} times within "
                f"{RESTART_WINDOW_SECONDS:g} s (--max-restarts)."
            )
        self._manager.fail(description)
