"""Speed of attention kernels, beside what the device can do and beside torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu_device import Device
from bench.gpu_passes import AttentionPass, Heads
from srt.forward_batch import ForwardMode

# Keys and values that a measurement goes round: several times what an L2 cache holds.
WORKING_SET = 512 << 20
ELEMENT_BYTES = 2  # all of it is bfloat16
FLEX_BATCH = 32  # decode; each shape costs seconds of compilation


@dataclass(frozen=True)
class DecodeRow:
    """Bandwidths in GB/s of keys and values; `share` of the measured copy. None: did not run, for
    the reason in `note`."""

    batch: int
    context: int
    us: float
    gb_s: float
    share: float
    sdpa_gb_s: float | None
    flex_gb_s: float | None
    note: str


@dataclass(frozen=True)
class ExtendRow:
    """Rates in TFLOP/s of the visible half of the scores; `share` of the measured product."""

    batch: int
    prefix: int
    new: int
    ms: float
    tflops: float
    share: float
    sdpa_tflops: float | None
    flex_tflops: float | None
    note: str


def decode_rows(device: Device, copy_bytes: float) -> Iterator[DecodeRow]:
    heads = Heads(2, 1, 32) if device.is_dry else Heads()
    batches, contexts = ((1, 3), (70,)) if device.is_dry else ((1, 8, 32, 128, 256), (1024, 4096))
    for context in contexts:
        for batch in batches:
            yield _decode(device, heads, batch, context, copy_bytes)
            _empty_cache(device)


def _decode(device: Device, heads: Heads, batch: int, context: int, copy_bytes: float) -> DecodeRow:
    kv_bytes = 2 * batch * context * heads.num_kv_heads * heads.head_dim * ELEMENT_BYTES
    layers = 1 if device.is_dry else max(1, math.ceil(WORKING_SET / kv_bytes))
    made = AttentionPass(
        device, heads, ForwardMode.DECODE, [context] * batch, [1] * batch, num_layers=layers
    )
    made.plan()
    seconds = device.seconds(made.attend) / layers
    rates: dict[str, float | None] = dict.fromkeys(PEERS)
    notes = []
    for name, peer in PEERS.items():
        if name == "flex" and batch != FLEX_BATCH:
            continue
        taken, note = _peer(device, peer, heads, batch, context, 1, layers)
        rates[name] = taken and kv_bytes / taken / 1e9
        notes += [f"{name}: {note}"] if note else []
    bandwidth = kv_bytes / seconds
    return DecodeRow(
        batch,
        context,
        seconds * 1e6,
        bandwidth / 1e9,
        bandwidth / copy_bytes,
        rates["sdpa"],
        rates["flex"],
        "; ".join(notes),
    )


def extend_rows(device: Device, product_rate: float) -> Iterator[ExtendRow]:
    heads = Heads(2, 1, 32) if device.is_dry else Heads()
    shapes = [(1, 0, 2048), (1, 0, 8192), (4, 0, 2048), (1, 8192, 2048), (1, 0, 32768)]
    for batch, prefix, new in [(1, 0, 40), (2, 30, 9)] if device.is_dry else shapes:
        yield _extend(device, heads, batch, prefix, new, product_rate)
        _empty_cache(device)


def _extend(
    device: Device, heads: Heads, batch: int, prefix: int, new: int, product_rate: float
) -> ExtendRow:
    seq_len = prefix + new
    pairs = batch * (new * prefix + new * (new + 1) // 2)
    operations = 4 * pairs * heads.num_heads * heads.head_dim
    made = AttentionPass(device, heads, ForwardMode.EXTEND, [seq_len] * batch, [new] * batch)
    made.plan()
    seconds = device.seconds(made.attend)
    rates: dict[str, float | None] = dict.fromkeys(PEERS)
    notes = []
    for name, peer in PEERS.items():
        if prefix:
            notes.append(f"{name}: no causal mask over a prefix")
            continue
        taken, note = _peer(device, peer, heads, batch, new, new, 1)
        rates[name] = taken and operations / taken / 1e12
        notes += [f"{name}: {note}"] if note else []
    rate = operations / seconds
    return ExtendRow(
        batch,
        prefix,
        new,
        seconds * 1e3,
        rate / 1e12,
        rate / product_rate,
        rates["sdpa"],
        rates["flex"],
        "; ".join(notes),
    )


# --- torch's own, over dense keys and values -----------------------------------------------------

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Peer = Callable[[Device, int], Attend]  # for so many new tokens, causal if more than one


def _sdpa(device: Device, new: int) -> Attend:
    return partial(F.scaled_dot_product_attention, is_causal=new > 1, enable_gqa=True)


def _flex(device: Device, new: int) -> Attend:
    if device.is_dry:
        raise NotImplementedError("is compiled for GPUs only")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Else it gives up after a few shapes, and computes without a kernel.
    torch.compiler.reset()
    mask = None
    if new > 1:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, new, new, device=device.name
        )
    attend: Attend = partial(torch.compile(flex_attention), block_mask=mask, enable_gqa=True)
    return attend


PEERS: dict[str, Peer] = {"sdpa": _sdpa, "flex": _flex}


def _peer(
    device: Device, peer: Peer, heads: Heads, batch: int, context: int, new: int, layers: int
) -> tuple[float | None, str]:
    """Seconds of one call, or None and why not. `layers` sets of keys are gone round."""

    def random(num_heads: int, length: int) -> torch.Tensor:
        shape = (batch, num_heads, length, heads.head_dim)
        return torch.randn(shape, device=device.name, dtype=torch.bfloat16)

    try:
        run = peer(device, new)
        q = random(heads.num_heads, new)
        caches = [
            (random(heads.num_kv_heads, context), random(heads.num_kv_heads, context))
            for _ in range(layers)
        ]

        def all_layers() -> None:
            for k, v in caches:
                run(q, k, v)

        return device.seconds(all_layers) / layers, ""
    except (RuntimeError, NotImplementedError) as error:
        # A peer that cannot run is a fact about the peer; what is measured goes on.
        return None, str(error).splitlines()[0]


def _empty_cache(device: Device) -> None:
    if not device.is_dry:
        torch.cuda.empty_cache()
