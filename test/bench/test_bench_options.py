"""The command line: what is accepted does something, what cannot be done is refused by name."""

from __future__ import annotations

import dataclasses
import math

import pytest

from bench.option_fields import OptionError
from bench.options import Options, build_parser, parse_options


def test_defaults_are_those_of_sglangs_benchmark():
    options = parse_options([])
    assert (options.backend, options.dataset_name, options.seed) == ("sglang", "sharegpt", 42)
    assert (options.request_rate, options.warmup_requests) == (math.inf, 1)
    assert options.url == "http://127.0.0.1:30000"
    assert parse_options(["--backend", "vllm"]).url == "http://127.0.0.1:8000"
    assert parse_options(["--base-url", "http://there:1/"]).url == "http://there:1"
    assert parse_options(["--host", "there", "--port", "5"]).url == "http://there:5"


def test_every_field_is_an_option_with_a_help_text():
    known = build_parser().format_help()
    for field in dataclasses.fields(Options):
        assert "--" + field.name.replace("_", "-") in known
        assert field.metadata["help"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio must be in [0, 1], got 1.5"),
        (["--request-rate", "0"], "--request-rate must be a number above 0, got 0.0"),
        (["--request-rate", "nan"], "--request-rate must be a number above 0, got nan"),
        (["--request-rate", "fast"], "--request-rate"),
        (["--stall-timeout-sec", "inf"], "--stall-timeout-sec must be a number above 0"),
        (["--max-failures", "-2"], "--max-failures must be at least -1, got -2"),
        (["--top-p", "0"], "--top-p must be in (0, 1], got 0.0"),
        (["--base-url", "localhost:80"], "--base-url localhost:80: expected http://"),
        (["--port", "70000"], "--port must be in [1, 65535], got 70000"),
        (["--burstiness", "0.5"], "--burstiness needs a finite --request-rate"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "linear"], "needs both --ramp-up-start-rps"),
        (
            ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2",
             "--request-rate", "3"],
            "exclude each other",
        ),
        (
            ["--use-trace-timestamps", "--dataset-name", "random"],
            "data set random has no timestamps",
        ),
        (["--use-trace-timestamps", "--request-rate", "2"], "excludes --request-rate"),
        (["--mooncake-slowdown-factor", "2"], "needs --use-trace-timestamps"),
        (["--dataset-name", "custom"], "--dataset-name custom needs --dataset-path"),
        (["--dataset-path", "/no/such/file"], "/no/such/file: no such file"),
        (["--dataset-name", "random-ids", "--dataset-path", "x"], "reads no file"),
        (["--dataset-name", "random", "--dataset-offset", "3"], "reads no records"),
        (["--gsp-group-distribution", "zipf"], "need each other"),
        (["--gsp-zipf-alpha", "1.1"], "need each other"),
        (["--backend", "vllm-chat", "--tokenize-prompt"], "takes only text"),
        (["--backend", "vllm-chat", "--apply-chat-template"], "the server applies its own"),
        (["--tokenize-prompt", "--gsp-num-turns", "2"], "sessions of several turns"),
        (["--backend", "vllm", "--return-logprob"], "--return-logprob needs --backend sglang"),
        (["--top-logprobs-num", "2"], "need --return-logprob"),
        (["--backend", "lmdeploy", "--flush-cache"], "has no route for it"),
        (["--goodput", "itl:5"], "--goodput itl:5: expected each of ttft, tpot, e2el"),
        (["--goodput", "ttft:0"], "--goodput ttft:0"),
        (["--goodput", "ttft:5", "ttft:6"], "at most once"),
        (["--header", "novalue"], "--header novalue: expected NAME=VALUE"),
        (["--extra-request-body", "{"], "--extra-request-body is not JSON"),
        (["--extra-request-body", '{"stream": true}'], "use --disable-stream"),
        (["--extra-request-body", "[]"], "must be a JSON object"),
        (["--output-file", "/no/such/folder/x.jsonl"], "--output-file"),
        (["--num", "5"], "--num"),  # no abbreviations
        (["--no-such-option"], "--no-such-option"),
        (["--backend", "trt"], "--backend"),
        (["--dataset-name", "longbench_v2"], "--dataset-name"),
        (["--lora-name", "a"], "--lora-name is not supported: LoRA"),
        (["--profile-by-stage"], "--profile-by-stage is not supported"),
        (["--profile-num-steps=3"], "--profile-num-steps needs --profile"),
        (["--profile", "--backend", "llama.cpp"], "has no route for it"),
        (["--profile-decode-url", "x"], "--profile-decode-url is not supported"),
        (["--pd-separated"], "--pd-separated is not supported"),
        (["--image-count", "2"], "--image-count is not supported"),
        (["--speed-bench-split", "x"], "--speed-bench-split is not supported"),
        (["--mooncake-workload", "conversation"], "pass the file with --dataset-path"),
        (["--rust-client"], "--rust-client is not supported"),
        (["--plot-throughput"], "--plot-throughput is not supported"),
        (["--fake-prefill"], "--fake-prefill is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_reason(arguments, said):
    with pytest.raises(OptionError) as caught:
        parse_options(arguments)
    assert said in str(caught.value)


def test_recorded_messages_need_a_chat_backend(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text("{}")
    arguments = ["--dataset-name", "openai", "--dataset-path", str(file)]
    with pytest.raises(OptionError, match="use one of the backends sglang-oai-chat, vllm-chat"):
        parse_options(arguments)
    assert parse_options([*arguments, "--backend", "sglang-oai-chat"]).dataset_path == str(file)


def test_lists_of_values_are_parsed():
    options = parse_options(
        ["--goodput", "ttft:100", "tpot:20.5", "--header", "A=1", "B=x=y", "--return-logprob",
         "--token-ids-logprob", "3", "4"]
    )  # fmt: skip
    assert options.slos_ms == {"ttft": 100.0, "tpot": 20.5}
    assert options.headers == {"A": "1", "B": "x=y"}
    assert options.token_ids_logprob == (3, 4)
