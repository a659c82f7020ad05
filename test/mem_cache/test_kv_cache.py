"""K and V come back from the slots they were written to."""

from __future__ import annotations

import psutil
import pytest
import torch

from srt.mem_cache.kv_cache import KVCache, bytes_per_token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_at_a_slot_is_read_there_and_nowhere_else(dtype: torch.dtype) -> None:
    cache = KVCache(8, num_layers=2, num_kv_heads=3, head_dim=4, dtype=dtype, device="cpu")
    k, v = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    cache.set_kv(1, torch.tensor([5, 2]), k, v)
    k_buffer, v_buffer = cache.get(1)
    assert torch.equal(k_buffer[[5, 2]], k.to(dtype))
    assert torch.equal(v_buffer[[5, 2]], v.to(dtype))
    rest = [0, 1, 3, 4, 6, 7]
    assert not k_buffer[rest].any() and not v_buffer[rest].any()
    assert not any(buffer.any() for buffer in cache.get(0))


def test_the_bytes_of_a_token_are_those_of_the_buffers() -> None:
    cache = KVCache(10, 2, 3, 4, torch.bfloat16, "cpu")
    held = sum(buffer.nbytes for layer_id in range(2) for buffer in cache.get(layer_id))
    assert held == 10 * cache.bytes_per_token == 10 * bytes_per_token(2, 3, 4, torch.bfloat16)


@pytest.mark.parametrize(("head_dim", "row"), [(64, 64 + 4), (80, 96 + 6)])
def test_an_int8_token_has_a_byte_an_element_and_two_for_each_32(head_dim: int, row: int) -> None:
    cache = KVCache(10, 2, 3, head_dim, torch.int8, "cpu")
    held = sum(buffer.nbytes for layer_id in range(2) for buffer in cache.get(layer_id))
    assert held == 10 * cache.bytes_per_token == 10 * bytes_per_token(2, 3, head_dim, torch.int8)
    assert cache.bytes_per_token == 2 * 2 * 3 * row


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 0.0),
        (torch.bfloat16, 2**-8),
        (torch.int8, 0.006),
        (torch.float8_e4m3fn, 2**-4),
    ],
)
def test_what_is_gathered_is_what_was_written(dtype: torch.dtype, tolerance: float) -> None:
    cache = KVCache(8, 2, 3, 40, dtype, "cpu")
    cache.k_scales[1] = 2.0
    k, v = torch.rand(2, 3, 40), torch.rand(2, 3, 40)
    cache.set_kv(1, torch.tensor([5, 2]), k, v)
    gathered = cache.gather(1, torch.tensor([2, 0, 5], dtype=torch.int32), torch.float32)
    for got, written in zip(gathered, (k, v), strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got[[2, 0]], written, atol=tolerance, rtol=0)
        assert not got[1].any()  # the padding slot
    assert not any(x.any() for x in cache.gather(0, torch.tensor([2, 5]), torch.float32))


def test_unused_slots_cost_no_memory() -> None:
    before = psutil.Process().memory_info().rss
    cache = KVCache(1 << 18, 1, 8, 64, torch.float32, "cpu")
    assert cache.get(0)[0].nbytes == 1 << 29
    assert psutil.Process().memory_info().rss - before < 1 << 26


def test_e4m3_buffers_hold_the_scaled_values_and_saturate() -> None:
    cache = KVCache(8, 2, 1, 2, torch.float8_e4m3fn, "cpu")
    cache.k_scales[1], cache.v_scales[1] = 2.0, 0.5
    k, v = torch.tensor([[[3.0, -1e9]]]), torch.tensor([[[0.25, 1e9]]])
    cache.set_kv(1, torch.tensor([6]), k, v)
    assert cache.get(1)[0][6].float().tolist() == [[1.5, -448]]
    assert cache.get(1)[1][6].float().tolist() == [[0.5, 448]]
    assert cache.bytes_per_token == 2 * 2 * 2
