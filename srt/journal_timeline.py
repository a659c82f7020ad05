"""A page that draws requests over passes: who computed, who waited for what, who was retracted."""

from __future__ import annotations

import html
from collections.abc import Sequence

import msgspec

from srt.journal import StepRecord, client_rid
from srt.journal_history import History, State, StepView, Track, follow
from srt.journal_stats import BEHIND, Stats, journal_stats
from srt.journal_timeline_page import PAGE

# What a request may be doing in a pass, in the order of the legend; the page has a colour for each.
# A wait of a kind that is not here gets the last one's.
PREFILL, AGAIN, DECODE = "prefill", "prefill again", "decode"
HELD, DROPPED = "not in the pass", "dropped token"
WAIT = "waits: "
KINDS = (
    PREFILL, AGAIN, DECODE, HELD, DROPPED,
    *(WAIT + kind for kind in ("kv", "slots", "prefill_budget", "decode_turn", "prefix", BEHIND)),
)  # fmt: skip


class Row(msgspec.Struct):
    """One request. `spans`: (number of a kind, first pass, passes, tokens computed) one after the
    other, ascending. `marks`: the passes that began with its retraction."""

    rid: str
    spans: list[int] = []
    marks: list[int] = []
    end: int = -1  # the pass by which it ended
    outcome: str = ""
    tokens: int = 0  # that its client got
    prompt: int = 0  # tokens; 0 if its admission is not in the file


class Passes(msgspec.Struct):
    """Lists by pass: that of a request's spans counts from 0, unlike `step`."""

    step: list[int]
    phase: str
    ms: list[float]
    seconds: list[float]  # since the first one
    rows: list[int]
    tokens: list[int]
    used: list[int]
    queued: list[int]


class Timeline(msgspec.Struct):
    """What the page is given."""

    title: str
    facts: list[tuple[str, str]]
    kinds: list[str]
    rows: list[Row]
    passes: Passes
    kv_size: int
    row_limit: int
    restarts: list[int]


class TimelineBuilder:
    """Turns views into rows, from pass `first` on. What a request did between two passes that name
    it follows from its state: it waited behind others, or was admitted but not in the pass."""

    def __init__(self, first: int = 0) -> None:
        self.kinds = list(KINDS)
        self.restarts: list[int] = []
        self._first = first
        self._rows: dict[Track, Row] = {}
        self._drawn: dict[Track, int] = {}  # passes before this one are
        self._between: dict[Track, str] = {}  # kind of the passes until it is named again

    def add(self, view: StepView, history: History) -> None:
        index = view.index
        if view.restarted:
            self._between.clear()
            if index >= self._first:
                self.restarts.append(index - self._first)
        for track in view.retracted:
            self._draw_between(track, index)
            if index >= self._first:
                self._row(track).marks.append(index - self._first)
            self._between[track] = WAIT + BEHIND
        for track in view.left:
            self._end(track, self._drawn.get(track, index) - 1)
        for entry in view.record.refused:
            track = history.track(entry.rid)
            if track.state is State.WAITING:
                self._draw(track, index, WAIT + entry.blocker, 0)
                self._between[track] = WAIT + BEHIND
        for extend in view.extends:
            kind = AGAIN if extend.track.retractions else PREFILL
            self._draw(extend.track, index, kind, extend.new)
            self._between[extend.track] = HELD
        for track in view.decodes:
            self._draw(track, index, DECODE, 1)
            self._between[track] = HELD
        for track in view.dropped:
            self._draw(track, index, DROPPED, 1)
        for track in view.arrived:
            if track.state is State.WAITING and track not in self._drawn:
                self._draw(track, index, WAIT + BEHIND, 0)
                self._between[track] = WAIT + BEHIND
        for track in view.ended:
            self._end(track, index)

    def rows(self) -> list[Row]:
        """Of the requests that did something from `first` on, in the order of their arrival."""
        rows = []
        for track, row in self._rows.items():
            if row.spans or row.marks:
                row.tokens, row.prompt = track.tokens, track.start_len
                rows.append(row)
        return rows

    def _row(self, track: Track) -> Row:
        if track not in self._rows:
            self._rows[track] = Row(client_rid(track.rid))
        return self._rows[track]

    def _draw(self, track: Track, index: int, kind: str, tokens: int) -> None:
        """Draw pass `index` and what is missing before it."""
        self._draw_between(track, index)
        self._add_span(self._row(track), index, index + 1, kind, tokens)
        self._drawn[track] = index + 1

    def _draw_between(self, track: Track, index: int) -> None:
        first, kind = self._drawn.get(track, index), self._between.get(track)
        if kind is not None and first < index:
            self._add_span(self._row(track), first, index, kind, 0)
        self._drawn[track] = max(first, index)

    def _add_span(self, row: Row, first: int, end: int, kind: str, tokens: int) -> None:
        """Passes [first, end); joined to the span before if that is of the same kind."""
        first, end = max(0, first - self._first), end - self._first
        if end <= first:
            return
        if kind not in self.kinds:
            self.kinds.append(kind)
        number, spans = self.kinds.index(kind), row.spans
        if spans and spans[-4] == number and spans[-3] + spans[-2] == first:
            spans[-2] += end - first
            spans[-1] += tokens
        else:
            spans += (number, first, end - first, tokens)

    def _end(self, track: Track, index: int) -> None:
        row = self._row(track)
        row.end, row.outcome = index - self._first, track.outcome
        self._between.pop(track, None)


def build_timeline(records: Sequence[StepRecord], title: str, last: int | None = None) -> Timeline:
    """`last`: only so many passes. There must be a record."""
    first = 0 if last is None else max(0, len(records) - last)
    history, builder = History(), TimelineBuilder(first)
    for view in follow(records, history):
        builder.add(view, history)
    shown = records[first:]
    return Timeline(
        title=title,
        facts=_facts(journal_stats(records, last)),
        kinds=builder.kinds,
        rows=builder.rows(),
        passes=_passes(shown),
        kv_size=max(record.size for record in shown),
        row_limit=max(record.rows for record in shown),
        restarts=builder.restarts,
    )


def timeline_page(records: Sequence[StepRecord], title: str, last: int | None = None) -> str:
    """One HTML page that needs nothing else. Rids are data in it, never markup."""
    data = msgspec.json.encode(build_timeline(records, title, last)).decode()
    # "</script>" in a rid must not end the script; JSON has "<" only inside strings.
    return PAGE.replace("{{TITLE}}", html.escape(title)).replace(
        "{{DATA}}", data.replace("<", "\\u003c")
    )


def _passes(records: Sequence[StepRecord]) -> Passes:
    seconds, now = [], 0.0
    for at, record in enumerate(records):
        # The clock of another scheduler begins anywhere.
        if at and record.step > records[at - 1].step:
            now += record.time - records[at - 1].time
        seconds.append(round(now, 4))
    return Passes(
        step=[record.step for record in records],
        phase="".join(record.phase for record in records),
        ms=[round(sum(record.ms.values()), 2) for record in records],
        seconds=seconds,
        rows=[len(record.rids) for record in records],
        tokens=[sum(record.lens) if record.lens else len(record.rids) for record in records],
        used=[record.used for record in records],
        queued=[record.queued for record in records],
    )


def _facts(stats: Stats) -> list[tuple[str, str]]:
    retracted = sum(sums.requests for sums in stats.retractions.values())
    gap = stats.longest_gap
    return [
        ("passes", f"{stats.passes:,} in {stats.seconds:,.1f} s"),
        ("requests", ", ".join(f"{n} {name}" for name, n in stats.outcomes.items())),
        ("tokens out", f"{stats.given_tokens:,}"),
        ("rows used", f"{stats.phases['all'].utilisation:.1%}"),
        ("KV used", f"{stats.kv_usage.mean:.0%} mean, {stats.kv_usage.max:.0%} max"),
        ("retractions", str(retracted)),
        ("computed again", f"{stats.recomputed_tokens:,} tokens, {stats.recomputed_share:.1%}"),
        ("longest gap", "none" if gap is None else f"{gap.passes} passes, {gap.ms:.0f} ms"),
    ]
