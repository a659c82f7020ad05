"""The monitor against written-down logs and metrics, and a small server that serves them."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from srt import monitor
from srt.managers.retraction import Retraction
from srt.managers.scheduler_log import LoadSnapshot, SchedulerLog
from srt.monitor_alerts import Limits, find_alerts
from srt.monitor_history import History, Rates, Sample
from srt.monitor_log import LogReader, LogSource
from srt.monitor_sources import HttpSource, SourceError, sample_of_metrics, with_requests
from srt.monitor_view import screen, sparkline

LABELS = 'model_name="m",tp_rank="0"'


def metrics(**values: float) -> str:
    return "".join(f"sglang:{name}{{{LABELS}}} {value}\n" for name, value in values.items())


def our_log(path: Path) -> None:
    """One minute of a storm, in the words of our own scheduler."""
    clock = {"now": 0.0}

    class AtVirtualTime(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"[2026-01-02 03:04:{int(clock['now']):02d}] {record.getMessage()}"

    logger = logging.getLogger(SchedulerLog.__module__)
    handler = logging.FileHandler(path)
    handler.setFormatter(AtVirtualTime())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        logger.info("context_len=8192, decode_log_interval=25")
        log = SchedulerLog(25, "cpu", lambda: clock["now"])
        log.on_prefill(4, 400, 0, 90, LoadSnapshot(0, 7, 10, 1000))
        for second in range(1, 41):
            clock["now"] = float(second)
            for _ in range(25):
                log.on_decode(4, lambda: LoadSnapshot(4, 7, 950, 1000))
            if second % 4 == 0:
                log.on_retract(Retraction("kv", ("a", "b"), 60, 60, 0.5, 0.75))
        log.on_last_aborted("c")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


@contextmanager
def serving(routes: dict[str, Any], key: str | None = None) -> Iterator[str]:
    """A server that answers GETs with `routes`: text, or a list of texts, one a request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = routes.get(self.path)
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                self.send_error(401)
                return
            if found is None:
                self.send_error(404)
                return
            text = found.pop(0) if isinstance(found, list) else found
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Tests print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def names(alerts: list[Any]) -> list[str]:
    return [alert.name for alert in alerts]


# --- the log ---


def test_our_own_log_gives_load_retractions_and_what_was_given_up(tmp_path):
    our_log(tmp_path / "log")
    samples = LogSource(tmp_path / "log").poll()
    last = samples[-1]
    assert (last.running, last.queued, last.usage, last.ratio) == (4, 7, 0.95, 0.75)
    assert (last.retractions, last.recomputed, last.out_of_memory) == (20, 600, 1)
    assert (last.generated, last.computed) == (100 * 40, 400 + 100 * 40)
    assert last.gen_throughput == 100.0
    assert samples[-1].time - samples[0].time == 40.0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[2025-01-01 10:00:00 TP0] Prefill batch, #new-seq: 2, #new-token: 40, "
            "#cached-token: 8, token usage: 0.25, #running-req: 3, #queue-req: 1, "
            "#pending-token: 0, cuda graph: False, input throughput (token/s): 5.00",
            {"running": 3, "queued": 1, "usage": 0.25, "computed": 40},
        ),
        (
            "[2025-01-01 10:00:00] Decode batch. #running-req: 3, #token: 500, token usage: 0.50, "
            "gen throughput (token/s): 90.50, #queue-req: 2",
            {"running": 3, "queued": 2, "usage": 0.5, "gen_throughput": 90.5},
        ),
        (
            "[2025-01-01 10:00:00] Decode batch [41], #running-req: 3, #full token: 9, "
            "full token usage: 0.50, accept len: 1.00, cuda graph: True, "
            "gen throughput (token/s): 1.00, #queue-req: 0",
            {"running": 3, "queued": 0, "usage": 0.5},
        ),
        (
            "KV cache pool is full. Retract requests. #retracted_reqs: 5, #new_tokens_gained: 70, "
            "#mamba_num_gained: 1, #new_token_ratio: 0.1234 -> 0.5678",
            {"retractions": 5, "recomputed": 70, "ratio": 0.5678},
        ),
        ("Decode out of memory happened. #retracted_reqs: 2", {"retractions": 2, "recomputed": 0}),
        ("Testing retraction. #retracted_reqs: 1, #new_tokens_gained: 9", {"retractions": 1}),
        ("retract_decode: aborted last request r9 due to OOM", {"out_of_memory": 1}),
    ],
)
def test_lines_of_sglang_new_and_old_are_read(line, expected):
    sample = LogReader().read(line)
    assert sample is not None
    assert {name: getattr(sample, name) for name in expected} == expected


def test_an_idle_night_between_two_decode_lines_is_not_counted_as_work():
    reader = LogReader()
    decode = "Decode batch, #running-req: 3, #token: 9, gen throughput (token/s): 300.00"
    reader.read(f"[2025-01-01 22:00:00] {decode}")
    evening = reader.sample.generated
    reader.read(f"[2025-01-02 08:00:00] {decode}, #queue-req: 0")
    assert (evening, reader.sample.generated) == (3 * 40, 2 * 3 * 40)
    reader.read("[2025-01-02 08:00:01] server_args=ServerArgs(tp_size=1, decode_log_interval=10)")
    reader.read(f"[2025-01-02 08:00:02] {decode}, accept len: 2.50, accept rate: 0.60")
    assert reader.sample.generated == 2 * 3 * 40 + 75


def test_a_log_that_has_become_silent_shows_no_load_and_its_storm_passes(tmp_path):
    clock = {"now": 0.0}
    our_log(tmp_path / "log")
    source, history = LogSource(tmp_path / "log", lambda: clock["now"]), History(60.0)
    for second in range(0, 90, 5):
        clock["now"] = float(second)
        for sample in source.poll():
            history.add(sample)
        rate = history.rates().retractions_per_minute
        if second == 0:
            assert (history.last.running, rate) == (4, pytest.approx(30.0))
    assert (history.last.running, history.last.usage, rate) == (None, None, 0.0)
    assert history.last.retractions == 20, "sums stay"
    assert not find_alerts(history.last, history.rates(), Limits())


def test_other_ranks_and_other_lines_say_nothing():
    reader = LogReader()
    line = "Prefill batch, #new-seq: 2, #new-token: 40, #cached-token: 8, #running-req: 3"
    assert reader.read(f"[2025-01-01 10:00:00 TP1] {line}") is None
    assert reader.read("[2025-01-01 10:00:00] 127.0.0.1 GET /health") is None
    assert reader.read(f"[2025-01-01 10:00:00 DP0 TP0] {line}") is not None


def test_a_followed_log_gives_only_what_is_new_and_waits_for_whole_lines(tmp_path):
    file = tmp_path / "log"
    file.write_text("Testing retraction. #retracted_reqs: 1\nTesting retraction. #retr")
    source = LogSource(file)
    assert [sample.retractions for sample in source.poll()] == [1]
    assert source.poll() == []
    with file.open("a") as log:
        log.write("acted_reqs: 3\n")
    assert [sample.retractions for sample in source.poll()] == [4]


def test_a_log_that_was_turned_over_is_read_from_its_beginning(tmp_path):
    file = tmp_path / "log"
    file.write_text("Testing retraction. #retracted_reqs: 1\n" * 3)
    source = LogSource(file)
    source.poll()
    file.rename(tmp_path / "log.1")
    file.write_text("Testing retraction. #retracted_reqs: 2\n")
    assert [sample.retractions for sample in source.poll()] == [5]


# --- metrics ---


def test_metrics_are_read_with_tokens_counted_as_they_are_computed():
    text = metrics(
        num_running_reqs=3, num_queue_reqs=2, token_usage=0.5, max_total_num_tokens=1000,
        new_token_ratio=0.4, gen_throughput=80.0, num_retracted_requests_total=6,
        num_retracted_input_tokens_total=100, num_retracted_output_tokens_total=50,
        prompt_tokens_total=1, generation_tokens_total=1,
    )  # fmt: skip
    text += f'sglang:realtime_tokens_total{{{LABELS},mode="decode"}} 700\n'
    text += f'sglang:realtime_tokens_total{{{LABELS},mode="prefill_compute"}} 300\n'
    sample = sample_of_metrics(text, 5.0)
    assert (sample.running, sample.queued, sample.usage, sample.ratio) == (3, 2, 0.5, 0.4)
    assert (sample.generated, sample.computed, sample.retractions) == (700, 1000, 6)
    assert (sample.recomputed, sample.recomputed_is_estimate) == (150, True)


def test_a_server_that_counts_what_it_computed_again_is_believed():
    text = metrics(num_running_reqs=0, recomputed_tokens_total=42)
    sample = sample_of_metrics(text, 5.0)
    assert (sample.recomputed, sample.recomputed_is_estimate) == (42, False)


def test_ranks_add_up_but_a_share_is_their_mean():
    text = 'sglang:num_running_reqs{tp_rank="0"} 3\nsglang:num_running_reqs{tp_rank="1"} 4\n'
    text += 'sglang:token_usage{tp_rank="0"} 0.5\nsglang:token_usage{tp_rank="1"} 0.7\n'
    sample = sample_of_metrics(text, 0.0)
    assert sample.running == 7
    assert sample.usage == pytest.approx(0.6)


def test_waiting_requests_are_counted_by_what_they_wait_for():
    body = {
        "requests": [
            {"state": "waiting", "blocker": {"kind": "kv"}, "waiting_seconds": 9.5},
            {"state": "retracted", "blocker": {"kind": "kv"}, "waiting_seconds": 1.0},
            {"state": "waiting", "blocker": None, "waiting_seconds": 0.5},
            {"state": "running", "blocker": None, "waiting_seconds": 0.0},
        ]
    }
    sample = with_requests(Sample(0.0, queued=3), json.dumps(body))
    assert sample.blockers == {"kv": 2, "its turn": 1}
    assert sample.oldest_wait == 9.5
    assert with_requests(Sample(0.0, queued=3), '{"error": 1}') == Sample(0.0, queued=3)


def test_requests_are_asked_for_only_while_somebody_waits_and_the_key_is_sent():
    routes = {
        "/metrics": [
            metrics(num_running_reqs=1, num_queue_reqs=1),
            metrics(num_running_reqs=1, num_queue_reqs=0),
        ],
        "/v1/requests": ['{"requests": [{"state": "waiting", "blocker": {"kind": "slots"}}]}'],
    }
    with serving(routes, key="k") as url:
        source = HttpSource(url, "k")
        assert source.poll()[0].blockers == {"slots": 1}
        assert source.poll()[0].blockers == {}
        with pytest.raises(SourceError, match="401"):
            HttpSource(url).poll()


def test_a_server_without_metrics_or_with_other_ones_is_refused_by_name():
    with serving({"/metrics": "up 1\n"}) as url:
        with pytest.raises(SourceError, match="no sglang:num_running_reqs"):
            HttpSource(url).poll()
        with pytest.raises(SourceError, match="has no /metrics"):
            HttpSource(url + "/elsewhere").poll()


# --- rates and alerts ---


def test_rates_are_over_the_window_and_a_restarted_server_begins_anew():
    history = History(window=10.0)
    for second in range(0, 31):
        sample = Sample(
            float(second), retractions=second, computed=100 * second, generated=50 * second,
            recomputed=5 * second,
        )  # fmt: skip
        history.add(sample)
    rates = history.rates()
    assert rates.seconds == 10.0
    assert rates.retractions_per_minute == pytest.approx(60.0)
    assert rates.throughput == pytest.approx(50.0)
    assert rates.recomputed_share == pytest.approx(0.05)
    history.add(Sample(31.0, retractions=0, computed=0, generated=0, recomputed=0))
    assert history.rates() == Rates(0.0)


GOOD = Sample(0.0, running=4, queued=0, max_running=8, usage=0.5)


@pytest.mark.parametrize(
    ("sample", "rates", "expected", "advice"),
    [
        (GOOD, Rates(60.0, 5.0, 0.01, 1, 9.0, 100, 0), [], ""),
        (GOOD, Rates(60.0, 7.0, 0.01, 1, 9.0, 100, 0), ["retractions"], "conservativeness"),
        (GOOD, Rates(60.0, 5.0, 0.06, 6, 9.0, 100, 0), ["recomputed"], "--max-total-tokens"),
        (GOOD, Rates(60.0, 0.0, 0.0, 0, 9.0, 100, 2), ["out-of-memory"], "--context-length"),
        (GOOD, Rates(60.0, 0.0, None, 0, 0.0, 0, 0), ["stalled"], "/v1/requests"),
        (GOOD, Rates(5.0, 0.0, None, 0, 0.0, 0, 0), [], ""),
        (Sample(0.0, running=0, queued=0), Rates(60.0, 0.0, None, 0, 0.0, 0, 0), [], ""),
        (
            Sample(0.0, running=8, queued=5, max_running=8, usage=0.2),
            Rates(1.0), ["rows"], "raise --max-running-requests",
        ),
        (
            Sample(0.0, running=8, queued=5, usage=0.2, blockers={"slots": 5}),
            Rates(1.0), ["rows"], "raise --max-running-requests",
        ),
        (
            Sample(0.0, running=2, queued=5, usage=0.2, ratio=0.7, blockers={"kv": 5}),
            Rates(1.0), ["kv-reserved"], "--admission estimated",
        ),
        (
            Sample(0.0, running=9, queued=5, usage=0.95, blockers={"kv": 4, "slots": 1}),
            Rates(1.0), ["kv-full"], "fewer clients",
        ),
        (
            Sample(0.0, running=9, queued=5, usage=0.8, oldest_wait=61.0),
            Rates(1.0), ["queue-age"], "--max-queue-age",
        ),
    ],
)  # fmt: skip
def test_each_trouble_has_its_alert_and_its_advice(sample, rates, expected, advice):
    alerts = find_alerts(sample, rates, Limits())
    assert names(alerts) == expected
    assert advice in " ".join(alert.advice for alert in alerts)


# --- the command ---


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = monitor.main(list(arguments))
    return code, capsys.readouterr().out


def test_one_look_at_a_log_with_a_storm_is_one_json_object_and_exit_code_1(tmp_path, capsys):
    our_log(tmp_path / "log")
    code, out = run(capsys, "--log", str(tmp_path / "log"), "--once", "--json")
    assert code == 1
    found = json.loads(out)
    assert [alert["name"] for alert in found["alerts"]] == [
        "out-of-memory", "retractions", "recomputed",
    ]  # fmt: skip
    assert found["rates"]["retractions_per_minute"] == pytest.approx(30.0)
    assert found["sample"]["recomputed_is_estimate"] is True


def test_a_file_that_says_nothing_about_the_load_is_no_source(tmp_path, capsys):
    (tmp_path / "log").write_text("[2026-01-02 03:04:00] GET /health\n{}\n")
    code, out = run(capsys, "--log", str(tmp_path / "log"), "--once", "--json")
    assert (code, json.loads(out)["sample"]) == (3, None)


def test_the_limits_and_the_level_that_fails_can_be_chosen(tmp_path, capsys):
    (tmp_path / "log").write_text(
        "[2026-01-02 03:04:00] Testing retraction. #retracted_reqs: 1\n"
        "[2026-01-02 03:04:30] Testing retraction. #retracted_reqs: 9\n"
    )
    log = ("--log", str(tmp_path / "log"), "--once", "--json")
    assert run(capsys, *log)[0] == 1
    assert run(capsys, *log, "--fail-on", "critical")[0] == 0
    assert run(capsys, *log, "--fail-on", "never")[0] == 0
    assert run(capsys, *log, "--max-retractions-per-minute", "50")[0] == 0


def test_one_look_at_a_server_is_two_scrapes_and_a_view_for_people(capsys):
    scrapes = [
        metrics(num_running_reqs=3, num_queue_reqs=0, token_usage=0.5, generation_tokens_total=n,
                prompt_tokens_total=0, num_retracted_requests_total=0)
        for n in (100, 150)
    ]  # fmt: skip
    with serving({"/metrics": scrapes}) as url:
        code, out = run(capsys, "--url", url, "--once", "--interval", "0.01")
    assert code == 0
    assert scrapes == []
    assert "running" in out and "50 %" in out and "retractions a minute" in out


def test_a_server_that_is_not_there_gives_exit_code_3_and_a_critical_alert(capsys):
    with serving({}) as url:
        pass
    code, out = run(capsys, "--url", url, "--once", "--json", "--interval", "0.01")
    assert code == 3
    assert json.loads(out)["alerts"][0]["name"] == "unreachable"
    assert run(capsys, "--log", "/no/such/log", "--once", "--json")[0] == 3


def test_watching_for_a_while_prints_a_line_a_look_and_fails_for_an_alert_in_between(capsys):
    calm = metrics(num_running_reqs=1, num_queue_reqs=0, token_usage=0.1)
    full = metrics(num_running_reqs=1, num_queue_reqs=5, max_running_requests=1, token_usage=0.1)
    with serving({"/metrics": [calm, full, calm]}) as url:
        code, out = run(capsys, "--url", url, "--json", "--interval", "0.01", "--duration", "0.02")
    looks = [json.loads(line) for line in out.splitlines()]
    assert [[alert["name"] for alert in look["alerts"]] for look in looks] == [[], ["rows"], []]
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--url", "http://x", "--log", "y"], "exclude each other"),
        (["--url", "localhost:30000"], "--url localhost:30000: expected http://"),
        (["--interval", "0"], "--interval must be a number above 0, got 0.0"),
        (["--max-wait", "-1"], "--max-wait must be a number of at least 0, got -1.0"),
        (["--fail-on", "sometimes"], "sometimes"),
        (["--once", "--duration", "3"], "exclude each other"),
    ],
)
def test_a_wrong_command_line_is_refused_with_exit_code_2(arguments, part, capsys):
    with pytest.raises(SystemExit) as caught:
        monitor.main(arguments)
    assert caught.value.code == 2
    assert part in capsys.readouterr().err


def test_the_view_shows_alerts_with_advice_and_n_a_for_what_is_unknown():
    alerts = find_alerts(GOOD, Rates(60.0, 9.0), Limits())
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen("here", [GOOD], Rates(60.0, 9.0), alerts))
    text = console.export_text()
    assert "4 of 8" in text and "n/a" in text
    assert "warning: 9 retractions a minute" in text


def test_a_sparkline_scales_to_its_largest_value_and_leaves_gaps():
    assert sparkline([0.0, 5.0, None, 10.0]) == "▁▅ █"
    assert sparkline([None, 0.0]) == ""


def test_the_monitor_needs_no_torch():
    code = "import sys, srt.monitor, srt.monitor_view; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
