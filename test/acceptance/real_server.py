"""A server as users run it (two processes, real HTTP), and a client that holds it to its books."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from launch.launch_server import listen

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """The first true value of `condition`; an AssertionError that says `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.01)
    return value


class RealServer:
    """`python -m launch_server` with `argv`, from its start until `stop`."""

    def __init__(self, *argv: str, max_descriptors: int | None = None) -> None:
        self.argv = argv
        self.max_descriptors = max_descriptors
        with listen("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
        # Short, since socket paths are limited; ours, since a killed server leaves its own behind.
        self._temp = tempfile.TemporaryDirectory(prefix="rg-")
        self.log_file = Path(self._temp.name) / "log.txt"
        self.process = self.launch()

    def launch(self) -> subprocess.Popen[bytes]:
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "launch_server", "--port", str(self.port), *self.argv],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": self._temp.name, "OMP_NUM_THREADS": "1"},
                preexec_fn=self._limit,
            )

    def _limit(self) -> None:
        if self.max_descriptors is not None:
            limits = (self.max_descriptors, self.max_descriptors)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def wait_ready(self) -> None:
        wait_until(lambda: self._is_up() or self.process.poll() is not None, "the start", 120.0)
        assert self.process.poll() is None, self.log

    def _is_up(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._temp.cleanup()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    # --- calls ---

    def _open(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def get(self, path: str) -> tuple[int, bytes]:
        with closing(self._open()) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def raw(
        self, path: str, data: bytes, content_type: str | None = "application/json"
    ) -> tuple[int, Any]:
        """Status and JSON of the answer to a POST of `data`."""
        headers = {} if content_type is None else {"Content-Type": content_type}
        with closing(self._open()) as connection:
            connection.request("POST", path, data, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.raw(path, json.dumps(body).encode())

    def ask(self, path: str, **body: Any) -> Any:
        """The JSON of an answer with status 200."""
        status, answer = self.post(path, **body)
        assert status == 200, answer
        return answer

    def refused(self, path: str, **body: Any) -> str:
        """The message of a 400, which must be the same for a stream."""
        messages = []
        for stream in (False, True):
            status, answer = self.post(path, **body, stream=stream)
            assert status == 400, (status, answer)
            messages.append(message_of(answer))
        assert messages[0] == messages[1]
        return messages[0]

    def stream(self, path: str, **body: Any) -> Iterator[Any]:
        """The events of a stream, which must end with [DONE]. Closing it early hangs up."""
        with closing(self._open()) as connection:
            data = json.dumps({**body, "stream": True})
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            with closing(connection.getresponse()) as response:
                assert response.status == 200, response.read()
                for line in response:
                    if line == b"data: [DONE]\n":
                        return
                    if line.strip():
                        yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream broke off before [DONE]")

    def generate(self, prompt: str | list[int], **params: Any) -> Any:
        """The answer of /generate; greedy unless `params` say otherwise."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        return self.ask("/generate", **{key: prompt}, sampling_params={**GREEDY, **params})

    def ids(self, prompt: str | list[int], **params: Any) -> list[int]:
        result: list[int] = self.generate(prompt, **params)["output_ids"]
        return result

    def abort(self, rid: str) -> None:
        with closing(self._open()) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/abort_request", json.dumps({"rid": rid}), headers)
            assert connection.getresponse().status == 200

    # --- what it tells about itself ---

    @property
    def state(self) -> dict[str, Any]:
        """The scheduler's own figures of this moment: on a busy machine the server may first tell
        older ones, marked as such."""

        def fresh() -> dict[str, Any] | None:
            status, body = self.get("/server_info")
            assert status == 200, self.log
            state: dict[str, Any] = json.loads(body)["internal_states"][0]
            return None if "is_stale" in state else state

        return wait_until(fresh, "the scheduler's figures")

    def journal(self, last: int = 10_000) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = json.loads(self.get(f"/v1/journal?last={last}")[1])[
            "records"
        ]
        return records

    def wait_idle(self, seconds: float = 30.0) -> dict[str, Any]:
        """Until nobody runs or waits; then every slot and row is back and no lock is held."""

        def idle() -> dict[str, Any] | None:
            state = self.state
            is_idle = not (state["num_running_reqs"] or state["num_waiting_reqs"])
            return state if is_idle else None

        state = wait_until(idle, "an idle server", seconds)
        assert state["num_used_tokens"] == state["num_locked_tokens"] == 0, state
        assert (
            state["num_free_tokens"] + state["num_cached_tokens"] == (state["max_total_num_tokens"])
        )
        assert state["free_rows"] == state["max_running_requests"], state
        return state


GREEDY = {"temperature": 0}


def message_of(answer: Any) -> str:
    """The message of an error in any of its documented shapes."""
    error = answer.get("error", answer)
    message: str = error if isinstance(error, str) else error["message"]
    return message


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Results of `calls`, each run in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def start(folder: Path, *argv: str, max_descriptors: int | None = None) -> RealServer:
    options = ("--model-path", str(folder), "--dtype", "float32", "--device", "cpu", *argv)
    return RealServer(*options, max_descriptors=max_descriptors)


def serve(server: RealServer) -> Iterator[RealServer]:
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def whole_again(server: RealServer) -> Iterator[RealServer]:
    """`server`; after the test it must be idle, with nothing lost, and answer as it did before."""
    before = server.ids("ordinary", max_new_tokens=3)
    yield server
    server.wait_idle()
    assert server.ids("ordinary", max_new_tokens=3) == before
    assert server.process.poll() is None
    # Except for what aiohttp says of a body that it cannot unpack, after the answer.
    tracebacks = re.findall(r"^(\[.*)\nTraceback", server.log, re.MULTILINE)
    assert all("Unhandled exception" in line for line in tracebacks), server.log
