"""Entry point of the scheduler process: loads the model, builds the scheduler, runs its loop."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from srt.journal import Journal
from srt.log_lines import setup_logging
from srt.managers.admission import Admission
from srt.managers.batching import make_batching
from srt.managers.black_box import BlackBox, black_box_path
from srt.managers.io_struct import FailedMsg, ReadyMsg
from srt.managers.ipc import SchedulerChannel
from srt.managers.new_token_ratio import NewTokenRatio
from srt.managers.phase_policy import make_phase_policy
from srt.managers.prefill_adder import AdmissionLimits
from srt.managers.req_memory import ReqMemory
from srt.managers.retraction import RetractionPolicy
from srt.managers.schedule_batch import ModelLimits
from srt.managers.schedule_policy import SchedulePolicy, WaitingQueue, make_policy
from srt.managers.scheduler import Scheduler
from srt.managers.scheduler_log import SchedulerLog
from srt.mem_cache.radix_cache import RadixCache
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.mem_cache.token_to_kv_pool import TokenToKVPool
from srt.model_config import load_model_config
from srt.model_runner import ModelRunner
from srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

GB = 1 << 30

# Two cores without VNNI compute about 1000 prompt tokens a second on the default model: between two
# tokens of a running stream lies then at most a chunk of 0.05 s, and its slowest gaps are under
# three times the usual one (docs/cpu.md). Smaller chunks cost throughput, larger ones win little.
CPU_CHUNK = 48


def run_scheduler_process(args: ServerArgs, model_path: Path, ipc_dir: Path) -> None:
    """Serve until the parent goes away. A failure is told to the parent and ends in exit code 1."""
    setup_logging(args.log_level)
    _die_with_parent()
    # The parent decides when to stop; a Ctrl-C in the terminal reaches both of us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):  # the parent asks where we hang
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    channel = SchedulerChannel(ipc_dir)
    try:
        black_box = BlackBox(black_box_path(ipc_dir))
        scheduler, ready = build_scheduler(args, model_path, channel, black_box)
        channel.send(ready)
        scheduler.event_loop(_overlaps(args, scheduler.model.device == "cpu"))
    except Exception as error:
        logger.error("Scheduler process failed", exc_info=True)
        channel.send(FailedMsg(f"{type(error).__name__}: {error}", traceback.format_exc()))
        channel.close()
        sys.exit(1)


def build_scheduler(
    args: ServerArgs,
    model_path: Path,
    channel: SchedulerChannel,
    black_box: BlackBox | None = None,
) -> tuple[Scheduler, ReadyMsg]:
    """Load the model, size the pools, put the parts together."""
    started = time.monotonic()
    overrides = json.loads(args.json_model_override_args)
    config = load_model_config(model_path, args.context_length, overrides)
    runner = ModelRunner(model_path, config, args)
    plan = runner.plan_memory()
    rows = ReqToTokenPool(plan.max_running_requests, plan.context_len, runner.device)
    slots = TokenToKVPool(plan.max_total_num_tokens, args.page_size)
    tree = RadixCache(slots, disable=args.disable_radix_cache)
    memory = ReqMemory(rows, slots, tree)
    runner.init_memory(plan, rows.device_table)
    on_cpu, graphs = runner.device == "cpu", runner.graphs
    chunk = _chunk_size(args, on_cpu, plan.available_bytes)
    limits = AdmissionLimits(
        plan.max_running_requests,
        args.max_prefill_tokens,
        chunk,
        args.prefill_max_requests,
        wait_for_prefix=args.schedule_policy == "lpm",
    )
    scheduler = Scheduler(
        runner=runner,
        channel=channel,
        memory=memory,
        queue=WaitingQueue(_make_policy(args, tree), args.max_queue_age),
        phase=make_phase_policy(
            args.phase_policy,
            args.prefill_decode_interval,
            args.prefill_decode_interval_min_bs,
            args.target_ttft_ms / 1e3,
            args.target_itl_ms / 1e3,
            args.page_size,
        ),
        admission=Admission(
            memory, limits, NewTokenRatio(args.schedule_conservativeness), args.admission
        ),
        retraction=_make_retraction(args),
        model=ModelLimits(config.vocab_size, config.eos_token_ids, runner.device),
        log=SchedulerLog(
            args.decode_log_interval,
            "cpu" if on_cpu else "cuda",
            time.monotonic,
            0 if graphs is None else graphs.sizes[-1],
        ),
        journal=Journal(args.journal),
        mixed=args.enable_mixed_chunk,
        batching=make_batching(args.batching, _seconds(args.batching_timeout_ms)),
        black_box=black_box,
    )
    logger.info(
        f"max_total_num_tokens={slots.size}, "
        f"chunked_prefill_size={-1 if chunk is None else chunk}, "
        f"max_prefill_tokens={args.max_prefill_tokens}, "
        f"max_running_requests={plan.max_running_requests}, context_len={plan.context_len}, "
        f"available_{'cpu' if on_cpu else 'gpu'}_mem={plan.available_bytes / GB:.2f} GB, "
        f"decode_log_interval={args.decode_log_interval}"
    )
    logger.info(
        f"Weights {plan.weight_bytes / GB:.2f} GB, KV cache {plan.kv_bytes / GB:.2f} GB for "
        f"{slots.size} slots, {plan.max_running_requests} rows, context {plan.context_len}; "
        f"loaded in {time.monotonic() - started:.1f} s"
    )
    ready = ReadyMsg(
        max_total_num_tokens=slots.size,
        max_req_input_len=scheduler.max_req_input_len,
        max_running_requests=plan.max_running_requests,
        chunked_prefill_size=-1 if chunk is None else chunk,
        max_prefill_tokens=args.max_prefill_tokens,
        context_len=plan.context_len,
        memory={
            "weight": plan.weight_bytes / GB,
            "kvcache": plan.kv_bytes / GB,
            "graph": 0.0 if graphs is None else graphs.memory_bytes / GB,
        },
    )
    return scheduler, ready


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _is_priority(args: ServerArgs) -> bool:
    return args.enable_priority_scheduling or args.schedule_policy == "priority"


def _make_policy(args: ServerArgs, tree: RadixCache) -> SchedulePolicy:
    return make_policy(
        "priority" if _is_priority(args) else args.schedule_policy,
        tree,
        args.random_seed,
        args.schedule_low_priority_values_first,
        args.fair_output_weight,
        json.loads(args.tenant_weights),
    )


def _make_retraction(args: ServerArgs) -> RetractionPolicy:
    preempts = _is_priority(args) and not args.disable_priority_preemption
    return RetractionPolicy(
        args.retract_every,
        args.retraction_policy == "priority",
        args.priority_scheduling_preemption_threshold if preempts else None,
        args.schedule_low_priority_values_first,
    )


def _overlaps(args: ServerArgs, on_cpu: bool) -> bool:
    """On a CPU nothing computes while we schedule, so there is nothing to hide."""
    if args.disable_overlap_schedule:
        return False
    return args.overlap_schedule == "on" or (args.overlap_schedule == "auto" and not on_cpu)


def _chunk_size(args: ServerArgs, on_cpu: bool, available_bytes: int) -> int | None:
    """Tokens of one prefill chunk, None for no chunking. By device memory as SGLang does on
    GPUs."""
    size = args.chunked_prefill_size
    if size is None:
        if on_cpu:
            size = CPU_CHUNK
        else:
            size = next(
                tokens
                for limit, tokens in ((20, 2048), (60, 4096), (160, 8192), (1 << 30, 16384))
                if available_bytes < limit * GB
            )
    if size == -1:
        return None
    if size < args.page_size:
        raise ValueError(
            f"--chunked-prefill-size must be at least --page-size {args.page_size}, got {size}"
        )
    return size


def _die_with_parent() -> None:
    """A scheduler without its HTTP process serves nobody. Linux kills us with the parent;
    elsewhere, and if it died before we asked, a thread notices that we were adopted."""
    parent = os.getppid()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
