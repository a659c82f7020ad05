"""Rows of `req_to_token`: where each token of each admitted request has its KV slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from srt.device_copy import to_device
from srt.mem_cache.token_to_kv_pool import Int64Array


class ReqToTokenPool:
    """The table [num_rows + 1, context_len] int32 of slots and its free rows. Row 0 is padding.

    The host copy is the master; the device copy is what kernels read. On CPU they share memory.
    """

    def __init__(self, num_rows: int, context_len: int, device: str = "cpu") -> None:
        self.num_rows = num_rows
        self.context_len = context_len
        self.table: npt.NDArray[np.int32] = np.zeros((num_rows + 1, context_len), dtype=np.int32)
        self.device_table = (
            torch.from_numpy(self.table)
            if device == "cpu"
            else torch.zeros(self.table.shape, dtype=torch.int32, device=device)
        )
        self._on_device = device != "cpu"
        self._free = list(range(num_rows, 0, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        return self._free.pop() if self._free else None

    def free(self, row: int) -> None:
        self._free.append(row)

    def write(self, row: int, start: int, slots: Int64Array) -> None:
        """Tokens [start, start + len(slots)) of one row."""
        end = start + len(slots)
        self.table[row, start:end] = slots
        if self._on_device:
            new = to_device(self.table[row, start:end], self.device_table.device)
            self.device_table[row, start:end].copy_(new)

    def write_last(self, rows: Int64Array, positions: Int64Array, slots: Int64Array) -> None:
        """One token of each row: `table[rows[i], positions[i]] = slots[i]`, all [b]."""
        self.table[rows, positions] = slots
        if self._on_device:
            index = to_device(np.stack([rows, positions, slots]), self.device_table.device)
            self.device_table[index[0], index[1]] = index[2].int()

    def check(self, live_rows: list[int]) -> None:
        """Raise unless free and live rows partition 1..num_rows."""
        if sorted(self._free + live_rows) != list(range(1, self.num_rows + 1)):
            raise RuntimeError(
                f"row leak: {len(self._free)} free + {len(live_rows)} live != {self.num_rows}"
            )
