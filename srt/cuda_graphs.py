"""Decode passes as CUDA graphs: captured for a few batch sizes at start, replayed with padding."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.attention import AttentionBackend

logger = logging.getLogger(__name__)

# Of the largest captured batch, unless told. Beyond it launching takes less time than computing.
DEFAULT_MAX_BS = 256

Work = Callable[[], torch.Tensor]
Replay = Callable[[], None]
# Does `work` once and returns its result and a function that does it again, into the same result.
Capture = Callable[[Work], "tuple[torch.Tensor, Replay]"]
# (input_ids, positions, attention backend) -> hidden states [b, hidden_size]
Model = Callable[[torch.Tensor, torch.Tensor, AttentionBackend], torch.Tensor]


def graph_sizes(max_bs: int | None, max_running_requests: int) -> list[int]:
    """Batch sizes to capture, rising; the last is the smaller of the two limits. A batch is padded
    to the next one, in steps that keep the padding below a fifth from 48 rows on."""
    limit = min(DEFAULT_MAX_BS if max_bs is None else max_bs, max_running_requests)
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, limit, 32)]
    return [size for size in steps if size < limit] + [limit]


class GraphPool:
    """Captures work on a GPU. All captures share one pool of memory: only one replays at a time,
    and none reads what another left."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's handle

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        self._pool = graph.pool()
        return result, graph.replay


def repeat_work(work: Work) -> tuple[torch.Tensor, Replay]:
    """A capture for devices without graphs: does the work again. For tests and dry runs."""
    result = work().clone()

    def replay() -> None:
        result.copy_(work())

    return result, replay


class DecodeGraphs:
    """One captured pass of the model for each of `sizes`. A batch is copied into the columns that
    the captures read; rows that it lacks are padding: token 0 at position 0 of no request, without
    keys to see, written to slot 0."""

    @torch.inference_mode()
    def __init__(
        self,
        model: Model,
        attn: AttentionBackend,
        sizes: Sequence[int],
        device: str,
        capture: Capture,
    ) -> None:
        """The kernels must have been compiled and run before: a capture can do neither."""
        start = time.monotonic()
        self.memory_bytes = 0  # what they take of the device, where that is known
        self.sizes = sorted(sizes)
        most = self.sizes[-1]
        # input_ids, positions, req_pool_indices, seq_lens, out_cache_loc
        self._columns = torch.zeros((5, most), dtype=torch.int64, device=device)
        self._ones = torch.ones(most, dtype=torch.int64, device=device)
        self._passes: dict[int, tuple[torch.Tensor, Replay]] = {}
        # The largest first: the others then find room in what it has left in the pool.
        for size in reversed(self.sizes):
            batch = self._static_batch(size)

            def work(batch: ForwardBatch = batch) -> torch.Tensor:
                attn.plan(batch)
                return model(batch.input_ids, batch.positions, attn)

            self._passes[size] = capture(work)
        logger.info(
            "Capture cuda graph end. bs=%s, elapsed=%.1f s", self.sizes, time.monotonic() - start
        )

    def _static_batch(self, size: int) -> ForwardBatch:
        input_ids, positions, rows, seq_lens, out_cache_loc = self._columns[:, :size]
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=input_ids,
            positions=positions,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            extend_lens=self._ones[:size],
            out_cache_loc=out_cache_loc,
            seq_lens_cpu=[0] * size,
            extend_lens_cpu=[1] * size,
            sampling=None,
        )

    def can_run(self, batch: ForwardBatch) -> bool:
        return batch.mode is ForwardMode.DECODE and len(batch.seq_lens_cpu) <= self.sizes[-1]

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [b, hidden_size] of a decode pass that `can_run`; the next run of any size
        overwrites them."""
        b = len(batch.seq_lens_cpu)
        size = self.sizes[bisect_left(self.sizes, b)]
        columns = (
            batch.input_ids,
            batch.positions,
            batch.req_pool_indices,
            batch.seq_lens,
            batch.out_cache_loc,
        )
        # Two small launches rather than five.
        self._columns[:, :b].copy_(torch.stack(columns))
        if size > b:
            self._columns[:, b:size].zero_()
        hidden, replay = self._passes[size]
        replay()
        return hidden[:b]
