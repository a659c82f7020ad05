"""On CUDA the layers take the fused kernels, and the host does not wait for them."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.activation import GatedActivation
from srt.layers.attention import Attention, HeadNorms
from srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from srt.layers.rotary_embedding import rotate
from srt.layers.sampler import sample
from srt.layers.triton_attention import GpuFacts, TritonAttentionBackend
from srt.mem_cache.kv_cache import KVCache
from srt.model_config import ACTIVATIONS
from srt.sampling_batch import SamplingBatch
from srt.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built() and shutil.which("g++") is None,
    reason="torch without CUDA needs g++ to build a device guard",
)
BF16 = torch.bfloat16


def names(cuda: FakeCuda) -> list[str]:
    return [launch.name for launch in cuda.launches]


@pytest.mark.parametrize(("kind", "adds_one"), [(RMSNorm, False), (GemmaRMSNorm, True)])
def test_norms_are_one_launch_with_the_sum_before_them_or_without(kind, adds_one):
    with FakeCuda() as cuda, torch.device("cuda"):
        norm = kind(64, 1e-6)
        x = torch.empty(5, 3, 64, dtype=BF16)
        assert norm(x).shape == x.shape
        normed, total = norm.add(x[:, 0], x[:, 1])
        assert normed.shape == total.shape == (5, 64)
    assert names(cuda) == ["rms_norm_kernel"] * 2
    alone, added = (launch.arguments for launch in cuda.launches)
    assert alone["residual_ptr"] is None and added["residual_ptr"] is not None
    for arguments in (alone, added):
        assert arguments["ADD_ONE"] == adds_one
        assert arguments["eps"] == 1e-6
        assert arguments["weight_ptr"] is norm.weight


def test_adding_and_normalising_is_the_same_on_a_cpu_as_in_two_steps():
    torch.manual_seed(0)
    residual, update = torch.randn(3, 16).to(BF16), torch.randn(3, 16).to(BF16)
    for kind in (RMSNorm, GemmaRMSNorm):
        norm = kind(16, 1e-6).to(BF16)
        norm.weight.data.copy_(torch.randn(16))
        normed, total = norm.add(residual, update)
        assert torch.equal(total, residual + update)
        assert torch.equal(normed, norm(total))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gated_activation_is_one_launch(name):
    with FakeCuda() as cuda:
        out = GatedActivation(name)(torch.empty(5, 64, dtype=BF16, device="cuda"))
        assert out.shape == (5, 32)
    assert names(cuda) == ["gated_activation_kernel"]
    assert cuda.launches[0].arguments["NAME"] == name


def test_a_rotation_is_one_launch():
    with FakeCuda() as cuda, torch.device("cuda"):
        heads = torch.empty(5, 12, 64, dtype=BF16)
        cos = torch.empty(5, 1, 32)
        assert rotate(heads[:, :9], cos, cos).shape == (5, 9, 64)
    assert names(cuda) == ["rope_kv_kernel"]


@pytest.mark.parametrize("kind", [None, RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
def test_between_projection_and_attention_is_one_launch(kind, kv_dtype):
    with FakeCuda() as cuda, torch.device("cuda"):
        cache = KVCache(8, 1, 2, 64, kv_dtype, "cuda")
        table = torch.empty(3, 8, dtype=torch.int32)
        gpu = GpuFacts.of(torch.device("cuda"))
        backend = TritonAttentionBackend(cache, table, 4, BF16, {None}, 2, gpu)
        numbers = torch.empty(2, dtype=torch.int64)
        backend.plan(
            ForwardBatch(ForwardMode.DECODE, *[numbers] * 6, [1, 1], [1, 1], sampling=None)
        )
        norms = None if kind is None else HeadNorms(kind(64, 1e-6), kind(64, 1e-6))
        heads, cos = torch.empty(2, 8, 64, dtype=BF16), torch.empty(2, 1, 32)
        assert Attention(0, 4, 2, 64, 0.1)(heads, cos, cos, backend, norms).shape == (2, 4, 64)
    assert names(cuda) == [
        "decode_plan_kernel",
        "rope_kv_kernel",
        "decode_split_kernel",
        "decode_reduce_kernel",
    ]
    arguments = cuda.launches[1].arguments
    assert arguments["loc_ptr"] is numbers
    assert arguments["ADD_ONE"] == (kind is GemmaRMSNorm)
    assert (arguments["q_norm_ptr"] is None) == (kind is None)


SAMPLING: list[tuple[dict[str, Any], list[str]]] = [
    ({"temperature": 0.0}, []),
    ({}, ["weigh_kernel", "pick_kernel"]),
    ({"top_k": 5}, ["count_kernel", "list_kernel", "search_kernel"]),
    ({"top_p": 0.9}, ["count_kernel", "list_kernel", "search_kernel"]),
]


@pytest.mark.parametrize(("knobs", "kernels"), SAMPLING)
@pytest.mark.parametrize(
    ("adjustment", "adjusting"),
    [
        ({}, []),
        ({"repetition_penalty": 1.2}, ["penalty_kernel"]),
        ({"logit_bias": {3: 1.0}}, ["bias_kernel"]),
        ({"logit_bias": {3: 1.0}, "presence_penalty": 1.0}, ["penalty_kernel", "bias_kernel"]),
    ],
)
def test_sampling_takes_the_kernels_its_rows_need(knobs, kernels, adjustment, adjusting):
    params = [SamplingParams(**knobs, **adjustment)] * 3
    with FakeCuda() as cuda:
        batch = SamplingBatch.build(params, [[1]] * 3, [[]] * 3, [[2]] * 3, 5000, "cuda")
        logits = torch.empty(3, 5000, device="cuda")
        tokens = sample(logits, batch, torch.ones(3, dtype=torch.int64, device="cuda"))
        assert tokens.shape == (3,) and tokens.dtype == torch.int64 and tokens.is_cuda
    assert names(cuda) == [*adjusting, "best_kernel", *kernels]


def test_kinds_of_rows_in_one_batch_are_drawn_one_after_another():
    params = [SamplingParams(**knobs) for knobs, _ in SAMPLING]
    with FakeCuda() as cuda:
        with cuda.sync_allowed():
            batch = SamplingBatch.build(params, [[1]] * 4, [[]] * 4, [[2]] * 4, 5000, "cuda")
        sample(torch.empty(4, 5000, device="cuda"), batch, torch.ones(4, device="cuda").long())
    assert sorted(names(cuda)) == sorted(["best_kernel", *(k for _, ks in SAMPLING for k in ks)])
