"""What static and dynamic batching cost: `python -m bench.batching_modes padding|wait|curve|model`.

The first three drive the real scheduler with a fake model on a virtual clock, so they give the same
numbers on every machine; `model` runs the default model. A row-step is one row of one pass: used if
a token came out of it, padding if a closed batch held the row of a request that had ended.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from bench.fake_model import (
    VOCAB_SIZE,
    FakeModelRunner,
    Loopback,
    StepTime,
    VirtualClock,
    make_scheduler,
)
from srt.managers.batching import BATCHINGS, make_batching
from srt.managers.io_struct import TokenizedGenerateReq
from srt.sampling_params import SamplingParams

T = TypeVar("T")

PROMPT_LEN = 16
# Eight answers of a chat: one long, the others short. Their sum is 1968.
LENGTHS = (1024, 200, 150, 128, 120, 118, 116, 112)
# The newcomer of `wait` comes when the eight have so many tokens.
NEWCOMER_AFTER = 100
NEWCOMER_LENGTH = 50


@dataclass(frozen=True)
class Load:
    """Output lengths, and when each request arrives (seconds)."""

    lengths: list[int]
    arrivals: list[float]


@dataclass(frozen=True)
class Outcome:
    """One run. `waits[i]`: seconds from arrival to first token; `wait_passes[i]`: passes in
    between that computed others."""

    batching: str
    passes: int
    decode_passes: int
    row_steps: int
    useful: int
    seconds: float
    waits: list[float]
    wait_passes: list[int]

    @property
    def utilisation(self) -> float:
        return self.useful / self.row_steps

    @property
    def tokens_per_decode(self) -> float:
        """Used rows of a decode pass; a request's first token is that of its prefill."""
        return (self.useful - len(self.waits)) / self.decode_passes


def run_load(batching: str, load: Load, rows: int, timeout: float | None = None) -> Outcome:
    """The real scheduler with `rows` rows and room for everybody's KV."""
    clock, channel = VirtualClock(), Loopback()
    context = PROMPT_LEN + max(load.lengths) + 1
    scheduler = make_scheduler(
        FakeModelRunner(clock, StepTime()),
        channel,
        clock,
        pool_tokens=rows * context,
        max_running=rows,
        context_len=context,
        chunk=None,
        batching=make_batching(batching, timeout),
    )
    pending = sorted(range(len(load.lengths)), key=lambda i: load.arrivals[i], reverse=True)
    sent_passes: dict[str, int] = {}
    waits: dict[str, float] = {}
    wait_passes: dict[str, int] = {}
    passes = 0
    while pending or scheduler.live or channel.inbox:
        while pending and load.arrivals[pending[-1]] <= clock.now:
            number = pending.pop()
            channel.inbox.append(_request(number, load.lengths[number]))
            sent_passes[str(number)] = passes
        done = scheduler.step()
        if done is None:
            _rest(scheduler.batching.wait_ms(clock.now, 1 << 30), clock, pending, load, scheduler)
            continue
        passes += 1
        for message in channel.take_tokens():
            for rid in message.rids:
                if rid not in waits:
                    waits[rid] = clock.now - load.arrivals[int(rid)]
                    wait_passes[rid] = passes - 1 - sent_passes[rid]
    counters = scheduler.counters
    order = [str(number) for number in range(len(load.lengths))]
    return Outcome(
        batching,
        passes,
        counters.passes["D"],
        counters.row_steps,
        counters.generated_tokens,
        clock.now,
        [waits[rid] for rid in order],
        [wait_passes[rid] for rid in order],
    )


def _rest(
    wait_ms: int, clock: VirtualClock, pending: list[int], load: Load, scheduler: Any
) -> None:
    """Nothing to compute: time goes on to the next arrival or the end of the batch's patience."""
    until = [load.arrivals[pending[-1]]] if pending else []
    if scheduler.live:
        until.append(clock.now + wait_ms / 1e3)
    if until:
        clock.now = max(clock.now, min(until))


def _request(number: int, length: int) -> TokenizedGenerateReq:
    prompt = [(number * 7919 + i * 31) % VOCAB_SIZE for i in range(PROMPT_LEN)]
    params = SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True)
    return TokenizedGenerateReq(str(number), prompt, params)


# --- the three on the fake model ---


def padding_tax(lengths: Sequence[int] = LENGTHS, rows: int = 8, queued: int = 3) -> list[Outcome]:
    """`queued` times the same batch one after another: what each mode pays for it."""
    load = Load(list(lengths) * queued, [0.0] * (len(lengths) * queued))
    return [run_load(name, load, rows) for name in BATCHINGS]


def newcomer(rows: int = 8) -> list[Outcome]:
    """Eight requests run; one more comes when each has about NEWCOMER_AFTER tokens: the shortest
    ends a dozen passes later, the longest some 900."""
    alone = run_load("continuous", Load(list(LENGTHS), [0.0] * 8), rows)
    at = alone.waits[0] + NEWCOMER_AFTER * _decode_seconds(len(LENGTHS))
    load = Load([*LENGTHS, NEWCOMER_LENGTH], [0.0] * 8 + [at])
    return [run_load(name, load, rows) for name in BATCHINGS]


def _decode_seconds(rows: int) -> float:
    """About what a decode pass of `rows` rows takes on the fake model."""
    step = StepTime()
    return step.fixed + rows * (step.token + step.row)


@dataclass(frozen=True)
class CurvePoint:
    """Batches of `rows` requests whose lengths are exponential: used rows of a decode pass, and
    what theory says of static ones: the longest of B is H_B = 1 + 1/2 + ... + 1/B times the mean,
    so B / H_B."""

    rows: int
    static: float
    theory: float
    continuous: float


def static_curve(rows: Sequence[int], mean: int, batches: int, seed: int) -> list[CurvePoint]:
    found = []
    for count in rows:
        rng = np.random.default_rng(seed)
        drawn = np.ceil(rng.exponential(mean, count * batches)).astype(int)
        load = Load(np.maximum(1, drawn).tolist(), [0.0] * (count * batches))
        static = run_load("static", load, count)
        continuous = run_load("continuous", load, count)
        harmonic = sum(1 / i for i in range(1, count + 1))
        found.append(
            CurvePoint(
                count, static.tokens_per_decode, count / harmonic, continuous.tokens_per_decode
            )
        )
    return found


# --- the default model ---


@dataclass(frozen=True)
class ModelRun:
    """One batch of requests through the Engine, all at once."""

    label: str
    seconds: float
    tokens_per_second: float
    passes: int
    row_steps: int
    useful: int


def run_model(
    label: str, lengths: Sequence[int], prompt_len: int, seed: int, **server_args: Any
) -> ModelRun:
    from srt.engine import Engine

    rng = np.random.default_rng(seed)
    with Engine(log_level="warning", skip_server_warmup=True, **server_args) as engine:
        vocab = 1000  # plain tokens of any model; which ones does not matter
        prompts = rng.integers(300, 300 + vocab, (len(lengths), prompt_len)).tolist()
        params = [
            {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True} for length in lengths
        ]
        # Buffers and threads come into being with the first pass, which is not what is measured.
        engine.generate(
            input_ids=[prompts[0][::-1]], sampling_params=[{**params[0], "max_new_tokens": 2}]
        )
        before = engine.internal_state()
        begin = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=params)
        seconds = time.perf_counter() - begin
        after = engine.internal_state()
    useful = after["generated_tokens"] - before["generated_tokens"]
    return ModelRun(
        label,
        seconds,
        useful / seconds,
        after["num_steps"] - before["num_steps"],
        after["row_steps"] - before["row_steps"],
        useful,
    )


def model_modes(model_path: str | None, scale: int, seed: int) -> list[ModelRun]:
    """The eight answers, shortened by `scale`, twice, in each mode."""
    lengths = [max(1, length // scale) for length in LENGTHS] * 2
    return [
        run_model(
            name, lengths, PROMPT_LEN, seed, model_path=model_path, batching=name,
            batching_timeout_ms=50.0, max_running_requests=len(LENGTHS),
        )
        for name in BATCHINGS
    ]  # fmt: skip


def serial_baseline(
    model_path: str | None, rows: int, length: int, requests: int, seed: int
) -> list[ModelRun]:
    """The same requests one at a time, and up to `rows` at once. The serial run is given fewer, as
    a request of it takes as long as any other."""
    alone = run_model(
        "1 row", [length] * max(1, requests // 8), PROMPT_LEN, seed, model_path=model_path,
        max_running_requests=1,
    )  # fmt: skip
    together = run_model(
        f"{rows} rows", [length] * requests, PROMPT_LEN, seed, model_path=model_path,
        max_running_requests=rows,
    )  # fmt: skip
    return [alone, together]


# --- what is printed ---


def _print_padding(outcomes: list[Outcome]) -> None:
    print(f"{'batching':12} {'passes':>7} {'row-steps':>10} {'useful':>7} {'utilisation':>12}")
    for o in outcomes:
        print(
            f"{o.batching:12} {o.passes:7d} {o.row_steps:10d} {o.useful:7d} {o.utilisation:12.3f}"
        )


def _print_wait(outcomes: list[Outcome]) -> None:
    print(f"{'batching':12} {'waits (passes)':>15} {'waits (ms, virtual)':>20}")
    for o in outcomes:
        print(f"{o.batching:12} {o.wait_passes[-1]:15d} {o.waits[-1] * 1e3:20.1f}")


def _print_curve(points: list[CurvePoint]) -> None:
    print(
        f"{'rows':>5} {'static':>8} {'B / H_B':>8} {'continuous':>11}   used rows of a decode pass"
    )
    for p in points:
        print(f"{p.rows:5d} {p.static:8.2f} {p.theory:8.2f} {p.continuous:11.2f}")
    first, last = points[0], points[-1]
    print(
        f"{first.rows} -> {last.rows} rows: x {last.static / first.static:.2f} "
        f"static (theory {last.theory / first.theory:.2f}), "
        f"x {last.continuous / first.continuous:.2f} continuous"
    )


def _print_model(runs: list[ModelRun]) -> None:
    print(
        f"{'run':12} {'seconds':>8} {'tok/s':>8} {'passes':>7} {'row-steps':>10} {'useful':>7} "
        f"{'utilisation':>12}"
    )
    for r in runs:
        print(
            f"{r.label:12} {r.seconds:8.2f} {r.tokens_per_second:8.1f} {r.passes:7d} "
            f"{r.row_steps:10d} {r.useful:7d} {r.useful / r.row_steps:12.3f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.batching_modes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=("padding", "wait", "curve", "model", "serial"))
    add("--rows", type=int, nargs="+", help="curve: batch sizes; serial: rows of the second run")
    add("--mean", type=int, default=64, help="curve: mean output length, tokens")
    add("--batches", type=int, default=40, help="curve: static batches of each size")
    add("--queued", type=int, default=3, help="padding: batches of eight, one after another")
    add("--model-path", help="model and serial: default the default model")
    add("--scale", type=int, default=8, help="model: divide the lengths by this")
    add("--length", type=int, default=32, help="serial: output tokens of a request")
    add("--requests", type=int, default=128, help="serial: requests of the second run")
    add("--seed", type=int, default=1)
    add("--json", action="store_true", help="one JSON array instead of the table")
    args = parser.parse_args(argv)
    for name in ("mean", "batches", "queued", "scale", "length", "requests"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.rows is not None and min(args.rows) < 1:
        parser.error(f"--rows must be at least 1, got {min(args.rows)}")
    logging.disable(logging.WARNING)  # the scheduler's own lines; the table says it better
    try:
        _run(args)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _run(args: argparse.Namespace) -> None:
    if args.what in ("padding", "wait"):
        outcomes = padding_tax(queued=args.queued) if args.what == "padding" else newcomer()
        _print(outcomes, _print_padding if args.what == "padding" else _print_wait, args.json)
    elif args.what == "curve":
        rows = args.rows or [8, 16, 32, 64, 128, 256]
        _print(static_curve(rows, args.mean, args.batches, args.seed), _print_curve, args.json)
    elif args.what == "model":
        _print(model_modes(args.model_path, args.scale, args.seed), _print_model, args.json)
    else:
        rows = (args.rows or [128])[0]
        runs = serial_baseline(args.model_path, rows, args.length, args.requests, args.seed)
        _print(runs, _print_model, args.json)


def _print(found: list[T], as_table: Callable[[list[T]], None], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(item) for item in found]))  # type: ignore[call-overload]
    else:
        as_table(found)


if __name__ == "__main__":
    raise SystemExit(main())
