"""The load generator end to end against a stub server in each of its modes."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest
from bench_command import NATIVE, OUTPUT_LEN, lines_of
from stub_server import StubServer, word

from bench import load
from bench.backends import BACKENDS
from bench.server_routes import read_retractions

ODD = ["comments", "event_lines", "crlf", "unasked_usage", "no_finish_reason"]
# Backends of one API differ only in a request's fields, so not each needs every mode.
OPENAI = [(backend, "ok") for backend in BACKENDS if backend != NATIVE]
OPENAI_ODD = [(backend, mode) for backend in ("sglang-oai", "vllm-chat") for mode in ODD]


@pytest.mark.parametrize("mode", ["ok", *ODD, "incremental"])
def test_a_native_server_with_odd_but_legal_streams_is_measured_in_full(bench, mode):
    with StubServer(mode) as server:
        outcome = bench(server, "--backend", NATIVE)
    assert outcome.code == 0, outcome.errors
    result = outcome.result
    assert (result["completed"], result["failed"], result["short"]) == (4, 0, 0)
    assert result["total_output_tokens"] == 4 * OUTPUT_LEN
    assert result["total_output_tokens_retokenized"] == 4 * OUTPUT_LEN
    assert result["total_input_tokens"] == 4 * 12
    assert result["generated_texts"] == [word(OUTPUT_LEN)] * 4
    assert result["token_sources"] == {"server": 4}
    assert result["retractions"] == 4
    assert result["mean_ttft_ms"] > 0


@pytest.mark.parametrize(("backend", "mode"), OPENAI + OPENAI_ODD)
def test_an_openai_server_with_odd_but_legal_streams_is_measured_in_full(bench, backend, mode):
    with StubServer(mode) as server:
        outcome = bench(server, "--backend", backend)
    assert outcome.code == 0, outcome.errors
    result = outcome.result
    assert (result["completed"], result["failed"], result["short"]) == (4, 0, 0)
    assert result["total_output_tokens"] == 4 * OUTPUT_LEN
    assert result["total_output_tokens_retokenized"] == 4 * OUTPUT_LEN
    assert result["generated_texts"] == [word(OUTPUT_LEN)] * 4
    assert result["token_sources"] == {"server": 4}


@pytest.mark.parametrize("backend", [NATIVE, "sglang-oai", "vllm-chat"])
def test_missing_counts_are_replaced_by_our_own_and_the_report_says_so(bench, backend):
    with StubServer("no_completion_tokens") as server:
        outcome = bench(server, "--backend", backend)
    assert outcome.code == 0, outcome.errors
    assert outcome.result["total_output_tokens"] == 4 * OUTPUT_LEN
    assert outcome.result["token_sources"] == {"retokenized": 4}
    assert lines_of(outcome.printed)["Tokens counted by"] == "retokenising (4)"


@pytest.mark.parametrize("backend", [NATIVE, "sglang-oai"])
@pytest.mark.parametrize("mode", ["ok", "error_event"])
def test_streams_are_read_to_their_end_so_that_no_server_sees_a_client_leave(bench, backend, mode):
    with StubServer(mode, pace=0.002) as server:
        bench(server, "--backend", backend)
    assert server.num_cut_off == 0


def test_text_lost_on_the_way_is_warned_about(bench):
    with StubServer("lost_text") as server:
        outcome = bench(server)
    assert outcome.result["total_output_tokens"] == 4 * OUTPUT_LEN
    assert outcome.result["total_output_tokens_retokenized"] == 4
    assert "the texts hold 4 tokens and the server counted 32" in outcome.printed


@pytest.mark.parametrize("backend", [NATIVE, "sglang-oai", "vllm-chat"])
@pytest.mark.parametrize("mode", ["ok", "whole"])
def test_an_answer_in_one_document_has_tokens_and_no_first_token_time(bench, backend, mode):
    arguments = ["--disable-stream"] if mode == "ok" else []
    with StubServer(mode) as server:
        outcome = bench(server, "--backend", backend, *arguments)
    assert outcome.code == 0, outcome.errors
    result = outcome.result
    assert result["completed"] == 4
    assert result["total_output_tokens"] == 4 * OUTPUT_LEN
    assert result["mean_e2e_latency_ms"] > 0
    assert result["mean_ttft_ms"] is None
    assert result["mean_tpot_ms"] is None


def test_the_report_has_the_labels_that_scripts_look_for(bench):
    with StubServer() as server:
        outcome = bench(
            server, "--goodput", "ttft:60000", "e2el:60000", "--cache-report", "--tag", "try"
        )
    report = lines_of(outcome.printed)
    for label in (
        "Backend", "Traffic request rate", "Max request concurrency", "Successful requests",
        "Failed requests", "Benchmark duration (s)", "Total input tokens",
        "Total input text tokens", "Total generated tokens",
        "Total generated tokens (retokenized)", "Request throughput (req/s)",
        "Input token throughput (tok/s)", "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)", "Peak concurrent requests",
        "Total token throughput (tok/s)", "Concurrency", "SLOs (ms)", "Request goodput (req/s)",
        "SLO attainment (%)", "TTFT SLO attainment (%)", "E2EL SLO attainment (%)",
        "Mean E2E Latency (ms)", "Median E2E Latency (ms)", "P90 E2E Latency (ms)",
        "P95 E2E Latency (ms)", "P99 E2E Latency (ms)", "Mean TTFT (ms)", "P99 TTFT (ms)",
        "Mean TPOT (ms)", "P99 TPOT (ms)", "Mean ITL (ms)", "P99 ITL (ms)", "Max ITL (ms)",
        "P99 send lag (ms)", "Dropped arrivals", "Client CPU (% of one core)",
    ):  # fmt: skip
        assert label in report, label
    assert report["SLO attainment (%)"] == "100.00"
    assert report["SLOs (ms)"] == "ttft:60000 e2el:60000"
    rows = outcome.printed.splitlines()
    assert rows[0] == f"{' Serving Benchmark Result ':=^50}"
    assert f"{'Time to First Token':-^50}" in rows
    assert "=" * 50 in rows
    assert next(row for row in rows if row.startswith("Backend:")).index("sglang") == 41
    result = outcome.result
    assert result["tag"] == "try"
    assert result["cache_report"]["total_cached_tokens"] == 4 * 2
    assert result["slo_attainment"] == 1.0
    assert result["server_info"]["version"] == "stub"


def test_a_bodys_fields_are_those_the_native_route_expects(bench):
    with StubServer() as server:
        bench(
            server, "--return-logprob", "--top-logprobs-num", "2", "--logprob-start-len", "0",
            "--extra-request-body", '{"priority": 3}', "--header", "X-Team=blue", "--top-p", "0.5",
        )  # fmt: skip
        _, body, headers = next(r for r in reversed(server.requests) if r[0] == "/generate")
    assert body["sampling_params"] == {
        "temperature": 0.0, "max_new_tokens": OUTPUT_LEN, "ignore_eos": True, "top_p": 0.5,
    }  # fmt: skip
    assert isinstance(body["text"], str)
    assert (body["return_logprob"], body["top_logprobs_num"]) == (True, 2)
    assert (body["logprob_start_len"], body["priority"], body["stream"]) == (0, 3, True)
    assert headers["X-Team"] == "blue"


def test_token_ids_are_sent_when_asked_for(bench):
    with StubServer() as server:
        outcome = bench(server, "--tokenize-prompt")
        sent = server.sent("/generate")
    assert all(len(body["input_ids"]) == 12 for body in sent)
    assert outcome.result["input_lens"] == [12] * 4


def test_warm_up_is_short_and_not_counted_and_the_cache_is_flushed_behind_it(bench):
    with StubServer() as server:
        outcome = bench(
            server, "--warmup-requests", "2", "--random-output-len", "40", "--flush-cache"
        )
        paths = [path for path, _, _ in server.requests if path in ("/generate", "/flush_cache")]
        lengths = [b["sampling_params"]["max_new_tokens"] for b in server.sent("/generate")]
    assert paths == ["/generate"] * 2 + ["/flush_cache"] + ["/generate"] * 4
    assert lengths == [32, 32, 40, 40, 40, 40]
    assert outcome.result["completed"] == 4


def test_the_server_traces_the_run_and_not_the_warm_up(bench):
    with StubServer() as server:
        bench(server, "--profile", "--profile-output-dir", "x")
        bench(server, "--profile", "--profile-num-steps", "3")
        paths = [path for path, _, _ in server.requests if "profile" in path or path == "/generate"]
        wishes = server.sent("/start_profile")
    once = ["/generate", "/start_profile", *["/generate"] * 4]
    assert paths == [*once, "/stop_profile", *once]
    assert wishes == [
        {"output_dir": "x", "activities": ["CPU"]},
        {"num_steps": 3, "activities": ["CPU"]},
    ]


def test_a_run_whose_profile_cannot_be_started_is_not_made(bench):
    with StubServer() as server:
        server.is_profiling = True
        refused = bench(server, "--profile")
        assert refused.code != 0 and "/start_profile: HTTP 400: not now" in refused.errors


def test_a_missing_flush_route_of_vllm_is_a_warning_and_of_sglang_an_error(bench):
    with StubServer() as server:
        outcome = bench(server, "--backend", "vllm", "--flush-cache")
        assert outcome.code == 0
        assert "the cache was not flushed" in outcome.printed
        refused = bench(server, "--backend", "llama.cpp", "--flush-cache")
    assert refused.code == 2
    assert "--flush-cache: backend llama.cpp has no route for it" in refused.errors


def test_no_more_requests_run_at_once_than_allowed(bench):
    with StubServer() as server:
        outcome = bench(server, "--max-concurrency", "2", "--num-prompts", "12")
    assert outcome.result["completed"] == 12
    assert outcome.result["max_concurrent_requests"] <= 2
    assert outcome.result["max_concurrency"] == 2
    assert "P99 wait for concurrency (ms)" in lines_of(outcome.printed)


def test_a_seed_decides_what_is_sent(bench):
    def prompts(seed: str) -> list[str]:
        with StubServer() as server:
            bench(server, "--seed", seed, "--warmup-requests", "0")
            return sorted(body["text"] for body in server.sent("/generate"))

    assert prompts("1") == prompts("1")
    assert prompts("1") != prompts("2")


def test_the_turns_of_a_session_carry_the_replies_before_them(bench):
    with StubServer() as server:
        outcome = bench(
            server, "--backend", "sglang-oai-chat", "--dataset-name", "generated-shared-prefix",
            "--num-prompts", "1", "--gsp-num-groups", "1", "--gsp-prompts-per-group", "1",
            "--gsp-system-prompt-len", "20", "--gsp-question-len", "6", "--gsp-output-len", "5",
            "--gsp-num-turns", "3", "--warmup-requests", "0", "--gsp-send-routing-key",
        )  # fmt: skip
        sent = server.sent("/v1/chat/completions")
        keys = {h["X-SMG-Routing-Key"] for p, _, h in server.requests if "chat" in p}
    assert outcome.code == 0, outcome.errors
    assert [len(body["messages"]) for body in sent] == [1, 3, 5]
    assert sent[2]["messages"][:3] == sent[1]["messages"]
    assert [m["role"] for m in sent[2]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert sent[1]["messages"][1]["content"] == word(5)
    assert [len(key) for key in keys] == [16]
    assert outcome.result["completed"] == 3


def test_turns_behind_a_failed_one_are_dropped_and_counted(bench):
    with StubServer("http_503") as server:
        outcome = bench(
            server, "--dataset-name", "generated-shared-prefix", "--num-prompts", "2",
            "--gsp-num-groups", "2", "--gsp-prompts-per-group", "1", "--gsp-num-turns", "3",
            "--gsp-system-prompt-len", "20", "--gsp-question-len", "6",
        )  # fmt: skip
    assert outcome.result["failed"] == 2
    assert outcome.result["dropped_arrivals"] == 4


def test_recorded_chat_requests_arrive_at_their_times_with_their_own_keys(bench, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "b"}], "max_tokens": 3, "timestamp": 1060},
        {
            "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "timestamp": 1000,
            "tools": [{"type": "function"}],
        },
    ]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    with StubServer() as server:
        outcome = bench(
            server, "--backend", "vllm-chat", "--dataset-name", "openai", "--dataset-path",
            str(file), "--use-trace-timestamps", "--mooncake-slowdown-factor", "2",
            "--warmup-requests", "0",
        )  # fmt: skip
        sent = server.sent("/v1/chat/completions")
    assert [body["messages"][0]["content"] for body in sent] == ["a", "b"]
    assert sent[0]["tools"] == [{"type": "function"}]
    assert [body["max_completion_tokens"] for body in sent] == [4, 3]
    first, second = outcome.result["start_times"]
    assert second - first >= 0.1
    assert outcome.result["request_rate"] == "trace"
    assert "the data set had only 2 of 4 prompts" in outcome.printed


def test_an_interrupt_ends_the_run_with_a_report(bench, tmp_path):
    turns = [{"value": "a question"}, {"value": "an answer"}]
    far_ms = 10_000_000
    rows = [{"conversations": turns, "timestamp": t} for t in (0, 0, 0, far_ms, far_ms)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    with StubServer("stall") as server:

        def interrupt_when_three_wait() -> None:
            server.wait_for_posts("/generate", 3)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt_when_three_wait)
        thread.start()
        outcome = bench(
            server, "--warmup-requests", "0", "--dataset-name", "custom", "--dataset-path",
            str(file), "--use-trace-timestamps", "--num-prompts", "5",
        )  # fmt: skip
        thread.join(10)
    assert outcome.code == 130
    result = outcome.result
    assert result["interrupted"] is True
    assert result["failures_by_kind"] == {"interrupted": 3}
    assert result["dropped_arrivals"] == 2
    assert "the run was interrupted" in outcome.printed


def test_an_interrupt_drops_what_waits_for_a_permit(bench):
    with StubServer("stall") as server:

        def interrupt_when_two_wait() -> None:
            server.wait_for_posts("/generate", 2)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt_when_two_wait)
        thread.start()
        outcome = bench(server, "--warmup-requests", "0", "--max-concurrency", "2")
        thread.join(10)
        assert len(server.sent("/generate")) == 2
    assert outcome.code == 130
    assert outcome.result["failures_by_kind"] == {"interrupted": 2}
    assert outcome.result["dropped_arrivals"] == 2


def test_a_bug_in_the_generator_is_raised_and_not_counted_as_a_failure(bench, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(load, "judge", broken)
    with StubServer() as server, pytest.raises(ZeroDivisionError, match="ours"):
        bench(server)


def test_a_server_that_is_not_there_is_named(bench):
    gone = StubServer()
    with gone:
        pass
    outcome = bench(gone, "--ready-check-timeout-sec", "0.05")
    assert outcome.code == 1
    assert f"{gone.url}/v1/models was not ready" in outcome.errors
    assert outcome.result is None


def test_a_missing_key_is_said_at_once_and_not_waited_for(bench):
    with StubServer("no_key") as server:
        outcome = bench(server, "--ready-check-timeout-sec", "30")
    assert (outcome.code, outcome.result) == (1, None)
    assert "answered 401" in outcome.errors and "OPENAI_API_KEY" in outcome.errors


def test_no_tokenizer_anywhere_is_an_error_that_says_what_to_pass(bench):
    with StubServer(tokenize=False) as server:
        outcome = bench(server)
    assert outcome.code == 1
    assert "/nowhere/stub.gguf" in outcome.errors
    assert "pass --tokenizer" in outcome.errors


def test_each_ended_request_is_printed_when_asked_for(bench):
    with StubServer() as server:
        outcome = bench(server, "--print-requests")
    rows = [row for row in outcome.printed.splitlines() if row.startswith("request ")]
    assert len(rows) == 4
    assert "ok, input 12, output 8 of 8" in rows[0]


def test_results_are_appended_one_line_a_run(bench, tmp_path):
    file = tmp_path / "all.jsonl"
    with StubServer() as server:
        for _ in range(2):
            assert bench(server, "--output-file", str(file)).code == 0
    lines = file.read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [4, 4]


def test_a_file_that_cannot_be_written_is_refused_before_the_run(bench, tmp_path):
    with StubServer() as server:
        outcome = bench(server, "--output-file", str(tmp_path / "none" / "out.jsonl"))
        assert server.sent("/generate") == []
    assert outcome.code == 2
    assert "--output-file" in outcome.errors


def test_the_progress_bar_goes_to_stderr_and_leaves_the_report_alone(bench):
    with StubServer() as server:
        outcome = bench(server, "--num-prompts", "3", bar=True)
    assert outcome.result["completed"] == 3
    assert "3/3" in outcome.errors
    assert outcome.printed.startswith("=")


def test_tpot_is_that_of_the_tokens_which_came(bench):
    pace = 0.01
    with StubServer("short", pace=pace) as server:
        outcome = bench(server, "--random-output-len", "100", "--num-prompts", "1")
    result = outcome.result
    shown = (result["e2e_latencies"][0] - result["ttfts"][0]) / (5 - 1)
    assert result["mean_tpot_ms"] == pytest.approx(shown * 1000)
    assert shown >= 0.9 * pace
    assert result["mean_itl_ms"] == pytest.approx(sum(result["itls"][0]) / 4 * 1000)


def test_retractions_come_from_the_servers_counter_when_answers_do_not_say(bench):
    with StubServer() as server:
        assert bench(server, "--backend", "vllm").result["retractions"] == 3
        assert bench(server, "--backend", "sglang").result["retractions"] == 4


def test_retraction_counters_are_read_from_any_prometheus_spelling():
    name = "sglang:num_retracted_requests_total"
    assert read_retractions(f'{name}{{tp_rank="0"}} 2.0\n{name}{{tp_rank="1"}} 3 1700000\n') == 5
    assert read_retractions("# HELP x\nvllm:num_preemptions_total 4\n") == 4
    assert read_retractions(f"{name}{{}} broken\n") is None
    assert read_retractions("sglang:num_running_reqs 1\n") is None
    assert read_retractions("") is None
