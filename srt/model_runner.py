"""Owns the model, the KV bytes and the attention backend; computes passes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from srt.cuda_graphs import DecodeGraphs
from srt.cuda_setup import (
    capture_graphs,
    cuda_memory,
    make_batch_invariant,
    make_cuda_attention,
    planned_graph_sizes,
)
from srt.cuda_warmup import warm_up
from srt.forward_batch import ForwardBatch, ForwardMode
from srt.host_limits import available_memory, usable_cores
from srt.layers.attention import AttentionBackend
from srt.layers.logprobs import answer_query
from srt.layers.native_attention import NativeAttentionBackend
from srt.layers.native_decoder import NativeDecoder, can_run
from srt.layers.quantization.scheme import choose_quantization, pack_modules, packed_bytes
from srt.layers.sampler import mark_broken, sample
from srt.layers.torch_attention import TorchAttentionBackend
from srt.mem_cache.kv_cache import KVCache, bytes_per_token
from srt.memory_plan import DeviceMemory, MemoryPlan, make_memory_plan
from srt.model_config import ModelConfig
from srt.models.causal_lm import CausalLM
from srt.models.registry import create_model
from srt.native import DTYPE_CODES, native_library
from srt.server_args import ServerArgs
from srt.weights import fill_with_random_weights, iterate_checkpoint, load_weights

logger = logging.getLogger(__name__)

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
KV_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
DUMMY_SEED = 0


class ModelRunner:
    """Order of use: construct (loads the weights), `plan_memory`, `init_memory`, then any number of
    passes, from one thread."""

    def __init__(self, model_path: Path, config: ModelConfig, args: ServerArgs) -> None:
        """ValueError if the weights do not fit the config or the device is not there."""
        self.config = config
        self.args = args
        self.device = _choose_device(args.device)
        self.dtype = _choose_dtype(args.dtype, config.dtype, self.device)
        self.library = native_library() if self.device == "cpu" else None
        self.quantization = choose_quantization(
            args.quantization, model_path, args.load_format, self.device, self.library is not None
        )
        self.kv_dtype = self._choose_kv_dtype(args.kv_cache_dtype)
        if self.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # The one place where threads are chosen; the variable is OpenMP's, and torch obeys it.
            torch.set_num_threads(usable_cores())
        if self.library is not None:
            self.library.rg_set_threads(torch.get_num_threads())
        if args.batch_invariant and self.device != "cuda" and not self._packs_weights:
            raise ValueError(
                f"--batch-invariant needs our kernels, which on {self.device} compute quantized "
                f"and float32 weights, not {self.dtype}: torch's products depend on the batch"
            )
        self.model = self._load_model(model_path)
        if args.batch_invariant and self.device == "cuda":
            make_batch_invariant(self.model)
        self.kv_cache: KVCache | None = None
        self.attn: AttentionBackend | None = None
        # Computes all layers at once where the kernels can; else the model itself does.
        self.decoder: NativeDecoder | None = None
        # Replays decode passes where graphs are on.
        self.graphs: DecodeGraphs | None = None

    @property
    def _packs_weights(self) -> bool:
        """Our float32 products are faster than torch's, and a row's do not depend on its batch.
        Unquantised weights of 16 bits stay with torch."""
        is_ours = self.quantization != "none" or self.dtype is torch.float32
        return self.library is not None and is_ours

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def _load_model(self, model_path: Path) -> CausalLM:
        start = time.monotonic()
        load_format = self.args.load_format
        is_quantized = self.quantization != "none"
        with _default_dtype(self.dtype), torch.device(self.device):
            model = create_model(self.config)
        if self.library is not None and self._packs_weights:
            pack_modules(model, self.quantization, self.library)
        if load_format == "dummy":
            fill_with_random_weights(model, DUMMY_SEED)
        else:
            load_weights(model, iterate_checkpoint(model_path, load_format, is_quantized))
        model.eval()
        logger.info(
            "Load weight end. type=%s, dtype=%s, quantization=%s, device=%s, weight=%.2f GB, "
            "elapsed=%.2f s",
            type(model).__name__,
            str(self.dtype).removeprefix("torch."),
            self.quantization,
            self.device,
            _weight_bytes(model) / 2**30,
            time.monotonic() - start,
        )
        return model

    def _choose_kv_dtype(self, asked: str) -> torch.dtype:
        if asked == "int8" and self.device == "cuda":
            raise ValueError(
                "--kv-cache-dtype int8 is for device cpu; on cuda it may be auto, "
                f"{str(self.dtype).removeprefix('torch.')} (that of the activations) or fp8_e4m3"
            )
        if asked != "auto":
            return KV_DTYPES[asked]
        if self.quantization == "none" or self.dtype is not torch.float32:
            return self.dtype
        if self.quantization == "int8":
            return torch.float16  # its activations are exact, and int8 would be the larger error
        # Activations are rounded to int8 in blocks anyway, and half the bytes make attention 1.7
        # times as fast at batch 32, where it takes a quarter of a step.
        return torch.int8

    def plan_memory(self) -> MemoryPlan:
        """Size of the KV pool and number of rows from the memory that is free now. ValueError names
        the option and both numbers if they do not fit."""
        config = self.config
        token_bytes = bytes_per_token(
            config.num_layers, config.num_kv_heads, config.head_dim, self.kv_dtype
        )
        if self.device == "cuda":
            memory = cuda_memory(config, self.args, self.dtype, token_bytes)
        else:
            free = available_memory()
            memory = DeviceMemory(is_cuda=False, available=free, total=free)
        return make_memory_plan(
            memory, _weight_bytes(self.model), token_bytes, config.context_len, self.args
        )

    def init_memory(self, plan: MemoryPlan, req_to_token: torch.Tensor) -> None:
        """Make the KV cache and the attention backend. `req_to_token` [rows + 1, context_len] int32
        on our device; we only read it."""
        self.kv_cache = KVCache(
            plan.max_total_num_tokens + self.args.page_size,  # the padding page comes first
            self.config.num_layers,
            self.config.num_kv_heads,
            self.config.head_dim,
            self.kv_dtype,
            self.device,
        )
        self.attn = self._make_attention(self.kv_cache, req_to_token)
        if isinstance(self.attn, NativeAttentionBackend):
            stack = self.model.decoder_stack()
            if can_run(stack):
                self.decoder = NativeDecoder(stack, self.attn)
        if self.device == "cuda":
            self._prepare_cuda(self.attn, plan)

    def _prepare_cuda(self, attn: AttentionBackend, plan: MemoryPlan) -> None:
        """Compile and load the kernels, then capture the decode passes."""
        rows = plan.max_running_requests
        sizes = planned_graph_sizes(self.args, rows)
        warm_up(self.step, self.vocab_size, plan.context_len, sizes, rows, self.device)
        self.graphs = capture_graphs(self.model, attn, sizes, self.device)

    def _make_attention(self, kv_cache: KVCache, req_to_token: torch.Tensor) -> AttentionBackend:
        if self.device == "cuda":
            return make_cuda_attention(self.config, self.args, self.dtype, kv_cache, req_to_token)
        if self.library is not None and kv_cache.dtype in DTYPE_CODES:
            return NativeAttentionBackend(self.library, kv_cache, req_to_token)
        return TorchAttentionBackend(kv_cache, req_to_token)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [b, vocab] float32 after each request's last new token."""
        return self.model.logits(_last_of_each(self._hidden(batch), batch))

    @torch.inference_mode()
    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """next_token_ids [b] int64, BROKEN for a row whose numbers are not finite. A pass of inner
        chunks needs no tokens: zeros, or BROKEN."""
        hidden = self._hidden(batch)
        logits = None
        if batch.sampling is None:
            next_token_ids = mark_broken(_last_of_each(hidden, batch))
        else:
            logits = self.model.logits(_last_of_each(hidden, batch))
            next_token_ids = sample(logits, batch.sampling, batch.seq_lens)
        if batch.logprobs is not None:
            batch.logprobs.answer = answer_query(
                batch.logprobs, hidden, self.model.logits, logits, next_token_ids, self.vocab_size
            )
        return next_token_ids

    def _hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [n, hidden] of all new tokens."""
        assert self.attn is not None, "init_memory() comes before the first pass"
        if self.graphs is not None and self.graphs.can_run(batch):
            return self.graphs.run(batch)
        self.attn.plan(batch)
        hidden: torch.Tensor
        if self.decoder is not None:
            hidden = self.decoder.forward(batch)
        else:
            hidden = self.model(batch.input_ids, batch.positions, self.attn)
        return hidden


def _last_of_each(hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """Of [n, hidden] the rows [b, hidden] of each request's last new token: few meet the head."""
    if batch.mode is ForwardMode.DECODE:
        return hidden
    return hidden[batch.extend_lens.cumsum(0) - 1]


def _choose_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda is asked for, but torch finds no CUDA device; use device cpu")
    return device


def _choose_dtype(dtype: str, config_dtype: str | None, device: str) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    if device == "cpu":
        # Few CPUs multiply 16-bit floats faster than they convert them.
        return torch.float32
    # A float32 checkpoint is served in 16 bits: twice the speed, and what was trained as such.
    return torch.float16 if config_dtype == "float16" else torch.bfloat16


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _weight_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters()) + packed_bytes(model)
