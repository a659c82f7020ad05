"""What the scheduler tells about itself: counters, its state, its requests. Never any text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from srt.managers.io_struct import (
    ControlOut,
    FinishReason,
    InternalStateOut,
    InternalStateReq,
    JournalReq,
    PauseReq,
    RequestsReq,
    SchedulerInput,
    StartProfileReq,
    StopProfileReq,
    UpdateSchedulerReq,
)
from srt.managers.pass_profiler import ProfileError
from srt.managers.phase_policy import PassStats
from srt.managers.req import Blocker, Req
from srt.managers.retraction import Retraction
from srt.managers.scheduler_settings import change_settings, current_settings

if TYPE_CHECKING:
    from srt.managers.scheduler import Scheduler


class SchedulerCounters:
    """Sums since the start."""

    def __init__(self) -> None:
        self.passes: Counter[str] = Counter()  # by phase: P, D, M
        self.prompt_tokens = 0  # computed, not cached
        self.generated_tokens = 0
        # Rows of all passes, those that a closed batch held without use included.
        self.row_steps = 0
        self.recomputed_tokens = 0
        self.retracted_requests: Counter[str] = Counter()  # by cause
        self.retracted_input_tokens = 0
        self.retracted_output_tokens = 0
        self.ended: Counter[str] = Counter()  # by type of finish reason
        self.broken_requests = 0  # ended because their logits were not numbers
        self.ms: dict[str, float] = {}  # by part of a step

    def on_pass(self, phase: str, num_tokens: int, stats: PassStats) -> None:
        self.passes[phase] += 1
        self.generated_tokens += num_tokens
        if stats.is_extend:
            self.prompt_tokens += stats.num_tokens - (num_tokens if phase == "M" else 0)

    def on_retraction(self, event: Retraction, victims: list[Req]) -> None:
        self.retracted_requests[event.cause] += len(victims)
        self.retracted_input_tokens += sum(req.prompt_len for req in victims)
        self.retracted_output_tokens += sum(len(req.output_ids) for req in victims)

    def on_end(self, reason: FinishReason) -> None:
        self.ended[reason.type.value] += 1

    def add_times(self, ms: dict[str, float]) -> None:
        for part, value in ms.items():
            self.ms[part] = self.ms.get(part, 0.0) + value


def answer_query(scheduler: Scheduler, message: SchedulerInput) -> None:
    """Answer a message that asks or changes settings."""
    send = scheduler.channel.send
    match message:
        case InternalStateReq():
            send(InternalStateOut(message.id, internal_state(scheduler)))
        case JournalReq():
            send(ControlOut(message.id, scheduler.recorder.journal.last(message.last)))
        case RequestsReq():
            send(ControlOut(message.id, requests_view(scheduler, message.rid)))
        case PauseReq():
            if message.retract:
                scheduler.retractor.retract_all()
            scheduler.paused = message.paused
            send(ControlOut(message.id, {"paused": scheduler.paused}))
        case UpdateSchedulerReq():
            error = change_settings(scheduler, message.values)
            send(ControlOut(message.id, current_settings(scheduler), error))
        case StartProfileReq() | StopProfileReq():
            send(_profile(scheduler, message))
        case _:
            raise TypeError(f"no handler for {type(message).__name__}")


def _profile(scheduler: Scheduler, message: StartProfileReq | StopProfileReq) -> ControlOut:
    try:
        if isinstance(message, StopProfileReq):
            return ControlOut(message.id, str(scheduler.profiler.stop()))
        scheduler.profiler.start(message.options)
        return ControlOut(message.id, None)
    except ProfileError as error:
        return ControlOut(message.id, None, str(error))


def internal_state(scheduler: Scheduler) -> dict[str, Any]:
    """Load, memory and counters at this moment."""
    load, memory, counters = scheduler.load(), scheduler.memory, scheduler.counters
    blockers = Counter(
        blocker.kind for req in scheduler.admission.refused if (blocker := req.blocker)
    )
    return {
        "num_running_reqs": load.num_running,
        "num_waiting_reqs": load.num_queued,
        "num_waiting_uncached_tokens": scheduler.num_pending_tokens(),
        "num_retracted_waiting": sum(
            1 for req in scheduler.live.values() if req.kv is None and req.num_retractions
        ),
        "num_used_tokens": load.num_used,
        "num_cached_tokens": memory.tree.evictable_size,
        "num_locked_tokens": memory.tree.protected_size,
        "num_free_tokens": memory.slots.available,
        "max_total_num_tokens": load.size,
        "max_running_requests": scheduler.admission.limits.max_running_requests,
        "token_usage": load.usage,
        "page_size": memory.slots.page_size,
        "new_token_ratio": scheduler.admission.ratio.value,
        "last_gen_throughput": scheduler.log.gen_throughput,
        "free_rows": memory.rows.available,
        "paused": scheduler.paused,
        "oldest_wait_seconds": _oldest_wait(scheduler),
        "blockers": dict(blockers),
        "num_steps": scheduler.recorder.num_steps,
        "passes": dict(counters.passes),
        "prompt_tokens": counters.prompt_tokens,
        "generated_tokens": counters.generated_tokens,
        "row_steps": counters.row_steps,
        "recomputed_tokens": counters.recomputed_tokens,
        "evicted_tokens": memory.tree.evicted_tokens,
        "retracted_requests": dict(counters.retracted_requests),
        "retracted_input_tokens": counters.retracted_input_tokens,
        "retracted_output_tokens": counters.retracted_output_tokens,
        "broken_requests": counters.broken_requests,
        "ended": dict(counters.ended),
        "step_ms": dict(counters.ms),
        "settings": current_settings(scheduler),
    }


def _oldest_wait(scheduler: Scheduler) -> float:
    oldest = scheduler.waiting_queue.oldest()
    return 0.0 if oldest is None else scheduler.clock() - oldest.queued_at


def requests_view(scheduler: Scheduler, rid: str | None = None) -> list[dict[str, Any]]:
    """Every live request, or the one named (an empty list if it is not live). Waiting ones come
    first, in the order in which they would be tried."""
    positions = {
        req.rid: i for i, req in enumerate(scheduler.waiting_queue.order(scheduler.clock()))
    }
    reqs = list(scheduler.live.values()) if rid is None else [scheduler.live.get(rid)]
    found = [req for req in reqs if req is not None]
    found.sort(key=lambda req: positions.get(req.rid, len(positions)))
    return [_view(scheduler, req, positions.get(req.rid)) for req in found]


def _view(scheduler: Scheduler, req: Req, position: int | None) -> dict[str, Any]:
    now = scheduler.clock()
    return {
        "rid": req.rid,
        "state": _state(scheduler, req),
        "queue_position": position,
        "blocker": _blocker_view(_blocker(scheduler, req)),
        "prompt_tokens": req.prompt_len,
        "completion_tokens": len(req.output_ids),
        "max_new_tokens": req.max_new_tokens,
        "cached_tokens": req.cached_tokens if req.kv is None else req.kv.admitted_len,
        "kv_tokens": 0 if req.kv is None else scheduler.memory.kv_len(req),
        "num_retractions": req.num_retractions,
        "recomputed_tokens": req.recomputed_tokens,
        "bypassed": req.bypassed,
        "priority": req.priority,
        "tenant": req.tenant,
        "age_seconds": now - req.arrival_time,
        "waiting_seconds": now - req.queued_at if req.kv is None else 0.0,
        "queue_seconds": req.queue_time,
    }


def _state(scheduler: Scheduler, req: Req) -> str:
    if req.kv is None:
        return "retracted" if req.num_retractions else "waiting"
    return "chunked" if req is scheduler.chunked_req else "running"


def _blocker(scheduler: Scheduler, req: Req) -> Blocker | None:
    """What a waiting request waits for: its own refusal, or what ended the walk through the queue
    before it was reached."""
    if req.kv is not None:
        return None
    if scheduler.paused:
        return Blocker("paused")
    if scheduler.batching.refusal is not None:
        return scheduler.batching.refusal
    if scheduler.admission.decode_turn:
        return Blocker("decode_turn", 1, 0)
    return req.blocker or scheduler.admission.scan_stop


def _blocker_view(blocker: Blocker | None) -> dict[str, Any] | None:
    if blocker is None:
        return None
    return {
        "kind": blocker.kind,
        "needed": blocker.needed,
        "available": blocker.available,
        "reserved": blocker.reserved,
        "short_by": max(0, blocker.needed + blocker.reserved - blocker.available),
    }
