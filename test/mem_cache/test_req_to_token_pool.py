import numpy as np
import pytest

from srt.mem_cache.req_to_token_pool import ReqToTokenPool


def test_rows_are_handed_out_once_and_never_row_zero():
    pool = ReqToTokenPool(3, 8)
    rows = [pool.alloc() for _ in range(4)]
    assert sorted(rows[:3]) == [1, 2, 3] and rows[3] is None
    pool.free(rows[1])
    assert pool.alloc() == rows[1]


def test_the_device_sees_what_the_host_wrote():
    pool = ReqToTokenPool(3, 8)
    pool.write(2, 3, np.array([7, 8], dtype=np.int64))
    pool.write_last(np.array([1, 2]), np.array([0, 5]), np.array([4, 9]))
    assert pool.device_table[2].tolist() == [0, 0, 0, 7, 8, 9, 0, 0]
    assert pool.device_table[1, 0] == 4


def test_check_notices_a_row_that_is_lost_or_doubled():
    pool = ReqToTokenPool(3, 8)
    row = pool.alloc()
    pool.check([row])
    with pytest.raises(RuntimeError, match="2 free \\+ 0 live != 3"):
        pool.check([])
    with pytest.raises(RuntimeError, match="row leak"):
        pool.check([row, row])
