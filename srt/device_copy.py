"""Copies between host and device that do not make the host wait before it must."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[Any] | torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """`values` of the host on the device; for the CPU without a copy.

    From pinned memory a copy only joins the queue of the device, where one from ordinary memory
    waits for everything queued before it. The allocator keeps pinned memory until the copy is
    done, and the caller may change `values` at once."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host, in the device's queue behind what computes them and before
    whatever is launched later. On the CPU they are there already."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors, once they have arrived. Passes launched since need not have ended."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors
