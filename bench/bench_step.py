"""Where the time of a decode step goes: `python -m bench.bench_step`.

N requests with a prompt each decode together in the real scheduler with the real model, in this
process. Prints milliseconds a step in matrix products, attention, small operations, the language
model head, sampling, scheduling and messages; medians over steps. With `--json` one object a line
for scripts, with `--prefill` the same for prefills of that many tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch

from bench.fake_model import Loopback
from srt.default_model import fetch_default_model
from srt.layers.linear import Linear
from srt.layers.native_decoder import NativeDecoder, NativeTimes
from srt.managers.io_struct import TokenizedGenerateReq
from srt.managers.ipc import SchedulerChannel
from srt.managers.scheduler import Scheduler
from srt.managers.scheduler_process import build_scheduler
from srt.model_runner import ModelRunner
from srt.sampling_params import SamplingParams
from srt.server_args import ServerArgs

PARTS = ("linear", "attention", "small_ops", "head", "sampling", "scheduler", "messages")


@dataclasses.dataclass(frozen=True)
class Row:
    """Milliseconds a pass."""

    running: int
    new_tokens: int
    total: float
    linear: float
    attention: float
    small_ops: float
    head: float
    sampling: float
    scheduler: float
    messages: float


class Stopwatch:
    """Seconds spent in wrapped functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - begin
            return result

        return timed

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class PartTimes(Protocol):
    """What the parts of the decoder took."""

    def take(self) -> tuple[float, float]:
        """Seconds in linears and in attention since the last call."""
        ...


class FusedPartTimes:
    """As the fused kernels count them."""

    def __init__(self, decoder: NativeDecoder) -> None:
        self._times = decoder.times = NativeTimes()

    def take(self) -> tuple[float, float]:
        times = self._times
        seconds = times.linear, times.attention
        times.linear = times.attention = times.rest = 0.0
        return seconds


class ModulePartTimes:
    """By the clock around the modules of a model that computes layer by layer."""

    def __init__(self, runner: ModelRunner) -> None:
        self._linear, self._attention = Stopwatch(), Stopwatch()
        for module in runner.model.modules():
            if isinstance(module, Linear):
                module.forward = self._linear.around(module.forward)  # type: ignore[method-assign]
        assert runner.attn is not None
        runner.attn.forward = self._attention.around(  # type: ignore[method-assign]
            runner.attn.forward
        )

    def take(self) -> tuple[float, float]:
        return self._linear.take(), self._attention.take()


class Probe:
    """A scheduler with a model whose parts are timed."""

    def __init__(self, args: ServerArgs, model_path: Path) -> None:
        self.channel = Loopback()
        self.scheduler: Scheduler
        self.scheduler, _ = build_scheduler(
            args, model_path, cast("SchedulerChannel", self.channel)
        )
        runner = cast("ModelRunner", self.scheduler.runner)
        self.whole, self.head, self.hidden = Stopwatch(), Stopwatch(), Stopwatch()
        self.scheduler.runner = cast("Any", _Timed(self.whole.around(runner.step)))
        runner.model.logits = self.head.around(runner.model.logits)  # type: ignore[method-assign]
        self.parts: PartTimes
        if runner.decoder is not None:
            self.parts = FusedPartTimes(runner.decoder)
            runner.decoder.forward = self.hidden.around(  # type: ignore[method-assign]
                runner.decoder.forward
            )
        else:
            self.parts = ModulePartTimes(runner)
            runner.model.forward = self.hidden.around(  # type: ignore[method-assign]
                runner.model.forward
            )
        self._encoder = msgspec.msgpack.Encoder()
        self._vocab_size = runner.vocab_size
        self._sent = 0

    def send(self, count: int, prompt_len: int, max_new: int) -> None:
        for _ in range(count):
            ids = [(self._sent * 7919 + i * 31) % self._vocab_size for i in range(prompt_len)]
            params = SamplingParams(temperature=0.0, max_new_tokens=max_new, ignore_eos=True)
            self.channel.inbox.append(TokenizedGenerateReq(f"{self._sent:032x}", ids, params))
            self._sent += 1

    def step(self) -> tuple[Row, bool]:
        """One turn of the scheduler, and whether it was a prefill."""
        self.parts.take()
        begin = time.perf_counter()
        done = self.scheduler.step()
        stepped = time.perf_counter()
        # What a real channel would do with the messages.
        for message in self.channel.outbox:
            self._encoder.encode(message)
        encoded = time.perf_counter()
        self.channel.outbox.clear()
        assert done is not None, "nobody is left to compute"
        whole, hidden, head = self.whole.take(), self.hidden.take(), self.head.take()
        linear, attention = self.parts.take()
        seconds = {
            "total": encoded - begin,
            "linear": linear,
            "attention": attention,
            "small_ops": hidden - linear - attention,
            "head": head,
            "sampling": whole - hidden - head,
            "scheduler": stepped - begin - whole,
            "messages": encoded - stepped,
        }
        in_ms = {name: value * 1e3 for name, value in seconds.items()}
        row = Row(len(done.forward.seq_lens_cpu), len(done.forward.input_ids), **in_ms)
        return row, done.is_extend


class _Timed:
    """A runner whose step is wrapped."""

    def __init__(self, step: Callable[..., torch.Tensor]) -> None:
        self.step = step


def median_row(rows: Sequence[Row]) -> Row:
    """The median of each number."""
    fields = [field.name for field in dataclasses.fields(Row)]
    return Row(*(statistics.median(getattr(row, name) for row in rows) for name in fields))


def measure_decode(probe: Probe, running: int, context: int, steps: int) -> Row:
    """Decode steps of `running` requests around `context` tokens each."""
    probe.send(running, max(1, context - steps // 2), steps + 2)
    rows: list[Row] = []
    while len(rows) < steps:
        row, is_prefill = probe.step()
        if not is_prefill and row.running == running:
            rows.append(row)
    while probe.scheduler.live:
        probe.step()
    return median_row(rows[1:])


def measure_prefill(probe: Probe, tokens: int, steps: int) -> Row:
    """Prefills of one request of `tokens` tokens, in as few chunks as the options allow."""
    rows: list[Row] = []
    for _ in range(steps):
        probe.send(1, tokens, 1)
        while probe.channel.inbox or probe.scheduler.live:
            rows.append(probe.step()[0])
    return median_row([row for row in rows if row.new_tokens == max(r.new_tokens for r in rows)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.bench_step", description=__doc__)
    parser.add_argument("--model-path", help="else the default model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=256, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    path = Path(args.model_path) if args.model_path else fetch_default_model()
    most = max(args.running)
    server_args = ServerArgs(
        device="cpu",
        load_format=args.load_format,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_running_requests=most,
        max_total_tokens=most * (args.context + args.steps) + max([4096, *args.prefill]),
        chunked_prefill_size=-1,
        disable_radix_cache=True,
    )
    probe = Probe(server_args, path)
    rows = [measure_decode(probe, n, args.context, args.steps) for n in args.running]
    rows += [measure_prefill(probe, n, 4) for n in args.prefill]
    if args.json:
        for row in rows:
            print(json.dumps(dataclasses.asdict(row)))
        return 0
    print(f"{'rows':>5} {'tokens':>6} {'total':>8} " + " ".join(f"{p:>9}" for p in PARTS) + "  ms")
    for row in rows:
        cells = " ".join(f"{getattr(row, part):9.2f}" for part in PARTS)
        print(f"{row.running:5.0f} {row.new_tokens:6.0f} {row.total:8.2f} {cells}")
    return 0


if __name__ == "__main__":
    logging.disable(logging.INFO)
    raise SystemExit(main())
