"""Send sessions on schedule, open-loop, and write down what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from bench.backends import MAX_ERROR_CHARS, Answer, ApiKind, error_message, judge, read_event
from bench.metrics import RequestRecord, Status
from bench.sessions import Prompt, Session, Turn
from bench.sse import Event, SseDecoder

# Below the 5 s after which common servers close an idle connection: sending on one that is being
# closed would be a failure of ours.
KEEPALIVE_S = 4.0
# After its last event a response ends at once; nothing is owed to one that does not.
DRAIN_S = 1.0
# How often silent requests are looked for, as a share of the time they may be silent.
WATCH_SHARE = 0.1


@dataclass(frozen=True)
class Target:
    """Where requests go and how answers are read. `make_body` turns what is to be sent into
    JSON."""

    url: str
    kind: ApiKind
    headers: dict[str, str]
    stream: bool
    ignore_eos: bool
    make_body: Callable[[Prompt, Turn], dict[str, Any]]


@dataclass
class Live:
    """A request under way, for the one who watches over silence."""

    task: asyncio.Task[Any]
    last_output: float  # seconds; when sent, until output comes
    started: bool = False  # its first token has arrived
    given_up: tuple[Status, str, str] | None = None  # status, failure kind, message


@dataclass(frozen=True)
class LoadResult:
    records: list[RequestRecord]
    dropped_arrivals: int  # planned requests that were never sent
    client_cpu_share: float  # CPU seconds of this process per second of the run
    interrupted: bool


def open_session() -> aiohttp.ClientSession:
    """No limit on connections and no timeout: both would turn open-loop load into something else.
    Silence is watched over by LoadRun."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None),
        read_bufsize=2**20,
        auto_decompress=True,
    )


def body_error(body: bytes) -> str:
    """The message in the body of an HTTP error, whatever its form."""
    try:
        event = orjson.loads(body)
    except orjson.JSONDecodeError:
        event = None
    message = error_message(event) if isinstance(event, dict) else None
    return (message or body.decode("utf-8", "replace").strip() or "empty body")[:MAX_ERROR_CHARS]


class LoadRun:
    """One run over one target; use it once. `on_end` is told of each request that ended.

    Arrivals are timers, set before the run begins: nothing that happens to one request delays the
    next. Later turns of a session wait for the reply before them, as a person does.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        target: Target,
        *,
        max_concurrency: int | None = None,
        stall_timeout: float = 300.0,
        on_end: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.http = http
        self.target = target
        self.permits = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self.stall_timeout = stall_timeout
        self.on_end = on_end
        self.records: list[RequestRecord] = []
        self.timers: dict[int, asyncio.TimerHandle] = {}  # sessions not begun
        self.tasks: set[asyncio.Task[None]] = set()  # sessions begun and not ended
        self.live: dict[int, Live] = {}  # requests sent and not ended, by record index
        self.all_done = asyncio.Event()
        self.start = time.perf_counter()
        self.last_output = 0.0  # when output of any request last arrived
        self.chunks_seen = self.num_ended = self.num_failed = 0  # for the progress display
        self.dropped = 0
        self.interrupted = False
        self.bug: BaseException | None = None

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.start

    async def run(self, sessions: Sequence[Session], times: Sequence[float]) -> LoadResult:
        """Send `sessions[i]` at `times[i]` seconds and wait for all ends, or for an interrupt."""
        assert len(sessions) == len(times), f"{len(sessions)} sessions at {len(times)} times"
        # Serialising is done before the clock runs.
        bodies = [self.encode_body(s.turns[0].prompt, s.turns[0]) for s in sessions]
        loop = asyncio.get_running_loop()
        gc.freeze()  # prompts live through the run; scanning them again would stall the clock
        cpu_before, self.start = time.process_time(), time.perf_counter()
        for i, at in enumerate(times):
            self.timers[i] = loop.call_later(at, self.begin, i, sessions[i], at, bodies[i])
        watcher = asyncio.create_task(self.watch())
        with self.interruptible(loop):
            if sessions:
                await self.all_done.wait()
            for i, timer in self.timers.items():
                timer.cancel()
                self.dropped += len(sessions[i].turns)
            for live in self.live.values():
                self.give_up(live, Status.ERROR, "interrupted", "the run was interrupted")
            await asyncio.gather(*self.tasks)
        watcher.cancel()
        share = (time.process_time() - cpu_before) / max(self.now(), 1e-9)
        gc.unfreeze()
        if self.bug is not None:
            raise self.bug
        return LoadResult(self.records, self.dropped, share, self.interrupted)

    @contextlib.contextmanager
    def interruptible(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Ctrl-C ends the run early but with a report. Where the loop cannot take signals (another
        thread, Windows) it stays the plain KeyboardInterrupt."""
        try:
            loop.add_signal_handler(signal.SIGINT, self.interrupt)
        except (NotImplementedError, ValueError, RuntimeError):
            yield
            return
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def interrupt(self) -> None:
        self.interrupted = True
        self.all_done.set()

    def begin(self, i: int, session: Session, at: float, body: bytes) -> None:
        del self.timers[i]
        task = asyncio.create_task(self.run_session(session, at, body))
        self.tasks.add(task)
        task.add_done_callback(self.end_session)

    def end_session(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A bug of ours: end the run and raise it there.
            self.bug = task.exception()
            self.interrupt()
        if not self.tasks and not self.timers:
            self.all_done.set()

    async def run_session(self, session: Session, at: float, body: bytes) -> None:
        headers = dict(self.target.headers)
        if session.routing_key is not None:
            headers["X-SMG-Routing-Key"] = session.routing_key
        prompt: Prompt = []
        prompt_len, last = 0, None
        for k, turn in enumerate(session.turns):
            if last is not None and not last.completed:
                self.dropped += len(session.turns) - k  # there is no reply to go on from
                return
            if last is not None and turn.follows_reply:
                prompt = extend(prompt, last.text, turn.prompt)
                prompt_len += last.output_len + turn.prompt_len
            else:
                prompt, prompt_len = turn.prompt, turn.prompt_len
            if last is not None:
                at, body = last.ended_at, self.encode_body(prompt, turn)
            asked = self.now()
            async with self.permits or contextlib.nullcontext():
                if self.interrupted:
                    self.dropped += len(session.turns) - k
                    return
                index = len(self.records)
                record = last = RequestRecord(index, prompt_len, turn.output_len, scheduled_at=at)
                record.permit_wait = self.now() - asked if self.permits else 0.0
                self.records.append(record)
                await self.send(record, body, headers)
            self.num_ended += 1
            self.num_failed += not record.completed
            if self.on_end is not None:
                self.on_end(record)

    async def send(self, record: RequestRecord, body: bytes, headers: dict[str, str]) -> None:
        """Fill `record`. Whatever happens to the request is in it; nothing is raised."""
        record.sent_at = self.now()
        record.streamed = self.target.stream
        answer = Answer()
        # A task of its own, so that giving up on the request does not cancel its session.
        exchange = asyncio.create_task(self.exchange(record, answer, body, headers))
        live = self.live[record.index] = Live(exchange, record.sent_at)
        await asyncio.wait({exchange})
        del self.live[record.index]
        record.ended_at = record.ended_at or self.now()
        record.text = answer.text
        record.finish_reason = answer.finish_reason
        record.input_tokens = answer.input_tokens
        record.output_tokens = answer.tokens
        record.cached_tokens = answer.cached_tokens
        record.retractions = answer.retractions
        if exchange.cancelled() and not answer.done:
            assert live.given_up is not None, "only give_up cancels"
            record.status, record.failure_kind, record.error = live.given_up
            return
        if not exchange.cancelled():
            exchange.result()  # anything it raised is a bug of ours and must be seen
        record.status, record.failure_kind, record.error = judge(
            answer, record.requested_len, self.target.ignore_eos
        )

    async def exchange(
        self, record: RequestRecord, answer: Answer, body: bytes, headers: dict[str, str]
    ) -> None:
        try:
            async with self.http.post(self.target.url, data=body, headers=headers) as response:
                if response.status != 200:
                    text = body_error(await response.read())
                    answer.fail(f"http_{response.status}", text)
                elif self.target.stream and response.content_type != "application/json":
                    await self.read_stream(response, record, answer)
                else:
                    record.streamed = False
                    data = await response.read()
                    answer.keep_head(data)
                    answer.done = True
                    self.take([Event(data)], record, answer)
        except (aiohttp.ClientError, OSError) as error:
            answer.fail("connection", f"{type(error).__name__}: {error}")
        except ValueError as error:
            answer.fail("malformed", str(error))

    async def read_stream(
        self, response: aiohttp.ClientResponse, record: RequestRecord, answer: Answer
    ) -> None:
        decoder = SseDecoder()
        async for block in response.content.iter_any():
            answer.keep_head(block)
            self.take(decoder.feed(block), record, answer)
            if answer.done or answer.failure is not None:
                record.ended_at = self.now()
                # Hanging up now would look like a client that left: read what ends the response.
                with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError):
                    await asyncio.wait_for(response.content.read(), DRAIN_S)
                return
        self.take(decoder.finish(), record, answer)

    def take(self, events: list[Event], record: RequestRecord, answer: Answer) -> None:
        """Read events that arrived together; what they bring is one chunk."""
        now, before, brought = self.now(), answer.tokens or 0, False
        for event in events:
            if event.data.strip() == b"[DONE]":
                answer.done = True
                break
            if event.is_error:
                answer.fail("error_event", body_error(event.data))
            else:
                brought = read_event(self.target.kind, event.data, answer) or brought
            if answer.finish_reason is not None and record.finished_at is None:
                record.finished_at = now
            if answer.failure is not None:
                break
        if not brought:
            return
        record.chunk_times.append(now)
        record.chunk_tokens.append((answer.tokens or 0) - before)
        self.chunks_seen += 1
        self.last_output = now
        live = self.live[record.index]
        live.last_output, live.started = now, True

    async def watch(self) -> None:
        """Give up on silence. A started stream must bring output within the limit. A request still
        without any may be waiting in a queue, which is no fault while the server serves others: it
        is given up on only when the whole run was silent for the limit."""
        while True:
            await asyncio.sleep(self.stall_timeout * WATCH_SHARE)
            now = self.now()
            for live in list(self.live.values()):
                heard = live.last_output
                if not live.started:
                    heard = max(heard, self.last_output)
                if now - heard > self.stall_timeout:
                    what = "the stream stopped" if live.started else "no answer"
                    message = f"{what}: no output for {now - heard:.1f} s"
                    self.give_up(live, Status.STALLED, "stalled", message)

    def give_up(self, live: Live, status: Status, kind: str, message: str) -> None:
        if live.given_up is None:
            live.given_up = (status, kind, message)
            live.task.cancel()

    def encode_body(self, prompt: Prompt, turn: Turn) -> bytes:
        return orjson.dumps(self.target.make_body(prompt, turn))


def extend(before: Prompt, reply: str, new: Prompt) -> Prompt:
    """The prompt of a turn that goes on from a reply: everything so far and what is new."""
    if isinstance(before, str) and isinstance(new, str):
        return before + reply + new
    assert isinstance(before, list) and isinstance(new, list), "the turns differ in kind"
    messages: list[Any] = [*before, {"role": "assistant", "content": reply}, *new]
    assert all(isinstance(message, dict) for message in messages), "token ids cannot go on"
    return messages
