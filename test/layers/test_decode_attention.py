"""The decode kernels against float64 over odd ragged shapes, and how they split the work."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from attention_cases import EVERYWHERE, make_case

from srt.forward_batch import ForwardMode
from srt.layers.decode_attention import (
    INVARIANT_MAX_SPLITS,
    INVARIANT_SPLIT,
    MIN_SPLIT,
    REDUCE_BLOCK,
    DecodeScratch,
    plan_decode,
)
from srt.layers.triton_attention import GpuFacts

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# Lengths around a tile of 64 keys and of 32, around the shortest split, and one that is cut often.
LENGTHS = [1, 63, 64, 65, 33, 127, 129, 700]


def decode_case(lengths, device, **options):
    shapes = [(length - 1, 1) for length in lengths]
    return make_case(shapes, ForwardMode.DECODE, device=device, **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(head_dim=64, dtype=FP32),
        dict(head_dim=64, dtype=BF16, num_heads=6, num_kv_heads=1, page_size=16),
        dict(head_dim=80, dtype=FP16, num_heads=2, num_kv_heads=2),
        dict(head_dim=96, dtype=BF16, num_heads=14, num_kv_heads=2, window=50),
        dict(head_dim=128, dtype=BF16, num_heads=8, logit_cap=3.0, page_size=64),
        dict(head_dim=128, dtype=FP32, num_heads=40, num_kv_heads=1),
        dict(head_dim=128, dtype=BF16, kv_dtype=E4M3, scales=(0.5, 0.03)),
        dict(head_dim=256, dtype=BF16, window=64, logit_cap=2.0),
        dict(head_dim=64, dtype=FP32, window=64, batch_invariant=True),
        dict(head_dim=64, dtype=FP32, kv_dtype=E4M3, scales=(0.5, 2.0), window=200),
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_decode_agrees_with_float64(options, kernel_device):
    decode_case(LENGTHS, kernel_device, **options).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "window", "logit_cap", "page_size"), EVERYWHERE
)
def test_decode_agrees_with_float64_everywhere(
    head_dim, dtype, kv_dtype, window, logit_cap, page_size, kernel_device
):
    options = dict(window=window, logit_cap=logit_cap, page_size=page_size, kv_dtype=kv_dtype)
    lengths = [1, 31, 32, 66, 64, 300]
    decode_case(lengths, kernel_device, head_dim=head_dim, dtype=dtype, **options).check()


def test_a_row_of_one_token_returns_its_value(kernel_device):
    case = decode_case([1, 1], kernel_device)
    out = case.run()
    assert torch.equal(out[:, ::2], case.v) and torch.equal(out[:, 1::2], case.v)


def test_a_row_without_keys_gives_zeros(kernel_device):
    case = decode_case([5, 9], kernel_device)
    case.batch.seq_lens[0] = 0
    out = case.run()
    assert not out[0].any() and out[1].any()


def test_shares_that_are_empty_after_rounding_change_nothing(kernel_device):
    length = INVARIANT_SPLIT * INVARIANT_MAX_SPLITS + 1
    case = decode_case([length], kernel_device, num_heads=1, num_kv_heads=1, batch_invariant=True)
    case.check()


def test_a_request_of_more_items_than_the_reduction_reads_at_once(kernel_device):
    options = dict(num_heads=16, num_kv_heads=1, gpu=GpuFacts(50, (9, 0)))
    case = decode_case([(REDUCE_BLOCK + 3) * MIN_SPLIT], kernel_device, **options)
    case.layer.scale = 1.0  # so that each head has a favourite key, for some in the last items
    case.check()
    assert case.backend.scratch[None].first_item[1] == REDUCE_BLOCK + 3


def test_no_item_of_a_window_is_left_without_keys(kernel_device):
    case = decode_case([700], kernel_device, window=300, gpu=GpuFacts(50, (9, 0)))
    case.check()
    scratch = case.backend.scratch[300]
    assert scratch.first_item[1] == 3
    assert scratch.log_sum[:3].isfinite().all()


def test_huge_logits_do_not_overflow(kernel_device):
    case = decode_case([200], kernel_device)
    case.layer.scale = 1e4
    case.check()


@pytest.mark.parametrize("window", [None, 700])
def test_batch_invariant_rows_are_the_same_bits_alone_and_in_a_batch(window, kernel_device):
    options = dict(batch_invariant=True, window=window, dtype=BF16)
    case = decode_case([1100, 40, 513], kernel_device, **options)
    together = case.run()
    for row in range(3):
        one = slice(row, row + 1)
        batch = case.batch
        for name in ("req_pool_indices", "seq_lens", "extend_lens", "out_cache_loc"):
            setattr(batch, name, getattr(batch, name)[one])
        whole = (case.q, case.k, case.v)
        case.q, case.k, case.v = (x[one] for x in whole)
        assert torch.equal(case.run(), together[one])
        case = decode_case([1100, 40, 513], kernel_device, **options)


def test_queries_beyond_float16_saturate_over_an_e4m3_cache(kernel_device):
    case = decode_case([90, 3], kernel_device, dtype=BF16, kv_dtype=E4M3)
    case.q[..., 0] = 1e5
    case.check()


def scratch_for(max_batch, device, batch_invariant=False, sms=2):
    return DecodeScratch.allocate(max_batch, 4, 2, 64, sms, batch_invariant, torch.device(device))


def planned(lengths, scratch, window=None):
    """Items of each request after planning, checked to be a list in order."""
    seq_lens = torch.tensor(lengths, device=scratch.items.device)
    plan_decode(seq_lens, scratch, 4, 2, window)
    first = scratch.first_item[: len(lengths) + 1].tolist()
    splits = [after - before for before, after in itertools.pairwise(first)]
    expected = [row for row, count in enumerate(splits) for _ in range(count)]
    assert first[0] == 0
    assert scratch.items[: first[-1]].tolist() == expected
    return splits


def test_every_request_has_an_item_and_no_split_is_short(kernel_device):
    lengths = [0, 1, MIN_SPLIT, MIN_SPLIT + 1, 3 * MIN_SPLIT]
    splits = planned(lengths, scratch_for(8, kernel_device, sms=100))
    assert splits == [1, 1, 1, 2, 3]


def test_the_items_beyond_the_last_are_marked_as_none(kernel_device):
    scratch = scratch_for(3, kernel_device)
    scratch.items.fill_(7)
    assert planned([10, 20], scratch) == [1, 1]
    # Two rows and one item for each of the eight programs of two SMs, over two KV heads.
    assert scratch.items[2:6].tolist() == [-1] * 4


def test_one_long_request_gets_most_of_the_items(kernel_device):
    splits = planned([10_000, 10, 10, 10], scratch_for(4, kernel_device, sms=20))
    assert splits == [40, 1, 1, 1]


def test_a_full_machine_splits_nothing(kernel_device):
    assert planned([500] * 64, scratch_for(64, kernel_device)) == [1] * 64


def test_a_window_bounds_the_splits(kernel_device):
    assert planned([10_000], scratch_for(1, kernel_device, sms=100), window=300) == [3]


def test_batch_invariant_splits_depend_on_the_own_length_only(kernel_device):
    lengths = [1, INVARIANT_SPLIT, INVARIANT_SPLIT + 1, 10**6]
    expected = [1, 1, 2, INVARIANT_MAX_SPLITS]
    assert planned(lengths, scratch_for(4, kernel_device, batch_invariant=True)) == expected
    for length, count in zip(lengths, expected, strict=True):
        assert planned([length], scratch_for(1, kernel_device, True, sms=50)) == [count]


@pytest.mark.parametrize("seed", range(10))
def test_the_items_of_any_lengths_fit_the_scratch(seed, kernel_device):
    rng = random.Random(seed)
    batch = rng.randint(1, 40)
    lengths = [int(10 ** rng.uniform(0, 5)) for _ in range(batch)]
    scratch = scratch_for(batch, kernel_device, sms=rng.randint(1, 60))
    assert sum(planned(lengths, scratch)) <= len(scratch.items)
