"""The command line, the config file and Python agree on every option."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from srt.server_args import ServerArgs, ServerArgsError

# A value of every option that is not its default.
OTHER_VALUES = {
    "model_path": "some/model",
    "tokenizer_path": "some/tokenizer",
    "served_model_name": "name with spaces",
    "revision": "main",
    "cache_dir": "/somewhere",
    "load_format": "dummy",
    "dtype": "bfloat16",
    "kv_cache_dtype": "float16",
    "quantization": "int4",
    "context_length": 4096,
    "json_model_override_args": '{"rope_theta": 1e6}',
    "device": "cpu",
    "host": "0.0.0.0",
    "port": 0,
    "api_key": "-starts-with-a-dash",
    "api_key_file": "keys.txt",
    "admin_api_key": "admin",
    "ssl_certfile": "cert.pem",
    "ssl_keyfile": "key.pem",
    "ssl_ca_certs": "ca.pem",
    "cors_allow_origins": "https://a.example",
    "max_body_bytes": 2048,
    "body_timeout": 1.5,
    "max_restarts": 2,
    "watchdog_timeout": 12.5,
    "load_timeout": 120.0,
    "crash_dump_folder": "some/folder",
    "drain_timeout": 5.5,
    "header_timeout": 2.5,
    "max_call_requests": 7,
    "slow_client_timeout": 9.5,
    "queue_timeout": 2.5,
    "request_timeout": 3.5,
    "skip_server_warmup": True,
    "log_level": "debug",
    "log_requests": True,
    "log_requests_level": 2,
    "log_requests_format": "json",
    "mem_fraction_static": 0.123456789,
    "max_running_requests": 7,
    "max_total_tokens": 1000,
    "page_size": 16,
    "disable_radix_cache": True,
    "max_queued_requests": 12,
    "max_connections": 500,
    "max_queue_age": 2.5,
    "chunked_prefill_size": -1,
    "max_prefill_tokens": 512,
    "prefill_max_requests": 4,
    "schedule_policy": "lpm",
    "schedule_conservativeness": 0.3,
    "admission": "ratio",
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "default_priority_value": -5,
    "abort_on_priority_when_disabled": True,
    "disable_priority_preemption": True,
    "priority_scheduling_preemption_threshold": 3,
    "retraction_policy": "priority",
    "tenant_weights": '{"alice": 2.5}',
    "fair_output_weight": 4.0,
    "phase_policy": "slo",
    "prefill_decode_interval": 3,
    "prefill_decode_interval_min_bs": 2,
    "target_ttft_ms": 500.0,
    "target_itl_ms": 50.0,
    "enable_mixed_chunk": True,
    "batching": "static",
    "batching_timeout_ms": 25.0,
    "overlap_schedule": "on",
    "disable_overlap_schedule": True,
    "journal": "journal.jsonl",
    "random_seed": 42,
    "retract_every": 3,
    "batch_invariant": True,
    "disable_cuda_graph": True,
    "cuda_graph_max_bs": 16,
    "profile_dir": "traces",
    "decode_log_interval": 1,
    "stream_interval": 8,
    "stream_response_default_include_usage": True,
    "incremental_streaming_output": True,
    "chat_template": "template.jinja",
    "sampling_defaults": "openai",
    "preferred_sampling_params": '{"temperature": 0.5}',
    "allow_auto_truncate": True,
}


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        ServerArgs.from_cli(argv)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_no_arguments_give_the_defaults_and_defaults_need_no_arguments():
    assert ServerArgs.from_cli([]) == ServerArgs()
    assert ServerArgs().to_cli() == []


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(ServerArgs)])
def test_every_field_round_trips_through_the_command_line(name):
    args = ServerArgs(**{name: OTHER_VALUES[name]})
    assert args != ServerArgs()
    assert ServerArgs.from_cli(args.to_cli()) == args


def test_all_fields_together_round_trip_through_the_command_line():
    args = ServerArgs(**OTHER_VALUES)
    assert ServerArgs.from_cli(args.to_cli()) == args


def test_a_value_may_follow_its_flag_with_a_space_or_an_equals_sign():
    spaced = ServerArgs.from_cli(["--model", "m", "--chunked-prefill-size", "-1"])
    assert spaced == ServerArgs.from_cli(["--model-path=m", "--chunked-prefill-size=-1"])
    assert (spaced.model_path, spaced.chunked_prefill_size) == ("m", -1)


def test_the_last_of_two_equal_flags_wins():
    args = ServerArgs.from_cli(["--port", "1", "--port", "2", "--skip-server-warmup"])
    assert args.port == 2
    assert not ServerArgs.from_cli([*args.to_cli(), "--no-skip-server-warmup"]).skip_server_warmup


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--port", "70000"], ["--port", "70000", "[0, 65535]"]),
        (["--port", "x"], ["--port", "'x'", "an integer"]),
        (["--port", "1.5"], ["--port", "'1.5'", "an integer"]),
        (["--port"], ["--port"]),
        (["--max-running-requests", "0"], ["--max-running-requests", "0", "at least 1"]),
        (["--dtype", "int8"], ["--dtype", "'int8'", "bfloat16"]),
        (["--chunked-prefill-size", "0"], ["--chunked-prefill-size", "-1", "got 0"]),
        (["--chunked-prefill-size", "-2"], ["--chunked-prefill-size", "-2"]),
        (["--mem-fraction-static", "1.0"], ["--mem-fraction-static", "1.0", "0.99"]),
        (["--mem-fraction-static", "nan"], ["--mem-fraction-static", "nan"]),
        (["--max-queue-age", "inf"], ["--max-queue-age", "inf"]),
        (["--host", ""], ["--host", "non-empty"]),
        (["--json-model-override-args", "{"], ["--json-model-override-args", "JSON object"]),
        (["--json-model-override-args", "[1]"], ["--json-model-override-args", "JSON object"]),
        (
            ["--preferred-sampling-params", '{"top_p": 2}'],
            ["--preferred-sampling-params", "top_p must be in (0, 1], got 2.0"],
        ),
        (["model"], ["unexpected argument 'model'"]),
    ],
)
def test_a_bad_value_is_refused_with_flag_value_and_limit(argv, parts, capsys):
    message = error_of(argv, capsys)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--prot", "--port"),
        ("--schedule-polcy", "--schedule-policy"),
        ("--max-running-request", "--max-running-requests"),
        ("--disable-radix", "--disable-radix-cache"),
        ("--sched=fcfs", "--schedule-policy"),
    ],
)
def test_an_unknown_or_abbreviated_flag_is_refused_with_the_nearest_one(flag, nearest, capsys):
    message = error_of([flag, "1"], capsys)
    assert f"unknown option {flag.split('=')[0]}; the nearest is {nearest}\n" in message


@pytest.mark.parametrize(
    "argv",
    [
        ["--enable-lora"],
        ["--lora-paths", "a=b", "c=d"],
        ["--max-loras-per-batch", "4"],
        ["--max-lora-rank=8"],
        ["--speculative-algorithm", "EAGLE"],
        ["--disaggregation-mode", "prefill"],
        ["--enable-hierarchical-cache"],
        ["--hicache-ratio", "2"],
        ["--ep-size", "2"],
        ["--expert-parallel-size=2"],
        ["--enable-eplb"],
        ["--enable-multimodal"],
        ["--mm-attention-backend", "x"],
        ["--attention-backend", "flashinfer"],
        ["--disable-cuda-graph-padding"],
        ["--trust-remote-code"],
        ["--bucket-time-to-first-token", "0.1", "0.5"],
        ["--tool-call-parser=qwen25"],
    ],
)
def test_flags_of_absent_features_are_dropped_with_a_warning_that_names_them(argv, caplog):
    args = ServerArgs.from_cli(["--port", "1", *argv, "--host", "h"])
    assert args == ServerArgs(port=1, host="h")
    assert len(caplog.records) == 1
    assert argv[0].split("=")[0] in caplog.text


@pytest.mark.parametrize(
    ("argv", "wrong"),
    [
        (["--tp", "1"], "2"),
        (["--tensor-parallel-size=1"], "2"),
        (["--dp-size", "1"], "4"),
        (["--nnodes", "1"], "2"),
        (["--base-gpu-id", "0"], "1"),
        (["--num-continuous-decode-steps", "1"], "8"),
        (["--radix-eviction-policy", "lru"], "lfu"),
    ],
)
def test_a_flag_of_sglang_is_taken_at_the_value_that_is_true_here(argv, wrong, caplog, capsys):
    args = ServerArgs.from_cli(["--port", "1", *argv, "--enable-metrics", "--enable-cache-report"])
    assert args == ServerArgs(port=1)
    assert caplog.records == []
    flag, *rest = argv[0].split("=")
    right = (rest or argv[1:])[0]
    assert f"{flag} must be {right} for this server, got '{wrong}'" in error_of(
        [flag, wrong], capsys
    )
    assert f"{flag} must be {right} for this server, got ''" in error_of([flag], capsys)


def test_a_config_file_may_hold_sglangs_flags(tmp_path, caplog, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("port: 1\ntp-size: 1\nenable_metrics: true\nattention-backend: triton\n")
    assert ServerArgs.from_cli(["--config", str(path)]) == ServerArgs(port=1)
    [record] = caplog.records
    assert record.getMessage().endswith(": --attention-backend")
    path.write_text("tp-size: 2\n")
    assert f"--config {path}: --tp-size must be 1" in error_of(["--config", str(path)], capsys)


def test_python_values_of_the_wrong_type_are_refused():
    with pytest.raises(ServerArgsError, match="--port must be an integer"):
        ServerArgs(port="30000")
    with pytest.raises(ServerArgsError, match="--stream-interval must be an integer"):
        ServerArgs(stream_interval=True)
    with pytest.raises(ServerArgsError, match="--disable-radix-cache must be true or false, got 1"):
        ServerArgs(disable_radix_cache=1)
    with pytest.raises(ServerArgsError, match=r"--port must be an integer.*got None"):
        ServerArgs(port=None)
    assert ServerArgs(target_itl_ms=10).target_itl_ms == 10


def test_arguments_cannot_be_changed_and_a_changed_copy_is_checked():
    args = ServerArgs()
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.port = 1
    with pytest.raises(ServerArgsError, match="--port"):
        dataclasses.replace(args, port=-1)


def test_the_api_key_does_not_show_up_in_logs():
    assert "s3cret" not in repr(ServerArgs(api_key="s3cret"))


def test_a_config_file_sets_options_and_the_command_line_wins(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: some/model\nport: 1\nmax_queue_age: 3\nskip-server-warmup: true\n"
        "disable-radix-cache: true\njson-model-override-args: {a: 1}\nrevision: null\n"
    )
    args = ServerArgs.from_cli(
        ["--config", str(path), "--port", "2", "--no-disable-radix-cache", "--dtype", "half"]
    )
    assert args == ServerArgs(
        model_path="some/model",
        port=2,
        max_queue_age=3,
        skip_server_warmup=True,
        json_model_override_args='{"a": 1}',
        dtype="half",
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot: 1", ["unknown option --prot", "--port", "config.yaml"]),
        ("port: [1]", ["--port", "[1]"]),
        ("port: '1'", ["--port", "'1'"]),
        ("- port", ["mapping"]),
        ("a: b: c", ["--config", "config.yaml"]),
    ],
)
def test_a_bad_config_file_is_refused_with_the_reason(text, parts, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    message = error_of(["--config", str(path)], capsys)
    for part in parts:
        assert part in message


def test_a_missing_config_file_is_refused_by_name(tmp_path, capsys):
    assert "none.yaml" in error_of(["--config", str(tmp_path / "none.yaml")], capsys)


def test_help_lists_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_info:
        ServerArgs.from_cli(["--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for f in dataclasses.fields(ServerArgs):
        assert "--" + f.name.replace("_", "-") in text
        if f.default is not None:
            assert f"(default: {f.default})" in text


def test_parsing_arguments_and_sampling_params_does_not_load_torch():
    root = Path(__file__).parent.parent
    code = "import sys, json, srt, srt.server_args; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    modules = json.loads(output)
    assert "srt.sampling_params" in modules
    assert not {"torch", "transformers", "numpy"} & set(modules)


def test_no_flag_of_ours_is_taken_for_one_of_an_absent_feature(caplog):
    args = ServerArgs(**OTHER_VALUES)
    assert ServerArgs.from_cli(args.to_cli()) == args
    assert caplog.records == []
