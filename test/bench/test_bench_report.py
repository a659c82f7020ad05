"""The report's warnings and its strict JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import datetime

import pytest

from bench.metrics import RequestRecord, Status, summarize
from bench.options import parse_options
from bench.report import format_report
from bench.result import Run, warnings
from bench.result_json import default_output_file, json_line, strict


def run(*arguments: str, records: list[RequestRecord] | None = None) -> Run:
    records = [good_record()] if records is None else records
    return Run(
        options=parse_options(arguments), summary=summarize(records), records=records, model="m",
        tokenizer="t", dataset="d", client_cpu_share=0.1, interrupted=False, server_info=None,
        retractions_counted=None, notes=[],
    )  # fmt: skip


def good_record() -> RequestRecord:
    return RequestRecord(
        index=0, prompt_len=3, requested_len=2, scheduled_at=0.0, sent_at=0.0, ended_at=2.0,
        chunk_times=[1.0, 2.0], chunk_tokens=[1, 1], output_tokens=2, status=Status.OK,
        retokenized_len=2,
    )  # fmt: skip


def test_the_json_line_is_one_line_of_strict_json():
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    failed = RequestRecord(0, 3, 2, 0.0, status=Status.ERROR)  # its e2e latency is not a number
    line = json_line(run("--request-rate", "inf", "--output-details", records=[failed]))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    result = json.loads(line, parse_constant=refuse)
    assert result["request_rate"] == "inf"
    assert result["e2e_latencies"] == [None]
    assert result["schema_version"] == 1


def test_what_json_has_no_word_for_becomes_text_or_null():
    value = {"a": math.inf, "b": [math.nan, (1.5,)], 3: {"c": -math.inf}}
    assert strict(value) == {"a": "inf", "b": [None, [1.5]], "3": {"c": "-inf"}}


def test_keys_of_sglangs_json_line_are_all_there():
    result = json.loads(json_line(run()))
    names = ["e2e_latency", "ttft", "tpot", "itl"]
    marks = ["mean", "median", "std", "p90", "p95", "p99"]
    expected = {f"{mark}_{name}_ms" for name in names for mark in marks} | {
        "tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len",
        "random_input_len", "random_output_len", "random_range_ratio", "server_info", "duration",
        "completed", "total_input_tokens", "total_input_text_tokens", "total_input_vision_tokens",
        "total_output_tokens", "total_output_tokens_retokenized", "request_throughput",
        "input_throughput", "output_throughput", "total_throughput", "concurrency",
        "accept_length", "max_output_tokens_per_s", "max_concurrent_requests", "failed",
        "failures_by_kind", "max_itl_ms", "send_lag_ms_p99", "retractions", "schema_version",
    }  # fmt: skip
    assert expected <= set(result)
    assert "cache_report" not in result
    assert "ttfts" not in result
    assert result["mean_ttft_ms"] == 1000


def test_a_busy_client_and_late_sends_are_warned_about():
    assert warnings(run()) == []
    busy = replace(run(), client_cpu_share=0.95)
    assert "the client was busy 95 % of the time" in warnings(busy)[0]
    late = good_record()
    late.scheduled_at = -0.5
    assert "500 ms or more behind schedule" in warnings(run(records=[late]))[0]


def test_texts_of_which_the_server_counted_no_token_are_warned_about():
    uncounted = good_record()
    uncounted.output_tokens = 0
    assert (
        "the texts hold 2 tokens and the server counted 0" in warnings(run(records=[uncounted]))[0]
    )


def test_answers_that_are_too_long_are_warned_about():
    long = good_record()
    long.requested_len = 1
    assert warnings(run(records=[long])) == ["1 answers had more tokens than demanded"]


def test_the_accept_length_is_shown_when_the_server_has_one():
    assert "Accept length" not in format_report(run())
    info = {"internal_states": [{"avg_spec_accept_length": 2.5}]}
    spoken = replace(run(), server_info=info)
    assert "Accept length:                           2.50" in format_report(spoken)
    assert json.loads(json_line(spoken))["accept_length"] == 2.5
    for odd in ({"internal_states": []}, {"internal_states": [3]}, {"internal_states": None}):
        assert replace(run(), server_info=odd).accept_length is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "inf"),
        (["--request-rate", "2.5"], "2.5"),
        (
            ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9"],
            "linear ramp 1 -> 9",
        ),
    ],
)
def test_the_offered_rate_is_printed(arguments, text):
    assert f"{'Traffic request rate:':<40} {text}\n" in format_report(run(*arguments))


def test_default_output_names_follow_the_data_set():
    day = datetime(2026, 3, 9)
    options = parse_options(["--dataset-name", "random-ids", "--random-input-len", "8"])
    assert default_output_file(options, 5, day) == "sglang_0309_5_8_1024.jsonl"
    options = parse_options(["--backend", "vllm"])
    assert default_output_file(options, 5, day) == "vllm_0309_5_sharegpt.jsonl"
