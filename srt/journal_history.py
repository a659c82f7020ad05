"""What became of each request, pass by pass: the records of a journal, read in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from srt.journal import AdmittedEntry, ArrivedEntry, StepRecord

# Outcome of a request that was running and then was not, without a reason in the journal: aborted,
# or it asked for no tokens.
LEFT = "left"


class State(Enum):
    WAITING = "waiting"
    CHUNKED = "chunked"  # in mid-chunk: admitted, its prompt not computed to the end
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Track:
    """One request, as far as the records read so far tell. When they begin in the middle of its
    life, `tokens` and `kv_len` count from there."""

    rid: str
    state: State = State.WAITING
    tokens: int = 0  # that its client got
    kv_len: int = 0  # its tokens with KV; after a retraction, those it had
    fill_len: int = 0  # tokens that its prefill covers: prompt and outputs at its last admission
    start_len: int = 0  # tokens of its prompt
    retractions: int = 0
    outcome: str = ""  # type of its finish reason, LEFT, or "" while it lives


@dataclass(frozen=True)
class Extend:
    """A request's part of a prefill: `new` tokens; `entry` if it left the queue for this pass."""

    track: Track
    new: int
    entry: AdmittedEntry | None
    is_inner: bool


@dataclass(frozen=True)
class StepView:
    """One pass, with its requests. Lists are in the order of the record. The tracks live on: what
    they say holds until the next view is asked for."""

    index: int  # of the record, from 0; unlike `step` it goes on after a restart
    record: StepRecord
    restarted: bool  # the scheduler that wrote this is not the one that wrote the record before
    arrived: list[Track]  # in the queue since the pass before; some left it for this one
    extends: list[Extend]
    decodes: list[Track]
    given: list[Track]  # got a token by this pass
    dropped: list[Track]  # computed a token that nobody gets: with overlap, a stop is known late
    retracted: list[Track]
    recomputed: int  # tokens of retracted requests that have KV again only by computing it again
    ended: list[Track]  # by this pass
    left: list[Track]  # gone since the pass before, without a reason in the journal


class History:
    """Reads records one by one. A rid that comes back after its end is a new request."""

    def __init__(self) -> None:
        self.tracks: list[Track] = []  # in the order in which the records first name them
        self._by_rid: dict[str, Track] = {}
        self._running: dict[str, Track] = {}
        self._num_records = 0
        self._last_step = -1

    def advance(self, record: StepRecord) -> StepView:
        restarted = record.step <= self._last_step
        if restarted:
            self._restart()
        arrived = [self._arrive(entry) for entry in record.arrived]
        retracted = self._retract(record)
        recomputed = self._admit(record)
        for refused in record.refused:
            self.track(refused.rid)
        extends, decodes, dropped = self._compute(record)
        left = self._find_left(record)
        given = [e.track for e in extends if not e.is_inner] + decodes
        for track in given:
            track.tokens += 1
        index, self._num_records = self._num_records, self._num_records + 1
        self._last_step = record.step
        return StepView(
            index,
            record,
            restarted,
            arrived,
            extends,
            decodes,
            given,
            dropped,
            retracted,
            recomputed,
            [self._end(self.track(rid), reason) for rid, reason in record.finished.items()],
            left,
        )

    def track(self, rid: str) -> Track:
        """The request that is called so now."""
        track = self._by_rid.get(rid)
        return self._add(rid) if track is None else track

    def _add(self, rid: str) -> Track:
        track = Track(rid)
        self._by_rid[rid] = track
        self.tracks.append(track)
        return track

    def _arrive(self, entry: ArrivedEntry) -> Track:
        track = self._by_rid.get(entry.rid)
        # After a restart, whoever lived arrives once more.
        if track is None or track.state is State.ENDED:
            track = self._add(entry.rid)
            track.start_len = entry.prompt_len
        return track

    def _restart(self) -> None:
        """A new scheduler knows nobody. Those that lived are submitted again, or gone."""
        for track in self._by_rid.values():
            if track.state is not State.ENDED:
                track.state = State.WAITING
        self._running.clear()

    def _retract(self, record: StepRecord) -> list[Track]:
        tracks = [self.track(rid) for event in record.retractions for rid in event.victims]
        for track in tracks:
            track.state = State.WAITING
            track.retractions += 1
            self._running.pop(track.rid, None)
        return tracks

    def _admit(self, record: StepRecord) -> int:
        """Tokens that those admitted again have to compute again."""
        recomputed = 0
        for entry in record.admitted:
            track = self.track(entry.rid)
            if self._is_another(track, entry):
                if track.state is not State.ENDED:
                    self._end(track, LEFT)
                track = self._add(entry.rid)
            if entry.retractions > 0:
                had = track.kv_len if track.start_len > 0 else entry.fill_len - 1
                recomputed += max(0, had - entry.cached)
            if track.start_len == 0:
                track.start_len = entry.fill_len - track.tokens
            track.fill_len = entry.fill_len
            track.kv_len = entry.cached
            track.state = State.CHUNKED  # until a chunk is its last
        return recomputed

    def _is_another(self, track: Track, entry: AdmittedEntry) -> bool:
        """Was the rid of `track` given to a new request? One that a restart cut off comes back with
        its tokens behind its prompt."""
        if track.state is not State.WAITING:
            return True
        whole = track.start_len + track.tokens
        return entry.retractions == 0 and track.start_len > 0 and entry.fill_len != whole

    def _compute(self, record: StepRecord) -> tuple[list[Extend], list[Track], list[Track]]:
        """Extends, decodes and dropped."""
        extends, decodes, dropped = [], [], []
        entries = {entry.rid: entry for entry in record.admitted}
        inner = set(record.inner)
        lens = record.lens or [1] * len(record.rids)
        for rid, new in zip(record.rids, lens, strict=True):
            track = self.track(rid)
            if track.state is State.ENDED:
                dropped.append(track)
                continue
            track.kv_len += new
            # In a mixed pass, those that ride along look like a prompt with one token left.
            rides = new == 1 and rid not in entries and track.state is not State.CHUNKED
            if record.phase == "D" or (record.phase == "M" and rides):
                decodes.append(track)
            else:
                extends.append(Extend(track, new, entries.get(rid), rid in inner))
            track.state = State.CHUNKED if rid in inner else State.RUNNING
            if track.state is State.RUNNING:
                self._running[rid] = track
        return extends, decodes, dropped

    def _find_left(self, record: StepRecord) -> list[Track]:
        """A pass that decodes has everyone who runs in it."""
        if record.phase == "P":
            return []
        members = set(record.rids)
        gone = [
            track
            for rid, track in self._running.items()
            if rid not in members and rid not in record.finished
        ]
        return [self._end(track, LEFT) for track in gone]

    def _end(self, track: Track, outcome: str) -> Track:
        track.state, track.outcome = State.ENDED, outcome
        self._running.pop(track.rid, None)
        return track


def follow(records: Iterable[StepRecord], history: History | None = None) -> Iterator[StepView]:
    """The views of `records`, one by one. `history`: where to find the tracks afterwards."""
    history = History() if history is None else history
    for record in records:
        yield history.advance(record)
