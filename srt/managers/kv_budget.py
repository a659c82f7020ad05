"""The KV part of admission: will the pool hold the running requests and this one until they end?

Two rules answer. RatioBudget sums what everyone is believed to need. PeakBudget simulates who ends
when and looks at the peak: memory that one request gives back serves another.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from srt.managers.length_predictor import LengthPredictor
from srt.managers.req import Blocker, Req
from srt.managers.req_memory import ReqMemory
from srt.managers.schedule_batch import ScheduleBatch
from srt.mem_cache.token_to_kv_pool import Int64Array

# max_new_tokens counts up to this much: almost nobody produces more, and whoever asks for the rest
# of a long context must not have it all reserved. Source: SGLang.
CLIP_MAX_NEW_TOKENS = 4096


class KVBudget(Protocol):
    """Of one prefill pass. `cached` is what the tree has of the request's prompt; the memory's
    `available` is read anew at each call, since locking a prefix lowers it."""

    def blocker(self, req: Req, cached: int) -> Blocker | None:
        """None if `req` may be admitted; else what it is short of."""

    def take(self, req: Req, cached: int) -> None:
        """`req` is admitted, or goes on with its chunks."""


def final_need(memory: ReqMemory, req: Req, cached: int) -> int:
    """Slots, in whole pages, from `cached` tokens to the request's last. For one request alone this
    never exceeds the pool: its limits were cut to that on arrival."""
    end = req.fill_len + min(req.remaining, CLIP_MAX_NEW_TOKENS)
    pages = memory.slots.pages_of(end) - memory.slots.pages_of(cached)
    return pages * memory.slots.page_size


def reserved_for(batch: ScheduleBatch, ratio: float, page_size: int = 1) -> int:
    """Tokens the running requests are expected to need still: the remaining max_new_tokens,
    clipped, times `ratio`; in full, to the page, for those that ignore EOS, since they will use
    it."""
    clipped = np.minimum(batch.remaining_cpu, CLIP_MAX_NEW_TOKENS)
    certain = batch.ignore_eos_cpu
    have = batch.seq_lens_cpu[certain]
    pages = -(-(have + clipped[certain]) // page_size) - -(-have // page_size)
    believed = int(clipped[~certain].sum()) * ratio
    return int(pages.sum()) * page_size + int(np.ceil(believed))


class RatioBudget:
    """Uncached input + max_new_tokens <= available - what the running are believed to need
    still."""

    def __init__(
        self, memory: ReqMemory, running: ScheduleBatch | None, ratio: float, floor: int = 0
    ) -> None:
        """`floor`: slots that the running requests take in this very pass."""
        self._memory = memory
        self._reserved = (
            0
            if running is None
            else max(floor, reserved_for(running, ratio, memory.slots.page_size))
        )

    def blocker(self, req: Req, cached: int) -> Blocker | None:
        needed = final_need(self._memory, req, cached)
        available = self._memory.available
        if needed + self._reserved <= available:
            return None
        return Blocker("kv", needed, available, self._reserved)

    def take(self, req: Req, cached: int) -> None:
        self._reserved += final_need(self._memory, req, cached)


class PeakBudget:
    """The simulated peak of KV use, with `req` in it, <= everything the requests hold or could.

    Every request grows by a token a step until its predicted end and then gives back what it holds.
    Sorted by steps left, descending, use is highest just before an end: when the i-th of them ends,
    the first i hold what they had plus i times its steps.
    """

    def __init__(
        self,
        memory: ReqMemory,
        running: ScheduleBatch | None,
        predictor: LengthPredictor,
        floor: int = 0,
    ) -> None:
        self._memory = memory
        self._predictor = predictor
        self._page_size = memory.slots.page_size
        # Per request: tokens nobody else holds for it, and steps until it ends.
        self._held: Int64Array = np.empty(0, dtype=np.int64)
        self._steps: Int64Array = np.empty(0, dtype=np.int64)
        nobody = np.empty(0, dtype=np.int64)
        predictor.fit(nobody if running is None else running.produced_cpu)
        if running is not None:
            self._held = running.seq_lens_cpu - running.shared_cpu
            self._steps = self._steps_of(running)
        self._held_at_start = int(self._held.sum())
        self._floor = floor
        self._uncached = 0  # tokens that those taken here compute now

    def blocker(self, req: Req, cached: int) -> Blocker | None:
        if not len(self._held):
            # Alone it always fits, to the page.
            return RatioBudget(self._memory, None, 0.0).blocker(req, cached)
        own, steps = self._of(req, cached)
        held = np.append(self._held, own)
        peak = self._peak(held, np.append(self._steps, steps))
        available = self._memory.available
        needed = own + steps
        # Whatever is predicted, the pass itself and one token of everyone must fit.
        now = self._uncached + own + len(held) * self._page_size
        reserved = max(peak - self._held_at_start, now, self._floor + own) - needed
        if needed + reserved <= available:
            return None
        return Blocker("kv", needed, available, reserved)

    def take(self, req: Req, cached: int) -> None:
        own, steps = self._of(req, cached)
        self._held = np.append(self._held, own)
        self._steps = np.append(self._steps, steps)
        self._uncached += own

    def _of(self, req: Req, cached: int) -> tuple[int, int]:
        produced = np.array([len(req.output_ids)], dtype=np.int64)
        limit = np.array([min(req.remaining, CLIP_MAX_NEW_TOKENS)], dtype=np.int64)
        steps = limit if req.params.ignore_eos else self._predictor.remaining(produced, limit)
        return req.fill_len - cached, int(steps[0])

    def _steps_of(self, running: ScheduleBatch) -> Int64Array:
        limits = np.minimum(running.remaining_cpu, CLIP_MAX_NEW_TOKENS)
        predicted = self._predictor.remaining(running.produced_cpu, limits)
        return np.where(running.ignore_eos_cpu, limits, predicted)

    def _peak(self, held: Int64Array, steps: Int64Array) -> int:
        order = np.argsort(-steps, kind="stable")
        rows = np.arange(1, len(order) + 1)
        use = np.cumsum(held[order] + self._page_size - 1) + rows * steps[order]
        return int(use.max())
