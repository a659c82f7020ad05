"""Attention in plain torch: the CPU backend without a compiler, and the reference for kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.attention import Attention, HeadNorms, split_heads
from srt.mem_cache.kv_cache import KVCache

# A decode group pads its rows to the longest: to at most 4/3 of a row's length, or by 64 tokens.
MIN_FILL = 0.75
MAX_PAD = 64
# Limits of scratch memory: tokens gathered at once, and elements of an extend mask.
MAX_GATHERED_TOKENS = 65536
MAX_MASK_ELEMENTS = 1 << 22
MAX_QUERY_BLOCK = 512


@dataclass(frozen=True)
class DecodeGroup:
    """g rows of a decode batch that are padded to one length and computed at once."""

    rows: torch.Tensor  # [g] int64, indices into the batch
    slots: torch.Tensor  # [g * length] int32, slot 0 where a row is shorter
    length: int
    mask: torch.Tensor | None  # [g, 1, 1, length], 0 or -inf; None if no row is padded


class TorchAttentionBackend:
    """See AttentionBackend. Decode gathers rows of similar length; extend computes a request at a
    time, in blocks of queries. What a row is padded to depends on its neighbours, its result does
    not, beyond the order in which floats are added."""

    def __init__(self, kv_cache: KVCache, req_to_token: torch.Tensor) -> None:
        self.kv_cache = kv_cache
        self.req_to_token = req_to_token
        self.device = req_to_token.device
        self.batch: ForwardBatch | None = None
        self._table_rows: list[int] = []
        # Of the planned pass, by sliding window: few distinct ones, shared by many layers.
        self._decode_groups: dict[int | None, list[DecodeGroup]] = {}
        self._extend_masks: dict[int | None, torch.Tensor] = {}

    def plan(self, batch: ForwardBatch) -> None:
        self.batch = batch
        # A sync on a GPU, once a pass: extend slices the table on the host.
        extend = batch.mode is ForwardMode.EXTEND
        self._table_rows = batch.req_pool_indices.tolist() if extend else []
        self._decode_groups = {}
        self._extend_masks = {}

    def forward(
        self, layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        assert self.batch is not None, "plan() comes before forward()"
        self.kv_cache.set_kv(layer.layer_id, self.batch.out_cache_loc, k, v)
        out = torch.empty_like(q)
        if self.batch.mode is ForwardMode.DECODE:
            self._decode(layer, self.batch, q, out)
        else:
            self._extend(layer, self.batch, q, k, v, out)
        return out

    def forward_heads(
        self,
        layer: Attention,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        return self.forward(layer, *split_heads(layer, heads, cos, sin, norms))

    # --- decode --------------------------------------------------------------------------------

    def _decode(
        self, layer: Attention, batch: ForwardBatch, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        window = layer.sliding_window
        if window not in self._decode_groups:
            self._decode_groups[window] = self._plan_decode(batch, window, q.dtype)
        for group in self._decode_groups[window]:
            shape = (len(group.rows), group.length, layer.num_kv_heads, layer.head_dim)
            keys, values = self.kv_cache.gather(layer.layer_id, group.slots, q.dtype)
            # The query heads of a KV head take the place of query positions: nothing is repeated.
            queries = q[group.rows].view(shape[0], layer.num_kv_heads, -1, layer.head_dim)
            result = _attend(
                layer,
                queries,
                keys.view(shape).transpose(1, 2),
                values.view(shape).transpose(1, 2),
                group.mask,
            )
            out[group.rows] = result.reshape(shape[0], layer.num_heads, layer.head_dim)

    def _plan_decode(
        self, batch: ForwardBatch, window: int | None, dtype: torch.dtype
    ) -> list[DecodeGroup]:
        lens = [min(n, window) if window else n for n in batch.seq_lens_cpu]
        order = sorted(range(len(lens)), key=lambda row: -lens[row])
        groups = []
        while order:
            length = lens[order[0]]
            least = min(length * MIN_FILL, length - MAX_PAD)
            size = 1
            while (
                size < len(order)
                and lens[order[size]] >= least
                and (size + 1) * length <= MAX_GATHERED_TOKENS
            ):
                size += 1
            groups.append(self._group(batch, order[:size], lens, dtype))
            order = order[size:]
        return groups

    def _group(
        self, batch: ForwardBatch, rows: list[int], lens: list[int], dtype: torch.dtype
    ) -> DecodeGroup:
        length = lens[rows[0]]
        rows_tensor = torch.tensor(rows, dtype=torch.int64, device=self.device)
        row_lens = torch.tensor([lens[row] for row in rows], device=self.device)[:, None]  # [g, 1]
        starts = batch.seq_lens[rows_tensor][:, None] - row_lens  # [g, 1], first visible position
        offsets = torch.arange(length, device=self.device)
        padded = offsets >= row_lens  # [g, length]
        table_rows = batch.req_pool_indices[rows_tensor][:, None]
        last = self.req_to_token.shape[1] - 1
        slots = self.req_to_token[table_rows, (starts + offsets).clamp_(max=last)]
        # Padding reads slot 0: a stale entry may lead to another request's bytes, and if those are
        # not finite, a weight of zero does not silence them.
        slots = slots.masked_fill(padded, 0)
        mask = None
        if lens[rows[-1]] < length:
            mask = _additive(padded, dtype)[:, None, None]
        return DecodeGroup(rows_tensor, slots.flatten(), length, mask)

    # --- extend --------------------------------------------------------------------------------

    def _extend(
        self,
        layer: Attention,
        batch: ForwardBatch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        window = layer.sliding_window
        if window not in self._extend_masks:
            self._extend_masks[window] = _extend_mask(batch, window, q.dtype)
        mask = self._extend_masks[window]
        start = 0
        for i, (extend_len, seq_len) in enumerate(
            zip(batch.extend_lens_cpu, batch.seq_lens_cpu, strict=True)
        ):
            rows = slice(start, start + extend_len)
            start += extend_len
            prefix_len = seq_len - extend_len
            first = max(0, prefix_len - window + 1) if window else 0
            if first == prefix_len and self.kv_cache.dtype == q.dtype:
                # Everything visible is new, so the cache holds just these bytes.
                keys, values = k[rows], v[rows]
            else:
                slots = self.req_to_token[self._table_rows[i], first:seq_len]
                keys, values = self.kv_cache.gather(layer.layer_id, slots, q.dtype)
            self._extend_one(layer, q[rows], keys, values, first, prefix_len, mask, out[rows])

    def _extend_one(
        self,
        layer: Attention,
        q: torch.Tensor,  # [m, num_heads, head_dim], positions [prefix_len, prefix_len + m)
        keys: torch.Tensor,  # [length, num_kv_heads, head_dim], positions from `first` on
        values: torch.Tensor,
        first: int,
        prefix_len: int,
        mask: torch.Tensor,  # see _extend_mask
        out: torch.Tensor,  # [m, num_heads, head_dim]
    ) -> None:
        window = layer.sliding_window
        heads = (-1, layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_dim)
        block, past_len = mask.shape[0], mask.shape[1] - mask.shape[0]
        for start in range(0, len(q), block):
            end = min(start + block, len(q))
            position = prefix_len + start
            low = max(first, position - window + 1) if window else first
            past = position - low
            visible = slice(low - first, prefix_len + end - first)
            # KV heads as batch and the query heads of each as heads: keys are shared by expand,
            # which copies nothing.
            queries = q[start:end].view(heads).permute(1, 2, 0, 3)
            shape = (-1, heads[2], -1, -1)
            result = _attend(
                layer,
                queries,
                keys[visible].transpose(0, 1)[:, None].expand(shape),
                values[visible].transpose(0, 1)[:, None].expand(shape),
                mask[: end - start, past_len - past : past_len + end - start],
            )
            out[start:end] = result.permute(2, 0, 1, 3).reshape(out[start:end].shape)


def _extend_mask(batch: ForwardBatch, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Mask [block, past + block] of 0 and -inf, of which that of every query block of the pass is
    a slice: what a query sees depends only on distance. Column `past` is a block's first query."""
    longest = max(batch.seq_lens_cpu)
    block = min(max(batch.extend_lens_cpu), MAX_QUERY_BLOCK, max(16, MAX_MASK_ELEMENTS // longest))
    past = min(longest, window) if window else longest
    device = batch.seq_lens.device
    queries = torch.arange(block, device=device)[:, None]
    distance = queries - (torch.arange(past + block, device=device) - past)
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    return _additive(hidden, dtype)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Mask to add to scores: -inf where `hidden`, else 0."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _attend(
    layer: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention over [.., .., length, head_dim]; `mask` is added to the scores."""
    if not layer.logit_cap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    scores = (q @ k.transpose(-1, -2)).float() * layer.scale
    scores = torch.tanh(scores / layer.logit_cap) * layer.logit_cap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1).to(v.dtype) @ v
