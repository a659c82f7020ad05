"""A weight matrix in 4, 8 or 32 bits, packed for the CPU kernels, and products with it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from srt.layers.quantization.blocks import QuantizedBlocks

_SOURCE_F32 = 0
_SOURCES = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 3}


class PackedFormat(IntEnum):
    """As csrc/weight.h numbers them. In Q4 and Q8 a weight is code * scale (+ minimum), scale and
    minimum being float16 and shared by 32 consecutive inputs."""

    Q4 = 0  # codes 0..15, with a minimum
    Q8 = 1  # codes -127..127
    DENSE = 2  # float32, and products are exact


class NativeWeight(ctypes.Structure):
    """Weight in csrc/linear.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )


class PanelArena:
    """Memory for the panels of one model, side by side in large slabs: the kernel gives those huge
    pages, and reading weights at batch 1 is then 1.2 times as fast (Zen 3, virtual machine)."""

    SLAB_BYTES = 64 << 20

    def __init__(self) -> None:
        self._slab = _zeros(0)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Zeros [num_bytes] uint8, at an address that is a multiple of 64."""
        if self._used + num_bytes > len(self._slab):
            # What is left of the last slab is never touched, so it costs no memory.
            self._slab = _zeros(max(num_bytes, self.SLAB_BYTES))
            self._used = 0
        taken = self._slab[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // 64) * 64
        return taken


def _zeros(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 from an address that is a multiple of 64, not touched before its use."""
    # NumPy, unlike torch, asks the system for untouched zeros, and for huge pages.
    memory = np.zeros(num_bytes + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory)[start : start + num_bytes]


class PackedWeight:
    """`weight` [outputs, inputs] in blocks. Rows arrive in parts, through `load_rows`; once all are
    there it can be multiplied with.

    Products with int8 activations round each 32 activations of a row to int8 with a scale of their
    own; with `exact` they stay float32, as they always do for DENSE weights. Either way a row's
    result has the same bits with any number of other rows."""

    def __init__(
        self,
        library: ctypes.CDLL,
        arena: PanelArena,
        outputs: int,
        inputs: int,
        weight_format: PackedFormat | None,
        exact: bool,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Without a format, 4-bit blocks are kept as such, and all else becomes 8-bit. `bias`
        [outputs] float32 may be filled later, in place."""
        assert bias is None or (bias.dtype is torch.float32 and bias.is_contiguous())
        self.library = library
        self._arena = arena
        self.shape = (outputs, inputs)
        self.format = weight_format
        self.exact = exact
        self._bias = bias
        self._parts: list[tuple[int, QuantizedBlocks | torch.Tensor]] = []
        self._panels: torch.Tensor | None = None
        self._native: NativeWeight | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._panels is None else self._panels.nbytes

    @property
    def native(self) -> NativeWeight:
        """For the kernels; valid while this object lives."""
        assert self._native is not None, "not all rows are loaded"
        return self._native

    def load_rows(self, first: int, values: QuantizedBlocks | torch.Tensor) -> None:
        """Rows [first, first + len) of the matrix. The last ones to come trigger the packing."""
        assert self._native is None, "all rows are loaded already"
        self._parts.append((first, values))
        if sum(part.shape[0] for _, part in self._parts) == self.shape[0]:
            self._pack()

    def _pack(self) -> None:
        if self.format is None:
            four_bits = all(
                isinstance(part, QuantizedBlocks) and part.kind in ("Q4_0", "Q4_1")
                for _, part in self._parts
            )
            self.format = PackedFormat.Q4 if four_bits else PackedFormat.Q8
        size = self.library.rg_packed_bytes(self.format, *self.shape)
        # Of zeros: what lies past the last output must be finite.
        panels = self._arena.take(size)
        for first, part in self._parts:
            source, data = self._as_source(part)
            rows, inputs = part.shape
            self.library.rg_pack(
                panels.data_ptr(), self.format, data.data_ptr(), source, first, rows, inputs
            )
        self._parts = []
        self._panels = panels
        bias = 0 if self._bias is None else self._bias.data_ptr()
        self._native = NativeWeight(panels.data_ptr(), bias, *self.shape, self.format)

    def _as_source(self, part: QuantizedBlocks | torch.Tensor) -> tuple[int, torch.Tensor]:
        """The kernel's number of a layout that it packs into our format, and the bytes."""
        if isinstance(part, QuantizedBlocks):
            own_format = PackedFormat.Q8 if part.kind == "Q8_0" else PackedFormat.Q4
            if self.format is own_format:
                return _SOURCES[part.kind], part.data.contiguous()
            part = part.dequantize()
        return _SOURCE_F32, part.to(torch.float32).contiguous()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] -> x @ weight.T + bias [..., outputs], in the type of x."""
        outputs, inputs = self.shape
        rows = x.numel() // inputs
        flat = x.float().reshape(rows, inputs)
        if flat.stride(-1) != 1:
            flat = flat.contiguous()
        out = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32)
        self.library.rg_linear(
            ctypes.byref(self.native),
            flat.data_ptr(),
            flat.stride(0),
            rows,
            self.exact,
            out.data_ptr(),
        )
        return out.to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [m] int64 of the matrix, [m, inputs] float32."""
        ids = ids.contiguous()
        out = torch.empty((len(ids), self.shape[1]), dtype=torch.float32)
        self.library.rg_unpack_rows(
            ctypes.byref(self.native), ids.data_ptr(), len(ids), out.data_ptr()
        )
        return out


@dataclass(frozen=True)
class PackedRows:
    """Where a checkpoint's tensor goes: some rows of a packed weight."""

    weight: PackedWeight
    first: int
    shape: tuple[int, int]

    def copy_(self, values: QuantizedBlocks | torch.Tensor) -> None:
        self.weight.load_rows(self.first, values)
