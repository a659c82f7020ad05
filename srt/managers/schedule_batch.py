"""The requests of the next pass: gathered without the finished, concatenated with the new."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from srt.device_copy import to_device
from srt.forward_batch import ForwardBatch, ForwardMode
from srt.managers.req import Req
from srt.managers.req_memory import ReqMemory
from srt.mem_cache.token_to_kv_pool import Int64Array
from srt.sampling_batch import SamplingBatch


@dataclass(frozen=True)
class ModelLimits:
    """What building a batch must know about the model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str


@dataclass
class ScheduleBatch:
    """b requests; row i of every [b] column is reqs[i]. The tensors live on the device; columns
    that end in `_cpu` are host twins, so that no choice of the scheduler waits for the device.

    Columns are replaced, never written to: a pass in flight, and its snapshot, still read the old
    ones.
    """

    reqs: list[Req]
    rids: list[str]
    req_pool_indices: torch.Tensor  # [b] int64, each request's row of req_to_token
    seq_lens: torch.Tensor  # [b] int64, tokens with KV once the last prepared pass has run
    last_token_ids: torch.Tensor  # [b] int64, what the next decode pass reads
    sampling: SamplingBatch
    rows_cpu: Int64Array  # [b] twin of req_pool_indices
    seq_lens_cpu: Int64Array  # [b] twin of seq_lens
    limits_cpu: Int64Array  # [b] max_new_tokens
    remaining_cpu: Int64Array  # [b] tokens each request may still produce
    ignore_eos_cpu: npt.NDArray[np.bool_]  # [b]
    own_stops_cpu: npt.NDArray[np.bool_]  # [b] has stop_token_ids of its own
    shared_cpu: (
        Int64Array  # [b] tokens that were cached at admission, so perhaps held by others, too
    )

    def __len__(self) -> int:
        return len(self.reqs)

    @classmethod
    def from_reqs(cls, reqs: list[Req], ends: list[int], limits: ModelLimits) -> ScheduleBatch:
        """Columns of admitted requests with slots for `ends` tokens each."""
        kvs = [req.kv for req in reqs if req.kv is not None]
        assert len(kvs) == len(reqs), f"{len(reqs) - len(kvs)} of {len(reqs)} are not admitted"
        rows = np.array([kv.row for kv in kvs], dtype=np.int64)
        seq_lens = np.array(ends, dtype=np.int64)
        ignore_eos = np.array([req.params.ignore_eos for req in reqs], dtype=np.bool_)
        stop_ids = [
            () if req.params.ignore_eos else (*limits.eos_token_ids, *req.stop_ids) for req in reqs
        ]
        sampling = SamplingBatch.build(
            [req.params for req in reqs],
            [req.input_ids for req in reqs],
            [req.output_ids for req in reqs],
            stop_ids,
            limits.vocab_size,
            limits.device,
        )
        return cls(
            reqs=reqs,
            rids=[req.rid for req in reqs],
            req_pool_indices=to_device(rows, limits.device),
            seq_lens=to_device(seq_lens, limits.device),
            last_token_ids=torch.zeros(len(reqs), dtype=torch.int64, device=limits.device),
            sampling=sampling,
            rows_cpu=rows,
            seq_lens_cpu=seq_lens,
            limits_cpu=np.array([req.max_new_tokens for req in reqs], dtype=np.int64),
            remaining_cpu=np.array([req.remaining for req in reqs], dtype=np.int64),
            ignore_eos_cpu=ignore_eos,
            own_stops_cpu=np.array([bool(req.stop_ids) for req in reqs], dtype=np.bool_),
            shared_cpu=np.array([kv.admitted_len for kv in kvs], dtype=np.int64),
        )

    @property
    def produced_cpu(self) -> Int64Array:
        """[b] outputs of each request, those still on the device included."""
        return self.limits_cpu - self.remaining_cpu

    # --- the next pass ---

    @classmethod
    def prepare_for_extend(
        cls, reqs: list[Req], seq_lens: list[int], memory: ReqMemory, limits: ModelLimits
    ) -> tuple[ScheduleBatch, ForwardBatch]:
        """A batch that computes tokens [kv_len, seq_len) of each request, and its device
        tensors."""
        prefix_lens = [memory.kv_len(req) for req in reqs]
        slots = memory.extend(reqs, seq_lens)
        batch = cls.from_reqs(reqs, seq_lens, limits)
        spans = list(zip(reqs, prefix_lens, seq_lens, strict=True))
        input_ids = np.concatenate([req.tokens(end)[start:end] for req, start, end in spans])
        positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
        extend_lens = np.array([end - start for _, start, end in spans], dtype=np.int64)
        forward = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=to_device(input_ids.astype(np.int64), limits.device),
            positions=to_device(positions, limits.device),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            extend_lens=to_device(extend_lens, limits.device),
            out_cache_loc=to_device(slots, limits.device),
            seq_lens_cpu=seq_lens,
            extend_lens_cpu=extend_lens.tolist(),
            sampling=batch.sampling.snapshot(),
        )
        return batch, forward

    def prepare_for_decode(self, memory: ReqMemory) -> ForwardBatch:
        """Take a slot for one more token of each request; the device tensors of that pass."""
        self.seq_lens_cpu = self.seq_lens_cpu + 1
        slots = memory.extend_decode(self.rows_cpu, self.seq_lens_cpu)
        positions = self.seq_lens
        self.seq_lens = positions + 1
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=self.last_token_ids,
            positions=positions,
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            extend_lens=torch.ones_like(positions),
            out_cache_loc=to_device(slots, self.seq_lens.device),
            seq_lens_cpu=self.seq_lens_cpu.tolist(),
            extend_lens_cpu=[1] * len(self.reqs),
            sampling=self.sampling.snapshot(),
        )

    def take_tokens(self, next_token_ids: torch.Tensor) -> None:
        """The pass is launched: its tokens [b], still on the device, are what the next one
        reads. A broken row may be in the next pass before it is known to be one: it then reads
        token 0, since -1 is no token of the vocabulary."""
        self.last_token_ids = next_token_ids.clamp(min=0)
        self.sampling.append_tokens(self.last_token_ids)
        self.remaining_cpu = self.remaining_cpu - 1

    def snapshot(self) -> ScheduleBatch:
        """The batch as it is now, for who processes the pass later."""
        return copy.copy(self)

    def rows_that_stop(self, tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
        """Rows whose last token [b] is a stop token of theirs or the last they may produce."""
        ids = np.array(tokens, dtype=np.int64)
        stops = self.remaining_cpu <= 0
        for eos in eos_token_ids:
            stops |= (ids == eos) & ~self.ignore_eos_cpu
        for row in np.flatnonzero(self.own_stops_cpu):
            if tokens[row] in self.reqs[row].stop_ids:
                stops[row] = True
        rows: list[int] = np.flatnonzero(stops).tolist()
        return rows

    # --- gather and concat ---

    def filter_batch(self, keep: list[int]) -> None:
        """Keep rows `keep` (ascending). Whoever drops a request frees its memory; this forgets
        it."""
        if len(keep) == len(self.reqs):
            return
        self.reqs = [self.reqs[i] for i in keep]
        self.rids = [self.rids[i] for i in keep]
        rows_cpu = np.array(keep, dtype=np.int64)
        rows = to_device(rows_cpu, self.seq_lens.device)
        self.req_pool_indices = self.req_pool_indices[rows]
        self.seq_lens = self.seq_lens[rows]
        self.last_token_ids = self.last_token_ids[rows]
        self.sampling.filter_batch(keep)
        self.rows_cpu = self.rows_cpu[rows_cpu]
        self.seq_lens_cpu = self.seq_lens_cpu[rows_cpu]
        self.limits_cpu = self.limits_cpu[rows_cpu]
        self.remaining_cpu = self.remaining_cpu[rows_cpu]
        self.ignore_eos_cpu = self.ignore_eos_cpu[rows_cpu]
        self.own_stops_cpu = self.own_stops_cpu[rows_cpu]
        self.shared_cpu = self.shared_cpu[rows_cpu]

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Append other's rows below ours."""
        self.reqs = self.reqs + other.reqs
        self.rids = self.rids + other.rids
        self.req_pool_indices = torch.cat([self.req_pool_indices, other.req_pool_indices])
        self.seq_lens = torch.cat([self.seq_lens, other.seq_lens])
        self.last_token_ids = torch.cat([self.last_token_ids, other.last_token_ids])
        self.sampling.merge_batch(other.sampling)
        self.rows_cpu = np.concatenate([self.rows_cpu, other.rows_cpu])
        self.seq_lens_cpu = np.concatenate([self.seq_lens_cpu, other.seq_lens_cpu])
        self.limits_cpu = np.concatenate([self.limits_cpu, other.limits_cpu])
        self.remaining_cpu = np.concatenate([self.remaining_cpu, other.remaining_cpu])
        self.ignore_eos_cpu = np.concatenate([self.ignore_eos_cpu, other.ignore_eos_cpu])
        self.own_stops_cpu = np.concatenate([self.own_stops_cpu, other.own_stops_cpu])
        self.shared_cpu = np.concatenate([self.shared_cpu, other.shared_cpu])

    # --- memory pressure ---

    def decode_fits(self, memory: ReqMemory) -> bool:
        """Is there a slot, free or evictable, for one more token of each request?"""
        return memory.decode_need(self.seq_lens_cpu + 1) <= memory.available
