import numpy as np
import pytest

from srt.managers.kv_budget import RatioBudget
from srt.managers.prefill_adder import AdmissionLimits, PrefillAdder
from srt.managers.req import Blocker, Req
from srt.managers.req_memory import ReqMemory
from srt.mem_cache.radix_cache import RadixCache
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.mem_cache.token_to_kv_pool import TokenToKVPool
from srt.sampling_params import SamplingParams


def memory_of(size, rows=8, page_size=1):
    slots = TokenToKVPool(size, page_size)
    return ReqMemory(ReqToTokenPool(rows, 8192), slots, RadixCache(slots))


def request(rid, prompt_len, max_new, first=0):
    ids = np.arange(first, first + prompt_len, dtype=np.int32)
    return Req(rid, ids, SamplingParams(max_new_tokens=max_new), max_new, frozenset())


def adder_of(memory, reserved=0, budget=16384, chunk=None, rows=8, max_requests=None):
    limits = AdmissionLimits(rows, budget, chunk, max_requests)
    kv = RatioBudget(memory, None, ratio=1.0)
    kv._reserved = reserved
    return PrefillAdder(memory, limits, kv, budget if chunk is None else min(budget, chunk))


@pytest.mark.parametrize(
    ("available", "uncached", "max_new", "reserved", "short"),
    [(1800, 768, 256, 1024, 248), (1200, 600, 200, 500, 100)],
)
def test_a_request_waits_for_kv_and_says_by_how_much(available, uncached, max_new, reserved, short):
    adder = adder_of(memory_of(available), reserved)
    blocker = adder.try_add(request("r", uncached, max_new))
    assert blocker == Blocker("kv", uncached + max_new, available, reserved)
    assert blocker.needed + blocker.reserved - blocker.available == short


def test_exactly_enough_kv_is_enough():
    adder = adder_of(memory_of(1024), 100)
    assert adder.try_add(request("r", 800, 124)) is None
    assert adder.seq_lens == [800]


def test_what_is_admitted_in_a_pass_is_reserved_for_the_next_in_it():
    adder = adder_of(memory_of(100))
    assert adder.try_add(request("a", 30, 30)) is None
    assert adder.try_add(request("b", 20, 21, first=500)) == Blocker("kv", 41, 100, 60)
    assert adder.try_add(request("c", 20, 20, first=500)) is None


def test_no_row_no_admission():
    adder = adder_of(memory_of(100, rows=1), rows=1)
    assert adder.try_add(request("a", 3, 3)) is None
    assert adder.try_add(request("b", 3, 3)) == Blocker("slots", 1, 0)


def test_a_lower_cap_than_the_rows_there_are_holds():
    adder = adder_of(memory_of(100, rows=8), rows=2)
    assert [adder.try_add(request(str(i), 3, 3)) for i in range(3)][2] == Blocker("slots", 1, 0)


def test_a_prompt_over_the_budget_is_split_and_only_one_is():
    adder = adder_of(memory_of(1000), chunk=100)
    assert adder.try_add(request("a", 70, 1)) is None
    long = request("b", 50, 1, first=500)
    assert adder.try_add(long) is None
    assert adder.seq_lens == [70, 30] and adder.chunked is long and adder.budget_left == 0
    assert adder.try_add(request("c", 5, 1, first=900)) == Blocker("prefill_budget", 5, 0)


def test_without_chunking_a_prompt_over_the_budget_goes_alone():
    adder = adder_of(memory_of(1000), budget=100)
    assert adder.try_add(request("a", 70, 1)) is None
    assert adder.try_add(request("b", 150, 1, first=500)) == Blocker("prefill_budget", 150, 30)
    alone = adder_of(memory_of(1000), budget=100)
    assert alone.try_add(request("b", 150, 1)) is None
    assert alone.seq_lens == [150]


def test_inner_chunks_end_at_page_borders():
    memory = memory_of(4096, page_size=16)
    adder = adder_of(memory, chunk=100)
    req = request("a", 300, 1)
    assert adder.try_add(req) is None
    assert adder.seq_lens == [96]
    memory.extend([req], [96])
    following = adder_of(memory, chunk=100)
    following.add_chunked(req)
    assert following.seq_lens == [192]


def test_a_request_in_mid_chunk_keeps_its_reservation_from_others():
    memory = memory_of(400)
    first = adder_of(memory, chunk=100)
    req = request("a", 300, 50)
    assert first.try_add(req) is None
    memory.extend([req], [100])
    following = adder_of(memory, chunk=100)
    following.add_chunked(req)
    assert following.try_add(request("b", 30, 30, first=500)) == Blocker("kv", 60, 300, 250)
    assert following.try_add(request("c", 30, 20, first=500)) == Blocker("prefill_budget", 30, 0)


def test_a_refusal_takes_no_row_and_no_lock():
    memory = memory_of(100)
    cached = request("a", 40, 1)
    memory.admit(cached)
    memory.extend([cached], [40])
    memory.release_kv(cached)
    blocker = adder_of(memory, reserved=50).try_add(request("b", 60, 20))
    assert blocker.kind == "kv" and memory.tree.protected_size == 0
    memory.check([])
