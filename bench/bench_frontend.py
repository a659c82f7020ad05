"""What the HTTP process costs without a model: `python -m bench.bench_frontend`.

The real server stands before a scheduler process that answers at once, and a client process reads
the streams; both run beside it. Counted is the CPU time of the server's process alone, so the
results are what one core sustains, whatever else the machine does. The scheduler paces its passes:
one that ran ahead would make the server merge tokens into fewer chunks, which costs less.

`--framework fastapi` puts FastAPI and uvicorn (pip install fastapi uvicorn httptools) in the place
of our HTTP server, with the same tokenizer manager behind them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import socket
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from bench.frontend_client import run_client
from srt.http_server import HttpServer
from srt.managers.io_struct import (
    AbortReq,
    BatchTokenOut,
    FinishReason,
    FinishType,
    ReadyMsg,
    StartedInfo,
    TokenizedGenerateReq,
)
from srt.managers.ipc import FrontendChannel, SchedulerChannel, make_ipc_dir
from srt.managers.tokenizer_manager import TokenizerManager
from srt.model_config import ModelConfig, parse_model_config
from srt.server_args import ServerArgs
from srt.tokenizer import Tokenizer

VOCAB_SIZE = 1000
CONTEXT_LEN = 4096
# Of the issue this bench answers: chunks/s of one core.
TARGET_CHUNKS = 25_000
START_SECONDS = 30.0


@dataclass(frozen=True)
class Row:
    """One measurement. `cpu_s` is the server process's CPU time; the rates are per second of it,
    the wall rates are those of the run."""

    route: str
    streams: int
    requests: int
    chunks: int
    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def chunks_per_core_s(self) -> float:
        return self.chunks / self.cpu_s

    @property
    def requests_per_core_s(self) -> float:
        return self.requests / self.cpu_s


def word_tokenizer() -> Tokenizer:
    """Tokens are words, so that every token shows at once."""
    vocab = {f"▁word{i}": i for i in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="▁word0"))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, {}, (), {})


def model_config() -> ModelConfig:
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
            "eos_token_id": 0,
        },
        {},
    )


def run_scheduler(ipc_dir: Path, tokens_per_s: float) -> None:
    """A pass gives one token to each live request; passes are so far apart that all requests
    together get `tokens_per_s`. Runs until it is killed."""
    channel = SchedulerChannel(ipc_dir)
    channel.send(ReadyMsg(10**9, CONTEXT_LEN - 1, 10**6, 8192, 16384, CONTEXT_LEN))
    left: dict[str, int] = {}
    fresh: set[str] = set()
    due = time.perf_counter()
    while True:
        wait = due - time.perf_counter() if left else 1.0
        for message in channel.recv(max(0, int(wait * 1e3))):
            if isinstance(message, TokenizedGenerateReq):
                left[message.rid] = message.sampling_params.max_new_tokens or 1
                fresh.add(message.rid)
            elif isinstance(message, AbortReq):
                left.pop(message.rid, None)
        now = time.perf_counter()
        if not left or now < due:
            continue
        due = max(due, now - 0.002) + len(left) / tokens_per_s
        rids = list(left)
        out = BatchTokenOut(rids, [1 + n % (VOCAB_SIZE - 1) for n in left.values()])
        for i, rid in enumerate(rids):
            if rid in fresh:
                out.started[i] = StartedInfo(0, 0.0)
            left[rid] -= 1
            if left[rid] == 0:
                out.finished[i] = FinishReason(FinishType.LENGTH)
                del left[rid]
        fresh.clear()
        channel.send(out)


async def measure(
    route: str,
    streams: int,
    tokens: int,
    rounds: int,
    tokens_per_s: float,
    framework: str = "aiohttp",
) -> Row:
    """`streams` clients at once send `rounds` requests of `tokens` tokens each, one after the
    other."""
    context = multiprocessing.get_context("spawn")
    ipc_dir = make_ipc_dir()
    channel = FrontendChannel(ipc_dir)
    manager = TokenizerManager(ServerArgs(), model_config(), word_tokenizer(), channel)
    scheduler = context.Process(target=run_scheduler, args=(ipc_dir, tokens_per_s), daemon=True)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    children: list[SpawnProcess] = [scheduler]
    try:
        scheduler.start()
        await asyncio.wait_for(manager.wait_ready(), START_SECONDS)
        async with _listening(framework, manager, listener):
            ours, theirs = context.Pipe()
            port = listener.getsockname()[1]
            client = context.Process(
                target=run_client, args=(theirs, port, route, streams, tokens, rounds), daemon=True
            )
            client.start()
            children.append(client)
            await asyncio.to_thread(ours.recv)  # it is ready
            ours.send("go")
            wall, cpu = time.perf_counter(), time.process_time()
            num_chunks, num_requests = await asyncio.to_thread(_receive, ours)
            cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
        num_tokens = num_requests * tokens
        return Row(route, streams, num_requests, num_chunks, num_tokens, wall_s, cpu_s)
    finally:
        for child in children:
            child.terminate()
            child.join()
        listener.close()
        await manager.close()
        shutil.rmtree(ipc_dir, ignore_errors=True)


def _listening(
    framework: str, manager: TokenizerManager, listener: socket.socket
) -> AbstractAsyncContextManager[None]:
    if framework == "fastapi":
        from bench import fastapi_frontend

        return fastapi_frontend.listening(manager, listener)
    server = HttpServer(manager.args)
    server.open(manager)
    return server.listening(listener, backlog=4096)


def _receive(connection: Connection) -> tuple[int, int]:
    counts: tuple[int, int] = connection.recv()
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    parser.add_argument("--tokens-per-s", type=float, default=8000.0, help="of the scheduler")
    parser.add_argument("--routes", nargs="+", help="default: /generate and /v1/completions")
    parser.add_argument("--framework", choices=("aiohttp", "fastapi"), default="aiohttp")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    options = parser.parse_args(argv)
    if options.framework == "fastapi" and options.routes not in (None, ["/generate"]):
        parser.error("--framework fastapi has the route /generate only")
    routes = options.routes or ["/generate", "/v1/completions"]
    if options.framework == "fastapi":
        routes = ["/generate"]
    framework = options.framework
    if not options.json:
        print(f"{'route':<18}{'streams':>8}{'tok/chunk':>11}{'chunks/core-s':>15}{'us/chunk':>10}")
    for route in routes:
        for streams in options.streams:
            load = (streams, options.tokens, options.rounds, options.tokens_per_s)
            row = _run(measure(route, *load, framework))
            if options.json:
                print(json.dumps({**asdict(row), "chunks_per_core_s": row.chunks_per_core_s}))
                continue
            print(
                f"{route:<18}{streams:>8}{row.tokens / row.chunks:>11.2f}"
                f"{row.chunks_per_core_s:>15.0f}{row.cpu_s / row.chunks * 1e6:>10.1f}"
            )
    row = _run(measure(routes[0], 64, 1, 50, 1e6, framework))
    if options.json:
        print(json.dumps({**asdict(row), "requests_per_core_s": row.requests_per_core_s}))
    else:
        print(f"{row.route} with one token: {row.requests_per_core_s:.0f} requests/core-s")
        print(f"Target: {TARGET_CHUNKS} chunks/core-s")
    return 0


def _run(coroutine: Coroutine[Any, Any, Row]) -> Row:
    import uvloop

    return uvloop.run(coroutine)


if __name__ == "__main__":
    raise SystemExit(main())
