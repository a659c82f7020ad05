"""The CUDA path of runner and scheduler on a fake device: what it launches, and that it never waits
but for the tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import FakeCuda, HiddenSync
from fake_scheduler import VOCAB_SIZE
from scheduler_harness import LoopbackChannel
from tiny_model import write_tiny_model

from srt.cuda_warmup import SAMPLING_KINDS, padding_batch
from srt.device_copy import HostCopy
from srt.forward_batch import ForwardMode
from srt.managers.io_struct import TokenizedGenerateReq
from srt.managers.scheduler import Scheduler
from srt.managers.scheduler_process import build_scheduler
from srt.model_config import load_model_config
from srt.model_runner import ModelRunner
from srt.sampling_params import SamplingParams
from srt.server_args import ServerArgs

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built() and shutil.which("g++") is None,
    reason="torch without CUDA needs g++ to build a device guard",
)
LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def make_runner(cuda: FakeCuda, folder: Path, **options: Any) -> ModelRunner:
    options = {"max_running_requests": 5, "max_total_tokens": 256, **options}
    args = ServerArgs(load_format="dummy", device="cuda", **options)
    with cuda.sync_allowed():
        runner = ModelRunner(folder, load_model_config(folder), args)
        plan = runner.plan_memory()
        rows, length = plan.max_running_requests + 1, plan.context_len
        runner.init_memory(plan, torch.zeros(rows, length, dtype=torch.int32, device="cuda"))
    cuda.launches.clear()
    return runner


def a_pass(cuda: FakeCuda, mode: ForwardMode, lens: list[int]) -> Any:
    with cuda.sync_allowed():
        return padding_batch(mode, lens, SAMPLING_KINDS[:1], VOCAB_SIZE, "cuda")


def replays(cuda: FakeCuda) -> list[int]:
    """Of each graph, by size."""
    return [graph.num_replays for graph in reversed(cuda.graphs)]


def test_decode_passes_are_captured_at_start_and_replayed_padded(folder: Path) -> None:
    with FakeCuda(90) as cuda:
        runner = make_runner(cuda, folder)
        assert runner.graphs is not None and runner.graphs.sizes == [1, 2, 4, 5]
        assert replays(cuda) == [0, 0, 0, 0]
        tokens = runner.step(a_pass(cuda, ForwardMode.DECODE, [1, 1, 1]))
        assert tokens.shape == (3,) and tokens.dtype == torch.int64
        assert replays(cuda) == [0, 0, 1, 0]
        runner.step(a_pass(cuda, ForwardMode.DECODE, [1] * 5))
        assert replays(cuda) == [0, 0, 1, 1]
    # What is left to launch is the sampler.
    assert {launch.name for launch in cuda.launches} == {"best_kernel"}
    names = [launch.name for launch in cuda.graphs[0].launches or ()]
    assert names.count("decode_split_kernel") == LAYERS
    assert names[0] == "decode_plan_kernel"


def test_an_extend_pass_is_launched(folder: Path) -> None:
    with FakeCuda(90) as cuda:
        runner = make_runner(cuda, folder)
        assert runner.step(a_pass(cuda, ForwardMode.EXTEND, [7, 1, 3])).shape == (3,)
        assert sum(replays(cuda)) == 0
    assert [launch.name for launch in cuda.launches].count("extend_kernel") == LAYERS


def test_without_graphs_every_decode_pass_is_launched(folder: Path) -> None:
    with FakeCuda(90) as cuda:
        runner = make_runner(cuda, folder, disable_cuda_graph=True)
        assert runner.graphs is None and not cuda.graphs
        runner.step(a_pass(cuda, ForwardMode.DECODE, [1, 1]))
    assert [launch.name for launch in cuda.launches].count("decode_split_kernel") == LAYERS


def test_a_batch_beyond_the_largest_captured_one_is_launched(folder: Path) -> None:
    with FakeCuda(90) as cuda:
        runner = make_runner(cuda, folder, cuda_graph_max_bs=2)
        assert runner.graphs is not None and runner.graphs.sizes == [1, 2]
        runner.step(a_pass(cuda, ForwardMode.DECODE, [1] * 3))
        assert replays(cuda) == [0, 0]
        runner.step(a_pass(cuda, ForwardMode.DECODE, [1] * 2))
        assert replays(cuda) == [0, 1]


@pytest.mark.parametrize(
    ("options", "dtype", "kv_dtype"),
    [
        ({}, torch.bfloat16, torch.bfloat16),
        ({"dtype": "half"}, torch.float16, torch.float16),
        ({"kv_cache_dtype": "fp8_e4m3"}, torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_types_on_a_gpu(folder: Path, options: Any, dtype: Any, kv_dtype: Any) -> None:
    with FakeCuda(90) as cuda:
        runner = make_runner(cuda, folder, **options)
        assert {parameter.dtype for parameter in runner.model.parameters()} == {dtype}
        assert runner.kv_cache is not None and runner.kv_cache.dtype is kv_dtype
        runner.step(a_pass(cuda, ForwardMode.EXTEND, [3]))


def test_an_int8_cache_is_refused_on_a_gpu(folder: Path) -> None:
    message = (
        "--kv-cache-dtype int8 is for device cpu; on cuda it may be auto, bfloat16 .* fp8_e4m3"
    )
    with FakeCuda(90) as cuda, pytest.raises(ValueError, match=message):
        make_runner(cuda, folder, kv_cache_dtype="int8")


def test_a_batch_invariant_runner_takes_no_product_of_a_library(folder: Path) -> None:
    with FakeCuda(90) as cuda:
        runner = make_runner(cuda, folder, batch_invariant=True)
        with mock.patch("torch.nn.functional.linear", side_effect=AssertionError):
            runner.step(a_pass(cuda, ForwardMode.EXTEND, [3, 1]))
        names = [launch.name for launch in cuda.launches]
        assert names.count("invariant_linear_kernel") == 4 * LAYERS + 1  # and the head
        captured = cuda.graphs[0].launches or []
        (plan,) = (launch for launch in captured if launch.name == "decode_plan_kernel")
        assert plan.arguments["BATCH_INVARIANT"] is True


@pytest.fixture
def scheduler(folder: Path) -> Any:
    """A scheduler on the fake device, which may wait for tokens only."""
    with FakeCuda(90) as cuda:
        options: dict[str, Any] = {"max_running_requests": 4, "max_total_tokens": 256}
        args = ServerArgs(load_format="dummy", device="cuda", **options)
        with cuda.sync_allowed():
            made, _ = build_scheduler(args, folder, LoopbackChannel())  # type: ignore[arg-type]
        wait = HostCopy.wait

        def allowed(copy: HostCopy) -> Any:
            with cuda.sync_allowed():
                return wait(copy)

        with mock.patch.object(HostCopy, "wait", allowed):
            yield made, cuda


KNOBS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5, "sampling_seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5, "min_new_tokens": 2},
    {"temperature": 1.0, "logit_bias": {3: 1.0}},
]


def send(scheduler: Scheduler, count: int, **options: Any) -> None:
    for i in range(count):
        params = SamplingParams(max_new_tokens=3 + i, ignore_eos=True, **KNOBS[i % len(KNOBS)])
        message = TokenizedGenerateReq(f"r{i}", list(range(1, 6 + i)), params, **options)
        scheduler.channel.inbox.append(message)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [{}, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}],
    ids=["tokens", "logprobs"],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_no_step_of_the_scheduler_waits_but_for_the_tokens(
    scheduler: Any, overlap: bool, options: dict[str, Any]
) -> None:
    made, cuda = scheduler
    send(made, 6, **options)
    turn = made.step_overlap if overlap else made.step
    for _ in range(60):
        turn()
        if not made.live and made.in_flight is None:
            break
    assert not made.live
    assert sum(graph.num_replays for graph in cuda.graphs) >= 3


def test_with_overlap_a_pass_is_launched_before_the_tokens_of_the_last_are_read(
    scheduler: Any,
) -> None:
    made, cuda = scheduler
    send(made, 1)
    made.step_overlap()
    events: list[str] = []
    step, wait = made.runner.step, HostCopy.wait

    def noting(name: str, function: Any) -> Any:
        def noted(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return noted

    with (
        mock.patch.object(made.runner, "step", noting("launch", step)),
        mock.patch.object(HostCopy, "wait", noting("read", wait)),
    ):
        made.step_overlap()
    assert events == ["launch", "read"]
    assert sum(replays(cuda)) == 1


def test_the_log_says_whether_decode_passes_are_replayed(
    scheduler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = scheduler
    caplog.set_level("INFO")
    send(made, 1)
    for _ in range(4):
        made.log._decode_steps = 100  # a line for every pass
        made.step()
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Decode batch")]
    assert lines and "cuda graph: True" in lines[0]


def test_a_wait_that_slipped_into_a_step_is_found(scheduler: Any) -> None:
    made, _ = scheduler
    send(made, 1)
    step = made.runner.step
    with (
        mock.patch.object(made.runner, "step", lambda batch: step(batch) + step(batch).item()),
        pytest.raises(HiddenSync),
    ):
        made.step()
