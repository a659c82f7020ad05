"""The backend: no hidden waits, nothing that a CUDA graph could not hold, and clear refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import LAYER, SMALL_GPU, make_case
from fake_cuda import FakeCuda, WrongDevice

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.attention import Attention, HeadNorms, split_heads
from srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from srt.layers.triton_attention import GpuFacts, TritonAttentionBackend
from srt.mem_cache.kv_cache import KVCache

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64


def make_backend(device="cpu", kv_dtype=torch.bfloat16, **options):
    arguments = dict(
        num_heads=NUM_HEADS,
        dtype=torch.bfloat16,
        windows={None, 128},
        max_batch=8,
        gpu=SMALL_GPU,
        head_dim=HEAD_DIM,
        num_kv_heads=NUM_KV_HEADS,
    )
    arguments.update(options)
    head_dim, num_kv_heads = arguments.pop("head_dim"), arguments.pop("num_kv_heads")
    cache = KVCache(64, 2, num_kv_heads, head_dim, kv_dtype, device)
    table = torch.zeros(9, 64, dtype=torch.int32, device=device)
    return TritonAttentionBackend(cache, table, **arguments)


def fake_batch(mode, seq_lens, extend_lens):
    def numbers(size):
        return torch.zeros(size, dtype=torch.int64, device="cuda")

    b, n = len(seq_lens), sum(extend_lens)
    return ForwardBatch(
        mode=mode,
        input_ids=numbers(n),
        positions=numbers(n),
        req_pool_indices=numbers(b),
        seq_lens=numbers(b),
        extend_lens=numbers(b),
        out_cache_loc=numbers(n),
        seq_lens_cpu=seq_lens,
        extend_lens_cpu=extend_lens,
        sampling=None,
    )


def fake_pass(backend, batch, layer=None):
    layer = layer or Attention(0, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 0.1)
    n = len(batch.input_ids)
    q = torch.empty(n, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    k = torch.empty(n, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    backend.plan(batch)
    return backend.forward(layer, q, k, k)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_decode_pass_never_waits_for_the_device(kv_dtype):
    with FakeCuda(90) as cuda:
        gpu = GpuFacts.of(torch.device("cuda"))
        backend = make_backend("cuda", kv_dtype, gpu=gpu)
        out = fake_pass(backend, fake_batch(ForwardMode.DECODE, [3, 40], [1, 1]))
    assert gpu == GpuFacts(132, (9, 0))
    assert (out.shape, out.dtype) == ((2, NUM_HEADS, HEAD_DIM), torch.bfloat16)
    assert [launch.name for launch in cuda.launches] == [
        *["decode_plan_kernel"] * 2,  # one a window
        "decode_split_kernel",
        "decode_reduce_kernel",
    ]


def test_an_extend_pass_never_waits_for_the_device():
    with FakeCuda(90) as cuda:
        batch = fake_batch(ForwardMode.EXTEND, [3, 140], [3, 90])
        out = fake_pass(make_backend("cuda"), batch)
    assert out.shape == (93, NUM_HEADS, HEAD_DIM)
    # 128 rows are 32 tokens of 4 query heads: one tile and three.
    assert [(launch.name, launch.grid) for launch in cuda.launches] == [
        ("extend_kernel", (NUM_KV_HEADS, 4))
    ]


def test_the_launches_of_a_decode_pass_do_not_depend_on_lengths():
    def launches(seq_lens):
        with FakeCuda(90) as cuda:
            fake_pass(make_backend("cuda"), fake_batch(ForwardMode.DECODE, seq_lens, [1, 1]))
        numbers = [
            [value for value in launch.arguments.values() if not torch.is_tensor(value)]
            for launch in cuda.launches
        ]
        return [launch.name for launch in cuda.launches], numbers

    assert launches([1, 1]) == launches([7, 60_000])


def test_a_table_that_was_left_on_the_host_is_found_out():
    with FakeCuda(90):
        backend = make_backend("cuda")
        backend.req_to_token = torch.zeros(9, 64, dtype=torch.int32)
        with pytest.raises(WrongDevice, match="table_ptr"):
            fake_pass(backend, fake_batch(ForwardMode.DECODE, [3], [1]))


def test_other_lengths_in_the_same_tensors_need_no_new_host_plan(kernel_device):
    """What a graph replay does: launches again with the same arguments."""
    case = make_case([(299, 1), (9, 1)], ForwardMode.DECODE, device=kernel_device)
    case.run()
    case.batch.seq_lens -= 4
    case.batch.out_cache_loc.fill_(0)
    case.batch.seq_lens_cpu = [-1, -1]  # must not be read
    out = case.run().double().cpu()
    shorter = [(x[:-4], y[:-4]) for x, y in zip(case.keys, case.values, strict=True)]
    case.keys, case.values = map(list, zip(*shorter, strict=True))
    torch.testing.assert_close(out, case.reference(), atol=3e-6, rtol=3e-6)


@pytest.mark.gpu
def test_a_captured_decode_pass_serves_other_lengths():
    case = make_case([(299, 1), (9, 1)], ForwardMode.DECODE, device="cuda")
    case.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    case.batch.seq_lens -= 4
    case.batch.out_cache_loc.fill_(0)
    graph.replay()
    shorter = [(x[:-4], y[:-4]) for x, y in zip(case.keys, case.values, strict=True)]
    case.keys, case.values = map(list, zip(*shorter, strict=True))
    torch.testing.assert_close(out.double().cpu(), case.reference(), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("mode", ForwardMode)
def test_queries_may_be_a_slice_of_a_wider_matrix(mode, kernel_device):
    case = make_case([(70, 1), (3, 1)], mode, device=kernel_device)
    wide = torch.full((2, 3, *case.q.shape[1:]), float("nan"), device=kernel_device)
    wide[:, 1] = case.q
    case.q = wide[:, 1]
    case.check()


@pytest.mark.parametrize("mode", ForwardMode)
def test_only_the_layer_and_the_slots_of_the_pass_are_written(mode, kernel_device):
    case = make_case([(5, 1), (0, 1)], mode, device=kernel_device)
    cache = case.backend.kv_cache
    before = [buffer.clone() for buffer in (*cache.k_buffers, *cache.v_buffers)]
    case.run()
    slots = case.batch.out_cache_loc
    before[LAYER][slots] = case.k
    before[2 + LAYER][slots] = case.v
    for buffer, expected in zip((*cache.k_buffers, *cache.v_buffers), before, strict=True):
        torch.testing.assert_close(buffer, expected, equal_nan=True, rtol=0, atol=0)


def test_layers_with_and_without_a_window_share_a_pass(kernel_device):
    case = make_case([(299, 1), (20, 1)], ForwardMode.DECODE, device=kernel_device, window=40)
    case.check()
    case.layer.sliding_window = None
    case.check()
    scratch = case.backend.scratch
    assert scratch[40].first_item[:3].tolist() == [0, 1, 2]
    assert scratch[None].first_item[:3].tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(head_dim=512), "head_dim is 512.*256"),
        (dict(num_heads=7), "num_heads 7 is no multiple of num_kv_heads 2"),
        (dict(dtype=torch.float16), "kv_cache_dtype torch.bfloat16 is neither dtype torch.float16"),
        (
            dict(kv_dtype=torch.float8_e4m3fn, gpu=GpuFacts(108, (8, 0))),
            r"float8_e4m3fn needs compute capability \(8, 9\), this GPU has \(8, 0\)",
        ),
    ],
)
def test_what_the_kernels_cannot_serve_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_backend(**options)


def test_a_batch_beyond_the_announced_one_is_refused(kernel_device):
    case = make_case([(3, 1)] * 4, ForwardMode.DECODE, device=kernel_device)
    case.backend.max_batch = 3
    with pytest.raises(AssertionError, match="4 rows, at most 3"):
        case.backend.plan(dataclasses.replace(case.batch))


@pytest.mark.parametrize("scales", [None, (0.5, 2.0)])
@pytest.mark.parametrize("kind", [None, RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("mode", ForwardMode)
def test_heads_of_a_projection_are_attended_to_as_in_separate_steps(
    mode, kind, scales, kernel_device
):
    """Slot 0 aside, which a padded row must leave alone."""
    options = {} if scales is None else dict(kv_dtype=torch.float8_e4m3fn, scales=scales)
    case = make_case([(40, 1), (3, 1), (7, 1)], mode, device=kernel_device, **options)
    case.batch.out_cache_loc[2] = 0
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = 4, 2, 64
    heads = torch.randn(3, num_heads + 2 * num_kv_heads, head_dim, device=kernel_device)
    angles = torch.randn(3, 1, head_dim // 2, device=kernel_device)
    norms = None
    if kind is not None:
        norms = HeadNorms(*(kind(head_dim, 1e-5).to(kernel_device) for _ in range(2)))
        for norm in norms:
            norm.weight.data.normal_()
    cache, backend = case.backend.kv_cache, case.backend
    cos, sin = angles.cos(), angles.sin()
    backend.plan(case.batch)
    out = backend.forward_heads(case.layer, heads, cos, sin, norms)
    written = [buffer.float().clone() for buffer in cache.get(LAYER)]
    expected = backend.forward(case.layer, *split_heads(case.layer, heads, cos, sin, norms))
    # A value that rounds to another float8 moves the result by more than float32 does.
    atol = 1e-5 if scales is None else 0.1
    torch.testing.assert_close(out[:2], expected[:2], atol=atol, rtol=0)
    slots = case.batch.out_cache_loc[:2]
    for got, buffer in zip(written, cache.get(LAYER), strict=True):
        rtol = 1e-5 if scales is None else 2**-3
        torch.testing.assert_close(got[slots], buffer.float()[slots], atol=1e-5, rtol=rtol)
        assert got[0].isnan().all()
