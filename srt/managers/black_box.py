"""What a scheduler process was doing, in memory that outlives it: heartbeat, members, last passes.

A file mapped by both processes. The scheduler writes it without a system call; the HTTP process
reads it when the scheduler hangs or is dead. It holds no text.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

SIZE = 1 << 20
NUM_PASSES = 64
# Requests that came in since the last pass began; one of them may be what kills the scheduler.
NUM_ARRIVALS = 16

_BEAT = struct.Struct("<d")  # time.monotonic() seconds, the same clock in every process
_COUNT = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_PASS = struct.Struct("<QdBIIII")  # step, time, phase letter, rows, new tokens, used, queued
_BEAT_AT, _COUNT_AT, _LENGTH_AT, _PASSES_AT = 0, 8, 16, 64
_RIDS_AT = _PASSES_AT + NUM_PASSES * _PASS.size


def black_box_path(ipc_dir: Path) -> Path:
    return ipc_dir / "black_box"


def create_black_box(path: Path) -> None:
    """An empty one. The process that reads it makes it, before the other one starts."""
    with path.open("wb") as file:
        file.truncate(SIZE)


def _map(path: Path, access: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), SIZE, access=access)


class BlackBox:
    """The scheduler's side."""

    def __init__(self, path: Path) -> None:
        self._map = _map(path, mmap.ACCESS_WRITE)
        self._num_passes = 0
        self._rids: Sequence[str] = ()
        self._arrived: deque[str] = deque(maxlen=NUM_ARRIVALS)

    def beat(self) -> None:
        """The loop still turns."""
        _BEAT.pack_into(self._map, _BEAT_AT, time.monotonic())

    def on_arrival(self, rid: str) -> None:
        self._arrived.append(rid)
        self._write_rids([*self._rids, *self._arrived])

    def on_pass(
        self, step: int, phase: str, rids: Sequence[str], num_new: int, used: int, queued: int
    ) -> None:
        """A pass is about to be launched. `rids` must not change afterwards."""
        at = _PASSES_AT + self._num_passes % NUM_PASSES * _PASS.size
        now = time.monotonic()
        _PASS.pack_into(self._map, at, step, now, ord(phase), len(rids), num_new, used, queued)
        self._num_passes += 1
        _COUNT.pack_into(self._map, _COUNT_AT, self._num_passes)
        if rids is not self._rids or self._arrived:  # most decode passes have the same members
            self._rids = rids
            self._arrived.clear()
            self._write_rids(rids)

    def _write_rids(self, rids: Sequence[str]) -> None:
        data = msgspec.msgpack.encode(rids)
        # No length while the rest is half written.
        _LENGTH.pack_into(self._map, _LENGTH_AT, 0)
        if _RIDS_AT + len(data) <= SIZE:
            self._map[_RIDS_AT : _RIDS_AT + len(data)] = data
            _LENGTH.pack_into(self._map, _LENGTH_AT, len(data))


class BlackBoxReader:
    """The HTTP process's side."""

    def __init__(self, path: Path) -> None:
        self._map = _map(path, mmap.ACCESS_READ)

    def last_beat(self) -> float:
        """`time.monotonic()` of the last turn of the loop. Before the first one: now, since a model
        may take any time to load."""
        beat: float = _BEAT.unpack_from(self._map, _BEAT_AT)[0]
        return beat or time.monotonic()

    def rids(self) -> list[str]:
        """The members of the last pass, and who came in after it began. Read it when the writer is
        dead; empty if it died while it wrote them."""
        (length,) = _LENGTH.unpack_from(self._map, _LENGTH_AT)
        if not length:
            return []
        return msgspec.msgpack.decode(self._map[_RIDS_AT : _RIDS_AT + length], type=list[str])

    def passes(self) -> list[dict[str, Any]]:
        """The last passes, oldest first."""
        (count,) = _COUNT.unpack_from(self._map, _COUNT_AT)
        found = []
        for number in range(max(0, count - NUM_PASSES), count):
            at = _PASSES_AT + number % NUM_PASSES * _PASS.size
            step, begun, phase, rows, new, used, queued = _PASS.unpack_from(self._map, at)
            found.append(
                {
                    "step": step,
                    "time": begun,
                    "phase": chr(phase),
                    "rows": rows,
                    "new_tokens": new,
                    "used": used,
                    "queued": queued,
                }
            )
        return found

    def close(self) -> None:
        self._map.close()
