"""The offline benchmark over an engine that is none."""

from __future__ import annotations

import json

import pytest

from bench import bench_offline
from bench.bench_offline import measure_latency, measure_throughput, parse


class FakeEngine:
    """Answers at once, with what was asked for."""

    def __init__(self, missing: int = 0, can_flush: bool = True) -> None:
        self.can_flush = can_flush
        self.calls: list[tuple[list[list[int]], list[int]]] = []
        self.num_flushed = 0
        self.missing = missing

    def generate(self, *, input_ids, sampling_params):
        assert all(p["ignore_eos"] and p["temperature"] == 0.0 for p in sampling_params)
        lengths = [p["max_new_tokens"] for p in sampling_params]
        self.calls.append((input_ids, lengths))
        return [{"meta_info": {"completion_tokens": n - self.missing}} for n in lengths]

    def flush_cache(self, timeout: float = 0.0) -> bool:
        self.num_flushed += 1
        return self.can_flush


def test_throughput_counts_the_tokens_of_one_call_with_lengths_in_range():
    engine = FakeEngine()
    found = measure_throughput(engine, 1000, 20, 40, 8, 0.5, seed=1)
    prompts, outputs = engine.calls[-1]
    assert len(engine.calls) == 2, "a warm-up, and one call with all requests"
    assert (found.requests, found.input_tokens) == (20, sum(map(len, prompts)))
    assert found.output_tokens == sum(outputs)
    assert all(20 <= len(prompt) <= 40 for prompt in prompts)
    assert all(4 <= length <= 8 for length in outputs)
    assert all(100 <= token < 1000 for prompt in prompts for token in prompt)
    assert found.output_throughput == found.output_tokens / found.seconds


def test_latency_measures_each_size_as_often_as_asked_and_never_from_the_cache():
    engine = FakeEngine()
    found = measure_latency(engine, 1000, [1, 3], 10, 5, repeats=2, seed=1)
    assert [row.batch_size for row in found] == [1, 3]
    measured = [(len(prompts), outputs[0]) for prompts, outputs in engine.calls[1:]]
    assert measured == [(1, 1), (1, 5)] * 2 + [(3, 1), (3, 5)] * 2
    assert engine.num_flushed == 4
    assert all(row.seconds > 0 and row.decode_ms >= 0 for row in found)


def test_a_cache_that_was_not_emptied_is_an_error_and_no_measurement():
    with pytest.raises(RuntimeError, match="not emptied"):
        measure_latency(FakeEngine(can_flush=False), 1000, [1], 10, 5, repeats=1, seed=1)


def test_an_answer_that_is_too_short_is_an_error_and_no_measurement():
    with pytest.raises(AssertionError, match=r"\[3, 3\] tokens for \[4, 4\]"):
        measure_throughput(FakeEngine(missing=1), 1000, 2, 4, 4, 1.0, seed=1)


def test_the_report_is_a_table_or_json(capsys):
    args, server_args = parse(["throughput", "--num-prompts", "2", "--page-size", "4", "--json"])
    assert server_args.page_size == 4
    assert bench_offline._run(args, FakeEngine(), 1000) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2
    args, _ = parse(["latency", "--batch-sizes", "1", "2"])
    assert bench_offline._run(args, FakeEngine(), 1000) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["latency", "--batch-sizes", "0"], "--batch-sizes must be at least 1, got 0"),
        (["throughput", "--range-ratio", "2"], "--range-ratio must be in [0, 1], got 2.0"),
        (["throughput", "--output-len", "0"], "--output-len must be at least 1, got 0"),
        (["throughput", "--no-such-option", "1"], "--no-such-option"),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(arguments, part, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert part in capsys.readouterr().err
