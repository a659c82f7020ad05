"""The HTTP process's side of every request: tokenize, check, send, receive, stream, abort."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection
from enum import Enum
from typing import Any

from prometheus_client.core import Metric

from srt.managers.detokenizer import Detokenizer
from srt.managers.io_struct import (
    AbortReq,
    BatchTokenOut,
    FailedMsg,
    FinishReason,
    FinishType,
    FlushCacheOut,
    ReadyMsg,
    SchedulerInput,
    SchedulerOutput,
)
from srt.managers.ipc import FrontendChannel
from srt.managers.live_request import ClientCall, LiveRequest
from srt.managers.queue_limit import QueueLimit
from srt.managers.req_state import ReqState
from srt.managers.request_preparer import GenerateReqInput, PreparedReq, RequestPreparer
from srt.managers.restart_counts import RestartCounts
from srt.managers.scheduler_control import SchedulerControl
from srt.managers.scheduler_link import SchedulerLink
from srt.managers.stop_matcher import StopRegexTimeout
from srt.model_config import ModelConfig
from srt.request_error import RequestError
from srt.request_log import RequestLog
from srt.request_metrics import RequestMetrics
from srt.server_args import ServerArgs
from srt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

WAITING_TIMEOUT = "Request waiting timeout reached."
RUNNING_TIMEOUT = "Request running timeout reached."
ABORTED = "Aborted"
DRAINED = "The server shut down before the request was finished."
QUARANTINED = (
    "The scheduler crashed twice in a row while it ran this request, which is not tried again."
)


class ServerStatus(Enum):
    STARTING = "starting"
    UP = "up"
    RESTARTING = "restarting"  # the scheduler died; another is loading
    DRAINING = "draining"
    DEAD = "dead"


class TokenizerManager:
    """Owns `rid -> ReqState`. An entry is made and removed by `generate`, nowhere else. Everything
    runs on one event loop; nothing here may be called from another thread."""

    def __init__(
        self,
        args: ServerArgs,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        channel: FrontendChannel,
    ) -> None:
        self.args = args
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.status = ServerStatus.STARTING
        self.failure = ""  # why the status is DEAD
        self.died = asyncio.Event()
        # Called with a description when the scheduler failed or cannot be heard any more.
        self.on_lost: Callable[[str], None] = self.fail
        self.restarts = RestartCounts()
        self._ready: asyncio.Future[ReadyMsg] = asyncio.get_running_loop().create_future()
        self._limits: ReadyMsg | None = None
        self._rid_to_live: dict[str, LiveRequest] = {}
        # Every name a client can use for live requests (an id, or the base id of a call) -> their
        # scheduler ids.
        self._name_to_rids: dict[str, list[str]] = {}
        self._no_requests = asyncio.Event()
        self._no_requests.set()
        self._preparer = RequestPreparer(args, model_config, tokenizer)
        self._link = SchedulerLink(self._dispatch, lambda message: self.on_lost(message))
        self._link.open(channel)
        self.control = SchedulerControl(self._send)
        self.queue = QueueLimit(args.max_queued_requests)
        self.metrics = RequestMetrics()
        self._log = (
            RequestLog(args.log_requests_level, args.log_requests_format == "json")
            if args.log_requests
            else None
        )

    # --- life ---

    async def wait_ready(self) -> ReadyMsg:
        """Until the scheduler can take work. RuntimeError, with its error, if it never will."""
        limits = await asyncio.shield(self._ready)
        if self.status is ServerStatus.STARTING:
            self.status = ServerStatus.UP
        return limits

    @property
    def limits(self) -> ReadyMsg:
        """What the scheduler said it can hold."""
        assert self._limits is not None, "asked for limits before the scheduler was ready"
        return self._limits

    @property
    def context_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.limits.context_len

    @property
    def num_live(self) -> int:
        """Requests without a terminal output read by their consumer."""
        return len(self._rid_to_live)

    @property
    def live_rids(self) -> list[str]:
        return list(self._rid_to_live)

    def fail(self, message: str) -> None:
        """The scheduler is gone: end every live request with an error and take no more."""
        if self.status is ServerStatus.DEAD:
            return
        self.status = ServerStatus.DEAD
        self.failure = message
        self.died.set()
        if not self._ready.done():
            self._ready.set_exception(RuntimeError(message))
            self._ready.exception()  # nobody may be waiting; that is no warning's business
        for live in self._rid_to_live.values():
            if live.state.finish_reason is None:
                _end_with_error(live.state, message, 500)
                live.call.notify(live.state, live.interval)
        self.control.fail(message)

    async def drain(self, timeout: float) -> bool:
        """Take no new requests and wait up to `timeout` s for the live ones; those that are left
        are aborted. Whether all of them finished by themselves."""
        if self.status is not ServerStatus.DEAD:
            self.status = ServerStatus.DRAINING
        try:
            await asyncio.wait_for(self._no_requests.wait(), timeout)
        except asyncio.TimeoutError:
            logger.warning("Aborting %d requests after %g s of draining", self.num_live, timeout)
            for live in self._unfinished():
                self._end_aborted(live, DRAINED)
            return False
        return True

    async def close(self) -> None:
        """End the two tasks and the sockets. Live requests get an error first."""
        self.fail("The server has shut down.")
        await self._link.close()

    # --- another scheduler ---

    async def disconnect(self) -> None:
        """The scheduler is gone and another one will come: until then requests wait, new ones
        too."""
        if self.status is ServerStatus.UP:
            self.status = ServerStatus.RESTARTING
        await self._link.close()

    def connect(self, channel: FrontendChannel) -> asyncio.Future[ReadyMsg]:
        """To a new scheduler that is loading; the result is there when it can take work. Then
        `resubmit`."""
        self._ready = asyncio.get_running_loop().create_future()
        self._link.open(channel)
        return self._ready

    def resubmit(self, held: Collection[str] = ()) -> int:
        """Submit every live request, but for the scheduler ids in `held`, with the outputs its
        client has had. Returns how many."""
        self.restarts.scheduler_restarts += 1
        if self.status is ServerStatus.RESTARTING:
            self.status = ServerStatus.UP
        self.control.brief()
        pending = self._unfinished()
        for live in pending:
            if live.is_aborted:
                self._end_aborted(live, ABORTED)
        pending = [live for live in self._unfinished() if live.state.request.rid not in held]
        # Those that ran go to the front of the queue, the last sent first.
        pending.sort(key=lambda live: live.is_waiting)
        num_ran = sum(not live.is_waiting for live in pending)
        for live in pending[:num_ran][::-1] + pending[num_ran:]:
            self._resubmit(live)
        return len(pending)

    def resubmit_one(self, rid: str) -> None:
        """Submit a request that `resubmit` held back."""
        live = self._rid_to_live.get(rid)
        if live is None or live.state.finish_reason is not None:
            return
        if live.is_aborted:
            self._end_aborted(live, ABORTED)
        else:
            self._resubmit(live)

    def quarantine(self, rid: str) -> None:
        """End a request that kills schedulers."""
        live = self._rid_to_live.get(rid)
        if live is not None and live.state.finish_reason is None:
            self.restarts.quarantined_requests += 1
            _end_with_error(live.state, QUARANTINED, 500)
            live.call.notify(live.state, live.interval)

    def unfinished_states(self) -> list[ReqState]:
        return [live.state for live in self._unfinished()]

    def num_outputs(self) -> dict[str, int]:
        """How many tokens each live request has had, by scheduler id."""
        return {live.state.request.rid: len(live.state.output_ids) for live in self._unfinished()}

    def _unfinished(self) -> list[LiveRequest]:
        return [live for live in self._rid_to_live.values() if live.state.finish_reason is None]

    def _resubmit(self, live: LiveRequest) -> None:
        self.restarts.resumed_requests += 1
        self._send(live.state.resumed_request(was_admitted=not live.is_waiting))

    def _end_aborted(self, live: LiveRequest, message: str) -> None:
        """End a request here, with the output it has, without asking the scheduler."""
        live.state.finish(FinishReason(FinishType.ABORT, message=message))
        self._send(AbortReq(live.state.request.rid, finished=True))
        live.call.notify(live.state, live.interval)

    # --- requests ---

    async def generate(self, call_input: GenerateReqInput) -> AsyncGenerator[ReqState, None]:
        """Run one call; RequestError at the first step if any of its members is refused (then none
        has started).

        Yields a state whenever it has news: with `stream` after its first token and after every
        `stream_interval` tokens, and always, once, with its `finish_reason` set. Several choices
        interleave; `state.index` says which it is (prompt-major: with n choices a prompt, those of
        prompt p are `p * n` to `p * n + n - 1`). Read the state before the next await; it grows.

        Leaving early (the client went away) aborts what still runs. Close it with `aclosing`, so
        that this happens at once.
        """
        self._check_accepting()
        if not call_input.is_probe:
            self.queue.check(len(call_input.prompts))  # before the work of tokenizing
        members = await self._preparer.prepare(call_input, self.limits)
        call = ClientCall(call_input.stream, len(members))
        names = {member.rid: [member.request.rid] for member in members}
        if call_input.rid is not None:
            names[call_input.rid] = [member.request.rid for member in members]
        # No await between these checks and the registration, or two calls could both pass them.
        self._check_accepting()
        self._check_free(members, names)
        if not call_input.is_probe:
            self.queue.check(len(members))
        try:
            self._name_to_rids.update(names)
            is_list = call_input.is_batch or len(members) > 1
            for index, member in enumerate(members):
                started = self._start(member, index, is_list, call, not call_input.is_probe)
                self._limit_time(started, call_input)
                if self._log is not None and started.is_counted:
                    self._log.on_start(started.state, member.text, call.is_stream)
            num_running = len(members)
            while num_running:
                state = await call.next()
                if state.finish_reason is not None:
                    num_running -= 1
                yield state
        finally:
            for member in members:
                live = self._rid_to_live.pop(member.request.rid, None)
                if live is None:
                    continue
                for timer in live.timers:
                    timer.cancel()
                if live.state.finish_reason is None:
                    self._send(AbortReq(member.request.rid, finished=True))
                if live.is_counted:
                    if live.is_waiting:
                        self.queue.on_left()
                    self.metrics.on_end(live.state, call.is_stream)
                    if self._log is not None:
                        self._log.on_end(live.state)
            for name in names:
                del self._name_to_rids[name]
            if not self._rid_to_live:
                self._no_requests.set()

    def abort(self, rid: str) -> None:
        """Ask for the end of `rid`, or of every member of the call it is the base id of. Exact
        match; an id that is not live is ignored. The request ends through its terminal output."""
        for member in self._name_to_rids.get(rid, ()):
            self._abort(self._rid_to_live[member])

    def abort_all(self) -> None:
        for live in self._rid_to_live.values():
            self._abort(live)

    def _abort(self, live: LiveRequest) -> None:
        live.is_aborted = True  # remembered, in case the scheduler dies before it does it
        if self._link.is_open and self._ready.done():
            self._send(AbortReq(live.state.request.rid))
        elif live.state.finish_reason is None:
            self._end_aborted(live, ABORTED)

    def _start(
        self, member: PreparedReq, index: int, is_member: bool, call: ClientCall, is_counted: bool
    ) -> LiveRequest:
        """Register one request and send it."""
        request = member.request
        params = request.sampling_params
        state = ReqState(
            member.rid,
            request,
            index,
            is_member,
            Detokenizer(
                self.tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
            ),
            member.stop_matcher,
            request.arrival_time,
        )
        interval = params.stream_interval or self.args.stream_interval
        live = self._rid_to_live[request.rid] = LiveRequest(state, call, interval, is_counted)
        if is_counted:
            self.queue.on_sent()
            self.metrics.on_start(call.is_stream)
        self._no_requests.clear()
        self._send(request)
        return live

    def _limit_time(self, live: LiveRequest, call_input: GenerateReqInput) -> None:
        """End the request when its time is over: the shorter of the client's and the server's
        limit, for its first token and for all of it."""
        queue = _shorter(call_input.queue_timeout, self.args.queue_timeout)
        total = _shorter(call_input.timeout, self.args.request_timeout)
        if call_input.is_probe or (queue is None and total is None):
            return
        later = asyncio.get_running_loop().call_later
        timers = []
        if queue is not None:
            timers.append(later(queue, self._on_queue_timeout, live))
        if total is not None:
            timers.append(later(total, self._time_out, live))
        live.timers = tuple(timers)

    def _on_queue_timeout(self, live: LiveRequest) -> None:
        if live.is_waiting:
            self._time_out(live)

    def _time_out(self, live: LiveRequest) -> None:
        if live.state.finish_reason is not None:
            return
        _end_with_error(live.state, WAITING_TIMEOUT if live.is_waiting else RUNNING_TIMEOUT, 503)
        self._send(AbortReq(live.state.request.rid, finished=True))
        live.call.notify(live.state, live.interval)

    def _check_accepting(self) -> None:
        if self.status in (ServerStatus.UP, ServerStatus.RESTARTING):
            return  # while it restarts, requests wait in our table
        message = {
            ServerStatus.STARTING: "The server is still starting.",
            ServerStatus.DRAINING: "The server is shutting down and takes no new requests.",
            ServerStatus.DEAD: self.failure,
        }[self.status]
        raise RequestError(message, status=503)

    def _check_free(self, members: list[PreparedReq], names: dict[str, list[str]]) -> None:
        duplicate = next((name for name in names if name in self._name_to_rids), None)
        if duplicate is None and len({member.rid for member in members}) < len(members):
            rids = [member.rid for member in members]
            duplicate = next(rid for rid in rids if rids.count(rid) > 1)
        if duplicate is not None:
            raise RequestError(f"Duplicate request ID detected: {duplicate}", param="rid")

    # --- control ---

    async def flush_cache(self, timeout: float) -> FlushCacheOut:
        """Drop the cached prefixes; with a `timeout`, wait that many seconds for the server to be
        idle first."""
        self._check_accepting()
        return await self.control.flush_cache(timeout)

    async def pause(self, abort: bool = False, retract: bool = False) -> None:
        """Stop generating: the live requests wait, with their memory or without, or are aborted
        first. New ones are accepted and wait."""
        if abort:
            self.abort_all()
        await self.control.pause(True, retract)

    async def resume(self) -> None:
        await self.control.pause(False)

    async def change_settings(self, values: dict[str, Any]) -> dict[str, Any]:
        """Change what may change while serving, all of `values` or none, and return all of it."""
        rest = dict(values)
        limit = rest.pop("max_queued_requests", self.queue.limit)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise RequestError(
                f"max_queued_requests must be an integer of at least 1 or null, got {limit!r}",
                param="max_queued_requests",
            )
        settings = await self.control.change_settings(rest)
        if limit != self.queue.limit:
            logger.info("max_queued_requests: %s -> %s", self.queue.limit, limit)
            self.queue.limit = limit
        return {**settings, "max_queued_requests": limit}

    async def requests(self, rid: str | None = None) -> list[dict[str, Any]]:
        """Where every live request stands, or those that `rid` names, under the names by which
        clients know them."""
        if rid is None:
            views = await self.control.requests()
        else:
            members = list(self._name_to_rids.get(rid, ()))
            views = [view for member in members for view in await self.control.requests(member)]
        live = self._rid_to_live
        return [
            {**view, "rid": live[view["rid"]].state.rid} for view in views if view["rid"] in live
        ]

    def request_metrics(self, labels: dict[str, str]) -> list[Metric]:
        """What is counted about requests, at this moment; `labels` are put on every sample."""
        counted = ((x.state, x.call.is_stream) for x in self._rid_to_live.values() if x.is_counted)
        return [*self.metrics.families(labels, counted), *self.restarts.families(labels)]

    # --- the socket ---

    def _send(self, message: SchedulerInput) -> None:
        """Never waits, so it can be called while a request is being cancelled; keeps the order."""
        # To a scheduler that still loads after another died, `resubmit` will say what matters.
        if self.status not in (ServerStatus.DEAD, ServerStatus.RESTARTING):
            self._link.send(message)

    def _dispatch(self, message: SchedulerOutput) -> None:
        if isinstance(message, BatchTokenOut):
            self._dispatch_tokens(message)
        elif isinstance(message, ReadyMsg):
            self._limits = message
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, FailedMsg):
            if message.traceback:
                logger.error("Scheduler failed:\n%s", message.traceback)
            self.on_lost(f"The scheduler failed: {message.error}")
        else:
            self.control.on_reply(message)

    def _dispatch_tokens(self, out: BatchTokenOut) -> None:
        # Hot: runs once a token. The tables are empty in almost every pass.
        rid_to_live, started, finished = self._rid_to_live, out.started, out.finished
        has_logprobs = bool(out.output_logprobs or out.input_logprobs)
        now = time.monotonic()
        self.metrics.on_pass(len(out.rids), now)
        for i, rid in enumerate(out.rids):
            live = rid_to_live.get(rid)
            if live is None:
                continue  # the client left; its AbortReq is on the way
            state = live.state
            if state.finish_reason is not None:
                continue  # a stop string ended it here; likewise
            reason = finished.get(i) if finished else None
            try:
                if started and i in started:
                    state.start(started[i])
                    self._note_admission(live)
                if has_logprobs:
                    state.add_logprobs(out.input_logprobs.get(i), out.output_logprobs.get(i))
                state.add_token(out.token_ids[i], reason)
            except StopRegexTimeout as error:
                _end_with_error(state, str(error), 400)
            except Exception:  # one request's text must not take down everybody's
                logger.exception("Decoding the output of %s failed", rid)
                _end_with_error(state, "Internal error; the server's log has the details.", 500)
            if state.finish_reason is not None and reason is None:
                has_stopped = state.finish_reason.type is FinishType.STOP
                self._send(AbortReq(rid, finished=True, stopped=has_stopped))
            if out.token_ids[i] >= 0 and live.is_counted:
                if live.last_token_at:
                    self.metrics.itl.observe(now - live.last_token_at)
                else:
                    self.metrics.on_first_token(state, live.call.is_stream)
                live.last_token_at = now
            live.call.notify(state, live.interval)

    def _note_admission(self, live: LiveRequest) -> None:
        """Its first one; after a retraction there are more."""
        if live.is_waiting and live.is_counted:
            self.queue.on_admitted()
            self.metrics.on_admitted(live.state)
        live.is_waiting = False


def _shorter(one: float | None, other: float | None) -> float | None:
    limits = [limit for limit in (one, other) if limit is not None]
    return min(limits, default=None)


def _end_with_error(state: ReqState, message: str, status_code: int) -> None:
    """End a request whose text could not be made. What was held back is lost."""
    state.finish_reason = FinishReason(
        FinishType.ABORT,
        message=message,
        status_code=status_code,
        err_type=RequestError(message, status_code).err_type,
    )
    state.finished_time = time.time()
