"""What the sampling kernels share: the numbers that sampler.py computes, to the bit, in Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

MAX_WEIGHT = tl.constexpr(1 << 40)  # as in sampler.py
# Tokens so many temperatures below the best weigh nothing: log(MAX_WEIGHT) is 27.726.
ZERO_DISTANCE = tl.constexpr(27.75)
LOW_WORD = tl.constexpr(0xFFFFFFFF)  # of a key: the token
MIN_KEY = tl.constexpr(-(1 << 63))
MAX_KEY = tl.constexpr((1 << 63) - 1)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def load_logits(logits_ptr, row, token, vocab_size, stride_logits_b):
    """float32, NaN counting as -inf."""
    x = tl.load(
        logits_ptr + row * stride_logits_b + token, mask=token < vocab_size, other=float("-inf")
    )
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def keys_of(x, token):
    """int64, unique, and in the order of sampler._best_ids: by falling logit, then by rising id."""
    bits = x.to(tl.int32, bitcast=True)
    falling = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (falling.to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def logit_of(key):
    """The logit that keys_of made `key` of."""
    rising = ~((key >> 32).to(tl.int32))
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(x, best, temperature):
    """int64, as sampler._weights; `best` is the row's largest logit. float64 as there: float32
    would move sums in their seventh digit, and with them a token now and then."""
    # Equality first, because infinity minus itself is NaN.
    below = tl.where(x == best, 0.0, x.to(tl.float64) - best.to(tl.float64))
    return (tl.exp(below / temperature) * MAX_WEIGHT).to(tl.int64)


@triton.jit
def bins_of(x, best, temperature, BINS: tl.constexpr):
    """Bin [0, BINS) of each logit, rising as logits fall; the last is for those without weight."""
    scale = ((BINS - 1) / (temperature * ZERO_DISTANCE)).to(tl.float32)
    steps = tl.minimum((best - x) * scale, BINS - 1.0)
    return tl.where(x == best, 0, steps.to(tl.int32))


@triton.jit
def least_weight(min_p):
    """The weight that a token needs to pass min-p."""
    return tl.ceil(min_p * MAX_WEIGHT).to(tl.int64)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def uniform_of(seed, position):
    """float64 in [0, 1), the bits of sampler.uniform."""
    state = _mix(seed.to(tl.uint64, bitcast=True) + GAMMA)
    state += position.to(tl.uint64, bitcast=True) * GAMMA
    return (_mix(state) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def target_weight(uniform, total):
    """The cumulative weight that the drawn token is the first to exceed; total > 0."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def total_weight(chunk_weights_ptr, place, chunks, BLOCK_C: tl.constexpr):
    """The weight of a row's whole vocabulary."""
    c = tl.arange(0, BLOCK_C)
    return tl.sum(tl.load(chunk_weights_ptr + place * chunks + c, mask=c < chunks, other=0), 0)


def aot_case(
    kernel: Any, name: str, constexprs: dict[str, Any], absent: tuple[str, ...] = (), warps: int = 4
) -> dict[str, Any]:
    """`absent`: pointers that are None."""
    types = {
        "logits_ptr": "*fp32",
        "counters_ptr": "*i32",
        "temperature_ptr": "*fp64",
        "top_p_ptr": "*fp64",
        "min_p_ptr": "*fp64",
        "vocab_size": "i32:16",
        "stride_logits_b": "i32:16",
        "chunks": "i32",
    }
    run_time = [arg for arg in kernel.arg_names if arg not in constexprs and arg not in absent]
    return {
        "kernel": kernel,
        "name": name,
        "signature": {arg: types.get(arg, "*i64") for arg in run_time},
        "constexprs": constexprs | dict.fromkeys(absent),
        "num_warps": warps,
    }
