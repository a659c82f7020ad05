"""Attention passes over a paged cache of scattered slots, for gpu_check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.gpu_device import Device
from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.attention import Attention
from srt.layers.attention_reference import attention_reference
from srt.layers.triton_attention import TritonAttentionBackend
from srt.mem_cache.kv_cache import KVCache


@dataclass(frozen=True)
class Heads:
    """Of one layer; those of Llama 3 8B unless given."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    window: int | None = None
    logit_cap: float = 0.0


class AttentionPass:
    """Requests of `seq_lens` tokens, of which the last `extend_lens` are new, all slots in random
    order. `num_layers` caches of the same content: going round them, no cache of the device holds
    what is read next."""

    def __init__(
        self,
        device: Device,
        heads: Heads,
        mode: ForwardMode,
        seq_lens: Sequence[int],
        extend_lens: Sequence[int],
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        num_layers: int = 1,
        batch_invariant: bool = False,
    ) -> None:
        self.heads = heads
        self.num_layers = num_layers
        total, longest, b = sum(seq_lens), max(seq_lens), len(seq_lens)
        generator = torch.Generator(device.name).manual_seed(0)

        def random(n: int, num_heads: int) -> torch.Tensor:
            shape = (n, num_heads, heads.head_dim)
            return torch.randn(shape, generator=generator, device=device.name).to(dtype)

        self.cache = KVCache(
            total + 1,
            num_layers,
            heads.num_kv_heads,
            heads.head_dim,
            kv_dtype or dtype,
            device.name,
        )
        # A request at a time: the whole in float32 would be larger than the cache.
        for length, slots in self._slots_of(seq_lens, generator, device):
            for buffers in (self.cache.k_buffers, self.cache.v_buffers):
                values = random(length, heads.num_kv_heads).to(self.cache.dtype)
                for buffer in buffers:
                    # As bytes, because 8-bit floats cannot be indexed everywhere.
                    buffer.view(torch.uint8)[slots] = values.view(torch.uint8)
        table = torch.zeros((b + 1, longest), dtype=torch.int32, device=device.name)
        for row, slots in enumerate(self.slots, start=1):
            table[row, : len(slots)] = slots.int()
        self.backend = TritonAttentionBackend(
            self.cache,
            table,
            heads.num_heads,
            dtype,
            {heads.window},
            b,
            device.gpu,
            batch_invariant,
        )
        n = sum(extend_lens)
        new = zip(self.slots, extend_lens, strict=True)
        loc = torch.cat([slots[len(slots) - count :] for slots, count in new])

        def column(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device.name)

        self.batch = ForwardBatch(
            mode=mode,
            input_ids=torch.zeros(n, dtype=torch.int64, device=device.name),
            positions=torch.zeros(n, dtype=torch.int64, device=device.name),
            req_pool_indices=column(range(1, b + 1)),
            seq_lens=column(seq_lens),
            extend_lens=column(extend_lens),
            out_cache_loc=loc,
            seq_lens_cpu=list(seq_lens),
            extend_lens_cpu=list(extend_lens),
            sampling=None,
        )
        self.q = random(n, heads.num_heads)
        scale = heads.head_dim**-0.5
        self.layers = [
            Attention(
                i,
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_dim,
                scale,
                heads.window,
                heads.logit_cap,
            )
            for i in range(num_layers)
        ]

    def _slots_of(
        self, seq_lens: Sequence[int], generator: torch.Generator, device: Device
    ) -> list[tuple[int, torch.Tensor]]:
        order = torch.randperm(sum(seq_lens), generator=generator, device=device.name) + 1
        self.slots = list(torch.split(order, list(seq_lens)))
        return list(zip(seq_lens, self.slots, strict=True))

    def plan(self) -> None:
        self.backend.plan(self.batch)

    def attend(self) -> torch.Tensor:
        """Every layer's attention; the keys are in the cache already. The last one's result."""
        for layer in self.layers:
            out = self.backend.attend(layer, self.q)
        return out

    def reference(self) -> torch.Tensor:
        """The same in float64."""
        heads, outs = self.heads, []
        k_buffer, v_buffer = self.cache.get(0)
        for q, slots in zip(
            torch.split(self.q, self.batch.extend_lens_cpu), self.slots, strict=True
        ):
            # Before the gather, for the sake of 8-bit floats.
            keys, values = (
                buffer.view(torch.uint8)[slots].view(buffer.dtype).double()
                for buffer in (k_buffer, v_buffer)
            )
            outs.append(
                attention_reference(
                    q, keys, values, heads.head_dim**-0.5, heads.window, heads.logit_cap
                )
            )
        return torch.cat(outs)
