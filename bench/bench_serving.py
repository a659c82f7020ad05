"""python -m bench_serving: prepare prompts, send them on schedule, report what came back."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from bench.arrivals import arrival_times, trace_times
from bench.backends import build_body
from bench.datasets import build_dataset
from bench.load import LoadRun, Target, open_session
from bench.metrics import RequestRecord, summarize
from bench.option_fields import OptionError
from bench.options import Options, parse_options
from bench.report import format_report
from bench.result import Run
from bench.result_json import default_output_file, json_line
from bench.server_routes import (
    ServerError,
    flush_cache,
    get_json,
    profile,
    request_headers,
    retraction_counter,
    stop_profile,
    wait_until_ready,
)
from bench.sessions import Dataset, DatasetError, Session
from bench.sharegpt_file import ShareGptError
from bench.tokenizer import TextTokenizer, TokenizerError, load_tokenizer
from srt.host_limits import raise_descriptor_limit

T = TypeVar("T")

WARMUP_OUTPUT_LEN = 32
PROGRESS_PERIOD_S = 0.5
EXIT_FAILURES, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


async def warm_up(
    http: aiohttp.ClientSession, target: Target, options: Options, first: Session
) -> list[str]:
    """Send short copies of the first request. A warm-up that fails is noted and no reason to stop:
    the run itself reports failures better."""
    turn = first.turns[0]
    short = replace(turn, output_len=min(turn.output_len, WARMUP_OUTPUT_LEN))
    sessions = [replace(first, turns=(short,))] * options.warmup_requests
    run = LoadRun(http, target, stall_timeout=options.stall_timeout_sec)
    result = await run.run(sessions, [0.0] * len(sessions))
    if result.interrupted:
        raise KeyboardInterrupt
    failed = [record for record in result.records if not record.completed]
    if not failed:
        return []
    return [
        f"{len(failed)} of {len(sessions)} warm-up requests failed: "
        f"{failed[0].failure_kind}: {failed[0].error}"
    ]


def plan_arrivals(options: Options, sessions: Sequence[Session]) -> list[float]:
    if options.use_trace_timestamps:
        stamps = [s.timestamp_ms for s in sessions if s.timestamp_ms is not None]
        return trace_times(stamps, options.mooncake_slowdown_factor)
    # A generator of its own: the same seed gives the same arrivals whatever the data set drew.
    rng = random.Random(f"arrivals/{options.seed}")
    return arrival_times(len(sessions), options.request_rate, options.burstiness, options.ramp, rng)


@contextmanager
def progress(run: LoadRun, total: int, enabled: bool) -> Iterator[None]:
    """A bar on stderr, drawn by the event loop itself: a drawing thread would disturb the clock."""
    if not enabled:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (
        TextColumn("sending"), BarColumn(), MofNCompleteColumn(), Elapsed(),
        TextColumn("{task.fields[running]} running, {task.fields[failed]} failed, "
                   "{task.fields[speed]:.0f} chunks/s"),
    )  # fmt: skip
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    task = bar.add_task("sending", total=total, running=0, failed=0, speed=0.0)
    seen = {"at": 0.0, "chunks": 0.0}

    def draw() -> None:
        now, chunks = run.now(), run.chunks_seen
        speed = (chunks - seen["chunks"]) / max(now - seen["at"], 1e-9)
        seen.update(at=now, chunks=chunks)
        bar.update(
            task,
            completed=run.num_ended,
            running=len(run.live),
            failed=run.num_failed,
            speed=speed,
        )
        bar.refresh()

    async def keep_drawing() -> None:
        while True:
            await asyncio.sleep(PROGRESS_PERIOD_S)
            draw()

    with bar:
        drawer = asyncio.create_task(keep_drawing())
        try:
            yield
        finally:
            drawer.cancel()
            draw()


def print_record(record: RequestRecord) -> None:
    ttft = f"{record.ttft * 1000:.1f} ms" if record.ttft is not None else "n/a"
    print(
        f"request {record.index}: {record.status.value}, input {record.input_len}, output "
        f"{record.output_len} of {record.requested_len}, TTFT {ttft}, "
        f"{record.error or record.finish_reason or 'no finish reason'}",
        flush=True,
    )


def retokenize(records: Sequence[RequestRecord], tokenizer: TextTokenizer) -> list[str]:
    """Count the tokens of every text ourselves. Notes for the report if that turns out
    impossible."""
    for record in records:
        if not record.completed:
            continue
        try:
            record.retokenized_len = len(tokenizer.encode(record.text))
        except TokenizerError as error:
            return [f"the texts could not be counted: {error}"]
    return []


async def make_ready(
    http: aiohttp.ClientSession, target: Target, options: Options, first: Session
) -> list[str]:
    """What the options ask of the server before the timed part. Raises ServerError."""
    notes = []
    if options.warmup_requests:
        notes += await warm_up(http, target, options, first)
    if options.flush_cache:
        notes += await flush_cache(http, options, target.headers)
    if options.profile:
        await profile(http, options, target.headers)
    return notes


async def benchmark(
    options: Options, while_sending: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Run:
    """Prepare, warm up, send, count; what `while_sending` makes is open during the timed part.
    Raises ServerError, DatasetError, TokenizerError."""
    headers = request_headers(options)
    raise_descriptor_limit()
    async with open_session() as http:
        named = await wait_until_ready(http, options, headers)
        info = await get_json(http, f"{options.url}/model_info", headers) or {}
        model = options.served_model_name or options.model or named or "default"
        given = [options.model, info.get("tokenizer_path"), info.get("model_path"), named]
        names = list(dict.fromkeys(name for name in given if isinstance(name, str) and name))
        tokenizer, dataset = await asyncio.to_thread(prepare, options, names, model, headers)
        times = plan_arrivals(options, dataset.sessions)
        target = Target(
            url=f"{options.url}{options.api.path}",
            kind=options.api.kind,
            headers=headers,
            stream=not options.disable_stream,
            ignore_eos=not options.disable_ignore_eos,
            make_body=lambda prompt, turn: build_body(options, model, prompt, turn),
        )
        notes = []
        wanted = options.num_prompts
        if wanted is not None and dataset.num_requests < wanted:
            notes.append(f"the data set had only {dataset.num_requests} of {wanted} prompts")
        notes += await make_ready(http, target, options, dataset.sessions[0])
        run = LoadRun(
            http,
            target,
            max_concurrency=options.max_concurrency,
            stall_timeout=options.stall_timeout_sec,
            on_end=print_record if options.print_requests else None,
        )
        retracted_before = await retraction_counter(http, options.url, headers)
        with progress(run, dataset.num_requests, not options.disable_tqdm), while_sending():
            result = await run.run(dataset.sessions, times)
        # After the timed part: a slow answer must not count.
        if options.profile and options.profile_num_steps is None:
            notes += await stop_profile(http, options, headers)
        retracted_after = await retraction_counter(http, options.url, headers)
        server_info = await get_json(http, f"{options.url}/server_info", headers)
    counted = None
    if retracted_before is not None and retracted_after is not None:
        counted = retracted_after - retracted_before
    notes += await asyncio.to_thread(retokenize, result.records, tokenizer)
    return Run(
        options=options,
        summary=summarize(
            result.records, result.dropped_arrivals, options.slos_ms, options.steady_state_ratio
        ),
        records=result.records,
        model=model,
        tokenizer=tokenizer.description,
        dataset=dataset.note,
        client_cpu_share=result.client_cpu_share,
        interrupted=result.interrupted,
        server_info=server_info,
        retractions_counted=counted,
        notes=notes,
    )


def prepare(
    options: Options, names: Sequence[str], model: str, headers: dict[str, str]
) -> tuple[TextTokenizer, Dataset]:
    tokenizer = load_tokenizer(options.tokenizer, names, options.url, model, headers)
    return tokenizer, build_dataset(options, tokenizer)


def run_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:  # not on every platform; the plain loop is right, only slower
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 when more requests failed than --max-failures or the run could not be
    made, 2 for a bad command line, 130 when interrupted. The report is printed in every case in
    which anything was sent."""
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv)
    except OptionError as error:
        print(f"bench_serving: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if options.sweep is not None:
        from bench.sweep import run_sweep  # it is made of many runs of this

        return run_sweep(options)
    try:
        run = run_loop(benchmark(options))
    except (ServerError, DatasetError, TokenizerError, ShareGptError) as error:
        print(f"bench_serving: error: {error}", file=sys.stderr)
        return EXIT_FAILURES
    except KeyboardInterrupt:
        print("bench_serving: interrupted before the run", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(format_report(run))
    planned = run.summary.sent + run.summary.dropped_arrivals
    file = Path(options.output_file or default_output_file(options, planned, datetime.now()))
    with file.open("ab") as output:
        output.write(json_line(run))
    print(f"Result appended to {file}")
    if run.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURES if run.failed_too_often else 0


if __name__ == "__main__":
    sys.exit(main())
