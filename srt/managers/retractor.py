"""Takes the KV of running requests back and sends them to the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srt.managers.io_struct import FinishReason, FinishType
from srt.managers.req import Req
from srt.managers.retraction import Retraction, RetractionPolicy
from srt.managers.schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from srt.managers.scheduler import Scheduler

OOM_MESSAGE = (
    "Out of memory even after retracting all other requests in the decode batch. "
    "Aborting the last request."
)


class Retractor:
    """`policy` says who; this does it, and tells what it did to the log, the journal, the counters
    and the ratio. Victims go to the front of the queue, the first of them last."""

    def __init__(self, scheduler: Scheduler, policy: RetractionPolicy) -> None:
        self.policy = policy
        self._scheduler = scheduler
        self._memory = scheduler.memory
        self._admission = scheduler.admission

    def retract_decode(self, batch: ScheduleBatch) -> None:
        """Take slots back until the next token of everyone left fits. The request in mid-chunk has
        the fewest outputs, none, so it goes first; the last one standing is never retracted."""
        ratio = self._admission.ratio
        before, old_ratio = self._memory.available, ratio.value
        victims = []
        chunked = self._scheduler.chunked_req
        if chunked is not None:
            victims.append(chunked)
            self._retract(chunked)
            self._scheduler.chunked_req = None
        order = self.policy.victim_order(batch)
        needs = self._memory.decode_needs(batch.seq_lens_cpu + 1)
        need, gone = int(needs.sum()), 0
        while need > self._memory.available and gone < len(order) - 1:
            row = order[gone]
            gone += 1
            need -= int(needs[row])
            victims.append(batch.reqs[row])
            self._retract(batch.reqs[row])
        stay = [batch.reqs[row] for row in order[gone:]]
        outputs = sum(len(req.output_ids) for req in stay)
        ratio.on_retract(outputs, sum(req.max_new_tokens for req in stay), len(stay))
        self._note_retraction("kv", victims, self._memory.available - before, old_ratio)
        if need > self._memory.available:
            self._scheduler.log.on_last_aborted(stay[0].rid)
            reason = FinishReason(FinishType.ABORT, None, OOM_MESSAGE, 500, "InternalServerError")
            self._scheduler.end_without_token(stay[0], reason)

    def force_retract(self, batch: ScheduleBatch) -> None:
        """`--retract-every`: retract the first victim although there is room, for tests."""
        if len(batch) < 2:
            return
        before = self._memory.available
        victim = batch.reqs[self.policy.victim_order(batch)[0]]
        self._retract(victim)
        gained = self._memory.available - before
        self._note_retraction("forced", [victim], gained, self._admission.ratio.value)

    def retract_all(self) -> None:
        """Send everyone who runs back to the queue, in their order: for a pause that holds no
        memory."""
        self._scheduler.settle_in_flight()
        self._scheduler.merge_last_batch()
        before, ratio = self._memory.available, self._admission.ratio.value
        running, chunked = self._scheduler.running_batch, self._scheduler.chunked_req
        victims = [] if running is None else list(running.reqs)
        if chunked is not None:
            victims.append(chunked)
            self._scheduler.chunked_req = None
        for req in reversed(victims):
            self._retract(req)
        self._scheduler.drop_ended()
        if victims:
            self._note_retraction("pause", victims, self._memory.available - before, ratio)

    def preempt_for_priority(self) -> None:
        """Make room for a waiting request that is more important than running ones by more than the
        threshold. They go back to the queue, first in their own class."""
        running = self._scheduler.running_batch
        head = next(self._scheduler.waiting_queue.order(self._scheduler.clock()), None)
        if running is None or head is None:
            return
        if not self.policy.preemption_victims(head, running):
            return
        if self._admission.would_fit(head, running) is None:
            return
        self._scheduler.settle_in_flight()
        before, old_ratio = self._memory.available, self._admission.ratio.value
        victims: list[Req] = []
        while (running := self._scheduler.running_batch) is not None:
            candidates = self.policy.preemption_victims(head, running)
            if not candidates or self._admission.would_fit(head, running) is None:
                break
            victims.append(candidates[0])
            self._retract(candidates[0])
            self._scheduler.drop_ended()
        if victims:
            self._note_retraction("priority", victims, self._memory.available - before, old_ratio)

    def _retract(self, req: Req) -> None:
        self._scheduler.release(req)
        req.num_retractions += 1
        req.bypassed = 0
        req.queued_at = self._scheduler.clock()
        self._scheduler.waiting_queue.push_front(req)

    def _note_retraction(
        self, cause: str, victims: list[Req], gained: int, old_ratio: float
    ) -> None:
        lost = sum(req.retracted_len for req in victims)
        rids = tuple(req.rid for req in victims)
        event = Retraction(cause, rids, gained, lost, old_ratio, self._admission.ratio.value)
        self._scheduler.recorder.on_retraction(event)
        self._scheduler.counters.on_retraction(event, victims)
        self._scheduler.log.on_retract(event)
