"""The device that gpu_check measures: its facts, its clock, and what it reaches at best."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

from srt.layers.triton_attention import GpuFacts

MAX_REPEATS = 50


@dataclass(frozen=True)
class Device:
    """ "cuda", or "cpu" in a dry run, which computes the same with kernels that are interpreted.
    `budget` is how many seconds one measurement may repeat itself."""

    name: str
    gpu: GpuFacts
    budget: float

    @classmethod
    def cuda(cls) -> Device:
        return cls("cuda", GpuFacts.of(torch.device("cuda")), budget=0.2)

    @classmethod
    def dry(cls) -> Device:
        return cls("cpu", GpuFacts(num_sms=2, capability=(9, 0)), budget=0.0)

    @property
    def is_dry(self) -> bool:
        return self.name == "cpu"

    def wait(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        if self.is_dry:
            return {"name": "dry run: CPU, interpreted", **facts}
        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "capability": list(self.gpu.capability),
            "sms": self.gpu.num_sms,
            "memory_gb": properties.total_memory / 2**30,
            "l2_mb": properties.L2_cache_size / 2**20,
            "cuda": torch.version.cuda,
            **facts,
        }

    def seconds(self, work: Callable[[], object], *, graph: bool = True) -> float:
        """Device time of one call of `work`, mean over repetitions. As a CUDA graph, unless it
        cannot be one, so that no launch is waited for."""
        work()
        if self.is_dry:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        call: Callable[[], object] = work
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                work()
            call = captured.replay
        call()
        once = self._time(call, 1)
        repeats = max(3, min(MAX_REPEATS, int(self.budget / max(once, 1e-6))))
        return self._time(call, repeats)

    def _time(self, call: Callable[[], object], repeats: int) -> float:
        event = partial(torch.cuda.Event, enable_timing=True)
        begin, end = event(), event()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    def host_seconds(self, work: Callable[[], object], repeats: int = 5) -> float:
        """How long one call of `work` keeps the host busy, with nothing queued before it."""
        taken = []
        for _ in range(repeats):
            self.wait()
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
        self.wait()
        return statistics.median(taken)


def copy_bandwidth(device: Device) -> float:
    """Bytes a second that a large copy reads and writes."""
    size = 1 << (20 if device.is_dry else 31)
    source = torch.empty(size, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    return 2 * size / device.seconds(lambda: target.copy_(source))


def matmul_rate(device: Device) -> float:
    """Dense bfloat16 operations a second of torch's own product."""
    size = 64 if device.is_dry else 8192
    a, b = (torch.randn(size, size, device=device.name).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / device.seconds(lambda: torch.mm(a, b, out=out))
