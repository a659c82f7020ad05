"""Copies between host and device join the device's queue, and only reading waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, HiddenSync

from srt.device_copy import HostCopy, to_device
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.sampling_batch import SamplingBatch
from srt.sampling_params import SamplingParams


def test_on_a_cpu_nothing_is_copied():
    values = np.arange(3)
    tensor = to_device(values, "cpu")
    values[0] = 7
    assert tensor.tolist() == [7, 1, 2]
    assert HostCopy(tensor).wait()[0] is tensor


def test_copies_to_the_device_do_not_wait():
    with FakeCuda():
        assert to_device(np.arange(3), "cuda").is_cuda
        assert to_device(torch.ones(2), torch.device("cuda")).is_cuda


def test_a_copy_to_the_host_waits_when_it_is_read_and_not_before():
    with FakeCuda() as cuda:
        copy = HostCopy(torch.ones(3, device="cuda"), torch.ones(2, device="cuda"))
        with pytest.raises(HiddenSync):
            copy.wait()
        with cuda.sync_allowed():
            first, second = copy.wait()
        assert (first.shape, second.shape) == ((3,), (2,))
        assert first.device.type == second.device.type == "cpu"


def test_writing_rows_of_the_table_does_not_wait():
    with FakeCuda():
        pool = ReqToTokenPool(4, 16, "cuda")
        pool.write(1, 2, np.array([5, 6]))
        pool.write_last(np.array([1, 2]), np.array([4, 0]), np.array([7, 8]))
        assert pool.table[1, 2:5].tolist() == [5, 6, 7] and pool.table[2, 0] == 8
        assert pool.device_table.is_cuda and pool.device_table.shape == pool.table.shape


@pytest.mark.parametrize(
    "knobs", [{}, {"top_k": 3}, {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}]
)
def test_building_and_changing_a_sampling_batch_does_not_wait(knobs):
    with FakeCuda():

        def build(count):
            params = [SamplingParams(**knobs)] * count
            return SamplingBatch.build(
                params, [[1]] * count, [[]] * count, [[2]] * count, 50, "cuda"
            )

        batch = build(3)
        batch.filter_batch([0, 2])
        batch.merge_batch(build(1))
        batch.append_tokens(torch.zeros(3, dtype=torch.int64, device="cuda"))
        assert batch.num_rows == 3
