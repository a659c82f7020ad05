"""The sweep against a stub server, and its judgement on made-up points."""

from __future__ import annotations

import csv
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from stub_server import StubServer

from bench import server_load
from bench import sweep as sweep_module
from bench.bench_serving import main
from bench.option_fields import OptionError
from bench.options import parse_options, parse_sweep
from bench.server_load import LoadPeaks, read_values
from bench.server_routes import ServerError
from bench.sweep_points import COLUMNS, Point, find_knee, remarks
from bench.sweep_server import launch_arguments


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if matplotlib were missing: importing it takes longer than all else here."""
    monkeypatch.setitem(sys.modules, "bench.sweep_plot", None)


def sweep(server: StubServer, prefix: Path, *arguments: str, base_url: bool = True) -> int:
    return main(
        [
            *(["--base-url", server.url] if base_url else []), "--dataset-name", "random-ids",
            "--random-input-len", "6", "--random-output-len", "3", "--random-range-ratio", "1",
            "--num-prompts", "3", "--disable-tqdm", "--warmup-requests", "0",
            "--sweep-output", str(prefix), *arguments,
        ]
    )  # fmt: skip


def points(**rates: float) -> list[Point]:
    return [Point(int(name[1:]), output_throughput=rate) for name, rate in rates.items()]


def test_each_value_is_patched_measured_and_written_and_the_old_one_restored(
    tmp_path, capsys, no_picture, monkeypatch
):
    monkeypatch.setattr(server_load, "SAMPLE_PERIOD_S", 0.02)
    with StubServer(pace=0.06) as server:  # a run of several samples
        code = sweep(server, tmp_path / "s", "--sweep", "max-running-requests=1,3")
        assert code == 0, capsys.readouterr()
        assert [patch["max_running_requests"] for patch in server.patches] == [1, 3, 8]
        assert len(server.sent("/generate")) == 6
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["sweep"] == "max_running_requests"
    assert [point["value"] for point in found["points"]] == [1, 3]
    for point in found["points"]:
        assert (point["completed"], point["failed"], point["output_tokens"]) == (3, 0, 9)
        assert (point["running_peak"], point["queued_peak"], point["usage_peak"]) == (2, 3, 0.5)
        assert point["retractions"] == 3, "by the answers: one of each request"
        assert point["recomputed_tokens"] > 0
        assert point["runs"][0]["total_output_tokens"] == 9
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert tuple(rows[0]) == COLUMNS
    assert [row["value"] for row in rows] == ["1", "3"]
    printed = capsys.readouterr().out
    assert "3: samples saw at most 2 of 3 run although up to 3 waited" in printed


def test_a_run_that_falls_between_two_samples_of_the_load_claims_nothing_of_it(
    tmp_path, capsys, no_picture
):
    with StubServer() as server:
        code = sweep(server, tmp_path / "s", "--sweep", "max-running-requests=1,4")
        assert code == 0, capsys.readouterr()
    found = json.loads((tmp_path / "s.json").read_text())
    assert [point["running_peak"] for point in found["points"]] == [None, None]
    assert [text for text in found["remarks"] if "cap" in text] == [
        "4: the offered load was the cap: at most 3 requests were under way"
    ]


@pytest.mark.parametrize("how", ["gone", "interrupted"])
def test_what_was_measured_is_written_although_the_sweep_cannot_end_well(
    tmp_path, capsys, no_picture, monkeypatch, how
):
    real, asked = sweep_module.run_value, []

    async def run_value(options, name, value, *more):
        asked.append(value)
        if value == 1:
            return await real(options, name, value, *more)
        if how == "interrupted":
            raise KeyboardInterrupt  # as a warm-up does that Ctrl-C ended
        server.settings.clear()  # a server that died refuses in other words, but refuses
        raise ServerError("the server is gone")

    monkeypatch.setattr(sweep_module, "run_value", run_value)
    with StubServer() as server:
        code = sweep(server, tmp_path / "s", "--sweep", "max-running-requests=1,4")
        restored = server.settings.get("max_running_requests") == 8
    assert asked == [1, 4]
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["points"][0]["completed"] == 3
    assert len(list(csv.DictReader((tmp_path / "s.csv").open()))) == len(found["points"])
    printed = capsys.readouterr().out
    left = "the server was left with the last value" in printed
    assert ("interrupted: values are missing" in printed) == (how == "interrupted")
    assert (code, found["interrupted"], restored, left) == (
        (130, True, True, False) if how == "interrupted" else (1, False, False, True)
    )


def test_the_log_of_a_value_that_is_a_path_has_a_name_in_the_folder_of_the_output(
    tmp_path, capsys, no_picture, monkeypatch
):
    @asynccontextmanager
    async def launched(arguments, log):
        log.write_text("started")
        yield server.url

    monkeypatch.setattr(sweep_module, "launched", launched)
    with StubServer() as server:
        prefix = tmp_path / "s"
        arguments = ["--sweep", "model-path=/a/b,c d", "--sweep-launch", ""]
        code = sweep(server, prefix, *arguments, "--warmup-requests", "1", base_url=False)
    assert code == 0, capsys.readouterr()
    assert {"s__a_b.log", "s_c_d.log"} <= {file.name for file in tmp_path.iterdir()}


def test_an_option_of_the_load_generator_is_swept_without_touching_the_server(
    tmp_path, capsys, no_picture
):
    with StubServer() as server:
        code = sweep(server, tmp_path / "s", "--sweep", "random-output-len=2,5")
        assert code == 0, capsys.readouterr()
        assert server.patches == []
    found = json.loads((tmp_path / "s.json").read_text())
    assert [point["output_tokens"] for point in found["points"]] == [6, 15]


def test_a_refused_setting_is_reported_with_the_servers_words_and_fails_the_sweep(
    tmp_path, capsys, no_picture
):
    with StubServer() as server:
        code = sweep(server, tmp_path / "s", "--sweep", "no-such-setting=1,2")
    printed = capsys.readouterr().out
    assert code == 1
    assert "answered 400" in printed and "unknown field 'no_such_setting'" in printed
    assert json.loads((tmp_path / "s.json").read_text())["knee"]["value"] is None


def test_failed_requests_fail_the_sweep_and_are_remarked(tmp_path, capsys, no_picture):
    with StubServer("http_503") as server:
        code = sweep(server, tmp_path / "s", "--sweep", "max-running-requests=1,4")
    assert code == 1
    assert "1: 3 requests failed" in capsys.readouterr().out


def test_the_median_of_the_repeats_counts_and_their_range_is_kept(tmp_path, capsys, no_picture):
    with StubServer() as server:
        code = sweep(
            server, tmp_path / "s", "--sweep", "max-running-requests=1,4", "--sweep-repeats", "3"
        )
        assert code == 0, capsys.readouterr()
        assert len(server.sent("/generate")) == 18
    for point in json.loads((tmp_path / "s.json").read_text())["points"]:
        rates = sorted(run["output_throughput"] for run in point["runs"])
        assert [point["lowest"], point["output_throughput"], point["highest"]] == rates


@pytest.mark.slow
def test_a_picture_is_written_as_png_and_svg_with_the_knee_in_its_title(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.sweep_plot import plot

    found = [
        Point(1, output_throughput=10.0, median_ttft_ms=5.0, retractions=0, running_peak=1),
        Point(4, output_throughput=40.0, median_ttft_ms=9.0, retractions=2, running_peak=4),
        Point(8, error="did not start"),
    ]
    png, svg = plot(
        "max_running_requests",
        found,
        find_knee([*found, Point(9, output_throughput=9.0)]),
        tmp_path / "p",
    )
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    assert "knee: 4 has 100 % of the best throughput" in text
    assert "max-running-requests" in text


def test_without_matplotlib_the_sweep_says_how_to_get_it_and_still_succeeds(
    tmp_path, capsys, no_picture
):
    with StubServer() as server:
        code = sweep(server, tmp_path / "s", "--sweep", "max-running-requests=1,4")
    assert code == 0
    assert "regather[plot]" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["s.csv", "s.json"]


def test_the_knee_is_the_smallest_value_about_as_good_as_the_best():
    knee = find_knee(points(v1=10, v4=38, v16=97, v64=100, v256=90))
    assert knee.value == 16
    assert "97 % of the best throughput (at 64)" in knee.text


def test_there_is_no_knee_while_throughput_still_rises():
    knee = find_knee(points(v1=10, v4=38, v16=97))
    assert knee.value is None
    assert "still rises at 16" in knee.text


def test_one_value_or_none_has_no_knee():
    assert find_knee(points(v4=38)).value is None
    assert "only one run gave a throughput" in find_knee(points(v4=38)).text
    assert "no run gave a throughput" in find_knee([Point(4, error="gone")]).text


def test_names_have_a_best_but_no_knee():
    knee = find_knee([Point("fcfs", output_throughput=5.0), Point("lpm", output_throughput=6.0)])
    assert knee.value == "lpm"
    assert "no knee" in knee.text


def test_a_fall_with_more_retractions_is_blamed_on_them_with_the_tokens_computed_again():
    found = remarks(
        "max_running_requests",
        [
            Point(16, output_throughput=100.0, output_tokens=1000, retractions=0),
            Point(
                64,
                output_throughput=80.0,
                output_tokens=1000,
                retractions=40,
                recomputed_tokens=500,
            ),
        ],
    )
    assert found == [
        "64: throughput is 20 % below that of 16 because of retraction: 40 retractions, "
        "500 tokens computed again (50 % of the output)"
    ]


def test_a_fall_without_retractions_is_not_blamed_on_them():
    slow = Point(64, output_throughput=80.0, retractions=2)
    found = remarks("phase_policy", [Point(16, output_throughput=100.0, retractions=2), slow])
    assert found == ["64: throughput is 20 % below that of 16, not because of retraction (2)"]


def test_an_offered_load_that_was_served_as_it_came_is_called_the_cap():
    found = remarks(
        "request_rate",
        [
            Point(2.0, output_throughput=20.0, offered_rate=2.0, kept_up=True),
            Point(9.0, output_throughput=50.0, offered_rate=9.0, kept_up=False),
        ],
    )
    assert found == ["2.0: the offered load was the cap: 2 req/s arrived and the server kept up"]


def test_rows_that_nobody_asked_for_are_told_from_a_full_pool():
    idle = Point(64, output_throughput=9.0, sent_peak=20, running_peak=20, queued_peak=0)
    full = Point(
        64, output_throughput=9.0, sent_peak=90, running_peak=20, queued_peak=5, usage_peak=0.97
    )
    missed = Point(64, output_throughput=9.0, sent_peak=90, running_peak=0, queued_peak=0)
    assert "offered load was the cap" in remarks("max_running_requests", [idle])[0]
    assert "KV was the cap" in remarks("max_running_requests", [full])[0]
    assert remarks("max_running_requests", [missed]) == []


def test_metrics_are_summed_over_label_sets_and_unknown_ones_leave_the_peaks_empty():
    text = 'sglang:num_running_reqs{tp_rank="0"} 3\nsglang:num_running_reqs{tp_rank="1"} 4\n'
    peaks = LoadPeaks()
    peaks.add(read_values(text))
    peaks.add(read_values('sglang:num_running_reqs{tp_rank="0"} 2\n'))
    assert (peaks.running, peaks.queued, peaks.usage, peaks.num_samples) == (7, None, None, 2)
    assert read_values("# HELP x y\nother 3\nvllm:num_requests_waiting 2\n") == {
        "vllm:num_requests_waiting": 2
    }


def test_values_have_the_kind_of_the_option_they_stand_for():
    assert parse_sweep("request-rate=1,inf") == ("request_rate", [1.0, float("inf")])
    assert parse_sweep("chunked-prefill-size=-1,512") == ("chunked_prefill_size", [-1, 512])
    assert parse_sweep("schedule-policy=fcfs,lpm") == ("schedule_policy", ["fcfs", "lpm"])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--sweep", "max-running-requests"], ["expected NAME=V1,V2"]),
        (["--sweep", "max-running-requests=4"], ["at least two values"]),
        (["--sweep", "max-running-requests=4,4"], ["each once"]),
        (["--sweep", "request-rate=1,-2"], ["--request-rate", "-2.0"]),
        (["--sweep", "dataset-name=random,none"], ["none is none of", "sharegpt"]),
        (["--sweep", "seed=1,2"], ["--seed cannot be swept"]),
        (["--sweep-repeats", "2"], ["--sweep-repeats needs --sweep"]),
        (["--sweep", "a=1,2", "--sweep-repeats", "0"], ["--sweep-repeats", "at least 1"]),
        (["--sweep", "a=1,2", "--sweep-launch", "", "--port", "1"], ["picks a port"]),
        (["--sweep", "a=1,2", "--sweep-launch", "--x 'y"], ["--sweep-launch", "quotation"]),
        (["--sweep", "a=1,2", "--output-file", "x"], ["--output-file", "--sweep-output"]),
    ],
)
def test_a_sweep_that_cannot_be_made_is_refused_by_name(arguments, parts):
    with pytest.raises(OptionError) as caught:
        parse_options(arguments)
    for part in parts:
        assert part in str(caught.value)


def test_a_launched_server_gets_the_users_arguments_and_the_value():
    template = "--model-path 'a b' --page-size 4"
    assert launch_arguments(template, {"max_running_requests": 16}) == [
        "--model-path", "a b", "--page-size", "4", "--max-running-requests=16",
    ]  # fmt: skip
    assert launch_arguments("", {}) == []
