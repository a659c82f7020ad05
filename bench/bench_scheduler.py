"""Host time of a decode step without a model: `python -m bench.bench_scheduler`.

N requests run; at each step 1% of them (at least one) finish and as many arrive. Timed are choose,
launch (building the tensors) and process of the real scheduler; the fake model's own time is taken
off. Prints a table, and with `--json` one object for scripts.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from bench.fake_model import VOCAB_SIZE, FakeModelRunner, Loopback, VirtualClock, make_scheduler
from srt.forward_batch import ForwardBatch
from srt.managers.io_struct import TokenizedGenerateReq
from srt.sampling_params import SamplingParams

PROMPT_LEN = 32
# Of the issue this bench answers: us per running request, and fixed.
TARGET_PER_REQUEST, TARGET_FIXED = 2.0, 60.0


class TimedRunner(FakeModelRunner):
    """Knows how long it took itself."""

    seconds = 0.0

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        begin = time.perf_counter()
        tokens = super().step(batch)
        self.seconds += time.perf_counter() - begin
        return tokens


@dataclass(frozen=True)
class Row:
    """Microseconds of host time, medians over the steps: a decode step without arrivals, and a turn
    of one prefill of the newcomers and one decode step, per pass."""

    running: int
    queued: int
    decode_us: float
    churn_us: float
    target_us: float


def measure(running: int, steps: int, queued: int = 0) -> Row:
    clock, channel, runner = VirtualClock(), Loopback(), TimedRunner()
    arriving = max(1, running // 100)
    lifetime = max(8, running // arriving)
    context = PROMPT_LEN + 4 * lifetime + 64
    # With a queue the rows are the limit: who arrives waits until somebody ends.
    rows = running if queued else running + 2 * arriving
    scheduler = make_scheduler(runner, channel, clock, (running + 64) * context, rows, context)
    sent = 0

    def send(count: int, max_new: int | None = None) -> None:
        nonlocal sent
        for _ in range(count):
            # Staggered ends: as many finish at each step as arrive.
            length = lifetime if max_new is None else max_new
            prompt = [(sent * 7919 + i * 31) % VOCAB_SIZE for i in range(PROMPT_LEN)]
            params = SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True)
            channel.inbox.append(TokenizedGenerateReq(f"{sent:032x}", prompt, params))
            sent += 1

    for group in range(lifetime):
        send(min(arriving, running - group * arriving), max_new=group + 8)
        if (group + 1) * arriving >= running:
            break
    while scheduler.live or channel.inbox:
        scheduler.step()
        if not channel.inbox and not scheduler.waiting_queue and scheduler.chunked_req is None:
            break
    send(queued)
    scheduler.receive()
    decode: list[float] = []
    churn: list[float] = []
    for number in range(steps):
        if number % 4 == 3:
            send(arriving)
        runner.seconds = 0.0
        begin = time.perf_counter()
        done = scheduler.step()
        elapsed = (time.perf_counter() - begin - runner.seconds) * 1e6
        channel.outbox.clear()
        if done is None:
            break
        (churn if done.is_extend else decode).append(elapsed)
    target = TARGET_PER_REQUEST * running + TARGET_FIXED
    return Row(
        running,
        queued,
        statistics.median(decode),
        statistics.median(churn) if churn else 0.0,
        target,
    )


def parts(running: int, steps: int) -> dict[str, float]:
    """Mean milliseconds of each part of a step, from the scheduler's own books."""
    clock, channel = VirtualClock(), Loopback()
    context = PROMPT_LEN + steps + 64
    scheduler = make_scheduler(
        FakeModelRunner(), channel, clock, running * context, running, context
    )
    for i in range(running):
        prompt = [(i * 7919 + j * 31) % VOCAB_SIZE for j in range(PROMPT_LEN)]
        params = SamplingParams(temperature=0.0, max_new_tokens=steps, ignore_eos=True)
        channel.inbox.append(TokenizedGenerateReq(f"{i:032x}", prompt, params))
    while scheduler.step() is not None:
        channel.outbox.clear()
    counters = scheduler.counters
    return {part: ms / scheduler.recorder.num_steps for part, ms in counters.ms.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.bench_scheduler", description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--queued", type=int, default=0, help="requests that wait meanwhile")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    rows = [measure(n, args.steps, args.queued) for n in args.running]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print(f"{'running':>8} {'queued':>8} {'decode us':>10} {'prefill us':>11} {'target us':>10}")
    for row in rows:
        print(
            f"{row.running:8d} {row.queued:8d} {row.decode_us:10.1f} {row.churn_us:11.1f} "
            f"{row.target_us:10.1f}"
        )
    print("\nMean ms of each part, 256 running:")
    for part, ms in parts(256, 200).items():
        print(f"  {part:8} {ms:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
