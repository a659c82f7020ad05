"""A monitor reads a server by its log, ours or SGLang's."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from srt.monitor_history import Sample
from srt.monitor_sources import SourceError

# A log may hold days; so many bytes at its end are read for a start.
LOG_TAIL_BYTES = 16 << 20
# Passes between two decode lines where the log does not say: the default of ours and of SGLang.
DECODE_LOG_INTERVAL = 40
# A busy server writes more often; what one does that is silent for longer, its log does not say.
QUIET_SECONDS = 10.0

_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?([^\]]*)\]")
# Lines of --log-requests hold what clients sent, which may look like anything.
_OF_A_REQUEST = re.compile(r"^[^\]]*\]\s*(?:Receive: |Finish: |\{)")
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
_INTERVAL = re.compile(r"\bdecode_log_interval=(\d+)")
_ACCEPTED = re.compile(r"\baccept len: ([\d.]+)")
_START = re.compile(r"max_total_num_tokens=(\d+).*max_running_requests=(\d+)")


class LogReader:
    """Lines of a log to samples. Tokens generated are those of so many passes as a decode line
    stands for, and tokens computed again what retractions gave up: both about right. (Throughput
    times the time between two lines would count an idle night as a busy one.)"""

    def __init__(self) -> None:
        self.sample = Sample(
            0.0, retractions=0, recomputed=0, recomputed_is_estimate=True, computed=0,
            generated=0, out_of_memory=0,
        )  # fmt: skip
        self._passes_a_line = DECODE_LOG_INTERVAL

    def read(self, line: str) -> Sample | None:
        """The server after `line`, None if it says nothing about the load."""
        if _OF_A_REQUEST.match(line):
            return None
        stamp = _TIME.search(line)
        if stamp is not None and _OTHER_RANK.search(stamp[2]):
            return None
        now = self.sample.time
        if stamp is not None:
            now = max(now, datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").timestamp())
        if found := _INTERVAL.search(line):
            self._passes_a_line = int(found[1])
        changes = self._changes(line)
        if changes is None:
            return None
        self.sample = replace(self.sample, time=now, **changes)
        return self.sample

    def _changes(self, line: str) -> dict[str, Any] | None:
        before = self.sample
        if found := _PREFILL.search(line):
            return {**_load(line), "computed": (before.computed or 0) + int(found[1])}
        if found := _DECODE.search(line):
            return {**_load(line), **self._decoded(line, int(found[1]))}
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

    def _decoded(self, line: str, running: int) -> dict[str, Any]:
        accepted = _ACCEPTED.search(line)
        tokens = round(self._passes_a_line * running * (float(accepted[1]) if accepted else 1.0))
        speed = _SPEED.search(line)
        return {
            "gen_throughput": self.sample.gen_throughput if speed is None else float(speed[1]),
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
    is read from its beginning. When nothing is added for QUIET_SECONDS, time goes on without any
    load being known, so that what was does not stay on show as what is."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = str(path)
        self._path = path
        self._offset: int | None = None
        self._inode: int | None = None
        self._rest = b""  # of a line that is still being written
        self._reader = LogReader()
        self._clock = clock
        self._heard_at = clock()

    def poll(self) -> list[Sample]:
        try:
            lines = self._new_lines()
        except OSError as error:
            raise SourceError(f"{self._path}: {error.strerror or error}") from None
        last = self._reader.sample
        samples = [s for line in lines if (s := self._reader.read(line)) is not None]
        if samples:
            self._heard_at = self._clock()
            return samples
        quiet = self._clock() - self._heard_at
        if quiet < QUIET_SECONDS or last.time == 0.0:
            return []
        now = last.time + quiet
        return [replace(last, time=now, running=None, queued=None, usage=None, gen_throughput=None)]

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
