"""The real scheduler around the runner of gpu_check."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from bench.fake_model import Loopback
from srt.journal import Journal
from srt.managers.admission import Admission
from srt.managers.io_struct import TokenizedGenerateReq
from srt.managers.new_token_ratio import NewTokenRatio
from srt.managers.phase_policy import make_phase_policy
from srt.managers.prefill_adder import AdmissionLimits
from srt.managers.req_memory import ReqMemory
from srt.managers.retraction import RetractionPolicy
from srt.managers.schedule_batch import ModelLimits
from srt.managers.schedule_policy import WaitingQueue, make_policy
from srt.managers.scheduler import Scheduler
from srt.managers.scheduler_log import SchedulerLog
from srt.mem_cache.radix_cache import RadixCache
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.mem_cache.token_to_kv_pool import TokenToKVPool
from srt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from bench.gpu_engine import EngineCheck

CHUNK = 8192


def make_loop(check: EngineCheck, channel: Loopback) -> Scheduler:
    """The server's own scheduler; its rows are those that the runner's kernels read."""
    plan, device = check.plan, check.device.name
    slots = TokenToKVPool(plan.max_total_num_tokens, 1)
    tree = RadixCache(slots, disable=True)
    rows = ReqToTokenPool(check.rows, plan.context_len, device)
    if device == "cpu":
        # On a CPU the pool and the device share one table; the runner has ours already.
        rows.table = check.table.numpy()
    rows.device_table = check.table
    limits = AdmissionLimits(check.rows, CHUNK * 2, CHUNK)
    memory = ReqMemory(rows, slots, tree)
    return Scheduler(
        runner=check.runner,
        channel=channel,
        memory=memory,
        queue=WaitingQueue(make_policy("fcfs", tree, seed=0)),
        phase=make_phase_policy("prefill-first", page_size=1),
        admission=Admission(memory, limits, NewTokenRatio(1.0), "ratio"),
        retraction=RetractionPolicy(),
        model=ModelLimits(check.config.vocab_size, (), device),
        log=SchedulerLog(1 << 30, "cuda", time.monotonic),
        journal=Journal(None),
    )


def turn_seconds(check: EngineCheck, batch: int, context: int, turns: int, overlap: bool) -> float:
    """Median wall time of a turn in which `batch` requests of about `context` tokens decode."""
    channel = Loopback()
    scheduler = make_loop(check, channel)
    turn = scheduler.step_overlap if overlap else scheduler.step
    params = SamplingParams(temperature=0.0, max_new_tokens=turns + 8, ignore_eos=True)
    for i in range(batch):
        ids = [(i * 7919 + k * 31) % check.config.vocab_size for k in range(context)]
        channel.inbox.append(TokenizedGenerateReq(f"{i:032x}", ids, params))
    taken = []
    while channel.inbox or scheduler.live or scheduler.in_flight is not None:
        begin = time.perf_counter()
        done = turn()
        seconds = time.perf_counter() - begin
        if done is not None and not done.is_extend and len(done.forward.seq_lens_cpu) == batch:
            taken.append(seconds)
    # The first turns still follow the prefills.
    return statistics.median(taken[2:-2] or taken)
