"""A scheduler process in a thread, with a script instead of a model, behind the real sockets."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from srt.http_server import HttpServer
from srt.managers.black_box import BlackBox
from srt.managers.io_struct import (
    AbortReq,
    BatchTokenOut,
    ControlOut,
    FailedMsg,
    FinishReason,
    FinishType,
    FlushCacheOut,
    FlushCacheReq,
    InternalStateOut,
    InternalStateReq,
    JournalReq,
    PauseReq,
    ProfileOptions,
    ReadyMsg,
    RequestsReq,
    SchedulerInput,
    StartedInfo,
    StartProfileReq,
    StopProfileReq,
    TokenizedGenerateReq,
    UpdateSchedulerReq,
)
from srt.managers.ipc import FrontendChannel, SchedulerChannel
from srt.managers.tokenizer_manager import TokenizerManager
from srt.model_config import ModelConfig, parse_model_config
from srt.server_args import ServerArgs
from srt.tokenizer import Tokenizer

EOS = 0
NUM_SPECIAL = 1
VOCAB_SIZE = 256 + NUM_SPECIAL
CONTEXT_LEN = 200
POOL_SIZE = 150
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

Script = Callable[[TokenizedGenerateReq], list[int]]


def byte_tokenizer() -> Tokenizer:
    """One token a byte: id = byte + NUM_SPECIAL; 0 is <eos>."""
    alphabet = _byte_characters()
    vocab = {"<eos>": EOS} | {char: byte + NUM_SPECIAL for byte, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, (), {"default": CHAT_TEMPLATE})


def _byte_characters() -> list[str]:
    """The character by which byte-level tokenizers write each byte (as in GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def ids(text: str) -> list[int]:
    return [byte + NUM_SPECIAL for byte in text.encode()]


def spelling(text: str) -> Script:
    """Every request is answered with `text` and the end token."""
    return lambda request: [*ids(text), EOS]


def alphabet(request: TokenizedGenerateReq) -> list[int]:
    """a to z, again and again."""
    return ids("abcdefghijklmnopqrstuvwxyz" * 20)


@dataclass
class _Row:
    request: TokenizedGenerateReq
    tokens: list[int]
    num_out: int = 0


class FakeScheduler(threading.Thread):
    """One pass gives one token to every live request, in order of arrival. `passes_left` says how
    many passes may run: a test holds the scheduler still with 0 and then allows some."""

    def __init__(
        self,
        ipc_dir: Path,
        script: Script,
        passes: float = math.inf,
        black_box: BlackBox | None = None,
    ) -> None:
        super().__init__(name="fake-scheduler", daemon=True)
        self.script = script
        self.passes_left = passes
        self.live: dict[str, _Row] = {}
        self.received: list[SchedulerInput] = []
        self.num_passes = 0
        self.paused = False
        self.is_deaf = False  # as in a long pass: no answer about its state
        self.settings: dict[str, Any] = {"max_running_requests": 8, "phase_policy": "interleave"}
        self.profiles: list[ProfileOptions] = []  # asked for
        self.abort_with: FinishReason | None = None  # end every new request with this
        self.poison: str | None = None  # a pass with a request of this id kills
        self._black_box = black_box
        self._ipc_dir = ipc_dir
        self._stopping = threading.Event()
        self._last_words: FailedMsg | None = None

    def run(self) -> None:
        channel = SchedulerChannel(self._ipc_dir)
        memory = {"weight": 1.0, "kvcache": 2.0, "graph": 0.5}
        channel.send(ReadyMsg(POOL_SIZE, POOL_SIZE - 1, 8, 512, 16384, CONTEXT_LEN, memory))
        while not self._stopping.is_set():
            may_run = bool(self.live) and self.passes_left > 0 and not self.paused
            for message in channel.recv(0 if may_run else 5):
                self.received.append(message)
                self._handle(message, channel)
            if self.live and self.passes_left > 0 and not self.paused:
                self.passes_left -= 1
                rids = list(self.live)
                if self._black_box is not None:
                    self._black_box.on_pass(self.num_passes, "D", rids, len(rids), 0, 0)
                if any(rid.split("#")[0] == self.poison for rid in rids):
                    self._last_words = FailedMsg("poisoned")
                    break
                channel.send(self._pass())
        if self._last_words is not None:
            channel.send(self._last_words)
        channel.close()

    def stop(self) -> None:
        self._stopping.set()
        self.join(10)

    def die(self, error: str) -> None:
        self._last_words = FailedMsg(error)
        self.stop()

    def of_type(self, kind: type) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    def _handle(self, message: SchedulerInput, channel: SchedulerChannel) -> None:
        if isinstance(message, TokenizedGenerateReq):
            if self.abort_with is not None:
                channel.send(BatchTokenOut([message.rid], [-1], {0: self.abort_with}))
            elif message.sampling_params.max_new_tokens == 0:
                length = FinishReason(FinishType.LENGTH)
                started = {0: StartedInfo(0, 0.0)}
                channel.send(BatchTokenOut([message.rid], [-1], {0: length}, started))
            else:
                self.live[message.rid] = _Row(
                    message, self.script(message), len(message.output_ids)
                )
        elif isinstance(message, AbortReq):
            if self.live.pop(message.rid, None) is not None and not message.finished:
                reason = FinishReason(FinishType.ABORT, message="Aborted")
                channel.send(BatchTokenOut([message.rid], [-1], {0: reason}))
        elif isinstance(message, FlushCacheReq):
            channel.send(FlushCacheOut(message.id, not self.live, "busy" if self.live else ""))
        elif isinstance(message, InternalStateReq):
            if not self.is_deaf:
                channel.send(InternalStateOut(message.id, self._state()))
        elif isinstance(message, RequestsReq):
            rids = self.live if message.rid is None else [message.rid]
            views = [{"rid": rid, "state": "running"} for rid in rids if rid in self.live]
            channel.send(ControlOut(message.id, views))
        elif isinstance(message, JournalReq):
            records = [{"step": i} for i in range(self.num_passes)]
            channel.send(ControlOut(message.id, records[-message.last :]))
        elif isinstance(message, PauseReq):
            self.paused = message.paused
            channel.send(ControlOut(message.id, {"paused": self.paused}))
        elif isinstance(message, StartProfileReq):
            self.profiles.append(message.options)
            channel.send(ControlOut(message.id, None))
        elif isinstance(message, StopProfileReq):
            error = None if self.profiles else "Profiling is not in progress."
            channel.send(ControlOut(message.id, "a.trace.json.gz", error))
        elif isinstance(message, UpdateSchedulerReq):
            unknown = next((name for name in message.values if name not in self.settings), None)
            if unknown is None:
                self.settings |= message.values
            error = None if unknown is None else f"unknown field {unknown!r}"
            channel.send(ControlOut(message.id, dict(self.settings), error))

    def _state(self) -> dict[str, Any]:
        """The same keys as the real one's."""
        return {
            "num_running_reqs": len(self.live),
            "num_waiting_reqs": 3,
            "num_waiting_uncached_tokens": 20,
            "num_retracted_waiting": 1,
            "num_used_tokens": 30,
            "num_cached_tokens": 10,
            "num_locked_tokens": 5,
            "num_free_tokens": POOL_SIZE - 40,
            "max_total_num_tokens": POOL_SIZE,
            "max_running_requests": 8,
            "token_usage": 0.2,
            "page_size": 1,
            "new_token_ratio": 0.7,
            "last_gen_throughput": 1.5,
            "free_rows": 8 - len(self.live),
            "paused": self.paused,
            "oldest_wait_seconds": 1.25,
            "blockers": {"kv": 2},
            "num_steps": self.num_passes,
            "passes": {"D": self.num_passes},
            "prompt_tokens": 100,
            "generated_tokens": 50,
            "recomputed_tokens": 7,
            "evicted_tokens": 4,
            "retracted_requests": {"kv": 2, "forced": 1},
            "retracted_input_tokens": 11,
            "retracted_output_tokens": 12,
            "ended": {},
            "step_ms": {"run": 1500.0},
            "settings": self.settings,
        }

    def _pass(self) -> BatchTokenOut:
        self.num_passes += 1
        out = BatchTokenOut([], [])
        for i, (rid, row) in enumerate(list(self.live.items())):
            token = row.tokens[row.num_out]
            row.num_out += 1
            out.rids.append(rid)
            out.token_ids.append(token)
            if row.num_out == len(row.request.output_ids) + 1:
                out.started[i] = StartedInfo(cached_tokens=2, queue_time=0.25)
            params = row.request.sampling_params
            if token == EOS and not params.ignore_eos:
                out.finished[i] = FinishReason(FinishType.STOP, matched=EOS)
            elif row.num_out == params.max_new_tokens:
                out.finished[i] = FinishReason(FinishType.LENGTH)
            if i in out.finished:
                del self.live[rid]
        return out


def tiny_model_config() -> ModelConfig:
    return parse_model_config(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": CONTEXT_LEN,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "eos_token_id": EOS,
        },
        {"temperature": 0.5},
    )


@asynccontextmanager
async def running_manager(
    ipc_dir: Path, script: Script = alphabet, passes: float = math.inf, **args: Any
) -> AsyncIterator[tuple[TokenizerManager, FakeScheduler]]:
    manager = TokenizerManager(
        ServerArgs(**args), tiny_model_config(), byte_tokenizer(), FrontendChannel(ipc_dir)
    )
    fake = FakeScheduler(ipc_dir, script, passes)
    fake.start()
    try:
        await asyncio.wait_for(manager.wait_ready(), 10)
        yield manager, fake
    finally:
        fake.stop()
        await manager.close()


def http_bytes(path: str, body: Any, *header: str) -> bytes:
    """A POST of JSON as it is on the wire."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *header]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


class RunningServer:
    """The real HTTP server on a free port, before a fake scheduler."""

    def __init__(
        self,
        server: HttpServer,
        manager: TokenizerManager,
        fake: FakeScheduler,
        session: aiohttp.ClientSession,
        url: str,
    ) -> None:
        self.server, self.manager, self.fake = server, manager, fake
        self.session, self.url = session, url

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """Status and JSON (or text) of the answer."""
        async with self.session.post(path, json=body, **kwargs) as response:
            return response.status, await _content(response)

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.get(path, **kwargs) as response:
            return response.status, await _content(response)

    async def connect(
        self, data: bytes, receive_buffer: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection over which `data` was sent. With a small `receive_buffer` next to nothing
        of the answer is on its way while nobody reads."""
        host, port = self.url.removeprefix("http://").split(":")
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        limit = 64 * 1024 if receive_buffer is None else receive_buffer
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, which must end in [DONE]."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return events_of(await response.text())


def events_of(text: str) -> list[Any]:
    """The events of (the rest of) a stream, which must end in [DONE] and hold nothing else."""
    lines = text.lstrip("\n").split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], lines[-2:]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def _content(response: aiohttp.ClientResponse) -> Any:
    if response.content_type == "application/json":
        return await response.json()
    return await response.text()


@asynccontextmanager
async def serving_fake(
    ipc_dir: Path,
    script: Script = alphabet,
    passes: float = math.inf,
    send_buffer: int | None = None,
    **args: Any,
) -> AsyncIterator[RunningServer]:
    """`send_buffer`: bytes that the system may hold for a client that does not read."""
    async with running_manager(ipc_dir, script, passes, **args) as (manager, fake):
        server = HttpServer(manager.args)
        server.open(manager)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if send_buffer is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with server.listening(listener), aiohttp.ClientSession(url) as session:
                yield RunningServer(server, manager, fake, session, url)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Let the loop run until `condition`, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)
