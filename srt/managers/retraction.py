"""Who gives its KV back: when the pool runs dry, for a more important request, or when a test
asks."""

from __future__ import annotations

from dataclasses import dataclass

from srt.managers.req import Req
from srt.managers.schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class Retraction:
    """One event: `cause` is "kv", "forced", "priority" or "pause". `gained` slots became free or
    evictable; what the victims had computed, `lost` tokens, is computed again but for what the
    cache still has."""

    cause: str
    victims: tuple[str, ...]
    gained: int
    lost: int
    old_ratio: float
    new_ratio: float


class RetractionPolicy:
    """The order of victims, and who may push whom aside."""

    def __init__(
        self,
        every: int = 0,
        by_priority: bool = False,
        preempt_threshold: int | None = None,
        low_priority_first: bool = False,
    ) -> None:
        """`every`: force a retraction each so many decode passes, 0 never. `preempt_threshold`: a
        waiting request pushes aside running ones whose priority is worse by more than this; None
        never. `low_priority_first`: small numbers are the important ones."""
        self.by_priority = by_priority
        self.preempt_threshold = preempt_threshold
        self._every = every
        self._sign = -1 if low_priority_first else 1
        self._decodes = 0

    def is_forced(self) -> bool:
        """Counts a decode pass; True if it must begin with a retraction."""
        self._decodes += 1
        if self._every == 0 or self._decodes < self._every:
            return False
        self._decodes = 0
        return True

    def victim_order(self, batch: ScheduleBatch) -> list[int]:
        """Rows, first victim first: fewest outputs, ties by the longest prompt, then the youngest;
        by priority, the least important class before that."""

        def key(row: int) -> tuple[int, int, int, int]:
            req = batch.reqs[row]
            importance = self._sign * req.priority if self.by_priority else 0
            return importance, len(req.output_ids), -req.prompt_len, -row

        return sorted(range(len(batch)), key=key)

    def outranks(self, head: Req, other: Req) -> bool:
        threshold = self.preempt_threshold
        if threshold is None:
            return False
        return self._sign * (head.priority - other.priority) > threshold

    def preemption_victims(self, head: Req, batch: ScheduleBatch) -> list[Req]:
        """Running requests that `head` may push aside, least important first."""
        if self.preempt_threshold is None:
            return []
        outranked = [req for req in batch.reqs if self.outranks(head, req)]
        return sorted(outranked, key=lambda req: (self._sign * req.priority, len(req.output_ids)))
