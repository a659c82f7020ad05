"""What a captured decode pass must do, with a capture for devices without graphs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

from srt.cuda_graphs import DEFAULT_MAX_BS, DecodeGraphs, Work, graph_sizes, repeat_work
from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.torch_attention import TorchAttentionBackend
from srt.model_config import load_model_config
from srt.model_runner import ModelRunner
from srt.server_args import ServerArgs

ROWS = 6
SLOTS_A_ROW = 10


def test_graph_sizes_end_at_the_smaller_limit_and_pad_little() -> None:
    assert graph_sizes(None, 1) == [1]
    assert graph_sizes(None, 5) == [1, 2, 4, 5]
    assert graph_sizes(3, 100) == [1, 2, 3]
    sizes = graph_sizes(None, 10_000)
    assert sizes[-1] == DEFAULT_MAX_BS and sizes == sorted(set(sizes))
    assert graph_sizes(1024, 10_000)[-1] == 1024
    for below, size in pairwise(sizes):
        assert size < 48 or (size - below - 1) / size < 1 / 5


class Rebuilt(TorchAttentionBackend):
    """Plans from what is on the device alone, as kernels in a graph must: the batch that was
    captured says nothing about later ones on the host."""

    def plan(self, batch: ForwardBatch) -> None:
        lens = batch.seq_lens.clamp(min=1).tolist()
        super().plan(
            ForwardBatch(
                mode=ForwardMode.DECODE,
                input_ids=batch.input_ids,
                positions=batch.positions,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens.clamp(min=1),
                extend_lens=batch.extend_lens,
                out_cache_loc=batch.out_cache_loc,
                seq_lens_cpu=lens,
                extend_lens_cpu=batch.extend_lens_cpu,
                sampling=None,
            )
        )


@pytest.fixture
def runner(tmp_path: Any) -> Iterator[ModelRunner]:
    folder = write_tiny_model(tmp_path)
    args = ServerArgs(
        load_format="dummy", device="cpu", dtype="float32", quantization="none",
        max_total_tokens=ROWS * SLOTS_A_ROW, max_running_requests=ROWS,
    )  # fmt: skip
    made = ModelRunner(folder, load_model_config(folder), args)
    plan = made.plan_memory()
    table = torch.zeros(ROWS + 1, plan.context_len, dtype=torch.int32)
    for row in range(1, ROWS + 1):
        table[row, :SLOTS_A_ROW] = torch.arange(SLOTS_A_ROW) + (row - 1) * SLOTS_A_ROW + 1
    made.init_memory(plan, table)
    made.decoder = None
    assert made.kv_cache is not None
    made.attn = Rebuilt(made.kv_cache, table)
    yield made


def decode(rows: list[int], position: int) -> ForwardBatch:
    b = len(rows)
    index = torch.tensor(rows)
    positions = torch.full((b,), position)
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        input_ids=index * 7 + position,
        positions=positions,
        req_pool_indices=index,
        seq_lens=positions + 1,
        extend_lens=torch.ones(b, dtype=torch.int64),
        out_cache_loc=(index - 1) * SLOTS_A_ROW + 1 + positions,
        seq_lens_cpu=[position + 1] * b,
        extend_lens_cpu=[1] * b,
        sampling=None,
    )


def hidden_of(runner: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
    assert runner.attn is not None
    runner.attn.plan(batch)
    with torch.inference_mode():
        return runner.model(batch.input_ids, batch.positions, runner.attn)


def test_a_replay_gives_what_the_model_gives_and_pads_into_slot_0_only(runner: ModelRunner) -> None:
    assert runner.attn is not None and runner.kv_cache is not None
    cache = [buffer for layer in range(2) for buffer in runner.kv_cache.get(layer)]
    graphs = DecodeGraphs(runner.model, runner.attn, [1, 2, 4], "cpu", repeat_work)
    for position in range(3):
        for rows in ([3], [1, 2], [6, 4, 5], [1, 2, 3, 4]):
            batch = decode(rows, position)
            before = [buffer.clone() for buffer in cache]
            expected = hidden_of(runner, batch)
            after = [buffer.clone() for buffer in cache]
            for buffer, old in zip(cache, before, strict=True):
                buffer.copy_(old)
            assert graphs.can_run(batch)
            got = graphs.run(batch)
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
            for buffer, want in zip(cache, after, strict=True):
                torch.testing.assert_close(buffer[1:], want[1:], atol=1e-6, rtol=1e-6)


def test_what_was_captured_reads_its_columns_anew(runner: ModelRunner) -> None:
    """No replay may see what a larger batch before it left in the padding."""
    assert runner.attn is not None
    seen: list[list[list[int]]] = []

    def model(ids: torch.Tensor, positions: torch.Tensor, attn: Any) -> torch.Tensor:
        seen.append([ids.tolist(), positions.tolist()])
        return ids[:, None].float()

    def capture(work: Work) -> Any:
        return repeat_work(work)

    graphs = DecodeGraphs(model, runner.attn, [4], "cpu", capture)
    graphs.run(decode([1, 2, 3, 4], 2))
    assert graphs.run(decode([5], 3)).tolist() == [[38.0]]
    assert seen[-1] == [[38, 0, 0, 0], [3, 0, 0, 0]]


def test_an_extend_pass_and_a_larger_batch_are_not_for_graphs(runner: ModelRunner) -> None:
    assert runner.attn is not None
    graphs = DecodeGraphs(runner.model, runner.attn, [2], "cpu", repeat_work)
    assert not graphs.can_run(decode([1, 2, 3], 0))
    batch = decode([1], 0)
    batch.mode = ForwardMode.EXTEND
    assert not graphs.can_run(batch)
