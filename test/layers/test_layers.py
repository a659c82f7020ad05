"""The small layers against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from srt.layers.activation import GatedActivation
from srt.layers.embedding import Embedding
from srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from srt.layers.linear import MergedLinear
from srt.model_config import ACTIVATIONS


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, 8), torch.randn(8)
    expected = x / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    for norm, factor in ((RMSNorm(8, 1e-5), weight), (GemmaRMSNorm(8, 1e-5), 1 + weight)):
        norm.weight.data.copy_(weight)
        torch.testing.assert_close(norm(x).double(), expected * factor, atol=1e-6, rtol=0)


def test_a_gemma_norm_rounds_once_at_the_end() -> None:
    torch.manual_seed(0)
    norm = GemmaRMSNorm(64, 1e-6).bfloat16()
    norm.weight.data.copy_(torch.randn(64))
    x = torch.randn(4, 64).bfloat16()
    exact = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact = exact * (1 + norm.weight.float())
    torch.testing.assert_close(norm(x), exact.bfloat16(), atol=0, rtol=2**-8)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gated_activation_multiplies_the_activated_first_half_with_the_second(name: str) -> None:
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    activate = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    }[name]
    expected = activate(x[:, :6]) * x[:, 6:]
    torch.testing.assert_close(GatedActivation(name)(x), expected)
    assert torch.equal(x, before)


def test_the_parts_of_a_merged_linear_cover_its_rows_in_order() -> None:
    linear = MergedLinear(4, {"q_proj": 6, "k_proj": 2, "v_proj": 3}, bias=True)
    rows = dict(linear.part_rows())
    assert rows == {"q_proj": slice(0, 6), "k_proj": slice(6, 8), "v_proj": slice(8, 11)}
    assert linear.weight.shape == (11, 4) and linear.bias is not None


def test_capped_logits_stay_below_the_cap_and_keep_their_order() -> None:
    head = Embedding(vocab_size=4, hidden_size=2)
    head.weight.data.copy_(torch.tensor([[1.0, 0], [2, 0], [40, 0], [-9, 0]]))
    hidden = torch.tensor([[1.0, 0]])
    assert head.logits(hidden).tolist() == [[1, 2, 40, -9]]
    capped = head.logits(hidden, cap=30.0)
    assert float(capped.abs().max()) < 30
    assert capped.argsort().tolist() == head.logits(hidden).argsort().tolist()
