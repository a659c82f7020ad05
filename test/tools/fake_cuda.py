"""Runs the host side of a CUDA path on a machine without a GPU, and finds where it would wait.

    with FakeCuda(arch=90) as cuda:
        runner.step(batch)                      # tensors made with device="cuda" have no bytes
    assert [launch.name for launch in cuda.launches] == [...]

Inside the block these raise at the line that does them:

- HiddenSync: whatever makes the host wait for the device: .item(), .tolist(), int(t), bool(t),
  .cpu(), nonzero, boolean masks, torch.cuda.synchronize(), a copy that is blocking or not from
  pinned memory, an index from the CPU. Where waiting is meant: `with cuda.sync_allowed():`.
- WrongDevice: a kernel launch with a CPU tensor, which on a GPU is a wild pointer.
- NotCapturable: what a CUDA graph cannot hold, or would repeat with stale bytes: a copy between
  host and device, or a wait, while one is captured.

A launch is recorded and, with `compile=True`, compiled for the target. No kernel runs, so there are
no values: those are the interpreter's business. What was copied to the host reads as zeros. A graph
remembers the launches of its capture and counts its replays. Events do nothing, but waiting for one
is a wait. Streams are not imitated.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

aten = torch.ops.aten
MAX_GRID = (2**31 - 1, 65535, 65535)

GUARD_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
}
"""


class HiddenSync(RuntimeError):
    """The host would wait for the device here."""


class NotCapturable(RuntimeError):
    """A CUDA graph that is being captured cannot hold this."""


class WrongDevice(RuntimeError):
    """A kernel got a tensor of the host."""


@dataclass(frozen=True)
class Launch:
    name: str
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]  # by name, options such as num_warps among them
    compiled: Any  # None unless compiled


class FakeEvent:
    """torch.cuda.Event: recorded, and waited for."""

    def __init__(self, owner: FakeCuda) -> None:
        self.owner = owner
        self.is_recorded = False

    def record(self, *args: Any) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded, "waiting for an event that was never recorded"
        self.owner.wait("event.synchronize()")


class FakeGraph:
    """torch.cuda.CUDAGraph: the launches of its capture, and how often it was replayed."""

    def __init__(self) -> None:
        self.launches: list[Launch] | None = None  # None: not captured
        self.num_replays = 0

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def replay(self) -> None:
        assert self.launches is not None, "replaying a graph that was not captured"
        self.num_replays += 1


class FakeCuda(contextlib.ExitStack):
    """See the head of this file. `sms`: multiprocessors that the device claims to have. Under
    interpreted_triton launches are recorded and cannot be compiled."""

    def __init__(self, arch: int = 90, sms: int = 132, compile: bool = False) -> None:
        super().__init__()
        self.arch = arch
        self.sms = sms
        self.compile = compile
        self.launches: list[Launch] = []
        self.graphs: list[FakeGraph] = []  # captured ones
        self.allow_sync = False
        self.is_capturing = False

    @contextlib.contextmanager
    def sync_allowed(self) -> Iterator[None]:
        before, self.allow_sync = self.allow_sync, True
        try:
            yield
        finally:
            self.allow_sync = before

    def wait(self, what: str) -> None:
        """The host waits for the device in `what`."""
        if self.is_capturing:
            raise NotCapturable(what)
        if not self.allow_sync:
            raise HiddenSync(what)

    @contextlib.contextmanager
    def _capture(self, graph: FakeGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
        assert not self.is_capturing, "a capture inside a capture"
        before, self.is_capturing = len(self.launches), True
        try:
            yield
        finally:
            self.is_capturing = False
        graph.launches = self.launches[before:]
        self.graphs.append(graph)

    def __enter__(self) -> FakeCuda:
        super().__enter__()
        _register_cuda_guard()
        if self.compile and triton.knobs.runtime.interpret:
            raise ValueError("compile=True in a process whose kernels are interpreted")
        self._patch_kernels()
        self._patch_torch_cuda()
        self.enter_context(_FakeDevice())
        self.enter_context(_SyncDetector(self))
        return self

    def _patch_kernels(self) -> None:
        real_run = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor) and not value.is_cuda:
                    raise WrongDevice(f"{kernel.__name__}: argument {name} is on {value.device}")
            if callable(grid):
                grid = grid(arguments)
            for size, limit in zip(grid, MAX_GRID, strict=False):
                if not 0 < size <= limit:
                    raise ValueError(f"{kernel.__name__}: grid {tuple(grid)} is not in 1..{limit}")
            compiled = None
            if self.compile:
                compiled = real_run(kernel, *args, grid=grid, warmup=True, **kwargs)
            self.launches.append(Launch(kernel.__name__, tuple(grid), arguments, compiled))
            return compiled

        self.enter_context(mock.patch.object(JITFunction, "run", run))
        self.enter_context(mock.patch.object(InterpretedFunction, "run", run))
        driver = triton.runtime.driver
        before = driver._active
        driver.set_active(_Driver(self.arch))
        self.callback(setattr, driver, "_active", before)

    def _patch_torch_cuda(self) -> None:
        capability = divmod(self.arch, 10)
        properties = SimpleNamespace(
            name="fake",
            multi_processor_count=self.sms,
            major=capability[0],
            minor=capability[1],
            total_memory=80 << 30,
        )
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda *args: capability,
            "get_device_properties": lambda *args: properties,
            "mem_get_info": lambda *args: (80 << 30, 80 << 30),
            "synchronize": lambda *args: self.wait("torch.cuda.synchronize()"),
            "Event": lambda **kwargs: FakeEvent(self),
            "CUDAGraph": FakeGraph,
            "graph": self._capture,
        }
        for name, answer in answers.items():
            self.enter_context(mock.patch.object(torch.cuda, name, answer))
        self.enter_context(mock.patch.object(torch, "Generator", _HostGenerator))


_torch_generator = torch.Generator


class _HostGenerator:
    """There are no values, so it does not matter whose random numbers they are. A class, since
    modules of torch that are imported later have it in their annotations."""

    def __new__(cls, *device: Any) -> Any:
        return _torch_generator()


class _FakeDevice(FakeTensorMode):
    avoid_device_init = True  # it would ask the driver, since CUDA claims to be there


class _Driver:
    """What Triton asks of its driver on the way to a compiled kernel."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # only the key of the JIT's cache

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class _SyncDetector(TorchDispatchMode):
    """Sees every operator before the fake tensors do."""

    def __init__(self, owner: FakeCuda) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func.namespace == "aten":
            # Then operators that are made of others come whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        # Fake tensors do not know pinned memory; the mark is ours.
        if func is aten._pin_memory.default:
            pinned = args[0].clone()
            pinned.is_fake_pinned = True
            return pinned
        if func is aten.is_pinned.default:
            return getattr(args[0], "is_fake_pinned", False)
        if func is aten._local_scalar_dense.default and not args[0].is_cuda:
            return False if args[0].dtype == torch.bool else 0
        if self.owner.is_capturing:
            _check_capture(func, args, kwargs)
        if not self.owner.allow_sync:
            _check_copy(func, args, kwargs)
            _check_index(func, args)
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if any(isinstance(x, torch.Tensor) and x.is_cuda for x in tree_leaves((args, kwargs))):
                raise HiddenSync(f"{func} needs a value from the device") from error
            raise


def _copy_between(func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, Any, bool] | None:
    """(source, target device, non_blocking) if `func` copies from host to device or back."""
    if func is aten._to_copy.default:
        source = args[0]
        target = torch.device(kwargs.get("device") or source.device)
        non_blocking = kwargs.get("non_blocking", False)
    elif func is aten.copy_.default:
        source, target = args[1], args[0].device
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    else:
        return None
    return None if source.device.type == target.type else (source, target, non_blocking)


def _check_capture(func: Any, args: Any, kwargs: Any) -> None:
    copy = _copy_between(func, args, kwargs)
    if copy is not None and copy[0].dim():
        raise NotCapturable(f"copy {copy[0].device} -> {copy[1]}")


def _check_copy(func: Any, args: Any, kwargs: Any) -> None:
    copy = _copy_between(func, args, kwargs)
    if copy is None:
        return
    source, target, non_blocking = copy
    what = f"copy {source.device} -> {target} of {tuple(source.shape)} {source.dtype}"
    if not non_blocking:
        raise HiddenSync(f"blocking {what}")
    # A scalar travels as a kernel argument.
    if (
        source.device.type == "cpu"
        and source.dim()
        and not getattr(source, "is_fake_pinned", False)
    ):
        raise HiddenSync(f"{what} from memory that is not pinned")


def _check_index(func: Any, args: Any) -> None:
    if func not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return
    if not args[0].is_cuda:
        return
    for index in (index for index in args[1] if index is not None):
        if not index.is_cuda:
            raise HiddenSync(f"{func}: a CPU tensor indexes a CUDA tensor")
        # Storing one value is a masked_fill, which does not need to count.
        fills = len(args) > 2 and args[2].numel() == 1
        if index.dtype == torch.bool and not fills:
            raise HiddenSync(f"{func}: a boolean mask indexes a CUDA tensor")


def _register_cuda_guard() -> None:
    """torch without CUDA has no device guard for it, which even fake tensors need when they are
    indexed or copied. Built once and kept with Python's own caches."""
    if torch.backends.cuda.is_built():
        return
    version = f"{torch.__version__}_{sysconfig.get_config_var('SOABI')}"
    library = Path(__file__).parent / "__pycache__" / f"cuda_guard_{version}.so"
    if not library.exists():
        root = Path(torch.__file__).parent
        library.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            subprocess.run(
                ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{root}/include", "-x", "c++", "-",
                 f"-L{root}/lib", "-lc10", "-o", str(built)],
                input=GUARD_SOURCE, text=True, check=True,
            )  # fmt: skip
            os.replace(built, library)  # atomic: another test process may do the same
    torch.ops.load_library(str(library))
