"""Writes the journal's record of each pass, with what happened between it and the pass before."""

from __future__ import annotations

from collections.abc import Sequence

from srt.journal import ArrivedEntry, Journal, RefusedEntry, RetractionEntry, StepRecord
from srt.managers.black_box import BlackBox
from srt.managers.req import Blocker, Req
from srt.managers.retraction import Retraction
from srt.managers.scheduler_log import LoadSnapshot
from srt.managers.scheduler_pass import Pass


class StepRecorder:
    """What has no pass of its own (arrivals, retractions, ends in the queue) waits here for the
    next record, however many choices come to nothing before it."""

    def __init__(self, journal: Journal, black_box: BlackBox | None = None) -> None:
        self.journal = journal
        self._black_box = black_box
        self.num_steps = 0  # records begun
        self._arrived: list[ArrivedEntry] = []
        self._retractions: list[RetractionEntry] = []
        self._ended: dict[str, str] = {}

    def on_turn(self) -> None:
        """The loop has turned once more, with or without a pass."""
        if self._black_box is not None:
            self._black_box.beat()

    def on_arrival(self, req: Req) -> None:
        if self._black_box is not None:
            self._black_box.on_arrival(req.rid)
        self._arrived.append(ArrivedEntry(req.rid, req.arrival_time, req.prompt_len))

    def on_retraction(self, event: Retraction) -> None:
        victims = list(event.victims)
        self._retractions.append(
            RetractionEntry(
                event.cause, victims, event.gained, event.lost, event.old_ratio, event.new_ratio
            )
        )

    def on_end_without_pass(self, req: Req) -> None:
        assert req.finish_reason is not None, f"{req.rid} has not ended"
        self._ended[req.rid] = req.finish_reason.type.value

    def begin(self, now: float, load: LoadSnapshot, ratio: float, max_rows: int) -> StepRecord:
        """A record with the state of things at a choice."""
        self.num_steps += 1
        return StepRecord(
            step=self.num_steps - 1,
            time=now,
            phase="",
            rids=[],
            lens=[],
            used=load.num_used,
            size=load.size,
            queued=load.num_queued,
            ratio=ratio,
            rows=max_rows,
        )

    def fill(self, chosen: Pass, refused: list[RefusedEntry]) -> None:
        """Complete the record of a pass that is about to be launched."""
        record = chosen.record
        record.phase = chosen.phase
        record.rids = chosen.batch.rids
        if chosen.is_extend:
            record.lens = chosen.forward.extend_lens_cpu
            record.inner = _inner_rids(record.rids, chosen.sampling_rows)
        record.refused = refused
        record.arrived, self._arrived = self._arrived, []
        record.retractions, self._retractions = self._retractions, []
        record.finished, self._ended = self._ended, {}
        if self._black_box is not None:
            num_new = sum(chosen.forward.extend_lens_cpu)
            self._black_box.on_pass(
                record.step, record.phase, record.rids, num_new, record.used, record.queued
            )

    def write(self, done: Pass) -> None:
        self.journal.write(done.record)


def _inner_rids(rids: Sequence[str], sampling_rows: Sequence[int] | None) -> list[str]:
    """Whoever computes a part of a prompt without sampling."""
    if sampling_rows is None:
        return []
    sampling = set(sampling_rows)
    return [rid for row, rid in enumerate(rids) if row not in sampling]


def refused_entries(reqs: Sequence[Req]) -> list[RefusedEntry]:
    """Each of `reqs` that has a blocker."""
    return [refused_entry(req, req.blocker) for req in reqs if req.blocker is not None]


def refused_entry(req: Req, blocker: Blocker) -> RefusedEntry:
    return RefusedEntry(req.rid, blocker.kind, blocker.needed, blocker.available, blocker.reserved)
