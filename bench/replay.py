"""Replay a load through the real scheduler in virtual time: `python -m bench.replay`.

Compares admission rules and phase policies on mixes of lengths, without a model: a pass takes what
a linear step-time model says. Requests ask for more tokens than they use, as clients do, and end by
a stop token. Prints one line a run: throughput, latencies, retractions, tokens computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bench.fake_model import (
    VOCAB_SIZE,
    FakeModelRunner,
    Loopback,
    StepTime,
    VirtualClock,
    make_scheduler,
)
from srt.managers.io_struct import BatchTokenOut, TokenizedGenerateReq
from srt.sampling_params import SamplingParams

CONTEXT_LEN = 8192
# median and sigma of log-normal input and output lengths, tokens; ShareGPT's first turns for
# "chat".
MIXES = {
    "chat": ((60, 1.4), (170, 1.1)),
    "summaries": ((1500, 0.5), (90, 0.6)),
    "stories": ((40, 0.6), (700, 0.7)),
}


@dataclass(frozen=True)
class Load:
    """Arrival times in seconds, input and true output lengths, and the limits clients ask for."""

    arrivals: list[float]
    inputs: list[int]
    outputs: list[int]
    limits: list[int]


def make_load(mix: str, count: int, rate: float, seed: int) -> Load:
    """`rate`: requests/s, Poisson; clients ask for a limit of 512, 1024 or 2048 tokens."""
    rng = np.random.default_rng(seed)
    (in_median, in_sigma), (out_median, out_sigma) = MIXES[mix]
    inputs = np.clip(rng.lognormal(np.log(in_median), in_sigma, count), 4, 4096).astype(int)
    outputs = np.clip(rng.lognormal(np.log(out_median), out_sigma, count), 2, 2048).astype(int)
    limits = np.maximum(rng.choice([512, 1024, 2048], count), outputs)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return Load(arrivals.tolist(), inputs.tolist(), outputs.tolist(), limits.tolist())


@dataclass(frozen=True)
class Outcome:
    """One replay. Milliseconds of virtual time; `max_gap_passes`: passes between two tokens of a
    stream that was running all the while."""

    mix: str
    admission: str
    phase: str
    output_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    max_gap_passes: int
    retractions: int
    recomputed_tokens: int
    mean_running: float


def replay(
    mix: str,
    load: Load,
    admission: str,
    phase: str,
    pool_tokens: int,
    max_running: int,
    conservativeness: float = 1.0,
    mixed: bool = False,
) -> Outcome:
    clock, channel = VirtualClock(), Loopback()
    scheduler = make_scheduler(
        FakeModelRunner(clock, StepTime()),
        channel,
        clock,
        pool_tokens,
        max_running,
        CONTEXT_LEN,
        phase=phase,
        admission=admission,
        conservativeness=conservativeness,
        mixed=mixed,
    )
    pending = list(enumerate(load.arrivals))[::-1]
    last_at: dict[str, float] = {}
    last_pass: dict[str, int] = {}
    ttfts, itls, running = [], [], []
    produced, passes, max_gap = 0, 0, 0
    while pending or scheduler.live:
        while pending and (pending[-1][1] <= clock.now or not scheduler.live):
            number, at = pending.pop()
            clock.now = max(clock.now, at)
            channel.inbox.append(_request(number, load))
            last_at[str(number)] = at
            if not scheduler.live:
                break
        done = scheduler.step()
        if done is None:
            continue
        passes += 1
        running.append(len(done.batch))
        retracted = {rid for event in done.record.retractions for rid in event.victims}
        for rid in retracted:
            last_pass.pop(rid, None)
        for message in channel.take_tokens():
            for rid in message.rids:
                produced += 1
                gap = clock.now - last_at[rid]
                if rid in last_pass:
                    itls.append(gap)
                    max_gap = max(max_gap, passes - last_pass[rid])
                elif _is_first(message, rid):
                    ttfts.append(gap)
                last_at[rid], last_pass[rid] = clock.now, passes
    counters = scheduler.counters
    return Outcome(
        mix,
        admission,
        phase + ("+mixed" if mixed else ""),
        produced / clock.now,
        *_percentiles(ttfts),
        *_percentiles(itls),
        max_gap,
        sum(counters.retracted_requests.values()),
        counters.recomputed_tokens,
        float(np.mean(running)),
    )


def _is_first(message: BatchTokenOut, rid: str) -> bool:
    """Is this the request's very first token, and not the first after a retraction?"""
    started = message.started.get(message.rids.index(rid))
    return started is not None and started.num_retractions == 0


def _request(number: int, load: Load) -> TokenizedGenerateReq:
    first = number * 7919
    prompt = [(first + i * 31) % VOCAB_SIZE for i in range(load.inputs[number])]
    # The fake model counts up from the last token, so this one comes after exactly `output` tokens.
    stop = (prompt[-1] + load.outputs[number]) % VOCAB_SIZE
    params = SamplingParams(
        temperature=0.0, max_new_tokens=load.limits[number], stop_token_ids=(stop,)
    )
    return TokenizedGenerateReq(str(number), prompt, params)


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.array(seconds or [0.0]) * 1e3, [50, 99])
    return float(p50), float(p99)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.replay", description=__doc__)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=list(MIXES))
    parser.add_argument("--admission", nargs="+", default=["ratio", "estimated"])
    parser.add_argument("--phase", nargs="+", default=["interleave"])
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--count", type=int, default=1000, help="requests of a run")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests/s that arrive")
    parser.add_argument("--pool-tokens", type=int, default=60_000)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--conservativeness", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON line a run")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    if not args.json:
        print(
            f"{'mix':10} {'admission':10} {'phase':14} {'tok/s':>7} {'TTFT p50':>9} {'p99':>8} "
            f"{'ITL p50':>8} {'p99':>8} {'gap':>4} {'retract':>8} {'recomp':>8} {'running':>8}"
        )
    for mix, admission, phase in itertools.product(args.mixes, args.admission, args.phase):
        load = make_load(mix, args.count, args.rate, args.seed)
        outcome = replay(
            mix,
            load,
            admission,
            phase,
            args.pool_tokens,
            args.max_running,
            args.conservativeness,
            args.mixed,
        )
        if args.json:
            print(json.dumps(asdict(outcome)))
            continue
        print(
            f"{outcome.mix:10} {outcome.admission:10} {outcome.phase:14} "
            f"{outcome.output_tokens_per_s:7.0f} {outcome.ttft_ms_p50:9.0f} "
            f"{outcome.ttft_ms_p99:8.0f} {outcome.itl_ms_p50:8.1f} {outcome.itl_ms_p99:8.1f} "
            f"{outcome.max_gap_passes:4d} {outcome.retractions:8d} "
            f"{outcome.recomputed_tokens:8d} {outcome.mean_running:8.1f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
