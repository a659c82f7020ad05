"""What is kept of a GPU's memory for everything but weights and KV cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_scheduler import tiny_model_config

from srt.cuda_memory import CudaWorkspace, cuda_workspace
from srt.memory_plan import DeviceMemory, make_memory_plan, most_rows
from srt.server_args import ServerArgs

GIB = 1 << 30


def workspace(rows: int = 64, num_graphs: int = 10, **options: object) -> CudaWorkspace:
    config = replace(tiny_model_config(), vocab_size=128256, num_layers=32, context_len=8192)
    args = ServerArgs(**options)  # type: ignore[arg-type]
    return cuda_workspace(config, args, rows, num_graphs, itemsize=2, num_sms=132)


def test_the_sum_is_of_all_parts() -> None:
    parts = CudaWorkspace(1, 20, 300, 4000, 50000, 600000)
    assert parts.total == 654321


def test_each_part_grows_with_what_it_is_for() -> None:
    base = workspace()
    assert workspace(rows=128).sampling > 1.5 * base.sampling
    assert workspace(rows=128).table == 129 * 8192 * 4
    assert workspace(num_graphs=20).graphs == 2 * base.graphs
    assert workspace(num_graphs=0).graphs == 0
    half = workspace(max_prefill_tokens=8192).activations
    assert workspace(max_prefill_tokens=16384).activations == 2 * half
    # Without chunks a prompt is computed whole, however long.
    whole = workspace(chunked_prefill_size=-1, max_prefill_tokens=64).activations
    assert whole == half


def test_a_batch_of_logits_is_counted_in_every_form_it_has_at_once() -> None:
    logits = 64 * 128256
    assert workspace().sampling >= logits * (2 + 4 + 4)


def cuda(workspace_bytes: int) -> DeviceMemory:
    return DeviceMemory(True, 60 * GIB, 80 * GIB, workspace_bytes)


def test_the_pool_leaves_room_for_everything_else() -> None:
    plan = make_memory_plan(cuda(20 * GIB), 100, GIB, 4096, ServerArgs())
    assert plan.max_total_num_tokens == 60 - 20 - 1 and plan.workspace_bytes == 20 * GIB
    # Where the usual share leaves more than that, it stays.
    plan = make_memory_plan(cuda(1 * GIB), 100, GIB, 4096, ServerArgs())
    assert plan.max_total_num_tokens == 60 - 10 - 1


def test_options_that_leave_too_little_for_everything_else_are_refused_with_the_numbers() -> None:
    words = r"mem_fraction_static 0.9 leaves 8 GB.*20 GB: use at most 0.75"
    with pytest.raises(ValueError, match=words):
        make_memory_plan(cuda(20 * GIB), 100, GIB, 4096, ServerArgs(mem_fraction_static=0.9))
    at_most = make_memory_plan(cuda(20 * GIB), 100, GIB, 4096, ServerArgs(mem_fraction_static=0.75))
    assert at_most.max_total_num_tokens == 60 - 20 - 1
    with pytest.raises(ValueError, match=r"40 GB is available beside 20 GB.*at most 39 tokens"):
        make_memory_plan(cuda(20 * GIB), 100, GIB, 4096, ServerArgs(max_total_tokens=40))


def test_no_more_rows_are_planned_for_than_the_plan_can_have() -> None:
    for options in ({}, {"max_total_tokens": 1000}, {"max_running_requests": 7}):
        args = ServerArgs(**options)  # type: ignore[arg-type]
        plan = make_memory_plan(cuda(0), 100, 1 << 16, 4096, args)
        assert most_rows(args, True, 60 * GIB, 1 << 16) >= plan.max_running_requests
