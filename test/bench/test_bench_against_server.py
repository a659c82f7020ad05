"""The load generator, the sweep and the monitor against our own server, in processes of its own."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from bench.bench_serving import benchmark, main
from bench.options import parse_options
from bench.server_routes import ServerError
from bench.sweep import measure
from bench.sweep_server import launched, patch_setting, scheduler_state
from srt import monitor

LOAD = [
    "--dataset-name", "random-ids", "--random-input-len", "12", "--random-output-len", "9",
    "--num-prompts", "12", "--warmup-requests", "0", "--disable-tqdm", "--tokenize-prompt",
]  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny_model(folder)
    return [f"--model-path={folder}", "--load-format=dummy", "--device=cpu", "--log-level=warning"]


@pytest.mark.slow
def test_the_report_agrees_with_the_servers_counters_to_the_token(model, tmp_path):
    async def run() -> None:
        async with launched([*model, "--skip-server-warmup"], tmp_path / "log") as url:
            options = parse_options([*LOAD, "--base-url", url, "--seed", "5"])
            measured = await measure(options)
            state = await scheduler_state(options)
        summary = measured.run.summary
        assert (summary.completed, summary.failed, summary.short) == (12, 0, 0)
        assert summary.total_output_tokens == measured.server_output_tokens
        assert summary.total_output_tokens == state["generated_tokens"] > 12
        cached = state["prompt_tokens"]
        assert summary.total_input_tokens >= cached, "a cached token is not computed"

    asyncio.run(run())


@pytest.mark.slow
def test_input_tokens_agree_when_no_prompt_can_be_cached(model, tmp_path):
    async def run() -> None:
        arguments = [*model, "--skip-server-warmup", "--disable-radix-cache"]
        async with launched(arguments, tmp_path / "log") as url:
            options = parse_options([*LOAD, "--base-url", url])
            found = await benchmark(options)
            state = await scheduler_state(options)
        assert found.summary.total_input_tokens == state["prompt_tokens"]
        assert found.summary.total_output_tokens == state["generated_tokens"]

    asyncio.run(run())


@pytest.mark.slow
def test_a_sweep_starts_a_server_for_each_value_and_one_that_cannot_start_is_remarked(
    model, tmp_path, capsys
):
    code = main(
        [
            *LOAD, "--sweep", "batching=continuous,static,none",
            "--sweep-launch", shlex.join([*model, "--max-running-requests=4"]),
            "--sweep-output", str(tmp_path / "s"),
        ]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert code == 1, printed
    found = json.loads((tmp_path / "s.json").read_text())["points"]
    assert [point["completed"] for point in found] == [12, 12, 0]
    assert "--batching must be one of continuous, static, dynamic, got 'none'" in found[2]["error"]
    assert found[0]["retractions"] == 0


@pytest.mark.slow
def test_settings_are_patched_and_the_monitor_sees_them(model, tmp_path, capsys):
    async def run() -> tuple[int, int]:
        async with launched([*model, "--max-running-requests=4"], tmp_path / "log") as url:
            options = parse_options([*LOAD, "--base-url", url, "--sweep", "a=1,2"])
            await patch_setting(options, "max_running_requests", 3)
            with pytest.raises(ServerError, match=r"max_running_requests must be an integer"):
                await patch_setting(options, "max_running_requests", 99)
            code = await asyncio.to_thread(
                monitor.main, ["--url", url, "--once", "--json", "--interval", "0.05"]
            )
            return code, json.loads(capsys.readouterr().out)["sample"]["max_running"]

    assert asyncio.run(run()) == (0, 3)


@pytest.mark.slow
def test_a_server_that_ends_at_once_is_reported_with_the_end_of_its_log(tmp_path):
    async def run() -> None:
        async with launched(["--no-such-flag"], tmp_path / "log"):
            raise AssertionError("it came up")

    with pytest.raises(ServerError, match=r"exit code 2.*--no-such-flag"):
        asyncio.run(run())
