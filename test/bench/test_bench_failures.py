"""Answers that are none, or not whole: what they count as, and what they do to the numbers."""

from __future__ import annotations

import pytest
from bench_command import NATIVE, OUTPUT_LEN, lines_of
from stub_server import StubServer

FAILURES = {
    "error_event": ("error_event", "prompt too long"),
    "error_named": ("error_event", "out of memory"),
    "error_field": ("error_event", "out of memory"),
    "http_400": ("http_400", "refused with 400"),
    "http_503": ("http_503", "refused with 503"),
    "empty": ("empty", "without a single token"),
    "truncated": ("truncated", "without [DONE]"),
    "broken": ("connection", ""),
    "abort": ("abort", ""),
    "abort_word": ("abort", "finish_reason abort"),
    "cancelled": ("abort", "finish_reason cancelled"),
    "web_page": ("empty", "<html>Who are you?"),
    "malformed": ("malformed", "not JSON"),
}


@pytest.mark.parametrize("backend", [NATIVE, "sglang-oai", "vllm-chat"])
@pytest.mark.parametrize("mode", list(FAILURES))
def test_a_run_in_which_all_fail_is_reported_and_exits_with_an_error(bench, backend, mode):
    kind, message = FAILURES[mode]
    with StubServer(mode) as server:
        outcome = bench(server, "--backend", backend)
    assert outcome.code == 1
    result = outcome.result
    assert (result["completed"], result["failed"]) == (0, 4)
    assert result["failures_by_kind"] == {kind: 4}
    assert message in result["failure_examples"][kind]
    assert result["total_output_tokens"] == 0
    assert result["mean_ttft_ms"] is None
    assert result["mean_itl_ms"] is None
    assert result["statuses"] == ["error"] * 4
    report = lines_of(outcome.printed)
    assert report["Successful requests"] == "0"
    assert report["Failed requests"] == "4"
    assert report["Mean TTFT (ms)"] == "n/a"
    assert report[kind] == "4"
    assert "4 requests failed, --max-failures is 0" in outcome.printed
    assert "warm-up requests failed" in outcome.printed


@pytest.mark.parametrize("backend", ["sglang-oai", "vllm-chat"])
def test_numbers_in_place_of_text_fail_the_request_and_not_the_run(bench, backend):
    with StubServer("not_text") as server:
        outcome = bench(server, "--backend", backend)
    assert (outcome.code, outcome.result["failures_by_kind"]) == (1, {"malformed": 4})


@pytest.mark.parametrize("backend", ["sglang-oai", "vllm-chat"])
def test_an_answer_has_ended_with_its_finish_reason_and_not_with_its_last_text(bench, backend):
    with StubServer("silent_tail") as server:
        outcome = bench(server, "--backend", backend)
    result = outcome.result
    assert (outcome.code, result["total_output_tokens"]) == (0, 4 * OUTPUT_LEN)
    times = zip(result["e2e_latencies"], result["ttfts"], strict=True)
    assert min(e2e - ttft for e2e, ttft in times) > 0.08


def test_an_answer_without_text_has_a_latency_and_does_not_spoil_the_others(bench):
    with StubServer("no_text") as server:
        outcome = bench(server, "--backend", "sglang-oai")
    result = outcome.result
    assert (outcome.code, result["completed"]) == (0, 4)
    assert result["mean_e2e_latency_ms"] > 0
    assert result["concurrency"] > 0
    assert result["mean_ttft_ms"] is None, "no first text was seen"


def test_an_answer_stopped_by_nan_is_a_failure(bench):
    with StubServer("nan") as server:
        outcome = bench(server)
    assert outcome.result["failures_by_kind"] == {"nan": 4}


def test_failures_up_to_the_limit_do_not_fail_the_run(bench):
    with StubServer("http_503") as server:
        assert bench(server, "--max-failures", "3").code == 1
        assert bench(server, "--max-failures", "4").code == 0
        assert bench(server, "--max-failures", "-1").code == 0


@pytest.mark.parametrize("backend", [NATIVE, "sglang-oai", "sglang-oai-chat"])
@pytest.mark.parametrize("rate", ["inf", "1000"])
def test_short_answers_count_their_produced_tokens(bench, backend, rate):
    with StubServer("short") as server:
        outcome = bench(
            server, "--backend", backend, "--random-output-len", "100", "--request-rate", rate
        )
    assert outcome.code == 0, outcome.errors
    result = outcome.result
    assert (result["completed"], result["short"], result["failed"]) == (4, 4, 0)
    assert result["total_output_tokens"] == 4 * 5
    assert result["output_lens"] == [5] * 4
    assert result["statuses"] == ["short"] * 4
    assert "4 answers ended with fewer tokens than demanded" in outcome.printed
    assert result["request_rate"] == ("inf" if rate == "inf" else 1000.0)


def test_an_answer_may_end_early_when_the_end_of_text_is_not_ignored(bench):
    with StubServer("short") as server:
        outcome = bench(server, "--random-output-len", "100", "--disable-ignore-eos")
        assert server.sent("/generate")[0]["sampling_params"]["ignore_eos"] is False
    assert (outcome.result["completed"], outcome.result["short"]) == (4, 0)


@pytest.mark.parametrize(("mode", "what"), [("stall", "no answer"), ("stall_midway", "stopped")])
def test_a_silent_server_is_given_up_on(bench, mode, what):
    with StubServer(mode) as server:
        outcome = bench(server, "--stall-timeout-sec", "0.1", "--warmup-requests", "0")
    assert outcome.code == 1
    result = outcome.result
    assert (result["completed"], result["failed"], result["stalled"]) == (0, 4, 4)
    assert result["statuses"] == ["stalled"] * 4
    assert what in result["failure_examples"]["stalled"]
