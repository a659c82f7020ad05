"""The interpreter computes what a GPU would, and its checks fire when they should."""

from __future__ import annotations

import os

import interpreted_triton
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

if torch.cuda.is_available():
    pytest.skip("kernels of this process run on the GPU", allow_module_level=True)
interpreted_triton.install()


@triton.jit
def copy_kernel(x_ptr, out_ptr, N: tl.constexpr, STEP: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    product = tl.dot(tl.load(a_ptr + tile), tl.load(b_ptr + tile), input_precision=PRECISION)
    tl.store(out_ptr + tile, product)


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    bigger = tl.where(x > y, x, y)
    tl.store(out_ptr + i, bigger * y + tl.abs(x))
    tl.store(out_ptr + N, tl.sum(x.to(tl.float32)).to(tl.bfloat16))
    tl.store(out_ptr + N + 1, tl.max(x, 0))


@triton.jit
def shift_kernel(x_ptr):
    i = tl.program_id(0)
    tl.store(x_ptr + i, tl.load(x_ptr + i + 1))


@triton.jit
def total_kernel(x_ptr, out_ptr):
    tl.atomic_add(out_ptr, tl.load(x_ptr + tl.program_id(0)))


@triton.jit
def masked_kernel(x_ptr, out_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n))


@triton.jit
def loop_kernel(out_ptr, n):
    total = 0
    for i in range(n):
        total += i
    tl.store(out_ptr, total)


@triton.jit
def bitcast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.int16, bitcast=True))


def test_functions_decorated_before_the_install_are_interpreted_too():
    assert not isinstance(tl.sum, JITFunction)
    assert not isinstance(tl.standard.max, JITFunction)


def test_processes_that_are_started_do_not_interpret():
    assert triton.knobs.runtime.interpret
    assert "TRITON_INTERPRET" not in os.environ


def test_an_aligned_copy_is_exact():
    x, out = torch.randn(32), torch.zeros(32)
    copy_kernel[(2,)](x, out, 16, 16)
    assert torch.equal(x, out)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float16),
        (torch.float32, torch.float8_e5m2),
        (torch.int32, torch.bfloat16),
    ],
)
def test_casts_round_as_torch_does(source, target):
    values = torch.linspace(-400, 400, 1024) + torch.linspace(0, 0.03, 1024)
    values[:256] /= 1000  # fp8 subnormals
    x = values.to(source)
    out = torch.zeros(1024, dtype=target)
    cast_kernel[(1,)](x, out, 1024)
    assert torch.equal(out.float(), x.to(target).float())


def test_casts_to_fp8_saturate():
    out = torch.zeros(4, dtype=torch.float8_e4m3fn)
    cast_kernel[(1,)](torch.tensor([1e6, -1e6, 460.0, 448.0]), out, 4)
    assert out.float().tolist() == [448, -448, 448, 448]


def test_a_halfway_float_rounds_to_the_even_bf16():
    below, halfway = 1 + 2**-7, 1 + 2**-7 + 2**-8
    out = torch.zeros(2, dtype=torch.bfloat16)
    cast_kernel[(1,)](torch.tensor([1 + 2**-8, halfway]), out, 2)
    assert out.tolist() == [1.0, below + 2**-7]


def test_bf16_arithmetic_rounds_after_every_operation():
    x, y = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    out = torch.zeros(66, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, 64)
    assert torch.equal(out[:64], torch.maximum(x, y) * y + x.abs())
    assert out[64] == x.float().sum().bfloat16()
    assert out[65] == x.max()


def test_bf16_bitcasts_show_the_bits():
    x = torch.randn(16).bfloat16()
    out = torch.zeros(16, dtype=torch.int16)
    bitcast_kernel[(1,)](x, out, 16)
    assert torch.equal(out, x.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dot_multiplies_small_floats_and_adds_in_float32(dtype):
    a, b = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype)
    out = torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, out, 16, "ieee")
    torch.testing.assert_close(out, a.float() @ b.float())


def test_a_tf32_dot_sees_ten_bits_of_mantissa():
    a, b = torch.full((16, 16), 1 + 2**-12), torch.eye(16)
    exact, rounded = torch.zeros(16, 16), torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, exact, 16, "ieee")
    dot_kernel[(1,)](a, b, rounded, 16, "tf32")
    assert torch.equal(exact, a)
    assert torch.equal(rounded, torch.ones(16, 16))


def test_tf32_cuts_the_low_bits_off():
    x = np.array([1 + 2**-11 + 2**-12, -1 - 2**-11, np.inf], dtype=np.float32)
    assert interpreted_triton.truncate_to_tf32(x).tolist() == [1, -1, np.inf]


def test_reading_past_a_tensor_is_a_fault():
    with pytest.raises(
        Exception, match=r"MemoryFault.*load.*1 of 16 .*element 15 of a storage of 15"
    ):
        copy_kernel[(1,)](torch.randn(15), torch.zeros(16), 16, 16)


def test_writing_past_a_tensor_is_a_fault():
    with pytest.raises(Exception, match=r"MemoryFault.*store"):
        copy_kernel[(1,)](torch.randn(16), torch.zeros(15), 16, 16)


def test_a_view_does_not_own_the_rest_of_its_storage():
    with pytest.raises(Exception, match="MemoryFault"):
        copy_kernel[(1,)](torch.randn(64)[:8], torch.zeros(16), 16, 16)


def test_the_gap_between_the_rows_of_a_slice_is_out_of_bounds():
    with pytest.raises(Exception, match="MemoryFault"):
        copy_kernel[(1,)](torch.randn(4, 8)[:, :4], torch.zeros(16), 16, 16)


def test_overlapping_stores_are_a_race():
    with pytest.raises(Exception, match=r"RaceFault.*number 1.*program number 0"):
        copy_kernel[(2,)](torch.randn(32), torch.zeros(32), 16, 8)


def test_reading_what_another_program_writes_is_a_race():
    with pytest.raises(Exception, match="RaceFault"):
        shift_kernel[(4,)](torch.randn(5))


def test_atomics_are_no_race():
    out = torch.zeros(1)
    total_kernel[(4,)](torch.ones(4), out)
    assert out.item() == 4


def test_a_masked_lane_without_a_default_is_not_zero():
    out = torch.zeros(16)
    masked_kernel[(1,)](torch.ones(16), out, 4, 16)
    assert out[:4].tolist() == [1] * 4
    assert out[4:].isnan().all()


def test_a_loop_may_have_a_bound_known_only_at_run_time():
    out = torch.zeros(1, dtype=torch.int32)
    loop_kernel[(1,)](out, 5)
    assert out.item() == 10
