"""Kernels beside float64 or, where the result is exact, beside the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.gpu_device import Device
from bench.gpu_passes import AttentionPass, Heads
from srt.forward_batch import ForwardMode
from srt.layers.fused_activation import gated_activation
from srt.layers.fused_norm import add_rms_norm
from srt.layers.fused_rope_kv import KVSlots, rotate_and_write_kv, rotate_and_write_kv_reference
from srt.layers.fused_sampler import choose_tokens
from srt.layers.invariant_linear import invariant_linear, invariant_linear_reference
from srt.layers.sampler import sample
from srt.sampling_batch import SamplingBatch
from srt.sampling_params import SamplingParams

# Attention averages values of size 1; what remains is the rounding of results and of weights.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Check:
    """The largest difference found, in parts of the value or of 1, whichever is larger, and what is
    allowed."""

    kernel: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def checks(device: Device) -> Iterator[Check]:
    """Every kernel of a step, in the shapes of models in use."""
    for mode in ForwardMode:
        yield from _attention(device, mode)
    yield from _small_kernels(device)
    yield _sampling(device)


def _attention(device: Device, mode: ForwardMode) -> Iterator[Check]:
    wide = Heads()
    cases: list[tuple[str, Heads, torch.dtype, torch.dtype | None, bool]] = [
        ("", wide, torch.bfloat16, None, False),
        ("fp16", wide, torch.float16, None, False),
        ("fp32", Heads(8, 2, 64), torch.float32, None, False),
        ("invariant", wide, torch.bfloat16, None, True),
        ("d64", Heads(9, 3, 64), torch.bfloat16, None, False),
        ("d80", Heads(8, 8, 80), torch.bfloat16, None, False),
        ("d96", Heads(8, 8, 96), torch.bfloat16, None, False),
        ("d256 window cap", Heads(8, 4, 256, 128, 50.0), torch.bfloat16, None, False),
    ]
    if device.gpu.capability >= (8, 9):
        cases.append(("e4m3 cache", wide, torch.bfloat16, FP8, False))
    for name, heads, dtype, kv_dtype, invariant in cases:
        if device.is_dry:
            heads = Heads(2, 1, heads.head_dim, heads.window and 16, heads.logit_cap)
            seq_lens = [1, 65, 130]
        else:
            seq_lens = [1, 63, 64, 65, 700, 3001]
        one = mode is ForwardMode.DECODE
        extend_lens = [1 if one else max(1, n // 2) for n in seq_lens]
        made = AttentionPass(
            device, heads, mode, seq_lens, extend_lens, dtype, kv_dtype, 1, invariant
        )
        made.plan()
        error = _relative(made.attend(), made.reference())
        yield Check(f"{mode.value} attention {name}".strip(), error, TOLERANCES[dtype])


def _small_kernels(device: Device) -> Iterator[Check]:
    rows, size = (3, 64) if device.is_dry else (257, 4096)
    generator = torch.Generator(device.name).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device=device.name)
        return x.bfloat16()

    residual, update, weight = random(rows, size), random(rows, size), random(size)
    normed, total = add_rms_norm(residual, update, weight, 1e-5)
    exact = total.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    yield Check("add + RMSNorm", _relative(normed, exact), 2**-8)

    product = random(size, size)
    out = invariant_linear(normed, product)
    exact = invariant_linear_reference(normed, product)
    yield Check("batch-invariant product", _relative(out, exact.double()), 2**-7)

    gate_up = random(rows, 2 * size)
    gate, up = gate_up.double().chunk(2, -1)
    out = gated_activation(gate_up, "silu")
    yield Check("SiLU * up", _relative(out, torch.nn.functional.silu(gate) * up), 2**-7)

    heads, num_kv_heads, head_dim = random(rows, 48, 128), 8, 128
    angles = torch.randn((rows, 1, head_dim // 2), generator=generator, device=device.name)
    slots = torch.arange(1, rows + 1, device=device.name)
    caches = [
        torch.zeros((rows + 1, num_kv_heads, head_dim), dtype=torch.bfloat16, device=device.name)
        for _ in range(4)
    ]
    cos, sin = angles.cos(), angles.sin()
    q = rotate_and_write_kv(heads, cos, sin, KVSlots(caches[0], caches[1], slots))
    exact_q = rotate_and_write_kv_reference(heads, cos, sin, KVSlots(caches[2], caches[3], slots))
    pairs = ((q, exact_q), (caches[0], caches[2]), (caches[1], caches[3]))
    # A result that falls between two numbers may be rounded to either.
    yield Check("RoPE + KV write", max(_relative(x, y.double()) for x, y in pairs), 2**-6)


def _relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((got.double() - exact).abs() / exact.abs().clamp(min=1.0)).max())


def _sampling(device: Device) -> Check:
    """Rows whose token differs from the CPU's, which must be none."""
    vocab, copies = (500, 1) if device.is_dry else (128_256, 16)
    knobs = [{"temperature": 0.0}, {}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}]
    params = [
        SamplingParams(**knob, sampling_seed=seed)  # type: ignore[arg-type]
        for seed in range(copies)
        for knob in knobs
    ]
    b = len(params)
    logits = torch.randn((b, vocab), generator=torch.Generator().manual_seed(2)) * 3
    seq_lens = torch.arange(b) + 5

    def batch(name: str) -> SamplingBatch:
        empty: list[list[int]] = [[] for _ in params]
        return SamplingBatch.build(params, empty, empty, empty, vocab, name)

    choose: Callable[..., torch.Tensor] = choose_tokens
    on_device = choose(logits.to(device.name), batch(device.name), seq_lens.to(device.name))
    expected = sample(logits, batch("cpu"), seq_lens)
    return Check("sampling, rows that differ", float((on_device.cpu() != expected).sum()), 0.0)
