"""Steps of a whole engine with random weights in the shape of Llama 3 8B."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_device import Device
from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.triton_attention import TritonAttentionBackend
from srt.model_config import ModelConfig, load_model_config
from srt.model_runner import ModelRunner
from srt.sampling_batch import SamplingBatch
from srt.sampling_params import SamplingParams
from srt.server_args import ServerArgs

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
TOY: dict[str, Any] = {
    **LLAMA_3_8B,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
BATCHES, CONTEXTS = (1, 8, 32, 64, 128, 256), (1024, 4096)
PREFILLS = (512, 2048, 8192)


@dataclass(frozen=True)
class StepRow:
    """Milliseconds of a decode step: one after another, at the least that memory allows, and of
    the host alone. `ms` is None if the KV cache is too small, `host_ms_without_graphs` if there are
    none."""

    batch: int
    context: int
    ms: float | None
    floor_ms: float
    ratio: float | None
    host_ms: float | None
    host_ms_without_graphs: float | None


@dataclass(frozen=True)
class PrefillRow:
    tokens: int
    ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class LoopRow:
    """Milliseconds of a turn of the scheduler in steady decode, wall clock, of a step of the model
    alone, and what is left: host time that nothing hides."""

    batch: int
    overlap: bool
    turn_ms: float
    step_ms: float
    exposed_ms: float


@contextmanager
def without_graphs(runner: ModelRunner) -> Iterator[bool]:
    """Decode passes are launched kernel by kernel; whether they were not before."""
    graphs = runner.graphs
    if graphs is None:
        yield False
        return
    runner.graphs = None
    try:
        yield True
    finally:
        runner.graphs = graphs


class EngineCheck:
    """One runner for all measurements: loading it is what takes long."""

    def __init__(self, device: Device) -> None:
        self.device = device
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            config_json = TOY if device.is_dry else LLAMA_3_8B
            (Path(folder) / "config.json").write_text(json.dumps(config_json))
            self.config: ModelConfig = load_model_config(Path(folder))
            self.args = ServerArgs(
                load_format="dummy",
                device=device.name,
                dtype="bfloat16",
                max_running_requests=3 if device.is_dry else 256,
                max_total_tokens=512 if device.is_dry else None,
                disable_radix_cache=True,
            )
            self.runner = ModelRunner(Path(folder), self.config, self.args)
        self.plan = self.runner.plan_memory()
        self.rows = self.plan.max_running_requests
        self.table = torch.zeros(
            (self.rows + 1, self.plan.context_len), dtype=torch.int32, device=device.name
        )
        self.runner.init_memory(self.plan, self.table)
        if device.is_dry:
            self._take_gpu_kernels()
        self.load_seconds = time.monotonic() - begin

    def _take_gpu_kernels(self) -> None:
        """A runner on a CPU has kernels for CPUs; here those for GPUs are to run, interpreted."""
        runner = self.runner
        assert runner.kv_cache is not None
        runner.decoder = None
        runner.attn = TritonAttentionBackend(
            runner.kv_cache,
            self.table,
            self.config.num_heads,
            runner.dtype,
            {None},
            self.rows,
            self.device.gpu,
        )

    # --- decode ---

    def step_rows(self, copy_bytes: float) -> Iterator[StepRow]:
        batches, contexts = ((1, 3), (40,)) if self.device.is_dry else (BATCHES, CONTEXTS)
        for context in contexts:
            for batch in batches:
                yield self._step_row(batch, context, copy_bytes)

    def _step_row(self, batch: int, context: int, copy_bytes: float) -> StepRow:
        cache = self.runner.kv_cache
        assert cache is not None
        floor = (self._read_weights() + batch * context * cache.bytes_per_token) / copy_bytes * 1e3
        if batch * context > self.plan.max_total_num_tokens:
            return StepRow(batch, context, None, floor, None, None, None)
        decode = self._decode_batch(batch, context)

        def step() -> torch.Tensor:
            return self.runner.step(decode)

        ms = self.device.seconds(step, graph=False) * 1e3
        host_ms = self.device.host_seconds(step) * 1e3
        without = None
        with without_graphs(self.runner) as had_graphs:
            if had_graphs:
                step()
                without = self.device.host_seconds(step) * 1e3
        return StepRow(batch, context, ms, floor, ms / floor, host_ms, without)

    def _read_weights(self) -> int:
        """Bytes of weights that a step reads: of an embedding that is not the head, only rows."""
        model = self.runner.model
        total = sum(parameter.nbytes for parameter in model.parameters())
        table = self.config.vocab_size * self.config.hidden_size * self.runner.dtype.itemsize
        return total if self.config.tie_word_embeddings else total - table

    def _decode_batch(self, batch: int, context: int) -> ForwardBatch:
        name = self.device.name
        order = torch.randperm(self.plan.max_total_num_tokens, device=name)[: batch * context] + 1
        slots = order.int().view(batch, context)
        self.table[1 : batch + 1, :context] = slots

        def column(value: int) -> torch.Tensor:
            return torch.full((batch,), value, dtype=torch.int64, device=name)

        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=column(7),
            positions=column(context - 1),
            req_pool_indices=torch.arange(1, batch + 1, device=name),
            seq_lens=column(context),
            extend_lens=column(1),
            out_cache_loc=slots[:, -1].long(),
            seq_lens_cpu=[context] * batch,
            extend_lens_cpu=[1] * batch,
            sampling=self._greedy(batch),
        )

    def _greedy(self, batch: int) -> SamplingBatch:
        empty: list[list[int]] = [[] for _ in range(batch)]
        params = [SamplingParams(temperature=0.0)] * batch
        return SamplingBatch.build(
            params, empty, empty, empty, self.config.vocab_size, self.device.name
        )

    # --- prefill ---

    def prefill_rows(self) -> Iterator[PrefillRow]:
        name = self.device.name
        for tokens in (24,) if self.device.is_dry else PREFILLS:
            if tokens > self.plan.max_total_num_tokens:
                continue
            slots = torch.arange(1, tokens + 1, device=name)
            self.table[1, :tokens] = slots.int()
            positions = torch.arange(tokens, device=name)
            batch = ForwardBatch(
                mode=ForwardMode.EXTEND,
                input_ids=positions % self.config.vocab_size,
                positions=positions,
                req_pool_indices=torch.ones(1, dtype=torch.int64, device=name),
                seq_lens=torch.full((1,), tokens, device=name),
                extend_lens=torch.full((1,), tokens, device=name),
                out_cache_loc=slots,
                seq_lens_cpu=[tokens],
                extend_lens_cpu=[tokens],
                sampling=self._greedy(1),
            )
            seconds = self.device.seconds(partial(self.runner.step, batch), graph=False)
            yield PrefillRow(tokens, seconds * 1e3, tokens / seconds)

    # --- the scheduler's loop ---

    def loop_rows(self) -> Iterator[LoopRow]:
        """Steady decode in the real scheduler."""
        from bench.gpu_loop import turn_seconds

        batches, context, turns = ((2,), 20, 4) if self.device.is_dry else ((32, 128), 1024, 60)
        for batch in batches:
            decode = self._decode_batch(batch, context)
            step_ms = self.device.seconds(partial(self.runner.step, decode), graph=False) * 1e3
            for overlap in (False, True):
                turn_ms = turn_seconds(self, batch, context, turns, overlap) * 1e3
                yield LoopRow(batch, overlap, turn_ms, step_ms, turn_ms - step_ms)
