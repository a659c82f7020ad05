"""When newcomers may join: at every pass, or only once the whole batch before them has ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from srt.managers.req import Blocker

BATCHINGS = ("continuous", "static", "dynamic")
# Seconds that a batch waits to be full. A static batch waits for that as such; the limit is there
# because nobody may wait for ever.
DEFAULT_TIMEOUT = {"static": 2.0, "dynamic": 0.1}


@dataclass(frozen=True)
class BatchingState:
    """What decides whether a batch may take newcomers. Times are seconds of the scheduler's
    clock."""

    now: float
    num_admitted: int  # requests that hold memory
    num_waiting: int
    oldest_queued_at: float
    max_running: int
    has_chunk: bool  # somebody's prompt is half computed


class Batching(Protocol):
    name: str
    # Why newcomers may not join now; None if they may.
    refusal: Blocker | None
    # Whether a prefill goes before any decode, whatever the phase policy says.
    is_forming: bool
    # Whether nobody runs because the batch waits to be full.
    is_holding: bool

    def admits(self, state: BatchingState) -> bool:
        """May newcomers join now? Asked at every choice while somebody waits."""

    def on_admitted(self, count: int) -> None:
        """`count` newcomers have joined."""

    def on_launch(self, is_extend: bool, num_rows: int) -> int:
        """A pass of `num_rows` rows starts; how many rows more the batch holds without use."""

    def wait_ms(self, now: float, limit_ms: int) -> int:
        """How long the scheduler may rest while it is holding, at most `limit_ms`."""


class ContinuousBatching:
    """Whoever fits joins at the next pass; a row that has ended is used by the next in line."""

    name = "continuous"
    refusal: Blocker | None = None
    is_forming = False
    is_holding = False

    def admits(self, state: BatchingState) -> bool:
        return True

    def on_admitted(self, count: int) -> None:
        """Nothing depends on who is in it."""

    def on_launch(self, is_extend: bool, num_rows: int) -> int:
        return 0

    def wait_ms(self, now: float, limit_ms: int) -> int:
        return limit_ms


class RunToCompletion:
    """A batch forms while nobody runs, starts when it is full (all rows) or its oldest request has
    waited for `timeout` seconds, and takes nobody in until its last request has ended. Rows of
    those that ended before are padding: held, and of no use. This is how serving was done before
    iteration-level scheduling (Orca, OSDI 2022), and is here to be compared with.

    "static" and "dynamic" are this rule with much and with little patience."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self.refusal: Blocker | None = None
        self.is_forming = False
        self.is_holding = False
        self._timeout = timeout
        self._members = 0
        self._deadline = 0.0

    def admits(self, state: BatchingState) -> bool:
        if state.num_admitted == 0:
            self._members = 0
            self._deadline = state.oldest_queued_at + self._timeout
            is_full = state.num_waiting >= state.max_running
            self.is_forming = is_full or state.now >= self._deadline
            self.is_holding = not self.is_forming
        else:
            self.is_holding = False
        # A prompt in mid-chunk is the batch's own and must go on.
        admits = (self.is_forming and self._members < state.max_running) or state.has_chunk
        self.refusal = None
        if self.is_holding:
            self.refusal = Blocker("batching", state.max_running, state.num_waiting)
        elif not admits:
            self.refusal = Blocker("batching", 1, 0)
        return admits

    def on_admitted(self, count: int) -> None:
        self._members += count

    def on_launch(self, is_extend: bool, num_rows: int) -> int:
        if is_extend:
            return 0
        self.is_forming = False
        return self._members - num_rows

    def wait_ms(self, now: float, limit_ms: int) -> int:
        if not self.is_holding:
            return limit_ms
        return min(limit_ms, max(0, math.ceil((self._deadline - now) * 1e3)))


def make_batching(name: str, timeout: float | None = None) -> Batching:
    """What `--batching` names; `timeout` in seconds, None for the kind's own."""
    if name == "continuous":
        return ContinuousBatching()
    if name in DEFAULT_TIMEOUT:
        return RunToCompletion(name, DEFAULT_TIMEOUT[name] if timeout is None else timeout)
    raise ValueError(f"batching must be one of {', '.join(BATCHINGS)}, got {name!r}")
