"""What a ModelRunner does otherwise on a GPU: its memory, its attention, its products, its graphs.

Triton is imported inside functions: there is none where there is no CUDA.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from srt.cuda_graphs import DecodeGraphs, GraphPool, Model, graph_sizes
from srt.cuda_memory import cuda_workspace
from srt.layers.attention import AttentionBackend
from srt.layers.embedding import Embedding
from srt.layers.linear import Linear
from srt.mem_cache.kv_cache import KVCache
from srt.memory_plan import DeviceMemory, most_rows
from srt.model_config import ModelConfig
from srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def cuda_memory(
    config: ModelConfig, args: ServerArgs, dtype: torch.dtype, bytes_per_token: int
) -> DeviceMemory:
    """What is free now, and how much of it is not for the KV cache."""
    available, total = torch.cuda.mem_get_info()
    rows = most_rows(args, True, available, bytes_per_token)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    num_graphs = len(planned_graph_sizes(args, rows))
    workspace = cuda_workspace(config, args, rows, num_graphs, dtype.itemsize, num_sms)
    return DeviceMemory(True, available, total, workspace.total)


def make_cuda_attention(
    config: ModelConfig,
    args: ServerArgs,
    dtype: torch.dtype,
    kv_cache: KVCache,
    req_to_token: torch.Tensor,
) -> AttentionBackend:
    """ValueError if the kernels cannot serve this model on this GPU."""
    from srt.layers.triton_attention import GpuFacts, TritonAttentionBackend

    return TritonAttentionBackend(
        kv_cache,
        req_to_token,
        config.num_heads,
        dtype,
        {config.window_of(layer_id) for layer_id in range(config.num_layers)},
        max_batch=len(req_to_token) - 1,
        gpu=GpuFacts.of(req_to_token.device),
        batch_invariant=args.batch_invariant,
    )


def make_batch_invariant(model: nn.Module) -> None:
    """Let all products with weights round the same way in any batch. The other layers do anyway,
    and attention when it is asked to."""
    from srt.layers.invariant_linear import invariant_linear

    for module in model.modules():
        if isinstance(module, (Linear, Embedding)):
            module.product = invariant_linear


def planned_graph_sizes(args: ServerArgs, max_running_requests: int) -> list[int]:
    """Batch sizes to capture; none if graphs are off."""
    if args.disable_cuda_graph:
        return []
    return graph_sizes(args.cuda_graph_max_bs, max_running_requests)


def capture_graphs(
    model: Model, attn: AttentionBackend, sizes: list[int], device: str
) -> DecodeGraphs | None:
    """None for no sizes. The log tells what they take: compare with cuda_memory's estimate."""
    if not sizes:
        return None
    before, _ = torch.cuda.mem_get_info()
    graphs = DecodeGraphs(model, attn, sizes, device, GraphPool())
    after, _ = torch.cuda.mem_get_info()
    graphs.memory_bytes = before - after
    logger.info("CUDA graphs take %.2f GB", graphs.memory_bytes / 2**30)
    return graphs
