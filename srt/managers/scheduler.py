"""The scheduler loop: receive, choose, run, process. It owns the queue, the running batch and the
pools."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from srt.device_copy import HostCopy, to_device
from srt.forward_batch import ForwardBatch
from srt.journal import Journal, RefusedEntry, StepRecord
from srt.managers.admission import Admission
from srt.managers.batching import Batching, BatchingState, ContinuousBatching
from srt.managers.black_box import BlackBox
from srt.managers.cache_flushes import CacheFlushes
from srt.managers.io_struct import (
    AbortReq,
    BatchTokenOut,
    FinishReason,
    FinishType,
    FlushCacheReq,
    SchedulerInput,
    SchedulerOutput,
    StartedInfo,
    TokenizedGenerateReq,
)
from srt.managers.pass_profiler import PassProfiler
from srt.managers.phase_policy import PassStats, PhasePolicy, PhaseState
from srt.managers.req import Blocker, Req
from srt.managers.req_logprobs import LogprobPlan
from srt.managers.req_memory import ReqMemory
from srt.managers.retraction import RetractionPolicy
from srt.managers.retractor import Retractor
from srt.managers.schedule_batch import ModelLimits, ScheduleBatch
from srt.managers.schedule_policy import WaitingQueue
from srt.managers.scheduler_log import LoadSnapshot, SchedulerLog
from srt.managers.scheduler_pass import Pass
from srt.managers.scheduler_view import SchedulerCounters, answer_query
from srt.managers.step_recorder import StepRecorder, refused_entries, refused_entry
from srt.sampling_batch import BROKEN

logger = logging.getLogger(__name__)

BROKEN_MESSAGE = (
    "The model computed NaN or infinity where the logits of the next token should be. Its weights, "
    "or a number format that this input overflows (see --dtype), are the likely cause."
)


class Runner(Protocol):
    """What computes a pass: the ModelRunner, or a fake in tests."""

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """next_token_ids [b] int64 on the device, BROKEN for rows that mean nothing. On a GPU this
        returns before they are computed."""


class Channel(Protocol):
    """Where messages come from and go to."""

    def recv(self, timeout_ms: int) -> Sequence[SchedulerInput]: ...

    def send(self, message: SchedulerOutput) -> None: ...


class Scheduler:
    """One thread, no locks. Everything it is made of comes through the constructor, so tests drive
    the real one with a fake runner, a tiny pool and a clock of their own."""

    def __init__(
        self,
        runner: Runner,
        channel: Channel,
        memory: ReqMemory,
        queue: WaitingQueue,
        phase: PhasePolicy,
        admission: Admission,
        retraction: RetractionPolicy,
        model: ModelLimits,
        log: SchedulerLog,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
        mixed: bool = False,
        batching: Batching | None = None,
        black_box: BlackBox | None = None,
    ) -> None:
        self.runner = runner
        self.channel = channel
        self.memory = memory
        self.waiting_queue = queue
        self.phase = phase
        self.admission = admission
        self.retractor = Retractor(self, retraction)
        self.model = model
        self.log = log
        self.recorder = StepRecorder(journal, black_box)
        self.clock = clock
        self.mixed = mixed
        self.batching = ContinuousBatching() if batching is None else batching
        self.running_batch: ScheduleBatch | None = None
        self.last_batch: ScheduleBatch | None = (
            None  # an extend pass whose rows have not merged yet
        )
        self.chunked_req: Req | None = None
        self.in_flight: Pass | None = None  # launched, tokens not processed
        self.live: dict[str, Req] = {}  # every request without a terminal output
        self._num_asking = 0  # of them, who wants logprobs
        self.paused = False
        self.counters = SchedulerCounters()
        self.profiler = PassProfiler()
        # Rows of req_to_token whose request ended; batches drop them at the next choice.
        self._ended_rows = np.zeros(memory.rows.num_rows + 1, dtype=np.bool_)
        self._any_ended = False
        self._flushes = CacheFlushes(memory.tree)
        self._started: dict[str, StartedInfo] = {}  # admitted, first token not yet out
        self._last_token_at = clock()
        self._fruitless_choices = 0

    # --- the loop ---

    def event_loop(self, overlap: bool) -> None:
        """Run for ever. Blocks on the channel only when there is nothing to compute."""
        turn = self.step_overlap if overlap else self.step
        while True:
            turn()
            self.recorder.on_turn()

    def step(self) -> Pass | None:
        """One turn: receive, choose, run, process, or rest."""
        begin = time.perf_counter()
        self.receive()
        received = time.perf_counter()
        chosen = self.get_next_batch_to_run()
        if chosen is None:
            self.rest()
            return None
        self._fruitless_choices = 0
        decided = time.perf_counter()
        self.launch(chosen)
        launched = time.perf_counter()
        self.process_batch_result(chosen)
        self._note_times(chosen, begin, received, decided, launched)
        self.recorder.write(chosen)
        return chosen

    def step_overlap(self) -> Pass | None:
        """The same with the device one pass ahead: the next pass is chosen and launched before the
        tokens of the last one are looked at. A stop is known one pass later; the token computed in
        between is dropped."""
        begin = time.perf_counter()
        self.receive()
        received = time.perf_counter()
        chosen = self.get_next_batch_to_run()
        decided = time.perf_counter()
        previous = self.in_flight
        if chosen is not None:
            self.launch(chosen)
        launched = time.perf_counter()
        self.in_flight = chosen
        if previous is not None:
            self.process_batch_result(previous)
            self.recorder.write(previous)
        if chosen is not None:
            self._note_times(chosen, begin, received, decided, launched)
        if chosen is None and previous is None:
            self.rest()
        else:
            self._fruitless_choices = 0
        return chosen

    def _note_times(
        self, done: Pass, begin: float, received: float, decided: float, launched: float
    ) -> None:
        """Milliseconds of each part; with overlap, `process` is that of the pass before."""
        end = time.perf_counter()
        done.record.ms = {
            "receive": (received - begin) * 1e3,
            "choose": (decided - received) * 1e3,
            "run": (launched - decided) * 1e3,
            "process": (end - launched) * 1e3,
        }
        self.counters.add_times(done.record.ms)

    @property
    def has_work(self) -> bool:
        if self.in_flight is not None:
            return True
        return bool(self.live) and not self.paused and not self.batching.is_holding

    # --- receive ---

    def receive(self, idle_timeout_ms: int = 1000) -> None:
        timeout_ms = self.batching.wait_ms(self.clock(), idle_timeout_ms)
        for message in self.channel.recv(0 if self.has_work else timeout_ms):
            match message:
                case TokenizedGenerateReq():
                    self._accept(message)
                case AbortReq():
                    self._abort(message)
                case FlushCacheReq():
                    self._flushes.add(message, self.clock())
                case _:
                    answer_query(self, message)
        self._answer_flushes()

    def _accept(self, message: TokenizedGenerateReq) -> None:
        """Queue a request, or end it at once if it can never run. Its max_new_tokens is cut to what
        the context and the pool hold, so that one request alone always fits."""
        prompt_len = len(message.input_ids)
        room = self.max_req_input_len + 1 - prompt_len
        if room < 1:
            error = (
                f"Input length ({prompt_len} tokens) exceeds the maximum allowed length "
                f"({self.max_req_input_len} tokens). Use a shorter input or enable "
                "--allow-auto-truncate."
            )
            self._send_end(message.rid, FinishReason(FinishType.ABORT, None, error, 400))
            return
        asked = message.sampling_params.max_new_tokens
        req = Req.from_message(message, room if asked is None else min(asked, room), self.clock())
        assert req.rid not in self.live, f"rid {req.rid} is live already"
        self.live[req.rid] = req
        self._num_asking += req.logprobs is not None
        self.recorder.on_arrival(req)
        if req.remaining <= 0 < req.max_new_tokens:
            # Resumed in a pool too small for what it has already produced.
            del self.live[req.rid]
            self._send_end(req.rid, FinishReason(FinishType.LENGTH))
        elif req.was_admitted:
            self.waiting_queue.push_front(req)
        else:
            self.waiting_queue.append(req)

    def _abort(self, message: AbortReq) -> None:
        req = self.live.get(message.rid)
        if req is None:
            return
        if message.stopped:
            reason = FinishReason(FinishType.STOP)
        else:
            text = "Abort in waiting queue" if req.kv is None else "Aborted"
            reason = FinishReason(FinishType.ABORT, None, text)
        self.end_without_token(req, reason, message.finished)

    def end_without_token(self, req: Req, reason: FinishReason, silent: bool = False) -> None:
        """End a request wherever it is."""
        if req.kv is None:
            self.waiting_queue.remove(req)
        if req is self.chunked_req:
            self.chunked_req = None
        self._end(req, reason)
        self.admission.observe_end(req)
        self.recorder.on_end_without_pass(req)
        self._started.pop(req.rid, None)
        if not silent:
            self._send_end(req.rid, reason)

    @property
    def max_req_input_len(self) -> int:
        """The longest prompt that can run: one token must still fit behind it."""
        return min(self.memory.rows.context_len, self.memory.slots.size) - 1

    # --- choose ---

    def get_next_batch_to_run(self) -> Pass | None:
        self.merge_last_batch()
        if self.paused:
            return None
        chosen = None
        budget = self._prefill_budget()
        if budget:
            chosen = self.get_new_batch_prefill(budget)
        if chosen is None and self.running_batch is not None:
            chosen = self.get_next_batch_decode()
        if chosen is not None:
            self.recorder.fill(chosen, self._refusals())
        return chosen

    def merge_last_batch(self) -> None:
        """Filter at every choice, before admission is tried: a slot freed at the end of a step can
        be used in the next."""
        last = self.last_batch
        self._filter(last)
        self.drop_ended()
        self.last_batch = None
        if last is not None and last.reqs:
            if self.running_batch is None:
                self.running_batch = last
            else:
                self.running_batch.merge_batch(last)

    def drop_ended(self) -> None:
        """Filter the running batch. From here on the rows of the ended may be handed out again."""
        self._filter(self.running_batch)
        if self.running_batch is not None and not self.running_batch.reqs:
            self.running_batch = None
        self._ended_rows[:] = False
        self._any_ended = False

    def _filter(self, batch: ScheduleBatch | None) -> None:
        """Drop who has ended, and who has all its tokens launched."""
        if batch is None:
            return
        stays = batch.remaining_cpu > 0
        if self._any_ended:
            stays &= ~self._ended_rows[batch.rows_cpu]
        if not stays.all():
            batch.filter_batch(np.flatnonzero(stays).tolist())

    def _prefill_budget(self) -> int:
        """New tokens that a prefill may take now; 0 when there is nothing to prefill or the phase
        policy lets the running requests decode first."""
        self.admission.decode_turn = False
        if self.chunked_req is None and not self.waiting_queue:
            return 0
        running, chunked = self.running_batch, self.chunked_req
        first = chunked if chunked is not None else self.waiting_queue.oldest()
        assert first is not None, "nobody to prefill"
        if not self.batching.admits(self._batching_state(first)):
            self.admission.decode_turn = False
            return 0
        state = PhaseState(
            now=self.clock(),
            num_running=0 if running is None else len(running),
            num_kv_read=0 if running is None else int(running.seq_lens_cpu.sum()),
            num_pending=self.num_pending_tokens(),
            first_token_due=first.queued_at,
            last_token_at=self._last_token_at,
        )
        limit = self.admission.token_budget
        if self.mixed and running is not None:
            limit = max(1, limit - len(running))
        budget = limit
        if not self.batching.is_forming:
            budget = self.phase.prefill_tokens(state, limit)
        self.admission.decode_turn = budget == 0
        return budget

    def _batching_state(self, first: Req) -> BatchingState:
        num_waiting = len(self.waiting_queue)
        return BatchingState(
            self.clock(),
            len(self.live) - num_waiting,
            num_waiting,
            first.queued_at,
            self.admission.limits.max_running_requests,
            self.chunked_req is not None,
        )

    def get_new_batch_prefill(self, budget: int) -> Pass | None:
        """Admit what fits; None if nobody does."""
        self.retractor.preempt_for_priority()
        mixed = self.running_batch if self.mixed else None
        if mixed is not None and not mixed.decode_fits(self.memory):
            return None
        result = self.admission.build(
            self.waiting_queue, self.chunked_req, self.running_batch, budget, self.clock(), mixed
        )
        for req in result.newcomers:
            self.waiting_queue.remove(req)
            self._note_admission(req)
        self.batching.on_admitted(len(result.newcomers))
        self.chunked_req = result.chunked
        if not result.members:
            return None
        batch, forward = ScheduleBatch.prepare_for_extend(
            result.members, result.seq_lens, self.memory, self.model
        )
        num_new = sum(forward.extend_lens_cpu)
        num_cached = sum(req.kv.admitted_len for req in result.newcomers if req.kv is not None)
        chosen = Pass("P", batch, forward, self._new_record(), result.members, result.chunked)
        chosen.record.budget_left = result.budget_left
        chosen.record.admitted = result.admitted_entries()
        if mixed is not None:
            self._ride_along(chosen, mixed)
        # An inner chunk has no token yet, and a request for no tokens wants none.
        sampling = [
            row
            for row, req in enumerate(batch.reqs)
            if req is not result.chunked and req.max_new_tokens > 0
        ]
        if len(sampling) < len(batch):
            chosen.sampling_rows = sampling
        self.log.on_prefill(
            len(result.members), num_new, num_cached, self.num_pending_tokens(), self.load()
        )
        return chosen

    def _ride_along(self, chosen: Pass, running: ScheduleBatch) -> None:
        """Let the running requests take their next token in the same pass, as extends of one token.
        Admission has left room for them."""
        decode = running.prepare_for_decode(self.memory)
        chosen.batch.merge_batch(running)
        chosen.forward = chosen.forward.followed_by(decode, chosen.batch.sampling.snapshot())
        chosen.phase = "M"
        chosen.record.used = self.memory.used  # with the slots of those that ride along
        self.running_batch = None

    def _note_admission(self, req: Req) -> None:
        assert req.kv is not None, f"{req.rid} is not admitted"
        cached = req.kv.admitted_len
        if not req.was_admitted:
            req.was_admitted = True
            req.cached_tokens = cached
            req.queue_time = self.clock() - req.arrival_time
        else:
            req.recomputed_tokens += max(0, req.retracted_len - cached)
            self.counters.recomputed_tokens += max(0, req.retracted_len - cached)
        self.waiting_queue.policy.on_admitted(req, req.fill_len - cached)
        self._started[req.rid] = StartedInfo(
            req.cached_tokens, req.queue_time, req.num_retractions, req.recomputed_tokens
        )

    def get_next_batch_decode(self) -> Pass | None:
        """The running batch, less whoever had to be retracted for its next token to fit."""
        batch = self.running_batch
        assert batch is not None, "nobody is running"
        must, forced = not batch.decode_fits(self.memory), self.retractor.policy.is_forced()
        if must or forced:
            # What the last pass gave is needed to choose victims, and may have ended somebody.
            self.settle_in_flight()
            batch = self.running_batch
            if batch is None:
                return None
            if not batch.decode_fits(self.memory):
                self.retractor.retract_decode(batch)
            elif forced:
                self.retractor.force_retract(batch)
            self.drop_ended()
            if self.running_batch is None:
                return None
        else:
            self.admission.ratio.decay()
        return Pass("D", batch, batch.prepare_for_decode(self.memory), self._new_record())

    def settle_in_flight(self) -> None:
        """Process the pass in flight now, with a wait for the device."""
        if self.in_flight is not None:
            done, self.in_flight = self.in_flight, None
            self.process_batch_result(done)
            self.recorder.write(done)
            self.merge_last_batch()

    def release(self, req: Req) -> None:
        """Take back the memory of an admitted request; batches forget it at the next choice."""
        assert req.kv is not None, f"{req.rid} is not admitted"
        req.retracted_len = self.memory.kv_len(req)
        self._ended_rows[req.kv.row] = True
        self._any_ended = True
        self.memory.release_kv(req)

    # --- run ---

    def launch(self, chosen: Pass) -> None:
        """Start the pass. Its tokens stay on the device: the next pass may read them there."""
        batch = chosen.batch
        self.profiler.before_pass()
        self.phase.on_launch(chosen.is_extend)
        if self._num_asking:
            self._ask_logprobs(chosen)
        next_token_ids = self.runner.step(chosen.forward)
        chosen.tokens = HostCopy(next_token_ids)
        if chosen.sampling_rows is not None:
            rows = to_device(np.array(chosen.sampling_rows, dtype=np.int64), self.model.device)
            next_token_ids = next_token_ids[rows]
            batch.filter_batch(chosen.sampling_rows)
        batch.take_tokens(next_token_ids)
        if chosen.logprobs is not None:
            chosen.logprobs.fetch()
        chosen.batch = batch.snapshot()
        padding = self.batching.on_launch(chosen.is_extend, len(batch))
        self.counters.row_steps += len(batch) + padding
        if chosen.is_extend:
            self.last_batch = batch

    def _ask_logprobs(self, chosen: Pass) -> None:
        forward, rows = chosen.forward, chosen.sampling_rows
        lens = forward.extend_lens_cpu
        starts = [end - n for end, n in zip(forward.seq_lens_cpu, lens, strict=True)]
        reqs = chosen.batch.reqs
        sampling = range(len(reqs)) if rows is None else rows
        chosen.logprobs = LogprobPlan.of(reqs, starts, lens, sampling, self.model.device)
        if chosen.logprobs is not None:
            forward.logprobs = chosen.logprobs.query

    # --- process ---

    def process_batch_result(self, done: Pass) -> None:
        """Give out the tokens, end what has ended, one message for the whole pass. Waiting for the
        tokens is the one device sync of a step: whether a request goes on depends on them."""
        assert done.tokens is not None, "processed before it was launched"
        batch = done.batch
        ids: list[int] = done.tokens.wait()[0].tolist()
        if BROKEN in ids:
            self._end_broken(done, ids)
        for req, end in done.ends():
            self.memory.trust(req, end, is_last=req is not done.chunked)
        sampled = done.sampling_rows
        tokens = ids if sampled is None else [ids[row] for row in sampled]
        rows: Sequence[int] = range(len(tokens))
        if done.has_late_ends:
            rows = [row for row, req in enumerate(batch.reqs) if not req.has_ended]
        if len(rows) == len(tokens):
            for req, token in zip(batch.reqs, tokens, strict=True):
                req.output_ids.append(token)
            out = BatchTokenOut(batch.rids, tokens)
        else:
            for row in rows:
                batch.reqs[row].output_ids.append(tokens[row])
            out = BatchTokenOut([batch.rids[row] for row in rows], [tokens[row] for row in rows])
        place = {row: at for at, row in enumerate(rows)} if done.has_late_ends else None
        for row in batch.rows_that_stop(tokens, self.model.eos_token_ids):
            at = row if place is None else place.get(row)
            if at is not None:
                reason = self._finish_reason(batch.reqs[row], tokens[row])
                self._end(batch.reqs[row], reason)
                self.admission.observe_end(batch.reqs[row])
                out.finished[at] = reason
                done.record.finished[batch.rids[row]] = reason.type.value
        if done.logprobs is not None:
            found = done.logprobs.settle(dict(zip(batch.rids, tokens, strict=True)))
            out.output_logprobs = {i: found[rid] for i, rid in enumerate(out.rids) if rid in found}
        if done.extended:
            self._settle_extended(done, out)
        if out.rids:
            self.waiting_queue.policy.on_tokens(batch.reqs)
            self.channel.send(out)
        self._note_pass(done, len(rows))
        self.profiler.after_pass()

    def _end_broken(self, done: Pass, ids: list[int]) -> None:
        """End the requests whose rows mean nothing, before their tokens or their KV get anywhere.
        The rest of the pass then sees requests that have ended."""
        for req in done.reqs_of(row for row, token in enumerate(ids) if token == BROKEN):
            if req.has_ended:
                continue
            self.memory.distrust(req)
            reason = FinishReason(
                FinishType.ABORT, None, BROKEN_MESSAGE, 500, "InternalServerError"
            )
            self.end_without_token(req, reason)
            self.counters.broken_requests += 1
            self.log.on_broken(req.rid)
        done.has_late_ends = True

    def _settle_extended(self, done: Pass, out: BatchTokenOut) -> None:
        """Share what was computed; tell when first tokens started; end requests for no tokens."""
        for req, end in done.ends():
            if req.kv is not None:
                self.memory.cache_unfinished(req, end)
                if req.max_new_tokens == 0 and req is not done.chunked:
                    self._end(req, FinishReason(FinishType.LENGTH))
                    done.record.finished[req.rid] = FinishType.LENGTH.value
                    self._send_end(req.rid, req.finish_reason, self._started.pop(req.rid), req)
        extended = {req.rid: req for req in done.extended}
        for at, rid in enumerate(out.rids):
            if rid in extended:
                out.started[at] = self._started.pop(rid)
                _tell_prompt_logprobs(extended[rid], out, at)

    def _note_pass(self, done: Pass, num_tokens: int) -> None:
        now = self.clock()
        seconds = now - done.record.time
        if done.phase != "P":
            self._last_token_at = now
            self.log.on_decode(num_tokens, self.load)
        stats = PassStats(
            done.is_extend,
            sum(done.forward.extend_lens_cpu),
            len(done.forward.seq_lens_cpu),
            sum(done.forward.seq_lens_cpu),
            seconds,
        )
        self.phase.on_pass(stats)
        self.counters.on_pass(done.phase, num_tokens, stats)

    def _finish_reason(self, req: Req, token: int) -> FinishReason:
        is_eos = token in self.model.eos_token_ids and not req.params.ignore_eos
        if is_eos or token in req.stop_ids:
            return FinishReason(FinishType.STOP, token)
        return FinishReason(FinishType.LENGTH)

    def _end(self, req: Req, reason: FinishReason) -> None:
        """The one place where a request stops being live."""
        req.finish_reason = reason
        if req.kv is not None:
            self.release(req)
        if self.in_flight is not None:
            self.in_flight.has_late_ends = True
        self.counters.on_end(reason)
        del self.live[req.rid]
        self._num_asking -= req.logprobs is not None

    def _send_end(
        self,
        rid: str,
        reason: FinishReason | None,
        started: StartedInfo | None = None,
        req: Req | None = None,
    ) -> None:
        """A terminal output without a token. `req`: tell what it knows about its prompt."""
        assert reason is not None, f"{rid} has no finish reason"
        out = BatchTokenOut([rid], [-1], {0: reason})
        if started is not None:
            out.started[0] = started
        if req is not None:
            _tell_prompt_logprobs(req, out, 0)
        self.channel.send(out)

    # --- rest ---

    def rest(self) -> None:
        """Nothing to compute: the books must balance."""
        if self.paused:
            return
        if self.live:
            if self.batching.is_holding:
                return
            # The step that aborts the last one standing admits nobody, but the next one must.
            self._fruitless_choices += 1
            assert self._fruitless_choices < 3, f"{len(self.live)} requests are live, none can run"
            return
        self.admission.ratio.reset()
        self.log.on_idle()
        self.memory.check([])
        self._answer_flushes()

    def _answer_flushes(self) -> None:
        holds_nothing = not self.live or (self.paused and not self.memory.used)
        is_idle = holds_nothing and self.in_flight is None
        self._flushes.answer(is_idle, self.clock(), self.load, self.channel.send)

    # --- what it tells ---

    def load(self) -> LoadSnapshot:
        num_queued = len(self.waiting_queue)
        return LoadSnapshot(
            len(self.live) - num_queued, num_queued, self.memory.used, self.memory.slots.size
        )

    def num_pending_tokens(self) -> int:
        """Prompt tokens that no pass has computed; an estimate that ignores the cache."""
        chunk = self.chunked_req
        left = 0 if chunk is None else chunk.fill_len - self.memory.kv_len(chunk)
        return left + self.waiting_queue.num_tokens

    def _new_record(self) -> StepRecord:
        return self.recorder.begin(
            self.clock(),
            self.load(),
            self.admission.ratio.value,
            self.admission.limits.max_running_requests,
        )

    def _refusals(self) -> list[RefusedEntry]:
        """Who waits on after this choice, and for what."""
        oldest = self.waiting_queue.oldest()
        if oldest is None:
            return []
        if self.batching.refusal is not None:
            return [refused_entry(oldest, self.batching.refusal)]
        if self.admission.decode_turn:
            return [refused_entry(oldest, Blocker("decode_turn", 1, 0))]
        return refused_entries(self.admission.refused)


def _tell_prompt_logprobs(req: Req, out: BatchTokenOut, at: int) -> None:
    if req.logprobs is not None and req.logprobs.prompt:
        out.input_logprobs[at] = req.logprobs.take_prompt()
