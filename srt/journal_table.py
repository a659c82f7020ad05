"""The step table of a journal: what each pass computed, for whom, and who waited for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from srt.journal import RefusedEntry, StepRecord, client_rid
from srt.journal_history import Extend, StepView, Track, follow

# With so many requests at most, and names of so many characters together, each has a column.
MAX_COLUMNS = 8
MAX_COLUMN_CHARS = 60
# Names in one cell, before it goes on with "+3".
MAX_NAMES = 4
# A rid is cut to what tells it from the others, and at least so many characters.
MIN_NAME_CHARS = 6
MAX_BLOCKED = 2  # the same for those that wait; the first ones are the ones that matter
# Cells longer than this do not widen their column.
MAX_PADDING = 64


def step_table(
    records: Iterable[StepRecord], last: int | None = None, rid: str | None = None
) -> list[str]:
    """The lines of a Markdown table, one a pass. `last`: only so many passes; `rid`: only those
    that have to do with this request, and only its tokens."""
    records = list(records)
    steps = [record for record in records if rid is None or rid in mentioned(record)]
    if last is not None:
        steps = steps[-last:] if last > 0 else []
    wanted = {id(record) for record in steps}
    names = short_names(rid for record in records for rid in mentioned(record))
    cells = RowCells(names, [rid] if rid is not None else _columns(steps, names))
    rows = [["step", "pass", cells.header, "KV", "waiting", "notes"]]
    for view in follow(records):
        cells.count(view)
        if id(view.record) in wanted:
            rows.append(cells.of(view))
    return list(_aligned(rows))


def _columns(steps: Sequence[StepRecord], names: Mapping[str, str]) -> list[str] | None:
    """The requests of `steps`, or None if they are too many for a column each."""
    rids = list(dict.fromkeys(rid for record in steps for rid in mentioned(record)))
    chars = sum(len(names[rid]) for rid in rids)
    return rids if len(rids) <= MAX_COLUMNS and chars <= MAX_COLUMN_CHARS else None


def mentioned(record: StepRecord) -> Iterator[str]:
    """Rids that a record names; the computed ones first, and some twice."""
    for entry in record.admitted:
        yield entry.rid
    yield from record.rids
    for event in record.retractions:
        yield from event.victims
    for refused in record.refused:
        yield refused.rid
    for arrived in record.arrived:
        yield arrived.rid
    # Whoever is aborted in the queue may be named by nothing else.
    yield from record.finished


def short_names(rids: Iterable[str]) -> dict[str, str]:
    """Each rid, cut to a start that no other one has, in letters that a table and a terminal can
    show: clients choose rids. A rid that a client used more than once keeps its serial number."""
    whole = set(rids)
    uses = Counter(client_rid(rid) for rid in whole)
    clients = {rid: name if uses[name := client_rid(rid)] == 1 else rid for rid in whole}
    names = dict(_cut(sorted(clients.values())))
    return {rid: names[client] for rid, client in clients.items()}


def _cut(ordered: list[str]) -> Iterator[tuple[str, str]]:
    for at, rid in enumerate(ordered):
        shared = max(
            (_common(rid, ordered[i]) for i in (at - 1, at + 1) if 0 <= i < len(ordered)), default=0
        )
        name = rid[: max(MIN_NAME_CHARS, shared + 1)]
        yield rid, "".join(c if c.isprintable() and c != "|" else "?" for c in name)


def _common(a: str, b: str) -> int:
    """Characters that both start with."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))


class RowCells:
    """Writes a pass as cells. `columns`: requests whose tokens are shown in every row; None: only
    those of requests that join or leave the batch."""

    def __init__(self, names: Mapping[str, str], columns: list[str] | None) -> None:
        self.names = names
        self.columns = columns
        self.header = "tokens so far"
        if columns is not None:
            self.header += " " + "/".join(names[rid] for rid in columns)
        self._tokens: dict[str, int] = {}  # by rid, of whoever has it now

    def count(self, view: StepView) -> None:
        """Of every pass, also of those that are not written."""
        for track in view.given:
            self._tokens[track.rid] = track.tokens

    def of(self, view: StepView) -> list[str]:
        """The cells of the pass that was counted last."""
        record = view.record
        return [
            str(record.step),
            self._pass(view),
            self._so_far(view),
            f"{record.used}/{record.size}",
            self._waiting(record),
            self._notes(view),
        ]

    def _pass(self, view: StepView) -> str:
        decodes = view.decodes + view.dropped
        parts = []
        if view.extends:
            parts.append("prefill " + _limited([self._extend(e) for e in view.extends]))
        if decodes:
            names = [self.names[track.rid] for track in decodes]
            is_wide = len(names) > (MAX_NAMES if self.columns is None else MAX_COLUMNS)
            parts.append(f"decode {len(names)} rows" if is_wide else "decode " + ", ".join(names))
        return ("mixed " if len(parts) == 2 else "") + " with ".join(parts)

    def _extend(self, extend: Extend) -> str:
        """The bare name for a whole prompt that computed all of itself, as most do."""
        track, entry = extend.track, extend.entry
        remarks = []
        if extend.is_inner or entry is None:
            whole = f" of {track.fill_len}" if track.fill_len else ""
            remarks.append(f"{extend.new}{whole}")
        if entry is not None and entry.retractions:
            remarks.append("again")
        if entry is not None and entry.cached:
            remarks.append(f"{entry.cached} cached")
        return self.names[track.rid] + (f" ({', '.join(remarks)})" if remarks else "")

    def _so_far(self, view: StepView) -> str:
        if self.columns is not None:
            return "/".join(str(self._tokens.get(rid, 0)) for rid in self.columns)
        changed = [e.track for e in view.extends] + view.retracted + view.ended + view.left
        return _limited([f"{self.names[t.rid]} {t.tokens}" for t in dict.fromkeys(changed)])

    def _waiting(self, record: StepRecord) -> str:
        if not record.queued:
            return ""
        named = record.refused
        if self.columns is not None:  # which may be of one request only
            columns = set(self.columns)
            named = sorted(named, key=lambda entry: entry.rid not in columns)
        named = named[:MAX_BLOCKED]
        rest = record.queued - len(named)
        texts = [f"{self.names[entry.rid]} {blocker_text(entry)}" for entry in named]
        if rest > 0:
            texts.append(f"+{rest}" if named else str(rest))
        return ", ".join(texts)

    def _notes(self, view: StepView) -> str:
        notes = ["RESTARTED"] if view.restarted else []
        for event in view.record.retractions:
            victims = _limited([self.names[rid] for rid in event.victims])
            notes.append(
                f"RETRACTED {victims} ({event.cause}: {event.lost} lost, {event.gained} gained, "
                f"ratio {event.old_ratio:.2f} to {event.new_ratio:.2f})"
            )
        ends = [self._end(track) for track in view.left + view.ended]
        if ends:
            notes.append("end of " + _limited(ends))
        return "; ".join(notes)

    def _end(self, track: Track) -> str:
        return f"{self.names[track.rid]} ({track.outcome})"


def blocker_text(entry: RefusedEntry) -> str:
    """What a request waits for, in a word or two."""
    missing = entry.needed + entry.reserved - entry.available
    if entry.blocker in ("kv", "prefill_budget") and missing > 0:
        return f"{entry.blocker} short by {missing}"
    return entry.blocker


def _limited(texts: list[str]) -> str:
    shown = texts if len(texts) <= MAX_NAMES + 1 else texts[:MAX_NAMES]
    return ", ".join(shown) + (f", +{len(texts) - len(shown)}" if len(shown) < len(texts) else "")


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    widths = [
        max((len(row[at]) for row in rows if len(row[at]) <= MAX_PADDING), default=0)
        for at in range(len(rows[0]))
    ]
    for number, row in enumerate(rows):
        step, *rest = row
        cells = [step.rjust(widths[0])]
        cells += [cell.ljust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "| " + " | ".join(cells) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
