import random
import time

import numpy as np
import pytest

from srt.managers.req import Req
from srt.managers.schedule_policy import POLICIES, WaitingQueue, make_policy
from srt.mem_cache.radix_cache import RadixCache
from srt.mem_cache.token_to_kv_pool import TokenToKVPool
from srt.sampling_params import SamplingParams


def tree_with(*prefixes):
    pool = TokenToKVPool(4096)
    tree = RadixCache(pool)
    for ids in prefixes:
        tree.insert(np.array(ids, dtype=np.int32), pool.alloc_pages(len(ids)))
    return tree


def request(rid, ids=(1, 2, 3), max_new=10, queued_at=0.0):
    params = SamplingParams(max_new_tokens=max_new)
    prompt = np.array(ids, dtype=np.int32)
    return Req(rid, prompt, params, max_new, frozenset(), queued_at=queued_at)


def order(queue, now=0.0):
    return [req.rid for req in queue.order(now)]


def test_fcfs_is_the_order_of_arrival():
    queue = WaitingQueue(make_policy("fcfs", tree_with(), None))
    for rid in "cab":
        queue.append(request(rid))
    assert order(queue) == ["c", "a", "b"]


def test_lpm_puts_the_longest_cached_prefix_first_and_ties_by_arrival():
    queue = WaitingQueue(make_policy("lpm", tree_with([1, 2, 3, 4], [5, 6]), None))
    for rid, ids in [("none", [9, 9]), ("two", [5, 6, 7]), ("four", [1, 2, 3, 4, 5]), ("too", [8])]:
        queue.append(request(rid, ids))
    assert order(queue) == ["four", "two", "none", "too"]


def test_lof_puts_the_longest_output_first():
    queue = WaitingQueue(make_policy("lof", tree_with(), None))
    for rid, max_new in [("a", 5), ("b", 50), ("c", 5), ("d", 500)]:
        queue.append(request(rid, max_new=max_new))
    assert order(queue) == ["d", "b", "a", "c"]


def test_random_is_not_arrival_but_stays_put():
    queue = WaitingQueue(make_policy("random", tree_with(), 1))
    for i in range(20):
        queue.append(request(str(i)))
    first = order(queue)
    assert first != [str(i) for i in range(20)] and sorted(map(int, first)) == list(range(20))
    assert order(queue) == first


@pytest.mark.parametrize("policy", POLICIES)
def test_the_too_old_go_first_then_those_that_returned(policy):
    queue = WaitingQueue(make_policy(policy, tree_with([1, 2, 3]), 0), max_age=10.0)
    queue.append(request("old", [9], max_new=1, queued_at=0.0))
    for i in range(5):
        queue.append(request(f"young-{i}", max_new=100, queued_at=95.0))
    queue.push_front(request("returned-1", queued_at=96.0))
    queue.push_front(request("returned-2", queued_at=97.0))
    got = order(queue, now=100.0)
    assert got[:3] == ["old", "returned-2", "returned-1"]
    assert sorted(got[3:]) == [f"young-{i}" for i in range(5)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_listed_once_and_removal_forgets_it(policy):
    rng = random.Random(0)
    queue = WaitingQueue(make_policy(policy, tree_with(), 0), max_age=5.0)
    there = {}
    for i in range(300):
        if there and rng.random() < 0.4:
            queue.remove(there.pop(rng.choice(list(there))))
        else:
            req = request(str(i), range(rng.randint(1, 9)), rng.randint(1, 9), float(i))
            there[req.rid] = req
            queue.append(req) if rng.random() < 0.8 else queue.push_front(req)
        assert sorted(order(queue, now=float(i))) == sorted(there)
        assert len(queue) == len(there)
        assert queue.num_tokens == sum(req.fill_len for req in there.values())
    assert {req.rid for req in queue} == set(there)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_of_100000_waiting_is_found_at_once(policy):
    queue = WaitingQueue(make_policy(policy, tree_with(), 0))
    for i in range(100_000):
        queue.append(request(str(i), max_new=i % 100))
    begin = time.perf_counter()
    for _ in range(10):
        head = next(queue.order(0.0))
    queue.remove(head)
    assert (time.perf_counter() - begin) / 10 < 0.001


def test_an_unknown_policy_is_named():
    with pytest.raises(ValueError, match="'best'"):
        make_policy("best", tree_with(), None)
