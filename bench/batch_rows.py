"""Three ways to hold the columns of a running batch, with the same churn on the same columns.

Each keeps, for every running request, three columns that the device reads and four that only the
host reads. `leave` and `join` change who is in; `device_columns` is what the next pass is given.
`rows_moved` counts the entries copied for it, so that they can be compared without a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

NUM_DEVICE, NUM_HOST = 3, 4
HostColumns = npt.NDArray[np.int64]  # [NUM_HOST, b]


class BatchRows(Protocol):
    name: str
    rows_moved: int

    def join(self, rids: Sequence[int]) -> None:
        """New requests, with columns made of their ids."""

    def leave(self, rids: Sequence[int]) -> None:
        """Requests that have ended."""

    def park(self) -> None:
        """Everybody pauses: the next `join` or `resume` begins another batch."""

    def resume(self, rids: Sequence[int]) -> None:
        """Those parked before, exactly these, run again instead of whoever runs now."""

    def device_columns(self) -> list[torch.Tensor]:
        """NUM_DEVICE tensors [b] in the order of `order`, without gaps."""

    def order(self) -> list[int]:
        """The id of each row."""


def columns_of(rids: Sequence[int]) -> tuple[list[torch.Tensor], HostColumns]:
    """What a prefill hands over for new requests: NUM_DEVICE tensors [n] and a [NUM_HOST, n]."""
    ids = np.asarray(rids, dtype=np.int64)
    device = [torch.from_numpy(ids * (k + 1)) for k in range(NUM_DEVICE)]
    return device, np.stack([ids * (NUM_DEVICE + k + 1) for k in range(NUM_HOST)])


class GatherRows:
    """Gather and concat: a new set of columns at every change, none at all without one. Another
    batch is another object."""

    name = "gather"

    def __init__(self, capacity: int) -> None:
        self.rows_moved = 0
        self._rids: list[int] = []
        self._device = [torch.empty(0, dtype=torch.int64) for _ in range(NUM_DEVICE)]
        self._host: HostColumns = np.empty((NUM_HOST, 0), dtype=np.int64)
        self._parked: dict[int, tuple[list[int], list[torch.Tensor], HostColumns]] = {}

    def join(self, rids: Sequence[int]) -> None:
        device, host = columns_of(rids)
        self._rids = [*self._rids, *rids]
        self._device = [
            torch.cat([old, new]) for old, new in zip(self._device, device, strict=True)
        ]
        self._host = np.concatenate([self._host, host], axis=1)
        self.rows_moved += len(self._rids)

    def leave(self, rids: Sequence[int]) -> None:
        gone = set(rids)
        keep = [i for i, rid in enumerate(self._rids) if rid not in gone]
        rows = np.array(keep, dtype=np.int64)
        index = torch.from_numpy(rows)
        self._rids = [self._rids[i] for i in keep]
        self._device = [column[index] for column in self._device]
        self._host = self._host[:, rows]
        self.rows_moved += len(keep)

    def park(self) -> None:
        if self._rids:
            self._parked[self._rids[0]] = (self._rids, self._device, self._host)
        self._rids = []
        self._device = [torch.empty(0, dtype=torch.int64) for _ in range(NUM_DEVICE)]
        self._host = np.empty((NUM_HOST, 0), dtype=np.int64)

    def resume(self, rids: Sequence[int]) -> None:
        self.park()
        self._rids, self._device, self._host = self._parked.pop(rids[0])

    def device_columns(self) -> list[torch.Tensor]:
        return self._device

    def order(self) -> list[int]:
        return self._rids


class CondensedRows:
    """Persistent rows [0, b) of fixed arrays: newcomers fill holes, then the last rows move into
    those that are left (vLLM's way). Whoever is not in the pass must give up its row."""

    name = "condense"

    def __init__(self, capacity: int) -> None:
        self.rows_moved = 0
        self._count = 0
        self._rids: list[int] = [-1] * capacity
        self._row_of: dict[int, int] = {}
        self._holes: list[int] = []  # rows below _count whose request has left
        self._device = [torch.zeros(capacity, dtype=torch.int64) for _ in range(NUM_DEVICE)]
        self._host: HostColumns = np.zeros((NUM_HOST, capacity), dtype=np.int64)

    def join(self, rids: Sequence[int]) -> None:
        self._holes.sort(reverse=True)
        rows = []
        for rid in rids:
            row = self._holes.pop() if self._holes else self._count
            if row == self._count:
                self._count += 1
            self._rids[row] = rid
            self._row_of[rid] = row
            rows.append(row)
        device, host = columns_of(rids)
        where = np.array(rows, dtype=np.int64)
        index = torch.from_numpy(where)
        for column, new in zip(self._device, device, strict=True):
            column[index] = new
        self._host[:, where] = host
        self.rows_moved += len(rows)
        self._condense()

    def leave(self, rids: Sequence[int]) -> None:
        for rid in rids:
            row = self._row_of.pop(rid)
            self._rids[row] = -1
            self._holes.append(row)

    def park(self) -> None:
        self.leave([rid for rid in self._rids[: self._count] if rid >= 0])

    def resume(self, rids: Sequence[int]) -> None:
        self.park()
        self.join(rids)  # their columns must be written again: the rows were others' meanwhile

    def _condense(self) -> None:
        if not self._holes:
            return
        holes = set(self._holes)
        self._holes = []
        sources, targets = [], []
        for hole in sorted(holes):
            while self._count - 1 in holes:
                self._count -= 1
            if hole >= self._count:
                break
            holes.discard(hole)
            self._count -= 1
            sources.append(self._count)
            targets.append(hole)
            rid = self._rids[self._count]
            self._rids[hole], self._rids[self._count] = rid, -1
            self._row_of[rid] = hole
        if sources:
            source, target = np.array(sources), np.array(targets)
            source_index, target_index = torch.from_numpy(source), torch.from_numpy(target)
            for column in self._device:
                column[target_index] = column[source_index]
            self._host[:, target] = self._host[:, source]
            self.rows_moved += len(sources)

    def device_columns(self) -> list[torch.Tensor]:
        self._condense()
        return [column[: self._count] for column in self._device]

    def order(self) -> list[int]:
        self._condense()
        return self._rids[: self._count]


class IndexedRows:
    """Rows that never move and a list of free ones: the pass gets its columns through an index of
    the rows in it, made anew when that changes, and a gather at every pass."""

    name = "index map"

    def __init__(self, capacity: int) -> None:
        self.rows_moved = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._row_of: dict[int, int] = {}  # of everybody, parked or not
        self._active: dict[int, None] = {}  # who is in the pass, in order
        self._index: torch.Tensor | None = None
        self._device = [torch.zeros(capacity, dtype=torch.int64) for _ in range(NUM_DEVICE)]
        self._host: HostColumns = np.zeros((NUM_HOST, capacity), dtype=np.int64)

    def join(self, rids: Sequence[int]) -> None:
        rows = [self._free.pop() for _ in rids]
        self._row_of.update(zip(rids, rows, strict=True))
        self._active.update(dict.fromkeys(rids))
        device, host = columns_of(rids)
        where = np.array(rows, dtype=np.int64)
        index = torch.from_numpy(where)
        for column, new in zip(self._device, device, strict=True):
            column[index] = new
        self._host[:, where] = host
        self._index = None
        self.rows_moved += len(rows)

    def leave(self, rids: Sequence[int]) -> None:
        for rid in rids:
            self._free.append(self._row_of.pop(rid))
            del self._active[rid]
        self._index = None

    def park(self) -> None:
        self._active = {}
        self._index = None

    def resume(self, rids: Sequence[int]) -> None:
        self._active = dict.fromkeys(rids)
        self._index = None

    def device_columns(self) -> list[torch.Tensor]:
        if self._index is None:
            rows = [self._row_of[rid] for rid in self._active]
            self._index = torch.tensor(rows, dtype=torch.int64)
        self.rows_moved += len(self._active)
        return [column[self._index] for column in self._device]

    def order(self) -> list[int]:
        return list(self._active)


KINDS: tuple[type[GatherRows] | type[CondensedRows] | type[IndexedRows], ...] = (
    GatherRows,
    CondensedRows,
    IndexedRows,
)
