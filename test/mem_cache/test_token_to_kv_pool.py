import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srt.mem_cache.token_to_kv_pool import TokenToKVPool


def ints(*values):
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("seed", range(20))
def test_pool_neither_loses_nor_doubles_a_page(seed):
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    pool, owned = TokenToKVPool(64 * page_size, page_size), []
    for _ in range(300):
        if owned and rng.random() < 0.5:
            pages = owned.pop(rng.randrange(len(owned)))
            pool.free(pages * page_size)
        elif (pages := pool.alloc_pages(rng.randint(1, 12))) is not None:
            owned.append(pages)
        held = np.concatenate(owned) if owned else ints()
        pool.check(held * page_size)  # raises on a leak
        assert pool.available == (64 - len(held)) * page_size


def test_running_out_is_an_answer_and_takes_nothing():
    pool = TokenToKVPool(4)
    assert pool.alloc_pages(5) is None
    assert pool.available == 4


def test_slot_zero_is_never_handed_out():
    for page_size in (1, 16):
        pool = TokenToKVPool(4 * page_size, page_size)
        pages = pool.alloc_pages(4)
        assert sorted(pages.tolist()) == [1, 2, 3, 4]
        assert pool.num_slots == 5 * page_size


def test_check_names_a_page_that_is_lost_and_one_that_is_owned_twice():
    pool = TokenToKVPool(4)
    page = pool.alloc_pages(1)
    with pytest.raises(RuntimeError, match="3 free \\+ 0 owned != 4"):
        pool.check(ints())
    with pytest.raises(RuntimeError, match="leak"):
        pool.check(np.concatenate([page, page]))


def test_freeing_more_than_there_is_fails():
    pool = TokenToKVPool(4)
    with pytest.raises(AssertionError, match="leaves 5 free of 4"):
        pool.free(ints(1))


@pytest.mark.parametrize(("size", "page_size"), [(0, 1), (15, 16), (17, 16)])
def test_a_pool_that_is_not_whole_pages_is_refused(size, page_size):
    with pytest.raises(ValueError, match=f"pool size {size}"):
        TokenToKVPool(size, page_size)


@given(
    page_size=st.sampled_from([1, 4, 16]),
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=5),
)
def test_extend_fills_the_page_begun_and_then_whole_new_pages(page_size, spans):
    """The slots of each request are those of its pages, in order of position, and nobody else's."""
    pool = TokenToKVPool(1024 * page_size, page_size)
    tables = []
    for prefix, _ in spans:  # the prefixes first, one request at a time
        slots = pool.alloc_extend(ints(0), ints(prefix), ints(0))
        tables.append(slots.tolist())
    prefix_lens = ints(*(prefix for prefix, _ in spans))
    seq_lens = prefix_lens + ints(*(length for _, length in spans))
    last_slots = ints(*(table[-1] if table else 0 for table in tables))
    slots = pool.alloc_extend(prefix_lens, seq_lens, last_slots).tolist()
    for table, (_, length) in zip(tables, spans, strict=True):
        table += slots[:length]
        slots = slots[length:]
    assert not slots
    for table in tables:
        for position, slot in enumerate(table):
            assert slot % page_size == position % page_size
            assert slot // page_size == table[position // page_size * page_size] // page_size
    pages = [table[at] // page_size for table in tables for at in range(0, len(table), page_size)]
    assert len(set(pages)) == len(pages) and 0 not in pages
    pool.check(ints(*pages) * page_size)


@given(page_size=st.sampled_from([1, 4, 16]), lens=st.lists(st.integers(1, 40), min_size=1))
def test_decode_takes_a_page_only_at_a_border(page_size, lens):
    pool = TokenToKVPool(4096, page_size)
    tables = [pool.alloc_extend(ints(0), ints(n), ints(0)).tolist() for n in lens]
    before = pool.available
    last = ints(*(table[-1] for table in tables))
    slots = pool.alloc_decode(ints(*lens) + 1, last)
    borders = sum(n % page_size == 0 for n in lens)
    assert before - pool.available == borders * page_size
    for n, old, new in zip(lens, last.tolist(), slots.tolist(), strict=True):
        assert new == old + 1 if n % page_size else new % page_size == 0
