"""A monitor reads a server by its log, ours or SGLang's."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from srt.monitor_history import Sample
from srt.monitor_sources import SourceError

# A log may hold days; so many bytes at its end are read for a start.
LOG_TAIL_BYTES = 16 << 20

_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?([^\]]*)\]")
_OTHER_RANK = re.compile(r"\b(?:TP|PP|DP)[1-9]\d*\b")
# Of SGLang too, of old releases as of new ones.
_PREFILL = re.compile(r"Prefill batch\b.*#new-seq: \d+, #new-token: (\d+)")
_DECODE = re.compile(r"Decode batch\b.*#running-req: (\d+)")
_RETRACT = re.compile(
    r"(?:Retract requests|Testing retraction|Decode out of memory happened)\b.*"
    r"#retracted_reqs: (\d+)(?:, #new_tokens_gained: (-?\d+))?"
)
_RATIO = re.compile(r"#new_token_ratio: [\d.]+ -> ([\d.]+)")
_LAST_ABORTED = "retract_decode: aborted last request"
_USAGE = re.compile(r"token usage: ([\d.]+)")
_RUNNING = re.compile(r"#running-req: (\d+)")
_QUEUED = re.compile(r"#queue-req: (\d+)")
_SPEED = re.compile(r"gen throughput \(token/s\): ([\d.]+)")
_START = re.compile(r"max_total_num_tokens=(\d+).*max_running_requests=(\d+)")


class LogReader:
    """Lines of a log to samples. Tokens generated are the throughput of decode lines times the
    time between them, and tokens computed again what retractions gave up: both about right."""

    def __init__(self) -> None:
        self.sample = Sample(
            0.0, retractions=0, recomputed=0, recomputed_is_estimate=True, computed=0,
            generated=0, out_of_memory=0,
        )  # fmt: skip
        self._last_decode: float | None = None

    def read(self, line: str) -> Sample | None:
        """The server after `line`, None if it says nothing about the load."""
        stamp = _TIME.search(line)
        if stamp is not None and _OTHER_RANK.search(stamp[2]):
            return None
        now = self.sample.time
        if stamp is not None:
            now = max(now, datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").timestamp())
        changes = self._changes(line, now)
        if changes is None:
            return None
        self.sample = replace(self.sample, time=now, **changes)
        return self.sample

    def _changes(self, line: str, now: float) -> dict[str, Any] | None:
        before = self.sample
        if found := _PREFILL.search(line):
            return {**_load(line), "computed": (before.computed or 0) + int(found[1])}
        if _DECODE.search(line):
            return {**_load(line), **self._decoded(line, now)}
        if found := _RETRACT.search(line):
            ratio = _RATIO.search(line)
            return {
                "retractions": (before.retractions or 0) + int(found[1]),
                "recomputed": (before.recomputed or 0) + max(0, int(found[2] or 0)),
                "ratio": float(ratio[1]) if ratio else before.ratio,
            }
        if _LAST_ABORTED in line:
            return {"out_of_memory": (before.out_of_memory or 0) + 1}
        if found := _START.search(line):
            return {"pool_tokens": int(found[1]), "max_running": int(found[2])}
        return None

    def _decoded(self, line: str, now: float) -> dict[str, Any]:
        speed = _SPEED.search(line)
        if speed is None:
            return {}
        seconds = 0.0 if self._last_decode is None else now - self._last_decode
        self._last_decode = now
        tokens = round(float(speed[1]) * seconds)
        return {
            "gen_throughput": float(speed[1]),
            "generated": (self.sample.generated or 0) + tokens,
            "computed": (self.sample.computed or 0) + tokens,
        }


def _load(line: str) -> dict[str, Any]:
    """Running, queued and usage, as far as the line has them."""
    found: dict[str, Any] = {}
    for name, pattern, kind in (
        ("running", _RUNNING, int), ("queued", _QUEUED, int), ("usage", _USAGE, float),
    ):  # fmt: skip
        if match := pattern.search(line):
            found[name] = kind(match[1])
    return found


class LogSource:
    """Follows a file: what is there at first, then what is added. A file that was replaced or cut
    is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._offset: int | None = None
        self._inode: int | None = None
        self._rest = b""  # of a line that is still being written
        self._reader = LogReader()

    def poll(self) -> list[Sample]:
        try:
            return [s for line in self._new_lines() if (s := self._reader.read(line)) is not None]
        except OSError as error:
            raise SourceError(f"{self._path}: {error.strerror or error}") from None

    def _new_lines(self) -> list[str]:
        with self._path.open("rb") as file:
            status = self._path.stat()
            if self._offset is None:
                self._offset = max(0, status.st_size - LOG_TAIL_BYTES)
            elif status.st_ino != self._inode or status.st_size < self._offset:
                self._offset, self._rest = 0, b""
            self._inode = status.st_ino
            file.seek(self._offset)
            data = file.read()
            self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]
