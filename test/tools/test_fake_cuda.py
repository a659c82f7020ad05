"""Fake CUDA raises where a real one would wait or crash, and nowhere else."""

from __future__ import annotations

import shutil

import pytest
import torch
import triton
import triton.language as tl
from fake_cuda import FakeCuda, HiddenSync, NotCapturable, WrongDevice

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built() and shutil.which("g++") is None,
    reason="torch without CUDA needs g++ to build a device guard",
)


@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0) * 2, mask=i < n)


def double(x, out):
    grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)  # noqa: E731
    double_kernel[grid](x, out, x.numel(), BLOCK=64, num_warps=2)


def test_a_launch_is_recorded_with_its_grid_and_arguments():
    with FakeCuda() as cuda:
        x = torch.empty(100, device="cuda")
        double(x, torch.empty_like(x))
    (launch,) = cuda.launches
    assert (launch.name, launch.grid) == ("double_kernel", (2,))
    assert launch.arguments["n"] == 100
    assert launch.arguments["num_warps"] == 2


def test_a_cpu_tensor_in_a_launch_is_an_error():
    with FakeCuda(), pytest.raises(WrongDevice, match="out_ptr is on cpu"):
        double(torch.empty(64, device="cuda"), torch.empty(64))


def test_an_empty_grid_is_an_error():
    with FakeCuda(), pytest.raises(ValueError, match="grid"):
        double(torch.empty(0, device="cuda"), torch.empty(0, device="cuda"))


def test_the_device_has_the_properties_asked_for_while_it_lasts():
    before = torch.cuda.is_available()
    with FakeCuda(arch=89, sms=7):
        properties = torch.cuda.get_device_properties(0)
        assert torch.cuda.is_available()
        assert (properties.multi_processor_count, properties.major, properties.minor) == (7, 8, 9)
    assert torch.cuda.is_available() == before


SYNCS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.cpu().numpy(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked assignment": lambda x: x.__setitem__(x > 0, x),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "tensor from a list": lambda x: torch.tensor([1, 2], device="cuda"),
    "to": lambda x: torch.ones(3).to("cuda"),
    "not pinned": lambda x: torch.ones(3).to("cuda", non_blocking=True),
    "blocking copy": lambda x: x.copy_(torch.ones(4, dtype=torch.int32).pin_memory()),
    "cpu index": lambda x: x[torch.tensor([0, 1])],
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x.float(), x.float() + 1),
}


@pytest.mark.parametrize("name", SYNCS)
def test_what_waits_for_the_device_raises(name):
    with FakeCuda(), pytest.raises(HiddenSync):
        SYNCS[name](torch.zeros(4, dtype=torch.int32, device="cuda"))


def test_what_does_not_wait_passes():
    with FakeCuda() as cuda:
        x = torch.zeros(4, dtype=torch.int32, device="cuda")
        x.copy_(torch.ones(4, dtype=torch.int32).pin_memory(), non_blocking=True)
        y = torch.empty(4, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True)
        torch.where(x > 0, y, 3)[:2].cumsum(0).to("cpu", non_blocking=True)
        assert torch.repeat_interleave(x, output_size=8).shape == (8,)
        x.masked_fill_(x > 0, 1).index_copy_(0, y, x)
        x[x > 2] = 5
        with cuda.sync_allowed():
            assert x.cpu().shape == (4,)
            torch.cuda.synchronize()
    assert x.device.type == "cuda"


def test_waiting_for_an_event_is_a_wait_and_recording_one_is_none():
    with FakeCuda() as cuda:
        event = torch.cuda.Event()
        event.record()
        with pytest.raises(HiddenSync, match="event"):
            event.synchronize()
        with cuda.sync_allowed():
            event.synchronize()


def test_what_came_to_the_host_reads_as_zeros():
    with FakeCuda():
        x = torch.ones(3, dtype=torch.int64, device="cuda").to("cpu", non_blocking=True)
        assert x.tolist() == [0, 0, 0]


def test_a_graph_holds_the_launches_of_its_capture_and_counts_its_replays():
    with FakeCuda() as cuda:
        x = torch.empty(100, device="cuda")
        double(x, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            double(x, x)
            double(x, x)
        graph.replay()
        graph.replay()
    assert cuda.graphs == [graph]
    assert [launch.name for launch in graph.launches] == ["double_kernel"] * 2
    assert graph.num_replays == 2


@pytest.mark.parametrize(
    "uncapturable",
    [
        lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_copies_and_waits_cannot_be_captured(uncapturable):
    with FakeCuda(), pytest.raises(NotCapturable), torch.cuda.graph(torch.cuda.CUDAGraph()):
        uncapturable(torch.ones(3, device="cuda"))
