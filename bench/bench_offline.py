"""The engine without HTTP: `python -m bench.bench_offline throughput|latency`.

`throughput` gives all requests at once and counts tokens a second; `latency` runs one batch of
equal requests for each batch size. Prompts are random tokens, so no prefix is shared, and answers
have exactly the length asked for.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from srt.default_model import ModelUnavailable
from srt.engine import Engine
from srt.request_error import RequestError
from srt.server_args import ServerArgs, ServerArgsError


class Generator(Protocol):
    """What is measured: the Engine, or a fake in tests."""

    def generate(
        self, *, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]
    ) -> list[dict[str, Any]]: ...

    def flush_cache(self, timeout: float = 0.0) -> bool: ...


@dataclass(frozen=True)
class Throughput:
    """All requests given at once. Rates are per second of the whole run."""

    requests: int
    input_tokens: int
    output_tokens: int
    seconds: float

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_throughput(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.seconds


@dataclass(frozen=True)
class Latency:
    """One batch size, medians over the repeats: seconds of the whole batch, of its prefill (the
    same batch asked for one token), and milliseconds of a decode step in between."""

    batch_size: int
    seconds: float
    prefill_seconds: float
    decode_ms: float
    output_throughput: float


def random_prompts(lengths: Sequence[int], vocab_size: int, rng: random.Random) -> list[list[int]]:
    """Tokens from the upper part of the vocabulary: the special ones are at its beginning."""
    low = vocab_size // 10
    return [[rng.randrange(low, vocab_size) for _ in range(length)] for length in lengths]


def generate(engine: Generator, prompts: list[list[int]], lengths: Sequence[int]) -> float:
    """Seconds. AssertionError if an answer has another length than was asked for."""
    params = [
        {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True} for length in lengths
    ]
    begin = time.perf_counter()
    results = engine.generate(input_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - begin
    produced = [result["meta_info"]["completion_tokens"] for result in results]
    assert produced == list(lengths), f"{produced} tokens for {list(lengths)}"
    return seconds


def measure_throughput(
    engine: Generator,
    vocab_size: int,
    requests: int,
    input_len: int,
    output_len: int,
    ratio: float,
    seed: int,
) -> Throughput:
    """Lengths are uniform in [len * ratio, len]."""
    rng = random.Random(seed)

    def lengths(longest: int) -> list[int]:
        return [rng.randint(max(1, round(longest * ratio)), longest) for _ in range(requests)]

    inputs, outputs = lengths(input_len), lengths(output_len)
    warm_up(engine, vocab_size, rng)
    seconds = generate(engine, random_prompts(inputs, vocab_size, rng), outputs)
    return Throughput(requests, sum(inputs), sum(outputs), seconds)


def measure_latency(
    engine: Generator,
    vocab_size: int,
    batch_sizes: Sequence[int],
    input_len: int,
    output_len: int,
    repeats: int,
    seed: int,
) -> list[Latency]:
    rng = random.Random(seed)
    warm_up(engine, vocab_size, rng)
    found = []
    for size in batch_sizes:
        whole, prefill = [], []
        for _ in range(repeats):
            prompts = random_prompts([input_len] * size, vocab_size, rng)
            prefill.append(generate(engine, prompts, [1] * size))
            if not engine.flush_cache(timeout=10.0):
                raise RuntimeError("the cache was not emptied: the next prefill would be a hit")
            whole.append(generate(engine, prompts, [output_len] * size))
        seconds, first = statistics.median(whole), statistics.median(prefill)
        steps = output_len - 1
        found.append(
            Latency(
                size,
                seconds,
                first,
                1e3 * max(0.0, seconds - first) / steps if steps else 0.0,
                size * output_len / seconds,
            )
        )
    return found


def warm_up(engine: Generator, vocab_size: int, rng: random.Random) -> None:
    """Buffers, threads and kernels come into being with the first passes."""
    generate(engine, random_prompts([16, 16], vocab_size, rng), [4, 4])


def _print_throughput(found: Throughput) -> None:
    for label, value in (
        ("Requests:", found.requests),
        ("Input tokens:", found.input_tokens),
        ("Output tokens:", found.output_tokens),
        ("Seconds:", round(found.seconds, 2)),
        ("Requests/s:", round(found.requests / found.seconds, 2)),
        ("Output tokens/s:", round(found.output_throughput, 1)),
        ("Total tokens/s:", round(found.total_throughput, 1)),
    ):
        print(f"{label:20} {value}")


def _print_latency(found: list[Latency]) -> None:
    print(f"{'batch':>6} {'seconds':>9} {'prefill s':>10} {'decode ms':>10} {'output tok/s':>13}")
    for row in found:
        print(
            f"{row.batch_size:6d} {row.seconds:9.3f} {row.prefill_seconds:10.3f} "
            f"{row.decode_ms:10.2f} {row.output_throughput:13.1f}"
        )


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, ServerArgs]:
    """Options not known here are the server's."""
    parser = argparse.ArgumentParser(
        prog="bench.bench_offline",
        description=__doc__,
        epilog="Further options are those of launch_server.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("what", choices=("throughput", "latency"))
    add("--num-prompts", type=int, default=64, help="throughput: requests")
    add("--input-len", type=int, default=64, help="longest prompt, tokens")
    add("--output-len", type=int, default=32, help="longest answer, tokens")
    add(
        "--range-ratio", type=float, default=0.5, help="throughput: shortest length, of the longest"
    )
    add("--batch-sizes", type=int, nargs="+", default=[1, 4, 16], help="latency: sizes")
    add("--repeats", type=int, default=3, help="latency: runs of each size, of which the median")
    add("--seed", type=int, default=42)
    add("--json", action="store_true", help="one JSON object instead of the table")
    args, rest = parser.parse_known_args(argv)
    for name in ("num_prompts", "input_len", "output_len", "repeats"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be at least 1, got {getattr(args, name)}")
    if min(args.batch_sizes) < 1:
        parser.error(f"--batch-sizes must be at least 1, got {min(args.batch_sizes)}")
    if not 0 <= args.range_ratio <= 1:
        parser.error(f"--range-ratio must be in [0, 1], got {args.range_ratio}")
    return args, ServerArgs.from_cli(["--log-level=warning", *rest])


def main(argv: Sequence[str] | None = None) -> int:
    args, server_args = parse(argv)
    fields = {name: getattr(server_args, name) for name in ServerArgs.__dataclass_fields__}
    try:
        with Engine(**fields) as engine:
            vocab_size = engine.tokenizer.vocab_size
            return _run(args, engine, vocab_size)
    except (ServerArgsError, ModelUnavailable, RequestError, ValueError, RuntimeError) as error:
        print(f"bench_offline: error: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, engine: Generator, vocab_size: int) -> int:
    if args.what == "throughput":
        found = measure_throughput(
            engine, vocab_size, args.num_prompts, args.input_len, args.output_len,
            args.range_ratio, args.seed,
        )  # fmt: skip
        if args.json:
            print(json.dumps({**asdict(found), "output_throughput": found.output_throughput}))
        else:
            _print_throughput(found)
        return 0
    rows = measure_latency(
        engine, vocab_size, args.batch_sizes, args.input_len, args.output_len, args.repeats,
        args.seed,
    )  # fmt: skip
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        _print_latency(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
