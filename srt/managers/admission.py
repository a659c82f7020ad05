"""Walks the waiting queue and builds the next prefill pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from srt.journal import AdmittedEntry
from srt.managers.io_struct import FinishType
from srt.managers.kv_budget import KVBudget, PeakBudget, RatioBudget
from srt.managers.length_predictor import LengthPredictor
from srt.managers.new_token_ratio import NewTokenRatio
from srt.managers.prefill_adder import AdmissionLimits, PrefillAdder
from srt.managers.req import Blocker, Req
from srt.managers.req_memory import ReqMemory
from srt.managers.schedule_batch import ScheduleBatch
from srt.managers.schedule_policy import WaitingQueue

# How many requests that do not fit admission looks past in one step, and how often a request may be
# passed by others before nobody behind it is admitted any more.
MAX_LOOKAHEAD = 32
MAX_BYPASS = 64


@dataclass
class AdmissionResult:
    """A prefill pass: `members` compute up to `seq_lens` tokens each; `newcomers` are those of them
    that leave the queue; `chunked` is in mid-chunk after it."""

    members: list[Req]
    seq_lens: list[int]
    newcomers: list[Req]
    chunked: Req | None
    refused: list[Req] = field(default_factory=list)
    budget_left: int = 0

    def admitted_entries(self) -> list[AdmittedEntry]:
        return [
            AdmittedEntry(req.rid, req.kv.admitted_len, req.fill_len, req.num_retractions)
            for req in self.newcomers
            if req.kv is not None
        ]


class Admission:
    """The rule and its memory: `rule` is "ratio" or "estimated" (see kv_budget)."""

    def __init__(
        self, memory: ReqMemory, limits: AdmissionLimits, ratio: NewTokenRatio, rule: str = "ratio"
    ) -> None:
        if rule not in ("ratio", "estimated"):
            raise ValueError(f"admission must be ratio or estimated, got {rule!r}")
        self._memory = memory
        self.limits = limits
        self.ratio = ratio
        self.rule = rule
        self.predictor = LengthPredictor()
        # Why the last choice looked no further, for those behind whom it did not look at.
        self.decode_turn = False
        self.scan_stop: Blocker | None = None
        self.refused: list[Req] = []

    @property
    def token_budget(self) -> int:
        """New tokens of one pass at most."""
        chunk = self.limits.chunk
        limit = self.limits.max_prefill_tokens
        return limit if chunk is None else min(limit, chunk)

    def change_limits(self, **values: int | None) -> None:
        self.limits = replace(self.limits, **values)  # type: ignore[arg-type]

    def observe_end(self, req: Req) -> None:
        """`req` ended; its length tells about those to come, if it chose it."""
        reason = req.finish_reason
        if reason is not None and reason.type is not FinishType.ABORT and not req.params.ignore_eos:
            self.predictor.observe(len(req.output_ids))

    def _kv_budget(self, running: ScheduleBatch | None, floor: int) -> KVBudget:
        if self.rule == "estimated" and self.predictor.is_ready:
            return PeakBudget(self._memory, running, self.predictor, floor)
        return RatioBudget(self._memory, running, self.ratio.value, floor)

    def would_fit(self, req: Req, running: ScheduleBatch | None) -> Blocker | None:
        """What `req`, alone at the head of the queue, would wait for in rows or KV."""
        in_use = self._memory.rows.num_rows - self._memory.rows.available
        if in_use >= self.limits.max_running_requests:
            return Blocker("slots", 1, 0)
        return self._kv_budget(running, 0).blocker(req, self._memory.cached_len(req))

    def build(
        self,
        queue: WaitingQueue,
        chunked: Req | None,
        running: ScheduleBatch | None,
        token_budget: int,
        now: float,
        riding: ScheduleBatch | None,
    ) -> AdmissionResult:
        """Go on with who is in mid-chunk, then admit in the queue's order. Admitted requests have
        their row and prefix but are still in the queue. `riding` decodes in the same pass."""
        floor = 0 if riding is None else self._memory.decode_need(riding.seq_lens_cpu + 1)
        kv = self._kv_budget(running, floor)
        adder = PrefillAdder(self._memory, self.limits, kv, token_budget, floor)
        if chunked is not None:
            adder.add_chunked(chunked)
        newcomers = self._scan(adder, queue, now)
        return AdmissionResult(
            adder.admitted,
            adder.seq_lens,
            newcomers,
            adder.chunked,
            self.refused,
            adder.budget_left,
        )

    def _scan(self, adder: PrefillAdder, queue: WaitingQueue, now: float) -> list[Req]:
        """Whoever does not fit is passed by up to MAX_BYPASS others, then nobody."""
        newcomers: list[Req] = []
        self.refused, self.scan_stop = [], None
        for req in queue.order(now):
            if adder.budget_left <= 0 or len(self.refused) >= MAX_LOOKAHEAD:
                self.scan_stop = Blocker("prefill_budget", req.fill_len, adder.budget_left)
                break
            req.blocker = adder.try_add(req)
            if req.blocker is None:
                newcomers.append(req)
                continue
            self.refused.append(req)
            if req.blocker.kind == "slots" or req.bypassed >= MAX_BYPASS:
                self.scan_stop = req.blocker
                break
        for req in newcomers:
            req.bypassed = 0
        for req in self.refused:
            req.bypassed += len(newcomers)
        return newcomers
