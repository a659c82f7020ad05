"""How many requests may wait, and what one that may not is told: its place, when to return."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from srt.request_error import RequestError

QUEUE_FULL = "The request queue is full."
# The drain rate is that of the last so many admissions, none of them older than this.
RATE_ADMISSIONS = 64
RATE_SECONDS = 60.0
MAX_RETRY_SECONDS = 300


class QueueLimit:
    """Counts the requests that were sent and have no first token yet: the scheduler's queue, and
    those it prefills. Retracted requests are not among them; they have streams to go on with."""

    def __init__(self, limit: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit` None: any number may wait."""
        self.limit = limit
        self.num_waiting = 0
        self._clock = clock
        self._admissions: deque[float] = deque(maxlen=RATE_ADMISSIONS)

    def on_sent(self) -> None:
        self.num_waiting += 1

    def on_admitted(self) -> None:
        self.num_waiting -= 1
        self._admissions.append(self._clock())

    def on_left(self) -> None:
        """A request ended while it waited."""
        self.num_waiting -= 1

    def drain_rate(self) -> float | None:
        """Admissions/s of late; None if there were too few to tell."""
        now = self._clock()
        while self._admissions and self._admissions[0] < now - RATE_SECONDS:
            self._admissions.popleft()
        if len(self._admissions) < 2:
            return None
        return len(self._admissions) / max(now - self._admissions[0], 1e-3)

    def check(self, num_new: int) -> None:
        """RequestError if `num_new` more requests may not wait: 503 if they may later, 400 if there
        are more of them than may ever wait at once."""
        if self.limit is None or self.num_waiting + num_new <= self.limit:
            return
        if num_new > self.limit:
            raise RequestError(
                f"One call asks for {num_new} requests, and at most {self.limit} may wait at once "
                "(max_queued_requests). Please send them in smaller calls."
            )
        rate = self.drain_rate()
        wait = None if rate is None else (self.num_waiting + 1) / rate
        # By then half of those who wait now are gone: there is room, and still enough to do.
        retry_after = 1 if wait is None else math.ceil(min(wait / 2, MAX_RETRY_SECONDS))
        raise RequestError(
            QUEUE_FULL,
            status=503,
            retry_after=retry_after,
            details={
                "queue": {
                    "length": self.num_waiting,
                    "limit": self.limit,
                    "position": self.num_waiting + 1,
                    "estimated_wait_seconds": wait,
                }
            },
        )
