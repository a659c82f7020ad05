"""A journal in numbers: utilisation, KV use, retractions, blockers, waits, gaps, milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from srt.journal import StepRecord, client_rid
from srt.journal_history import History, State, StepView, Track, follow

PHASES = {"P": "prefill", "D": "decode", "M": "mixed"}
# Those in the queue at whom admission did not look, because of the ones before them.
BEHIND = "behind others"


@dataclass
class PhaseStats:
    """Passes of one phase. `rows`: their members, summed; `row_limit`: how many there could have
    been; `tokens`: that they computed."""

    passes: int = 0
    rows: int = 0
    row_limit: int = 0
    tokens: int = 0
    tokens_per_pass: float = 0.0
    utilisation: float = 0.0  # rows / row_limit

    def add(self, record: StepRecord) -> None:
        self.passes += 1
        self.rows += len(record.rids)
        self.row_limit += record.rows
        self.tokens += sum(record.lens) if record.lens else len(record.rids)
        self.tokens_per_pass = self.tokens / self.passes
        self.utilisation = self.rows / self.row_limit if self.row_limit else 0.0


@dataclass
class RetractionStats:
    """Of one cause. `lost`: tokens with KV that the victims gave up; `gained`: slots."""

    events: int = 0
    requests: int = 0
    lost: int = 0
    gained: int = 0


@dataclass(frozen=True)
class Spread:
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        data = np.array(values, dtype=np.float64)
        p50, p90, p99 = np.percentile(data, [50, 90, 99]).tolist()
        return cls(len(data), float(data.mean()), p50, p90, p99, float(data.max()))


@dataclass(frozen=True)
class Gap:
    """Between two tokens of a stream: the second came `passes` after the first, at `step`."""

    passes: int
    ms: float
    rid: str
    step: int


@dataclass(frozen=True)
class Stats:
    """See docs/journal.md for each number. Token counts are KV slots or computed tokens, as named;
    `waits` are from a request's arrival to its admission."""

    passes: int
    first_step: int
    last_step: int
    seconds: float
    restarts: int
    outcomes: dict[str, int]  # requests by outcome; "live" for those without an end
    phases: dict[str, PhaseStats]  # of those that occur, and "all"
    given_tokens: int
    dropped_tokens: int
    prefill_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    recomputed_share: float  # of prefill_tokens
    kv_usage: Spread  # used / size
    queue_len: Spread
    retractions: dict[str, RetractionStats]  # by cause
    blockers: dict[str, int]  # request-steps
    waits_passes: Spread
    waits_seconds: Spread
    requeue_waits_seconds: Spread  # after a retraction
    longest_gap: Gap | None  # while running
    longest_retraction_gap: Gap | None  # with a retraction in it
    ms: dict[str, Spread] = field(default_factory=dict)  # by part of a step


class StatsBuilder:
    """Sums views up. Give it every view from the start; `counts` says whether one is in the
    numbers."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []
        self._seconds = 0.0
        self._restarts = 0
        self._seen: dict[Track, None] = {}
        self._phases: dict[str, PhaseStats] = {}
        self._given = self._dropped = self._prefilled = self._cached = self._recomputed = 0
        self._retractions: dict[str, RetractionStats] = {}
        self._blockers: Counter[str] = Counter()
        self._waiting_since: dict[Track, tuple[int, float]] = {}
        self._waits: list[tuple[int, float]] = []  # passes, seconds
        self._requeue_waits: list[float] = []
        self._last_token: dict[Track, tuple[int, float, int]] = {}  # index, time, retractions
        self._gap: Gap | None = None
        self._retraction_gap: Gap | None = None

    def add(self, view: StepView, history: History, counts: bool = True) -> None:
        if view.restarted:
            self._waiting_since.clear()
            self._last_token.clear()
        if counts:
            self._add_sums(view)
        self._follow_waits(view, history, counts)
        self._follow_gaps(view, counts)

    def _add_sums(self, view: StepView) -> None:
        record = view.record
        if view.restarted:
            self._restarts += 1
        elif self._records:
            self._seconds += record.time - self._records[-1].time
        self._records.append(record)
        for name in (PHASES.get(record.phase, record.phase), "all"):
            self._phases.setdefault(name, PhaseStats()).add(record)
        for track in (*view.given, *view.retracted, *view.ended, *view.left):
            self._seen[track] = None
        self._given += len(view.given)
        self._dropped += len(view.dropped)
        self._prefilled += sum(extend.new for extend in view.extends)
        self._cached += sum(entry.cached for entry in record.admitted)
        self._recomputed += view.recomputed
        for event in record.retractions:
            sums = self._retractions.setdefault(event.cause, RetractionStats())
            sums.events += 1
            sums.requests += len(event.victims)
            sums.lost += event.lost
            sums.gained += event.gained
        self._blockers.update(entry.blocker for entry in record.refused)
        self._blockers[BEHIND] += max(0, record.queued - len(record.refused))

    def _follow_waits(self, view: StepView, history: History, counts: bool) -> None:
        record = view.record
        now = (view.index, record.time)
        for track, entry in zip(view.arrived, record.arrived, strict=True):
            self._waiting_since[track] = (view.index, entry.time)
        for extend in view.extends:
            if extend.entry is None:
                continue
            index, time = self._waiting_since.pop(extend.track, now)
            if counts and extend.entry.retractions:
                self._requeue_waits.append(record.time - time)
            elif counts:
                self._waits.append((view.index - index, record.time - time))
        for track in view.retracted:
            self._waiting_since[track] = now
        for refused in record.refused:
            track = history.track(refused.rid)
            if track.state is State.WAITING:
                self._waiting_since.setdefault(track, now)

    def _follow_gaps(self, view: StepView, counts: bool) -> None:
        index, record = view.index, view.record
        for track in view.given:
            last = self._last_token.get(track)
            self._last_token[track] = (index, record.time, track.retractions)
            if last is None or not counts:
                continue
            passes = index - last[0]
            longest = self._gap if track.retractions == last[2] else self._retraction_gap
            if longest is not None and passes <= longest.passes:
                continue
            gap = Gap(passes, (record.time - last[1]) * 1e3, client_rid(track.rid), record.step)
            if track.retractions == last[2]:
                self._gap = gap
            else:
                self._retraction_gap = gap
        for track in view.ended:
            self._last_token.pop(track, None)

    def result(self) -> Stats:
        records = self._records
        assert records, "no record"
        parts = list(dict.fromkeys(part for record in records for part in record.ms))
        return Stats(
            passes=len(records),
            first_step=records[0].step,
            last_step=records[-1].step,
            seconds=self._seconds,
            restarts=self._restarts,
            outcomes=dict(Counter(track.outcome or "live" for track in self._seen)),
            phases=self._phases,
            given_tokens=self._given,
            dropped_tokens=self._dropped,
            prefill_tokens=self._prefilled,
            cached_tokens=self._cached,
            recomputed_tokens=self._recomputed,
            recomputed_share=self._recomputed / self._prefilled if self._prefilled else 0.0,
            kv_usage=Spread.of([record.used / record.size for record in records]),
            queue_len=Spread.of([record.queued for record in records]),
            retractions=self._retractions,
            blockers={kind: count for kind, count in self._blockers.most_common() if count},
            waits_passes=Spread.of([passes for passes, _ in self._waits]),
            waits_seconds=Spread.of([seconds for _, seconds in self._waits]),
            requeue_waits_seconds=Spread.of(self._requeue_waits),
            longest_gap=self._gap,
            longest_retraction_gap=self._retraction_gap,
            ms={part: Spread.of([r.ms[part] for r in records if part in r.ms]) for part in parts},
        )


def journal_stats(records: Iterable[StepRecord], last: int | None = None) -> Stats:
    """Numbers of the last `last` records, or of all. There must be one."""
    records = list(records)
    first = 0 if last is None else len(records) - last
    history, builder = History(), StatsBuilder()
    for view in follow(records, history):
        builder.add(view, history, view.index >= first)
    return builder.result()


def stats_text(stats: Stats) -> str:
    """For people."""
    lines = [
        f"{stats.passes} passes, steps {stats.first_step} to {stats.last_step}, "
        f"{stats.seconds:.1f} s" + (f", {stats.restarts} restarts" if stats.restarts else ""),
        f"requests: {_counts(stats.outcomes)}",
        "",
        f"{'phase':<10}{'passes':>10}{'row-steps':>12}{'of':>10}{'used':>9}"
        f"{'tokens':>11}{'tokens/pass':>13}",
    ]
    for name, phase in sorted(stats.phases.items(), key=lambda item: item[0] == "all"):
        lines.append(
            f"{name:<10}{phase.passes:>10}{phase.rows:>12}{phase.row_limit:>10}"
            f"{phase.utilisation:>9.1%}{phase.tokens:>11}{phase.tokens_per_pass:>13.1f}"
        )
    lines += [
        "",
        f"tokens: {stats.given_tokens} given out, {stats.dropped_tokens} dropped, "
        f"{stats.prefill_tokens} prefilled, {stats.cached_tokens} found in the cache",
        "",
        f"{'':<22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
        _spread("KV used, %", stats.kv_usage, 100),
        _spread("queue, requests", stats.queue_len),
        _spread("queue wait, passes", stats.waits_passes),
        _spread("queue wait, ms", stats.waits_seconds, 1e3),
        _spread("requeue wait, ms", stats.requeue_waits_seconds, 1e3),
    ]
    lines += [_spread(f"{part}, ms", spread) for part, spread in stats.ms.items()]
    lines += [
        "",
        *_retraction_lines(stats),
        f"waiting for, requests x passes: {_counts(stats.blockers)}",
    ]
    lines.append(f"longest gap between two tokens of a stream: {_gap(stats.longest_gap)}")
    lines.append(f"  with a retraction in it: {_gap(stats.longest_retraction_gap)}")
    return "\n".join(lines)


def _retraction_lines(stats: Stats) -> list[str]:
    if not stats.retractions:
        return ["retractions: none"]
    lines = [
        f"retractions ({cause}): {sums.requests} requests in {sums.events} events, "
        f"{sums.lost} tokens lost, {sums.gained} slots gained"
        for cause, sums in stats.retractions.items()
    ]
    lines.append(
        f"computed again: {stats.recomputed_tokens} tokens, {stats.recomputed_share:.1%} of "
        "what was prefilled"
    )
    return lines


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"


def _spread(name: str, spread: Spread, factor: float = 1.0) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return f"{name:<22}" + "".join(f"{value * factor:>10.2f}" for value in values)


def _gap(gap: Gap | None) -> str:
    if gap is None:
        return "none"
    return f"{gap.passes} passes, {gap.ms:.0f} ms, to step {gap.step} of {gap.rid}"
