"""Fused gated activations against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from srt.layers.fused_activation import BLOCK, gated_activation
from srt.model_config import ACTIVATIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A unit in the last place: float32 and float64 may round to different sides. In float32 it is the
# error of fast exponentials.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def reference(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    if name == "silu":
        activated = F.silu(gate)
    else:
        activated = F.gelu(gate, approximate="tanh" if name == "gelu_pytorch_tanh" else "none")
    return (activated * up).to(gate_up.dtype)


def random(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * 2).to(device, dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    # The absolute part is for GELU far below zero, a difference of numbers close to one.
    torch.testing.assert_close(got, expected, rtol=RTOL[got.dtype], atol=2e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 1536])
def test_the_activated_first_half_is_multiplied_with_the_second(kernel_device, size, dtype, name):
    gate_up = random(3, 2 * size, dtype=dtype, device=kernel_device)
    before = gate_up.clone()
    assert_close(gated_activation(gate_up, name), reference(gate_up, name))
    assert torch.equal(gate_up, before)


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter's exp, to infinity as meant
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_gates_neither_overflow_nor_leak(kernel_device, name):
    gate = torch.tensor([-1e4, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0, 1e4])
    gate_up = torch.cat([gate, torch.full_like(gate, 2.0)])[None].to(kernel_device)
    assert_close(gated_activation(gate_up, name), reference(gate_up, name))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_rows_may_lie_apart(kernel_device, name):
    wide = random(5, 100, dtype=torch.float32, device=kernel_device)
    for rows in (wide[:, 3:97], wide[::2, :60], wide.view(5, 2, 50)[:, 1, :]):
        assert_close(gated_activation(rows, name), reference(rows, name))


def test_leading_dimensions_are_kept(kernel_device):
    x = random(2, 3, 8, dtype=torch.float32, device=kernel_device)
    assert_close(gated_activation(x, "silu"), reference(x, "silu"))
    assert gated_activation(x[0, 0], "silu").shape == (4,)
    assert gated_activation(torch.empty(0, 8, device=kernel_device), "silu").shape == (0, 4)


def test_an_unknown_activation_does_not_pass_for_another(kernel_device):
    with pytest.raises(AssertionError, match="relu"):
        gated_activation(torch.ones(1, 4, device=kernel_device), "relu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [4864, 8960, 14336, 18944, 21504, 28672])
def test_rows_of_all_sizes_in_use_are_activated(kernel_device, size, dtype, name):
    gate_up = random(4, 2 * size, dtype=dtype, device=kernel_device)
    assert_close(gated_activation(gate_up, name), reference(gate_up, name))
