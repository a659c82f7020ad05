"""The size of the KV pool, from memory and options."""

from __future__ import annotations

from typing import Any

import pytest

from srt.memory_plan import DeviceMemory, MemoryPlan, make_memory_plan
from srt.server_args import ServerArgs

GIB = 1 << 30


def make_plan(memory: DeviceMemory, bytes_per_token: int = 1024, **options: Any) -> MemoryPlan:
    return make_memory_plan(memory, 100, bytes_per_token, 4096, ServerArgs(**options))


def cpu(available: int) -> DeviceMemory:
    return DeviceMemory(is_cuda=False, available=available, total=available)


def test_on_cpu_the_cache_gets_a_tenth_of_what_is_free_or_the_share_asked_for() -> None:
    """H59: the default flags on a machine without a GPU."""
    plan = make_plan(cpu(GIB))
    assert plan.max_total_num_tokens == int(0.1 * GIB) // 1024 - 1
    assert plan.kv_bytes == (plan.max_total_num_tokens + 1) * 1024
    assert (plan.weight_bytes, plan.available_bytes, plan.context_len) == (100, GIB, 4096)
    assert make_plan(cpu(GIB), mem_fraction_static=0.5).max_total_num_tokens == 524287


def test_on_cuda_weights_and_cache_together_get_their_share_of_the_device() -> None:
    memory = DeviceMemory(is_cuda=True, available=60 * GIB, total=80 * GIB)
    plan = make_plan(memory, bytes_per_token=GIB)
    assert plan.max_total_num_tokens == 60 - 10 - 1  # 12 % of 80 rounded up, and the padding page
    plan = make_plan(memory, bytes_per_token=GIB, mem_fraction_static=0.5)
    assert plan.max_total_num_tokens == 60 - 40 - 1


def test_the_pool_is_whole_pages() -> None:
    assert make_plan(cpu(GIB), max_total_tokens=1000, page_size=64).max_total_num_tokens == 960
    assert make_plan(cpu(GIB), page_size=64).max_total_num_tokens % 64 == 0


def test_a_pool_asked_for_that_does_not_fit_is_an_error_with_both_numbers() -> None:
    assert make_plan(cpu(1 << 20), max_total_tokens=1023).max_total_num_tokens == 1023
    with pytest.raises(ValueError, match=r"max_total_tokens 2097152 needs 2 GB.*1 GB is avail"):
        make_plan(cpu(GIB), max_total_tokens=1 << 21)


@pytest.mark.parametrize(
    "options", [{}, {"max_total_tokens": 5, "page_size": 16}, {"mem_fraction_static": 0.001}]
)
def test_no_room_for_one_page_is_an_error_that_names_the_cause(options: dict[str, Any]) -> None:
    """H59: with too little memory."""
    available = 9 * 1024 if not options else 64 * 1024
    cause = "max_total_tokens 5" if "page_size" in options else "mem_fraction_static"
    with pytest.raises(ValueError, match=cause):
        make_plan(cpu(available), **options)


@pytest.mark.parametrize(
    ("is_cuda", "tokens", "rows"),
    [(False, 63, 1), (False, 640, 10), (False, 10**6, 128), (True, 2560, 10), (True, 10**7, 1024)],
)
def test_rows_follow_the_pool_unless_asked_for(is_cuda: bool, tokens: int, rows: int) -> None:
    memory = DeviceMemory(is_cuda=is_cuda, available=GIB, total=GIB)
    plan = make_plan(memory, 1, max_total_tokens=tokens)
    assert plan.max_running_requests == rows
    plan = make_plan(memory, 1, max_total_tokens=tokens, max_running_requests=7)
    assert plan.max_running_requests == 7
