"""The journal: one record a pass, with what the scheduler decided and why. It holds no text.

`python -m srt.journal show|stats|timeline FILE` reads the file that `--journal FILE` writes.
"""

from __future__ import annotations

import logging.handlers
import sys
from collections import deque
from pathlib import Path
from typing import Any, TypeVar

import msgspec

# Records kept for GET /v1/journal.
RING_SIZE = 512
# A journal file is turned over at this size; so many old ones are kept.
FILE_BYTES = 64 << 20
OLD_FILES = 2


class ArrivedEntry(msgspec.Struct):
    """A request that joined the queue since the record before; `time` as in StepRecord."""

    rid: str
    time: float
    prompt_len: int


class RefusedEntry(msgspec.Struct):
    """A request that waits on, and for what: see Blocker."""

    rid: str
    blocker: str
    needed: int
    available: int
    reserved: int


class AdmittedEntry(msgspec.Struct):
    """A request that left the queue: tokens it found in the cache, and its state at that time."""

    rid: str
    cached: int
    fill_len: int
    retractions: int


class RetractionEntry(msgspec.Struct):
    cause: str
    victims: list[str]
    gained: int
    lost: int
    old_ratio: float
    new_ratio: float


Entry = TypeVar("Entry", ArrivedEntry, AdmittedEntry, RefusedEntry)


class StepRecord(msgspec.Struct, omit_defaults=True):
    """One pass. `time`: seconds of the scheduler's clock at its choice. `lens[i]`: new tokens of
    `rids[i]`. `inner`: members of which only an inner chunk is computed. `ms`: receive, choose,
    run, process. Token counts are KV slots; `used` counts those of live requests."""

    step: int
    time: float
    phase: str  # "P" prefill, "D" decode, "M" both in one pass
    rids: list[str]
    lens: list[int]
    used: int
    size: int
    queued: int
    ratio: float
    budget_left: int = 0
    inner: list[str] = []
    arrived: list[ArrivedEntry] = []
    admitted: list[AdmittedEntry] = []
    refused: list[RefusedEntry] = []
    retractions: list[RetractionEntry] = []
    finished: dict[str, str] = {}  # rid to type of its finish reason
    rows: int = 0  # max_running_requests
    ms: dict[str, float] = {}


class Journal:
    """A ring of the last records, and the file if there is one."""

    def __init__(self, path: str | None = None, ring_size: int = RING_SIZE) -> None:
        """OSError if the file cannot be written."""
        self._ring: deque[StepRecord] = deque(maxlen=ring_size)
        self._encoder = msgspec.json.Encoder()
        self._file: logging.Handler | None = None
        if path is not None:
            handler = logging.handlers.RotatingFileHandler(
                path, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8"
            )
            handler.setFormatter(logging.Formatter("%(message)s"))
            # Without a logger: whoever turns logging down must not lose the journal.
            self._file = handler

    def write(self, record: StepRecord) -> None:
        self._ring.append(record)
        if self._file is not None:
            line = self._encoder.encode(record).decode()
            self._file.handle(logging.makeLogRecord({"msg": line}))

    def last(self, count: int) -> list[dict[str, Any]]:
        """The last `count` records, oldest first, as JSON-ready dicts with the clients' rids."""
        if count <= 0:
            return []
        records = list(self._ring)[-count:]
        return [msgspec.to_builtins(with_client_rids(record)) for record in records]


def client_rid(rid: str) -> str:
    """The rid by which a client knows the request that the scheduler calls `rid`. The scheduler's
    ends with "#" and a serial number if the client chose it."""
    name, _, serial = rid.rpartition("#")
    return name if name and serial.isdecimal() else rid


def with_client_rids(record: StepRecord) -> StepRecord:
    """A copy for clients. Among live requests their rids are unique too."""

    def renamed(entries: list[Entry]) -> list[Entry]:
        return [msgspec.structs.replace(entry, rid=client_rid(entry.rid)) for entry in entries]

    def names(rids: list[str]) -> list[str]:
        return [client_rid(rid) for rid in rids]

    return msgspec.structs.replace(
        record,
        rids=names(record.rids),
        inner=names(record.inner),
        arrived=renamed(record.arrived),
        admitted=renamed(record.admitted),
        refused=renamed(record.refused),
        retractions=[
            msgspec.structs.replace(event, victims=names(event.victims))
            for event in record.retractions
        ],
        finished={client_rid(rid): reason for rid, reason in record.finished.items()},
    )


def read_journal(path: Path) -> list[StepRecord]:
    """All records of a file. ValueError names the line that is none; a cut-off last line is left
    out, since the server may be writing it."""
    decoder = msgspec.json.Decoder(StepRecord)
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number} is not a journal record: {error}") from error
    return records


if __name__ == "__main__":
    from srt.journal_report import main

    sys.exit(main())
