"""Is any request lost while schedulers are killed? `python -m bench.chaos`.

Starts a server, notes what each of a set of requests answers undisturbed, then starts another one
and sends the same requests from many clients at once (some slow, some leaving early, some in bursts
that overflow the queue) while its scheduler is killed and frozen and requests are retracted. At the
end every request must be accounted for: finished with the tokens that it has alone, refused with a
reason, or left by its client; and rows, slots, locks, descriptors and folders must be back.

`--overload SECONDS` measures instead what ten times the load does to the accepted throughput, and
`--soak N` what N short requests do to the memory. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import shlex
import signal
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from bench.chaos_load import Case, Client, Tally, judge_mismatch, make_bodies, reference
from bench.chaos_server import ChaosServer, Footprint, chaos_server
from bench.server_routes import ServerError

# Every third fault freezes the scheduler instead of killing it.
FREEZE_EVERY = 3
BURST_SECONDS = 7.0
MAX_RSS_GROWTH = 1.25
SOAK_CLIENTS = 32
MAX_SOAK_GROWTH = 1.03
OVERLOAD = 10
MAX_OVERLOAD_LOSS = 0.05
OVERLOAD_TURNS = 3
CLIENT_NICENESS = 10

Ask = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of load")
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--streams", type=int, default=16, help="clients at a time")
    parser.add_argument("--cases", type=int, default=24, help="different requests")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--retract-every", type=int, default=50, help="passes; 0: never by force")
    parser.add_argument("--max-total-tokens", type=int, default=1536, help="a pool at the brink")
    parser.add_argument("--max-queued-requests", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overload", type=float, metavar="SECONDS", help="measure that instead")
    parser.add_argument("--soak", type=int, metavar="N", help="measure that instead")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument(
        "--server",
        default="--dtype float32 --quantization none",
        help="options of the server, as one argument",
    )
    parser.add_argument("--output", help="file for the result as JSON")
    return parser.parse_args(argv)


async def chaos(args: argparse.Namespace) -> dict[str, Any]:
    options = shlex.split(args.server)
    bodies = make_bodies(args.cases, args.max_new_tokens, args.seed)
    tally = Tally()
    async with aiohttp.ClientSession() as http:
        async with chaos_server(options, args.port) as calm:
            cases = [await reference(http, calm.url, body) for body in bodies]
        async with chaos_server([*options, *_at_the_brink(args)], args.port) as server:
            before = server.footprint()
            # Clients of their own, whose connections are closed before descriptors are counted.
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as clients:
                faults, mismatches, settled = await _torment(args, clients, server, cases, tally)
            wrong = await server.leaks(http, before)
            for case, got in mismatches:
                await judge_mismatch(http, server.url, case, got, tally)
            after = server.footprint()
            if after.main_rss > settled.main_rss * MAX_RSS_GROWTH:
                wrong.append(f"the main process grew from {settled.main_rss} to {after.main_rss} B")
            restarts = server.log.count("The scheduler was replaced in")
            quarantined = server.log.count("the scheduler crashes with it")
            await http.close()
            wrong += server.stop()
    wrong += [f"lost: {each}" for each in tally.lost]
    wrong += [f"duplicated: {each}" for each in tally.duplicated]
    wrong += [f"wrong: {each}" for each in tally.wrong]
    if tally.num_accounted != tally.sent:
        wrong.append(f"{tally.sent} requests were sent, {tally.num_accounted} accounted for")
    recoveries = sorted(
        end - begin for begin, end in tally.gaps if any(begin <= at < end for at in faults)
    )
    return {
        "seconds": args.duration,
        "sent": tally.sent,
        "right": tally.right,
        "tied": tally.tied,
        "refused": tally.refused,
        "left_by_client": tally.left,
        "lost": len(tally.lost),
        "duplicated": len(tally.duplicated),
        "wrong": len(tally.wrong),
        "faults": len(faults),
        "restarts": restarts,
        "quarantined": quarantined,
        "streams_hit": len(recoveries),
        "recovery_p50_s": _percentile(recoveries, 0.5),
        "recovery_p99_s": _percentile(recoveries, 0.99),
        "refusal_p99_ms": _percentile(sorted(tally.refusal_seconds), 0.99) * 1e3,
        "main_rss_mb": [settled.main_rss >> 20, after.main_rss >> 20],
        "scheduler_rss_mb": [settled.scheduler_rss >> 20, after.scheduler_rss >> 20],
        "descriptors": [before.descriptors, after.descriptors],
        "problems": wrong,
    }


def _at_the_brink(args: argparse.Namespace) -> list[str]:
    """Options under which requests are retracted and refused, and faults are noticed soon."""
    return [
        f"--retract-every={args.retract_every}",
        f"--max-total-tokens={args.max_total_tokens}",
        f"--max-queued-requests={args.max_queued_requests}",
        "--schedule-conservativeness=0",
        "--admission=ratio",
        "--watchdog-timeout=3",
        "--load-timeout=30",
        "--max-restarts=1000000",
    ]


async def _torment(
    args: argparse.Namespace,
    http: aiohttp.ClientSession,
    server: ChaosServer,
    cases: list[Case],
    tally: Tally,
) -> tuple[list[float], list[tuple[Case, list[int]]], Footprint]:
    """The times of the faults, the answers to judge, and the footprint in the load's first part."""
    until = time.monotonic() + args.duration
    clients = [Client(http, server.url, cases, tally) for _ in range(args.streams)]
    rngs = [random.Random(args.seed * 1000 + i) for i in range(args.streams)]
    burster = Client(http, server.url, cases, tally)
    faults: list[float] = []
    loads = [
        asyncio.create_task(client.run(until, rng))
        for client, rng in zip(clients, rngs, strict=True)
    ]
    loads.append(asyncio.create_task(_bursts(burster, args, until)))
    injecting = asyncio.create_task(_inject(server, args.kill_every, until, faults))
    await asyncio.sleep(args.duration / 5)
    settled = server.footprint()
    await asyncio.gather(*loads)
    await injecting
    mismatches = [each for client in [*clients, burster] for each in client.mismatches]
    return faults, mismatches, settled


async def _inject(server: ChaosServer, period: float, until: float, faults: list[float]) -> None:
    number = 0
    while time.monotonic() + period < until:
        await asyncio.sleep(period)
        number += 1
        kind = signal.SIGSTOP if number % FREEZE_EVERY == 0 else signal.SIGKILL
        at = server.hit(kind)
        if at is not None:
            faults.append(at)


async def _bursts(client: Client, args: argparse.Namespace, until: float) -> None:
    """More requests at once than the queue takes."""
    rng = random.Random(args.seed)
    while time.monotonic() + BURST_SECONDS < until:
        await asyncio.sleep(BURST_SECONDS)
        size = args.max_queued_requests + args.streams
        await asyncio.gather(*(client.ask_any(rng) for _ in range(size)))


async def overload(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of --overload seconds by turns: as many clients as there are rows, each with its next
    request when it has its answer; and arrivals ten times as often as those got answers."""
    rows = args.streams
    limits = [f"--max-running-requests={rows}", f"--max-queued-requests={rows}"]
    bodies = make_bodies(args.cases, args.max_new_tokens, args.seed)
    calm, crowded = Rounds(), Rounds()
    async with (
        chaos_server([*shlex.split(args.server), *limits], args.port) as server,
        aiohttp.ClientSession() as http,
    ):
        before = server.footprint()
        # They share a machine, and clients elsewhere would take no time from the server.
        os.nice(CLIENT_NICENESS)
        for _ in range(OVERLOAD_TURNS):
            for rounds in (calm, crowded):
                until = time.monotonic() + args.overload
                begun, begin = await _generated(server, http), time.monotonic()
                watch = asyncio.create_task(_generated_at(server, http, until))
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as users:
                    ask = partial(_ask, users, server.url, rounds)
                    if rounds is calm:
                        clients = (_keep_asking(ask, bodies, until, i) for i in range(rows))
                        await asyncio.gather(*clients)
                    else:
                        rate = OVERLOAD * calm.num_answered / calm.seconds
                        await _storm(ask, bodies, until, rate)
                    ended, at = await watch
                rounds.seconds += at - begin
                rounds.tokens_per_s.append((ended - begun) / (at - begin))
                await server.wait_idle(http)
        problems = calm.problems + crowded.problems + await server.leaks(http, before)
    best, under = max(calm.tokens_per_s), max(crowded.tokens_per_s)
    if under < best * (1 - MAX_OVERLOAD_LOSS):
        problems.append(f"{under:.0f} tokens/s under overload, {best:.0f} without")
    refusals = sorted(crowded.refusal_seconds)
    return {
        "calm_tokens_per_s": calm.tokens_per_s,
        "crowded_tokens_per_s": crowded.tokens_per_s,
        "arrivals_per_s": OVERLOAD * calm.num_answered / calm.seconds,
        "refused": len(refusals),
        "refusal_p50_ms": _percentile(refusals, 0.5) * 1e3,
        "refusal_p99_ms": _percentile(refusals, 0.99) * 1e3,
        "problems": problems,
    }


@dataclass
class Rounds:
    """What was seen in the rounds of one kind."""

    seconds: float = 0.0
    num_answered: int = 0
    tokens_per_s: list[float] = field(default_factory=list)  # of each
    refusal_seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def _ask(http: aiohttp.ClientSession, url: str, rounds: Rounds, body: dict[str, Any]) -> None:
    begin = time.monotonic()
    async with http.post(f"{url}/generate", json=body) as response:
        text = await response.text()
    if response.status == 503:
        rounds.refusal_seconds.append(time.monotonic() - begin)
    elif response.status == 200:
        rounds.num_answered += 1
    else:
        rounds.problems.append(f"status {response.status}: {text[:200]}")


async def _keep_asking(ask: Ask, bodies: list[dict[str, Any]], until: float, number: int) -> None:
    rng = random.Random(number)
    while time.monotonic() < until:
        await ask(rng.choice(bodies))


async def _storm(ask: Ask, bodies: list[dict[str, Any]], until: float, rate: float) -> None:
    """Poisson arrivals that wait for nobody."""
    rng = random.Random(0)
    tasks: list[asyncio.Task[None]] = []
    at = time.monotonic()
    while (at := at + rng.expovariate(rate)) < until:
        await asyncio.sleep(at - time.monotonic())
        tasks.append(asyncio.create_task(ask(rng.choice(bodies))))
    await asyncio.gather(*tasks)


async def _generated(server: ChaosServer, http: aiohttp.ClientSession) -> int:
    info = await server.get(http, "/server_info")
    if info is None:
        raise ServerError("the server does not answer /server_info")
    count: int = info["internal_states"][0]["generated_tokens"]
    return count


async def _generated_at(
    server: ChaosServer, http: aiohttp.ClientSession, when: float
) -> tuple[int, float]:
    await asyncio.sleep(when - time.monotonic())
    return await _generated(server, http), time.monotonic()


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory after a tenth of --soak short requests and after all of them."""
    marks: list[Footprint] = []
    problems: list[str] = []
    # A small pool is full of cached prefixes long before the first look: its memory is the
    # system's until it is written to.
    options = [*shlex.split(args.server), "--max-total-tokens=1024"]
    async with (
        chaos_server(options, args.port) as server,
        aiohttp.ClientSession() as http,
    ):
        numbers = iter(range(args.soak))

        async def client(end: int) -> None:
            for number in numbers:
                body = {
                    # Tokenizers cache up to 10,000 words, so few different ones: the cache is
                    # full at the first look.
                    "text": f"{number % 499} short request",
                    "sampling_params": {"max_new_tokens": 1 + number % 2},
                    "stream": number % 3 == 0,
                }
                async with http.post(f"{server.url}/generate", json=body) as response:
                    text = await response.text()
                    if response.status != 200:
                        problems.append(f"status {response.status}: {text[:200]}")
                if number >= end - SOAK_CLIENTS:
                    return

        for end in (args.soak // 10, args.soak):
            await asyncio.gather(*(client(end) for _ in range(SOAK_CLIENTS)))
            await server.wait_idle(http)
            marks.append(server.footprint())
    early, late = marks
    for name in ("main_rss", "scheduler_rss"):
        growth = getattr(late, name) / getattr(early, name)
        if growth > MAX_SOAK_GROWTH:
            problems.append(f"{name} grew by {growth - 1:.1%}")
    return {
        "requests": [args.soak // 10, args.soak],
        "main_rss_mb": [early.main_rss / 2**20, late.main_rss / 2**20],
        "scheduler_rss_mb": [early.scheduler_rss / 2**20, late.scheduler_rss / 2**20],
        "descriptors": [early.descriptors, late.descriptors],
        "problems": problems,
    }


def _percentile(values: Sequence[float], share: float) -> float:
    """Of ascending `values`; 0 if there are none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    run = overload if args.overload else soak if args.soak else chaos
    try:
        result = asyncio.run(run(args))
    except ServerError as error:
        print(f"bench.chaos: error: {error}")
        return 1
    for name, value in result.items():
        if name != "problems":
            print(f"{name:>18}  {_words(value)}")
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}")
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1, default=dataclasses.asdict))
    return 1 if result["problems"] else 0


def _words(value: Any) -> str:
    if isinstance(value, list):
        return " -> ".join(_words(each) for each in value)
    return f"{value:.3g}" if isinstance(value, float) and value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
