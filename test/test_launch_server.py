from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tiny_model import fake_handle_class, write_tiny_model

import launch.launch_server
import srt.supervisor
from launch.launch_server import READY_LINE, StartError, listen, main
from srt.managers.io_struct import TokenizedGenerateReq

ROOT = Path(__file__).parents[1]


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return result


def request(port, method, path, body=None):
    """Status and text of an answer; None if nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    except OSError:
        return None
    finally:
        connection.close()


def free_port():
    with listen("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def client_thread(work):
    """Run `work` beside the server, which needs this thread for its signals."""
    errors = []

    def run():
        try:
            work()
        except BaseException as error:  # reported below, in the test's own thread
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(30)
    if errors:
        raise errors[0]


@pytest.fixture
def made(monkeypatch):
    handles = fake_handle_class()
    monkeypatch.setattr(launch.launch_server, "SchedulerHandle", handles)
    return handles.made


def ready(port):
    return request(port, "GET", "/health") == (200, "")


def test_a_signal_lets_running_requests_finish_and_exits_with_0(tmp_path, made, caplog):
    caplog.set_level("INFO")
    port = free_port()
    answers = []

    def work():
        wait_until(lambda: ready(port))
        fake = made[0].fake
        fake.passes_left = 0
        body = {"text": "x", "sampling_params": {"max_new_tokens": 4}}
        running = threading.Thread(
            target=lambda: answers.append(request(port, "POST", "/generate", body))
        )
        running.start()
        wait_until(lambda: fake.live)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: request(port, "GET", "/health") == (503, ""))
        assert request(port, "POST", "/generate", body)[0] == 503
        fake.passes_left = 4
        running.join(30)

    with client_thread(work):
        code = main(["--model-path", str(write_tiny_model(tmp_path)), "--port", str(port)])
    assert code == 0
    [(status, text)] = answers
    assert status == 200 and json.loads(text)["text"] == "abcd"
    assert request(port, "GET", "/health") is None
    assert not made[0].ipc_dir.exists()
    assert READY_LINE in caplog.messages
    assert any("Remaining number of requests 1." in message for message in caplog.messages)


def test_the_schedulers_death_ends_the_server_with_1(tmp_path, made, caplog):
    port = free_port()

    def work():
        wait_until(lambda: ready(port))
        made[0].fake.die("the card fell out")

    folder = str(write_tiny_model(tmp_path))
    dumps = tmp_path / "dumps"
    limits = ["--max-restarts", "0", "--crash-dump-folder", str(dumps)]
    with client_thread(work):
        code = main(["--model-path", folder, "--port", str(port), *limits])
    assert code == 1
    assert any("the card fell out" in message for message in caplog.messages)
    assert not made[0].ipc_dir.exists() and len(made) == 1
    [dump] = dumps.iterdir()
    first = json.loads(dump.read_text().splitlines()[0])
    assert first["crash"] == "The scheduler failed: the card fell out"


def test_a_dead_scheduler_is_replaced_and_an_open_request_goes_on(tmp_path, made, caplog):
    port = free_port()
    answers = []

    def work():
        wait_until(lambda: ready(port))
        made[0].fake.passes_left = 2
        body = {"text": "x", "sampling_params": {"max_new_tokens": 6}}
        running = threading.Thread(
            target=lambda: answers.append(request(port, "POST", "/generate", body))
        )
        running.start()
        wait_until(lambda: made[0].fake.passes_left == 0)
        time.sleep(0.2)  # its two tokens arrive
        made[0].fake.die("the card fell out")
        running.join(30)
        wait_until(lambda: ready(port))
        os.kill(os.getpid(), signal.SIGTERM)

    with client_thread(work):
        code = main(["--model-path", str(write_tiny_model(tmp_path)), "--port", str(port)])
    assert code == 0 and len(made) == 2
    [(status, text)] = answers
    assert status == 200 and json.loads(text)["text"] == "abcdef"
    [again] = [m for m in made[1].fake.of_type(TokenizedGenerateReq) if m.output_ids]
    assert len(again.output_ids) == 2 and again.resume.was_admitted
    assert any("was replaced in" in message for message in caplog.messages)
    assert not any(each.ipc_dir.exists() for each in made)


def test_a_replacement_that_hangs_while_it_loads_is_replaced(tmp_path, made, monkeypatch, caplog):
    launch.launch_server.SchedulerHandle.hanging = frozenset({1})
    # Nothing to dump the stacks of: the process of the fake is this one.
    monkeypatch.setattr(srt.supervisor.Supervisor, "_dump_stacks", _no_stacks)
    port = free_port()

    def work():
        wait_until(lambda: ready(port))
        made[0].fake.die("the card fell out")
        wait_until(lambda: len(made) == 3 and ready(port))
        body = {"text": "x", "sampling_params": {"max_new_tokens": 3}}
        assert json.loads(request(port, "POST", "/generate", body)[1])["text"] == "abc"
        os.kill(os.getpid(), signal.SIGTERM)

    argv = ["--model-path", str(write_tiny_model(tmp_path)), "--port", str(port)]
    with client_thread(work):
        assert main([*argv, "--load-timeout", "0.3"]) == 0
    assert any("was not ready after 0.3 s (--load-timeout)" in text for text in caplog.messages)


@pytest.mark.parametrize("num_others", [0, 2])
def test_who_kills_every_scheduler_is_ended_and_everyone_else_goes_on(
    tmp_path, made, monkeypatch, caplog, num_others
):
    monkeypatch.setattr(srt.supervisor, "BACKOFF_SECONDS", (0.0,))
    launch.launch_server.SchedulerHandle.poison = "poison"
    port = free_port()
    answers = {}

    def ask(rid):
        body = {"rid": rid, "text": "x", "sampling_params": {"max_new_tokens": 6}}
        answers[rid] = request(port, "POST", "/generate", body)

    def work():
        wait_until(lambda: ready(port))
        made[0].fake.passes_left = 0
        rids = [f"other{i}" for i in range(num_others)] + ["poison"]
        clients = [threading.Thread(target=ask, args=(rid,)) for rid in rids]
        for client in clients:
            client.start()
        wait_until(lambda: len(made[0].fake.live) == len(rids))
        made[0].fake.passes_left = 100
        for client in clients:
            client.join(30)
        wait_until(lambda: ready(port))
        metrics = request(port, "GET", "/metrics")[1]
        assert re.search(r"^regather:quarantined_requests_total\S* 1.0$", metrics, re.MULTILINE)
        os.kill(os.getpid(), signal.SIGTERM)

    argv = ["--model-path", str(write_tiny_model(tmp_path)), "--port", str(port)]
    with client_thread(work):
        assert main(argv) == 0
    status, text = answers.pop("poison")
    assert status == 500 and "crash" in text
    assert [json.loads(text)["text"] for _, text in answers.values()] == ["abcdef"] * num_others
    # Alone it was in the batch at two crashes; in company it had its trial.
    assert len(made) == (3 if num_others == 0 else 4)


async def _no_stacks(supervisor):
    pass


def test_the_warm_up_runs_before_the_server_is_ready_unless_skipped(tmp_path, made):
    write_tiny_model(tmp_path)
    for extra, expected in ([], 1), (["--skip-server-warmup"], 0):
        port = free_port()

        def work(port=port):
            wait_until(lambda: ready(port))
            os.kill(os.getpid(), signal.SIGINT)

        with client_thread(work):
            assert main(["--model-path", str(tmp_path), "--port", str(port), *extra]) == 0
        assert len(made[-1].fake.of_type(TokenizedGenerateReq)) == expected


def test_a_taken_port_is_an_error_before_the_model_is_touched(capsys):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["--model-path", "/no/such/model", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert f"port {port}" in error and "in use" in error and "no/such" not in error


def test_an_impossible_address_is_named():
    with pytest.raises(StartError, match=r"203\.0\.113\.1 port 9"):
        listen("203.0.113.1", 9)  # an address for documentation: nobody has it
    with pytest.raises(StartError, match="--host"):
        listen("not a host", 0)


def test_a_model_that_is_not_there_is_an_error_with_1(capsys):
    assert main(["--model-path", "/no/such/model", "--port", "0"]) == 1
    assert "/no/such/model" in capsys.readouterr().err


def test_a_chat_template_that_cannot_be_read_is_an_error_with_1(tmp_path, made, capsys):
    argv = ["--model-path", str(write_tiny_model(tmp_path)), "--port", "0"]
    assert main([*argv, "--chat-template", str(tmp_path / "none.jinja")]) == 1
    assert "--chat-template" in capsys.readouterr().err
    assert not made[0].ipc_dir.exists()


class RealServer:
    """`python -m launch_server` on the tiny model, in a process of its own."""

    def __init__(self, folder, *argv):
        self.port = free_port()
        self.log = folder / "log.txt"
        # A killed server cannot remove its socket folder. Short, since socket paths are limited.
        self.temp = tempfile.TemporaryDirectory(prefix="rg-")
        command = [sys.executable, "-m", "launch_server", "--model-path", str(folder)]
        command += ["--load-format", "dummy", "--device", "cpu", "--max-total-tokens", "400"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *argv],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": self.temp.name},
            )

    def wait_ready(self):
        wait_until(lambda: ready(self.port) or self.process.poll() is not None, 60)
        assert self.process.poll() is None, self.log.read_text()

    def children(self):
        import psutil

        return psutil.Process(self.process.pid).children(recursive=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.temp.cleanup()


@pytest.mark.slow
def test_a_real_server_answers_and_a_signal_leaves_nothing(tmp_path):
    import psutil

    with RealServer(write_tiny_model(tmp_path)) as server:
        server.wait_ready()
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
        status, text = request(server.port, "POST", "/generate", body)
        assert status == 200 and len(json.loads(text)["output_ids"]) == 5
        children = server.children()
        assert len(children) == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert not any(psutil.pid_exists(child.pid) for child in children)
        log = server.log.read_text()
        assert READY_LINE in log
        assert all(
            re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", line) for line in log.splitlines()
        )


@pytest.mark.slow
def test_the_death_of_either_process_is_the_death_of_both(tmp_path):
    import psutil

    write_tiny_model(tmp_path)
    with RealServer(tmp_path, "--max-restarts", "0") as server:
        server.wait_ready()
        [child] = server.children()
        child.kill()
        assert server.process.wait(20) == 1
        assert "killed by signal 9" in server.log.read_text()
    with RealServer(tmp_path) as server:
        server.wait_ready()
        [child] = server.children()
        server.process.kill()
        wait_until(lambda: not psutil.pid_exists(child.pid), 5)
        # A server on the same port can follow at once.
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", server.port))


@pytest.mark.slow
def test_a_scheduler_that_cannot_start_says_why_and_the_server_exits_with_1(tmp_path):
    # The pool is smaller than one page.
    with RealServer(write_tiny_model(tmp_path), "--page-size", "1000") as server:
        assert server.process.wait(60) == 1
        assert "The scheduler failed" in server.log.read_text()
