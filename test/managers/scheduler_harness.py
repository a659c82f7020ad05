"""The real scheduler over a fake runner, driven message by message."""

from __future__ import annotations

from collections.abc import Sequence

from fake_runner import FakeRunner

from srt.journal import Journal
from srt.managers.admission import Admission
from srt.managers.batching import Batching
from srt.managers.io_struct import (
    AbortReq,
    BatchTokenOut,
    FinishReason,
    SchedulerInput,
    SchedulerOutput,
    StartedInfo,
    TokenizedGenerateReq,
)
from srt.managers.new_token_ratio import NewTokenRatio
from srt.managers.phase_policy import make_phase_policy
from srt.managers.prefill_adder import AdmissionLimits
from srt.managers.req_memory import ReqMemory
from srt.managers.retraction import RetractionPolicy
from srt.managers.schedule_batch import ModelLimits
from srt.managers.schedule_policy import WaitingQueue, make_policy
from srt.managers.scheduler import Pass, Scheduler
from srt.managers.scheduler_log import SchedulerLog
from srt.mem_cache.radix_cache import RadixCache
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.mem_cache.token_to_kv_pool import TokenToKVPool
from srt.sampling_params import SamplingParams


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class LoopbackChannel:
    def __init__(self) -> None:
        self.inbox: list[SchedulerInput] = []
        self.outbox: list[SchedulerOutput] = []

    def recv(self, timeout_ms: int) -> Sequence[SchedulerInput]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: SchedulerOutput) -> None:
        self.outbox.append(message)


class Harness:
    """`outputs`, `finished` and `started` are what a client of the scheduler has seen."""

    def __init__(
        self,
        pool_size: int = 4096,
        page_size: int = 1,
        max_running: int = 8,
        context_len: int = 1024,
        max_prefill_tokens: int = 16384,
        chunk: int | None = None,
        policy: str = "fcfs",
        phase: str = "prefill-first",
        decodes: int = 1,
        disable_radix: bool = False,
        retract_every: int = 0,
        vocab_size: int = 997,
        eos: tuple[int, ...] = (),
        max_queue_age: float | None = None,
        conservativeness: float = 1.0,
        admission: str = "ratio",
        overlap: bool = False,
        mixed: bool = False,
        preempt_threshold: int | None = None,
        journal: str | None = None,
        batching: Batching | None = None,
    ) -> None:
        self.overlap = overlap
        self.vocab_size = vocab_size
        self.eos = eos
        self.clock = VirtualClock()
        self.channel = LoopbackChannel()
        rows = ReqToTokenPool(max_running, context_len)
        slots = TokenToKVPool(pool_size, page_size)
        tree = RadixCache(slots, disable=disable_radix)
        self.memory = ReqMemory(rows, slots, tree)
        self.runner = FakeRunner(rows, slots.num_slots, vocab_size)
        limits = AdmissionLimits(
            max_running, max_prefill_tokens, chunk, None, wait_for_prefix=policy == "lpm"
        )
        self.scheduler = Scheduler(
            runner=self.runner,
            channel=self.channel,
            memory=self.memory,
            queue=WaitingQueue(make_policy(policy, tree, seed=0), max_queue_age),
            phase=make_phase_policy(
                phase, decodes, target_ttft=20, target_itl=3, page_size=page_size
            ),
            admission=Admission(self.memory, limits, NewTokenRatio(conservativeness), admission),
            retraction=RetractionPolicy(retract_every, policy == "priority", preempt_threshold),
            model=ModelLimits(vocab_size, eos, "cpu"),
            log=SchedulerLog(40, "cpu", self.clock),
            journal=Journal(journal),
            clock=self.clock,
            mixed=mixed,
            batching=batching,
        )
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.started: dict[str, StartedInfo] = {}

    def send(self, rid: str, prompt: list[int], max_new: int, **knobs: object) -> None:
        extra_key = knobs.pop("extra_key", None)
        outputs = knobs.pop("output_ids", [])
        priority = knobs.pop("priority", 0)
        tenant = knobs.pop("tenant", None)
        params = SamplingParams(temperature=0.0, max_new_tokens=max_new, **knobs)  # type: ignore[arg-type]
        self.channel.inbox.append(
            TokenizedGenerateReq(
                rid=rid,
                input_ids=prompt,
                sampling_params=params,
                output_ids=outputs,  # type: ignore[arg-type]
                extra_key=extra_key,  # type: ignore[arg-type]
                priority=priority,  # type: ignore[arg-type]
                tenant=tenant,  # type: ignore[arg-type]
            )
        )
        self.outputs[rid] = []

    def abort(self, rid: str, finished: bool = False, stopped: bool = False) -> None:
        self.channel.inbox.append(AbortReq(rid, finished, stopped))

    def step(self) -> Pass | None:
        """One turn of the loop, books checked, outputs collected."""
        chosen = self.scheduler.step_overlap() if self.overlap else self.scheduler.step()
        self.clock.now += 1.0
        self.memory.check(list(self.scheduler.live.values()))
        for message in self.channel.outbox:
            if isinstance(message, BatchTokenOut):
                self._collect(message)
        self.channel.outbox = [m for m in self.channel.outbox if not isinstance(m, BatchTokenOut)]
        return chosen

    def _collect(self, message: BatchTokenOut) -> None:
        for i, (rid, token) in enumerate(zip(message.rids, message.token_ids, strict=True)):
            assert rid not in self.finished, f"{rid} got output after its end"
            if token >= 0:
                self.outputs[rid].append(token)
            if i in message.started:
                self.started[rid] = message.started[i]
            if i in message.finished:
                self.finished[rid] = message.finished[i]

    def run(self, max_steps: int = 10_000) -> None:
        """Until everything that was sent has ended."""
        for _ in range(max_steps):
            idle = self.step() is None and self.scheduler.in_flight is None
            if idle and not self.scheduler.live and not self.channel.inbox:
                return
        raise AssertionError(f"still live after {max_steps} steps: {list(self.scheduler.live)}")
