"""How large the KV pool is: a pure function of free memory, the model's numbers and the options."""

from __future__ import annotations

import math
from dataclasses import dataclass

from srt.server_args import ServerArgs

# Of available RAM, for the KV cache: a laptop has other things to do.
CPU_MEM_FRACTION = 0.1
# Of the device, for weights and KV cache; the rest is for activations and the driver.
CUDA_MEM_FRACTION = 0.88
# Rows when none are asked for: at most so many, and one for so many tokens of the pool.
CPU_MAX_ROWS, CPU_TOKENS_A_ROW = 128, 64
CUDA_MAX_ROWS, CUDA_TOKENS_A_ROW = 1024, 256


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided at start. `kv_bytes` includes the padding page; `available_bytes` was free
    with the weights loaded and before the KV cache was made; `workspace_bytes` of them are kept for
    everything else."""

    max_total_num_tokens: int
    max_running_requests: int
    context_len: int
    weight_bytes: int
    kv_bytes: int
    available_bytes: int
    workspace_bytes: int = 0


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes, with the weights loaded. `total` matters on CUDA, where weights and KV cache together
    get a share of the device, and `workspace`, which must be left for activations, logits and
    graphs."""

    is_cuda: bool
    available: int
    total: int
    workspace: int = 0


def make_memory_plan(
    memory: DeviceMemory,
    weight_bytes: int,
    bytes_per_token: int,
    context_len: int,
    args: ServerArgs,
) -> MemoryPlan:
    """ValueError, with both numbers, if `max_total_tokens` does not fit or not one page does."""
    page = args.page_size
    room = memory.available - memory.workspace
    fits = room // bytes_per_token - page
    if args.max_total_tokens is not None:
        if args.max_total_tokens > fits:
            needed = (args.max_total_tokens + page) * bytes_per_token
            raise ValueError(
                f"max_total_tokens {args.max_total_tokens} needs {_gb(needed)} of KV cache, but "
                f"{_gb(max(0, room))} is available{_besides(memory)}: at most {max(0, fits)} tokens"
            )
        tokens, source = args.max_total_tokens, f"max_total_tokens {args.max_total_tokens}"
    else:
        if memory.is_cuda:
            fraction = args.mem_fraction_static or CUDA_MEM_FRACTION
            budget = memory.available - int(memory.total * (1 - fraction))
            if args.mem_fraction_static is not None and budget > room:
                most = fraction - (budget - room) / memory.total
                most = math.floor(round(most * 100, 6)) / 100  # two digits, rounded down
                raise ValueError(
                    f"mem_fraction_static {fraction} leaves {_gb(memory.available - budget)} of "
                    f"the device for everything else, which may need {_gb(memory.workspace)}: use "
                    f"at most {max(0.0, most)}, or lower "
                    "max_running_requests, max_prefill_tokens or cuda_graph_max_bs"
                )
            budget = min(budget, room)
        else:
            fraction = args.mem_fraction_static or CPU_MEM_FRACTION
            budget = int(memory.available * fraction)
        tokens = budget // bytes_per_token - page
        source = f"mem_fraction_static {fraction} of memory leaves {_gb(max(0, budget))}, which"
    tokens -= tokens % page
    if tokens < page:
        raise ValueError(
            f"{source} is too small for a KV cache of one page of {page} tokens: with the padding "
            f"page it takes {_gb(2 * page * bytes_per_token)}; {_gb(max(0, room))} is available"
            f"{_besides(memory)}"
        )
    return MemoryPlan(
        max_total_num_tokens=tokens,
        max_running_requests=args.max_running_requests or _rows(memory.is_cuda, tokens),
        context_len=context_len,
        weight_bytes=weight_bytes,
        kv_bytes=(tokens + page) * bytes_per_token,
        available_bytes=memory.available,
        workspace_bytes=memory.workspace,
    )


def most_rows(args: ServerArgs, is_cuda: bool, available: int, bytes_per_token: int) -> int:
    """At least as many rows as the plan will have."""
    tokens = available // bytes_per_token
    if args.max_total_tokens is not None:
        tokens = min(tokens, args.max_total_tokens)
    return args.max_running_requests or _rows(is_cuda, tokens)


def _besides(memory: DeviceMemory) -> str:
    return f" beside {_gb(memory.workspace)} for everything else" if memory.workspace else ""


def _rows(is_cuda: bool, tokens: int) -> int:
    if is_cuda:
        return max(1, min(CUDA_MAX_ROWS, tokens // CUDA_TOKENS_A_ROW))
    return max(1, min(CPU_MAX_ROWS, tokens // CPU_TOKENS_A_ROW))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.4g} GB"
