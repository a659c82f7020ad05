"""What a GPU must hold beside weights and KV cache: upper bounds, computed before any of it is
there."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from srt.model_config import ModelConfig
from srt.server_args import ServerArgs

# Of a captured graph: a node a kernel. Drivers of 2024 take less, those before took about this.
GRAPH_NODE_BYTES = 32 << 10
KERNELS_A_LAYER = 12
# Libraries' own: cuBLAS workspaces, loaded kernels, the allocator's rounding.
LIBRARY_BYTES = 256 << 20


@dataclass(frozen=True)
class CudaWorkspace:
    """Bytes. `activations` of the largest prefill; `sampling`: logits, penalties and the samplers'
    lists of candidates; `attention`: partial results of split requests; `table`: req_to_token."""

    activations: int
    sampling: int
    attention: int
    table: int
    graphs: int
    libraries: int = LIBRARY_BYTES

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def cuda_workspace(
    config: ModelConfig,
    args: ServerArgs,
    rows: int,
    num_graphs: int,
    itemsize: int,
    num_sms: int,
) -> CudaWorkspace:
    """`rows`: the most requests that may run at once; `itemsize`: bytes of an activation;
    `num_sms`: multiprocessors of the device."""
    return CudaWorkspace(
        activations=_activations(config, args, rows, itemsize),
        sampling=_sampling(config.vocab_size, rows, itemsize),
        attention=_attention(config, rows, num_sms, args.batch_invariant),
        table=(rows + 1) * config.context_len * 4,
        graphs=num_graphs * config.num_layers * KERNELS_A_LAYER * GRAPH_NODE_BYTES,
    )


def _activations(config: ModelConfig, args: ServerArgs, rows: int, itemsize: int) -> int:
    """Of one layer at a time. Two residuals and a norm live through it, beside them either heads,
    rotated heads and attended ones, or both halves of the MLP and their product."""
    tokens = max(args.max_prefill_tokens, rows)
    if args.chunked_prefill_size == -1:
        tokens = max(tokens, config.context_len)
    heads = config.num_heads + config.num_kv_heads
    attention = 3 * heads * config.head_dim
    mlp = 3 * config.intermediate_size
    rotation = 2 * 4 * config.head_dim  # cosines and sines, float32
    elements = 3 * config.hidden_size + max(attention, mlp)
    return tokens * (elements * itemsize + rotation)


def _sampling(vocab_size: int, rows: int, itemsize: int) -> int:
    # Late: Triton is there wherever CUDA is.
    from srt.layers.fused_top_sampler import MAX_LIST_ELEMENTS

    logits = rows * vocab_size
    # As the product gives them, as float32, and as penalties leave them; and who said what.
    adjusted = logits * (itemsize + 4 + 4) + logits * (1 + 4)
    listed = max(vocab_size, min(logits, MAX_LIST_ELEMENTS)) * 16
    return adjusted + listed


def _attention(config: ModelConfig, rows: int, num_sms: int, batch_invariant: bool) -> int:
    from srt.layers.decode_attention import scratch_bytes

    return scratch_bytes(
        rows, config.num_heads, config.num_kv_heads, config.head_dim, num_sms, batch_invariant
    )
