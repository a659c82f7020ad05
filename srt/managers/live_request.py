"""A live request in the HTTP process, and the client's call that waits for its news."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from srt.managers.req_state import ReqState


class ClientCall:
    """The live requests of one client's call and the ones among them that have news.

    News is not queued: a state is in `ready` once however many tokens it got, so a slow client
    finds everything that came in one piece, and costs no memory while it is slow.
    """

    __slots__ = ("event", "is_stream", "ready", "seen")

    def __init__(self, is_stream: bool, size: int) -> None:
        self.is_stream = is_stream
        self.event = asyncio.Event()
        self.ready: deque[ReqState] = deque()
        # Tokens of each choice at its last wake-up, for stream_interval; -1 while in `ready`.
        self.seen = [0] * size

    def notify(self, state: ReqState, interval: int) -> None:
        """Wake the consumer if `state` has something it waits for: its end, its first token, or
        `interval` more tokens since it last looked."""
        seen = self.seen[state.index]
        if seen < 0:
            return
        if state.finish_reason is None:
            if not self.is_stream:
                return
            num_new = len(state.output_ids) - seen
            if num_new < interval and not (seen == 0 and num_new):
                return
        self.seen[state.index] = -1
        self.ready.append(state)
        self.event.set()

    async def next(self) -> ReqState:
        while not self.ready:
            self.event.clear()
            await self.event.wait()
        state = self.ready.popleft()
        self.seen[state.index] = len(state.output_ids)
        return state


@dataclass(slots=True)
class LiveRequest:
    """A table entry: a request's state, the call that consumes it, and tokens between wake-ups."""

    state: ReqState
    call: ClientCall
    interval: int
    is_counted: bool  # by the metrics and the queue's limit: not a probe of our own
    is_waiting: bool = True  # never admitted
    last_token_at: float = 0.0  # time.monotonic() of the newest token, 0 before the first
    timers: tuple[asyncio.TimerHandle, ...] = ()  # of its time limits
    is_aborted: bool = False  # its client asked for its end
