import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.mem_cache.radix_cache import RadixCache
from srt.mem_cache.token_to_kv_pool import TokenToKVPool


def tokens(*values):
    return np.array(values, dtype=np.int32)


class Model:
    """A request's life against the tree, in the plainest possible way: what every prefix maps
    to."""

    def __init__(self, page_size, num_pages=64):
        self.pool = TokenToKVPool(num_pages * page_size, page_size)
        self.tree = RadixCache(self.pool)
        self.locked = []  # (node, slots, tokens)

    def check(self):
        self.pool.check(self.tree.owned_pages())
        assert self.pool.available + self.tree.evictable_size + self.tree.protected_size == (
            self.pool.size
        )

    def insert(self, ids, extra_key=None):
        """Compute `ids` from the cached prefix on and cache it; None if the pool is too full."""
        size = self.pool.page_size
        ids = ids[: len(ids) // size * size]
        match = self.tree.match_prefix(ids, extra_key)
        self.tree.lock(match.node)
        missing = len(ids) - len(match.slots)
        if missing > self.pool.available + self.tree.evictable_size:
            self.tree.unlock(match.node)
            return
        self.tree.evict(missing - self.pool.available)
        slots = self.pool.alloc_extend(
            np.array([len(match.slots)]), np.array([len(ids)]), np.array([0])
        )
        had = self.tree.insert(ids, np.concatenate([match.slots, slots]), extra_key)
        assert had == len(match.slots), "the prefix was locked, so nobody can have changed it"
        self.tree.unlock(match.node)


ids = st.lists(st.integers(0, 2), max_size=24).map(lambda values: tokens(*values))
operations = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "lock", "unlock", "evict"]), ids), max_size=40
)


@settings(max_examples=200, deadline=None)
@given(page_size=st.sampled_from([1, 4]), steps=operations, num_pages=st.integers(4, 64))
def test_books_balance_and_locked_prefixes_stay_whatever_happens(page_size, steps, num_pages):
    model = Model(page_size, num_pages)
    for kind, key in steps:
        if kind == "insert":
            model.insert(key)
        elif kind == "lock":
            match = model.tree.match_prefix(key)
            model.tree.lock(match.node)
            model.locked.append((match.node, match.slots.tolist(), key))
        elif kind == "unlock" and model.locked:
            model.tree.unlock(model.locked.pop(0)[0])
        elif kind == "evict":
            wanted = len(key)
            could = model.tree.evictable_size
            freed = model.tree.evict(wanted)
            assert freed >= min(wanted, could) and freed <= could
        model.check()
        for _, slots, locked_key in model.locked:
            found = model.tree.match_prefix(locked_key).slots.tolist()
            assert found[: len(slots)] == slots
        assert model.tree.match_len(key) == len(model.tree.match_prefix(key).slots)
    for node, _, _ in model.locked:
        model.tree.unlock(node)
    assert model.tree.protected_size == 0
    cached = model.tree.evictable_size
    assert model.tree.reset() == cached
    assert model.pool.available == model.pool.size


def test_a_prefix_is_found_with_the_slots_it_was_computed_in():
    model = Model(page_size=1)
    model.insert(tokens(1, 2, 3, 4))
    model.insert(tokens(1, 2, 9, 9))
    first = model.tree.match_prefix(tokens(1, 2, 3, 4, 5)).slots
    second = model.tree.match_prefix(tokens(1, 2, 9, 9)).slots
    assert len(first) == len(second) == 4
    assert first[:2].tolist() == second[:2].tolist() and first[2] != second[2]


@pytest.mark.parametrize("page_size", [4, 16])
def test_only_whole_pages_match(page_size):
    model = Model(page_size)
    model.insert(np.arange(3 * page_size, dtype=np.int32))
    query = np.arange(3 * page_size, dtype=np.int32)
    query[2 * page_size + 1] = 999
    assert len(model.tree.match_prefix(query).slots) == 2 * page_size
    assert len(model.tree.match_prefix(query[: 2 * page_size - 1]).slots) == page_size


def test_namespaces_share_nothing():
    model = Model(page_size=1)
    model.insert(tokens(1, 2, 3), "a")
    assert model.tree.match_len(tokens(1, 2, 3)) == 0
    assert model.tree.match_len(tokens(1, 2, 3), "b") == 0
    assert model.tree.match_len(tokens(1, 2, 3), "a") == 3


def test_the_least_recently_used_leaf_goes_first_and_only_as_much_of_it_as_needed():
    model = Model(page_size=1)
    model.insert(tokens(1, 1, 1, 1))
    model.insert(tokens(2, 2, 2, 2))
    model.tree.match_prefix(tokens(1, 1, 1, 1))
    assert model.tree.evict(3) == 3
    assert model.tree.match_len(tokens(2, 2, 2, 2)) == 1
    assert model.tree.match_len(tokens(1, 1, 1, 1)) == 4


def test_emptied_namespaces_leave_nothing_behind():
    model = Model(page_size=1)
    for i in range(50):
        model.insert(tokens(1, 2), f"tenant-{i}")
        model.tree.match_prefix(tokens(1, 2), f"nobody-{i}")
    model.tree.reset()
    assert not model.tree._root.children


def test_disabled_it_matches_and_keeps_nothing():
    pool = TokenToKVPool(16)
    tree = RadixCache(pool, disable=True)
    slots = pool.alloc_pages(3)
    assert tree.insert(tokens(1, 2, 3), slots) == 0
    assert len(tree.match_prefix(tokens(1, 2, 3)).slots) == 0
    assert tree.match_len(tokens(1, 2, 3)) == 0
    pool.free(slots)
    pool.check(tree.owned_pages())


def test_unlocking_what_nobody_locked_fails():
    model = Model(page_size=1)
    model.insert(tokens(1, 2))
    node = model.tree.match_prefix(tokens(1, 2)).node
    with pytest.raises(AssertionError, match="lock_ref 0"):
        model.tree.unlock(node)


def test_a_32k_prompt_matches_in_under_2_ms_among_a_million_cached_tokens():
    pool = TokenToKVPool(1_100_000)
    tree = RadixCache(pool)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50_000, 32_768).astype(np.int32)
    # The long prompt branches every 256 tokens, so its path is many nodes; the rest are others.
    for at in range(256, len(prompt) + 1, 256):
        ids = np.concatenate([prompt[:at], rng.integers(0, 50_000, 8).astype(np.int32)])
        had = tree.match_prefix(ids).slots
        tree.insert(ids, np.concatenate([had, pool.alloc_pages(len(ids) - len(had))]))
    for _ in range(1000):
        tree.insert(rng.integers(0, 50_000, 1000).astype(np.int32), pool.alloc_pages(1000))
    assert tree.evictable_size > 1_000_000
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        match = tree.match_prefix(prompt)
        times.append(time.perf_counter() - begin)
    assert len(match.slots) == len(prompt)
    assert min(times) < 0.002
