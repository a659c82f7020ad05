"""The same load on several running servers, in turn: `python -m bench.compare_peers`.

    python -m bench.compare_peers ours=sglang@http://127.0.0.1:30000 \\
        llama=llama.cpp@http://127.0.0.1:8080 --rounds 5 \\
        -- --dataset-name sharegpt --num-prompts 32 --tokenizer DIR

Each server is NAME=BACKEND@URL with a backend of bench_serving; what follows `--` are options of
bench_serving. In every round each server gets the same requests, one server after the other and
each round from another one on, so that what disturbs the machine disturbs all of them. The seed is
the round's, so no round finds the last one's prompts cached. Ratios are of the first server to each
other one, above 1 where the first is better; per round, then median and range over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.backends import BACKENDS
from bench.bench_serving import EXIT_FAILURES, EXIT_INTERRUPTED, EXIT_USAGE, benchmark, run_loop
from bench.metrics import Spread, Summary
from bench.option_fields import OptionError
from bench.options import Options, parse_options
from bench.server_routes import ServerError
from bench.sessions import DatasetError
from bench.sharegpt_file import ShareGptError
from bench.tokenizer import TokenizerError


@dataclass(frozen=True)
class Peer:
    name: str
    backend: str
    url: str


@dataclass(frozen=True)
class Metric:
    """A number of a run. None if the run has none, such as ITL of single tokens."""

    label: str
    read: Callable[[Summary], float | None]
    higher_is_better: bool = False


def _of(spread: Spread | None, name: str) -> float | None:
    return None if spread is None else float(getattr(spread, name))


METRICS = (
    Metric("output tok/s", lambda s: s.output_throughput, higher_is_better=True),
    Metric("total tok/s", lambda s: s.total_throughput, higher_is_better=True),
    Metric("TTFT p50 ms", lambda s: _of(s.ttft, "median")),
    Metric("TTFT p99 ms", lambda s: _of(s.ttft, "p99")),
    Metric("ITL p50 ms", lambda s: _of(s.itl, "median")),
    Metric("ITL p99 ms", lambda s: _of(s.itl, "p99")),
)


@dataclass(frozen=True)
class Range:
    """Of one number over rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float | None]) -> Range | None:
        """None if a round lacks the number."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return Range(statistics.median(known), min(known), max(known))


def parse_peer(text: str) -> Peer:
    name, equals, rest = text.partition("=")
    backend, at, url = rest.partition("@")
    if not (name and equals and at and url):
        raise OptionError(f"a server must be NAME=BACKEND@URL, got {text!r}")
    if backend not in BACKENDS:
        raise OptionError(f"{name}: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return Peer(name, backend, url)


def order_of_round(peers: Sequence[Peer], number: int) -> list[Peer]:
    """All peers, beginning with another one in each round."""
    start = number % len(peers)
    return [*peers[start:], *peers[:start]]


def run_rounds(peers: Sequence[Peer], rounds: int, options: Options) -> dict[str, list[Summary]]:
    """What each peer did in each round. ServerError if one cannot be measured."""
    found: dict[str, list[Summary]] = {peer.name: [] for peer in peers}
    for number in range(rounds):
        for peer in order_of_round(peers, number):
            asked = dataclasses.replace(
                options, backend=peer.backend, base_url=peer.url, seed=options.seed + number
            )
            run = run_loop(benchmark(asked))
            if run.interrupted:
                raise KeyboardInterrupt
            if run.failed_too_often:
                raise ServerError(
                    f"{peer.name}: {run.summary.failed} of {run.summary.sent} requests failed: "
                    f"{run.summary.failure_examples}"
                )
            found[peer.name].append(run.summary)
            print(
                f"round {number + 1}/{rounds}  {peer.name:<12} "
                f"{run.summary.output_throughput:8.1f} tok/s",
                file=sys.stderr,
            )
    return found


def ratios(metric: Metric, ours: Sequence[Summary], theirs: Sequence[Summary]) -> Range | None:
    """How many times better the first is, round by round."""
    values: list[float | None] = []
    for a, b in zip(ours, theirs, strict=True):
        mine, other = metric.read(a), metric.read(b)
        if not mine or not other:
            return None
        values.append(mine / other if metric.higher_is_better else other / mine)
    return Range.of(values)


def format_table(found: dict[str, list[Summary]]) -> str:
    """One row a metric, a column of values for each server and one of ratios for each but the
    first."""
    first, *others = found
    header = f"{'median (range)':<14}" + "".join(f"{name:>26}" for name in found)
    header += "".join(f"{first + ' / ' + name:>26}" for name in others)
    lines = [header]
    for metric in METRICS:
        cells = [
            _cell(Range.of([metric.read(summary) for summary in summaries]), 1)
            for summaries in found.values()
        ]
        cells += [_cell(ratios(metric, found[first], found[name]), 2) for name in others]
        lines.append(f"{metric.label:<14}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def _cell(value: Range | None, digits: int) -> str:
    if value is None:
        return "n/a"
    return f"{value.median:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"


def as_json(found: dict[str, list[Summary]]) -> str:
    """One object: the numbers of every round by server, in METRICS' order."""
    rounds = {
        name: {m.label: [m.read(summary) for summary in summaries] for m in METRICS}
        for name, summaries in found.items()
    }
    return json.dumps(rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes are those of bench_serving."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="bench.compare_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("peers", nargs="+", metavar="NAME=BACKEND@URL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    own = parser.parse_args(arguments[:split])
    try:
        if own.rounds < 1:
            raise OptionError(f"--rounds must be at least 1, got {own.rounds}")
        peers = [parse_peer(text) for text in own.peers]
        if len({peer.name for peer in peers}) < len(peers):
            raise OptionError("two servers have the same name")
        options = parse_options(["--disable-tqdm", *arguments[split + 1 :]])
    except OptionError as error:
        print(f"compare_peers: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        found = run_rounds(peers, own.rounds, options)
    except (ServerError, DatasetError, TokenizerError, ShareGptError) as error:
        print(f"compare_peers: error: {error}", file=sys.stderr)
        return EXIT_FAILURES
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(as_json(found) if own.json else format_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
