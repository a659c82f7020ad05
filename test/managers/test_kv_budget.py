import numpy as np

from srt.managers.kv_budget import PeakBudget, RatioBudget, reserved_for
from srt.managers.length_predictor import LengthPredictor
from srt.managers.req import Req
from srt.managers.req_memory import ReqMemory
from srt.managers.schedule_batch import ModelLimits, ScheduleBatch
from srt.mem_cache.radix_cache import RadixCache
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.mem_cache.token_to_kv_pool import TokenToKVPool
from srt.sampling_params import SamplingParams

LIMITS = ModelLimits(100, (), "cpu")


def memory_of(size, page_size=1):
    slots = TokenToKVPool(size, page_size)
    return ReqMemory(ReqToTokenPool(16, 8192), slots, RadixCache(slots))


def request(rid, prompt_len, max_new, outputs=0, ignore_eos=False):
    params = SamplingParams(max_new_tokens=max_new, ignore_eos=ignore_eos)
    ids = np.full(prompt_len, hash(rid) % 90, dtype=np.int32)
    req = Req(rid, ids, params, max_new, frozenset())
    req.output_ids = [1] * outputs
    return req


def running(memory, *reqs):
    """A batch of requests that hold KV for all their tokens."""
    for req in reqs:
        memory.admit(req)
        memory.extend([req], [req.fill_len])
    return ScheduleBatch.from_reqs(list(reqs), [req.fill_len for req in reqs], LIMITS)


def predictor_of(*lengths):
    made = LengthPredictor(0.5)
    for length in lengths:
        made.observe(length)
    return made


def test_the_reserve_is_the_rest_of_the_limits_times_the_ratio_and_whole_for_ignore_eos():
    memory = memory_of(1000)
    batch = running(memory, request("a", 5, 100, 20), request("b", 6, 50, 10, ignore_eos=True))
    assert reserved_for(batch, 0.5) == 40 + 40


def test_what_is_certain_is_reserved_to_the_page():
    memory = memory_of(1600, page_size=16)
    batch = running(memory, request("a", 10, 30, ignore_eos=True))
    assert reserved_for(batch, 0.0, 16) == 32, "tokens 11 to 40 need two pages more"


def test_limits_count_up_to_the_clip():
    memory = memory_of(20_000)
    batch = running(memory, request("a", 5, 10_000))
    assert reserved_for(batch, 1.0) == 4096


def test_a_prefill_that_decodes_beside_leaves_those_their_tokens():
    memory = memory_of(100)
    batch = running(memory, request("a", 50, 10, 9))
    budget = RatioBudget(memory, batch, ratio=0.0, floor=16)
    assert budget.blocker(request("b", 21, 5), 0).reserved == 16


def test_memory_that_one_gives_back_serves_another():
    """A holds 50 and ends in 10 steps; B needs 40 now and grows for 30 steps: the sum is 50 + 10 +
    40 + 30, but the peak is just before A ends, 60 + 50."""
    memory = memory_of(112)
    batch = running(memory, request("a", 40, 20, 10))
    predictor = predictor_of(*[20] * 10)
    budget = PeakBudget(memory, batch, predictor)
    assert budget.blocker(request("b", 40, 20), 0) is None
    static = RatioBudget(memory, batch, ratio=1.0)
    assert static.blocker(request("b", 40, 20), 0) is not None


def test_the_peak_is_blocked_by_what_it_is_short_of():
    memory = memory_of(100)
    batch = running(memory, request("a", 40, 20, 10))
    budget = PeakBudget(memory, batch, predictor_of(*[20] * 10))
    blocker = budget.blocker(request("b", 40, 20), 0)
    assert blocker.kind == "kv"
    # a: 50 + 10 steps, b: 40 + 20 steps. Before a ends: 60 + 50 = 110; before b ends: 60.
    assert blocker.needed + blocker.reserved - blocker.available == 10


def test_whoever_was_taken_in_the_pass_counts_for_the_next():
    memory = memory_of(100)
    budget = PeakBudget(memory, None, predictor_of(*[20] * 10))
    first = request("a", 40, 20)
    assert budget.blocker(first, 0) is None
    budget.take(first, 0)
    assert budget.blocker(request("b", 40, 20), 0) is not None


def test_a_request_alone_always_fits_when_its_limits_were_cut_to_the_pool():
    for page_size in (1, 16):
        memory = memory_of(160, page_size)
        for prompt_len in (1, 15, 16, 17, 100):
            req = request("a", prompt_len, 160 - prompt_len)
            assert RatioBudget(memory, None, 1.0).blocker(req, 0) is None
            assert PeakBudget(memory, None, predictor_of(5)).blocker(req, 0) is None


def test_a_shared_prefix_is_held_once():
    memory = memory_of(300)
    common = np.arange(80, dtype=np.int32) % 90
    first, second = request("a", 1, 20), request("b", 1, 20)
    first.input_ids = np.append(common, np.int32(1))
    second.input_ids = np.append(common, np.int32(2))
    memory.admit(first)
    memory.extend([first], [81])
    memory.cache_unfinished(first, memory.kv_len(first))
    memory.admit(second)
    memory.extend([second], [81])
    batch = ScheduleBatch.from_reqs([first, second], [81, 81], LIMITS)
    assert PeakBudget(memory, batch, predictor_of(5))._held.tolist() == [81, 1]
