"""The extend kernel against float64 over odd ragged shapes, and its list of tiles."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from attention_cases import EVERYWHERE, make_case

from srt.forward_batch import ForwardMode
from srt.layers.extend_attention import extend_tiles
from srt.layers.triton_attention import GpuFacts

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# (prefix, new): single tokens, no prefix, sums around tiles of 32, 64 and 128 keys, a long one.
SHAPES = [(0, 1), (0, 33), (31, 1), (62, 3), (63, 2), (64, 64), (127, 5), (400, 70)]


def extend_case(shapes, device, **options):
    return make_case(shapes, ForwardMode.EXTEND, device=device, **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(head_dim=64, dtype=FP32, num_heads=2),
        dict(head_dim=64, dtype=BF16, num_heads=6, num_kv_heads=1, page_size=16),
        dict(head_dim=80, dtype=FP16, num_heads=2, num_kv_heads=1),
        dict(head_dim=96, dtype=BF16, num_heads=7, num_kv_heads=1, window=50),
        dict(head_dim=128, dtype=BF16, logit_cap=3.0, page_size=64),
        dict(head_dim=128, dtype=FP32, num_heads=2, num_kv_heads=1, window=16),
        dict(head_dim=128, dtype=BF16, kv_dtype=E4M3, scales=(0.5, 0.03)),
        dict(head_dim=256, dtype=BF16, num_kv_heads=1, window=64, logit_cap=2.0),
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_extend_agrees_with_float64(options, kernel_device):
    extend_case(SHAPES, kernel_device, **options).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "window", "logit_cap", "page_size"), EVERYWHERE
)
def test_extend_agrees_with_float64_everywhere(
    head_dim, dtype, kv_dtype, window, logit_cap, page_size, kernel_device
):
    options = dict(window=window, logit_cap=logit_cap, page_size=page_size, kv_dtype=kv_dtype)
    shapes = [(0, 1), (130, 31), (5, 65), (200, 1)]
    extend_case(shapes, kernel_device, head_dim=head_dim, dtype=dtype, **options).check()


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_extend_agrees_with_float64_with_the_tiles_of_every_generation(capability, kernel_device):
    for head_dim, window in ((64, None), (128, None), (128, 90), (256, 33)):
        options = dict(head_dim=head_dim, window=window, dtype=BF16, gpu=GpuFacts(2, capability))
        extend_case(SHAPES, kernel_device, **options).check()


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33])
def test_a_window_sees_that_many_keys_and_the_token_is_one_of_them(window, kernel_device):
    options = dict(dtype=BF16, num_heads=2, num_kv_heads=1, window=window)
    extend_case([(0, 70), (61, 3)], kernel_device, **options).check()


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_a_prompt_cut_in_two_gives_the_same_result_up_to_rounding(cut, kernel_device):
    whole = extend_case([(0, 130)], kernel_device)
    expected = whole.run()[cut:]
    part = extend_case([(cut, 130 - cut)], kernel_device)
    part.q.copy_(whole.q[cut:])
    for buffer, new in ((0, whole.k), (1, whole.v)):
        slots = part.backend.req_to_token[part.batch.req_pool_indices[0], :130].long()
        part.backend.kv_cache.get(part.layer.layer_id)[buffer][slots] = new
    part.k.copy_(whole.k[cut:])
    part.v.copy_(whole.v[cut:])
    torch.testing.assert_close(part.run(), expected, atol=1e-6, rtol=1e-6)


def test_huge_logits_do_not_overflow(kernel_device):
    case = extend_case([(30, 40)], kernel_device)
    case.layer.scale = 1e4
    case.check()


@pytest.mark.parametrize("seed", range(20))
def test_every_new_token_is_in_exactly_one_tile(seed):
    rng = random.Random(seed)
    tokens = rng.choice([1, 18, 32, 128])
    extend_lens = [rng.choice([1, tokens, rng.randint(1, 500)]) for _ in range(rng.randint(1, 9))]
    seq_lens = [rng.randint(0, 900) + extend_len for extend_len in extend_lens]
    tiles = extend_tiles(seq_lens, extend_lens, tokens)
    starts = np.cumsum([0, *extend_lens])
    seen = []
    for request, q_start, start in tiles.tolist():
        assert q_start == starts[request]
        end = min(start + tokens, extend_lens[request])
        seen.extend(range(q_start + start, q_start + end))
    assert sorted(seen) == list(range(sum(extend_lens)))
    keys = [seq_lens[r] - extend_lens[r] + start for r, _, start in tiles.tolist()]
    assert keys == sorted(keys, reverse=True)
