"""A model that is none, on a clock that is none: the real scheduler at thousands of steps a
second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from srt.forward_batch import ForwardBatch
from srt.journal import Journal
from srt.managers.admission import Admission
from srt.managers.batching import Batching
from srt.managers.io_struct import BatchTokenOut, SchedulerInput, SchedulerOutput
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

VOCAB_SIZE = 32_000


@dataclass
class VirtualClock:
    """Seconds that pass only when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class StepTime:
    """Seconds of a pass: `fixed` + `token` per new token + `row` per request + `kv` per token of KV
    read. The defaults are those of a mid-size model on one GPU, in the right proportions."""

    fixed: float = 0.008
    token: float = 60e-6
    row: float = 20e-6
    kv: float = 40e-9

    def of(self, batch: ForwardBatch) -> float:
        lens = batch.seq_lens_cpu
        tokens = len(batch.input_ids)
        return self.fixed + self.token * tokens + self.row * len(lens) + self.kv * sum(lens)


class FakeModelRunner:
    """The next token is the last one plus one. Time passes on `clock` as `time` says."""

    def __init__(self, clock: VirtualClock | None = None, time: StepTime | None = None) -> None:
        self._clock = clock
        self._time = time

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        if self._clock is not None and self._time is not None:
            self._clock.now += self._time.of(batch)
        if len(batch.input_ids) == len(batch.seq_lens_cpu):
            last = batch.input_ids
        else:
            last = batch.input_ids[batch.extend_lens.cumsum(0) - 1]
        return (last + 1) % VOCAB_SIZE


@dataclass
class Loopback:
    """A channel inside the process."""

    inbox: list[SchedulerInput] = field(default_factory=list)
    outbox: list[SchedulerOutput] = field(default_factory=list)

    def recv(self, timeout_ms: int) -> Sequence[SchedulerInput]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: SchedulerOutput) -> None:
        self.outbox.append(message)

    def take_tokens(self) -> list[BatchTokenOut]:
        """What was sent since the last call."""
        sent, self.outbox = self.outbox, []
        return [message for message in sent if isinstance(message, BatchTokenOut)]


def make_scheduler(
    runner: FakeModelRunner,
    channel: Loopback,
    clock: VirtualClock,
    pool_tokens: int,
    max_running: int,
    context_len: int,
    page_size: int = 1,
    chunk: int | None = 2048,
    policy: str = "fcfs",
    phase: str = "interleave",
    admission: str = "ratio",
    conservativeness: float = 1.0,
    mixed: bool = False,
    journal: str | None = None,
    batching: Batching | None = None,
) -> Scheduler:
    """The server's own scheduler around `runner`."""
    slots = TokenToKVPool(pool_tokens, page_size)
    tree = RadixCache(slots)
    memory = ReqMemory(ReqToTokenPool(max_running, context_len), slots, tree)
    limits = AdmissionLimits(max_running, 16384, chunk, wait_for_prefix=policy == "lpm")
    return Scheduler(
        runner=runner,
        channel=channel,
        memory=memory,
        queue=WaitingQueue(make_policy(policy, tree, seed=0)),
        phase=make_phase_policy(phase, page_size=page_size),
        admission=Admission(memory, limits, NewTokenRatio(conservativeness), admission),
        retraction=RetractionPolicy(),
        model=ModelLimits(VOCAB_SIZE, (), "cpu"),
        log=SchedulerLog(40, "cpu", clock),
        journal=Journal(journal),
        clock=clock,
        mixed=mixed,
        batching=batching,
    )
