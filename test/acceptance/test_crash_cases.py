"""CASES H49 and what no other engine does: a scheduler dies, and its requests go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from real_server import GREEDY, RealServer, at_once, serve, start, wait_until

SAMPLED = {"temperature": 1.0, "sampling_seed": 7, "frequency_penalty": 0.3}


@pytest.fixture
def watched(tiny_folder: Path) -> Iterator[RealServer]:
    options = ("--max-total-tokens", "4096", "--watchdog-timeout", "1", "--max-restarts", "9")
    yield from serve(start(tiny_folder, *options))


def scheduler_of(server: RealServer) -> psutil.Process:
    [child] = psutil.Process(server.process.pid).children()
    return child


def bodies() -> list[dict[str, Any]]:
    """Greedy and sampled, with penalties, stop strings, a minimum and logprobs."""
    found: list[dict[str, Any]] = []
    for i in range(6):
        params = {**(SAMPLED if i % 2 else GREEDY), "max_new_tokens": 500, "ignore_eos": i < 4}
        if i == 3:
            params["stop"] = ["qqqq"]
        if i == 4:
            params["min_new_tokens"] = 400
        body: dict[str, Any] = {"text": f"prompt {i} " * (i + 1), "sampling_params": params}
        if i == 2:
            body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        found.append(body)
    return found


def streamed(server: RealServer, body: dict[str, Any]) -> Any:
    """The last chunk; no chunk takes back or repeats what one before it held."""
    last: Any = None
    for chunk in server.stream("/generate", **body):
        if last is not None:
            assert chunk["text"].startswith(last["text"])
            assert chunk["output_ids"][: len(last["output_ids"])] == last["output_ids"]
        last = chunk
    return last


def disturb(server: RealServer, signals: list[int]) -> None:
    for number in signals:
        wait_until(lambda: server.get("/health")[0] == 200, "the server to be up", 60)
        wait_until(lambda: "num_running_reqs" in server.state, "an answer about the state", 60)
        child = scheduler_of(server)
        child.send_signal(number)
        wait_until(lambda c=child: scheduler_of_or_none(server) not in (None, c), "another one", 60)


def scheduler_of_or_none(server: RealServer) -> psutil.Process | None:
    children = psutil.Process(server.process.pid).children()
    return children[0] if len(children) == 1 else None


@pytest.mark.slow
def test_a_killed_main_process_leaves_no_child_no_folder_and_a_free_port(tiny_folder: Path) -> None:
    """H51."""
    server = start(tiny_folder, "--max-total-tokens", "4096")
    try:
        server.wait_ready()
        child = scheduler_of(server)
        stream = server.stream("/generate", text="a", sampling_params={"max_new_tokens": 1000})
        next(stream)
        server.process.kill()
        _, alive = psutil.wait_procs([child], timeout=5)
        assert not alive
        assert list(server.log_file.parent.glob("regather-*")) == []
        server.process = server.launch()
        server.wait_ready()
        assert server.ids("a", max_new_tokens=3)
    finally:
        server.stop()


@pytest.mark.slow
def test_streams_go_on_after_the_scheduler_was_killed_and_stopped(watched: RealServer) -> None:
    """Killed, then frozen: every request has the tokens that it has undisturbed, and each once."""
    alone = [watched.ask("/generate", **body) for body in bodies()]
    *answers, _ = at_once(
        *(partial(streamed, watched, body) for body in bodies()),
        partial(disturb, watched, [signal.SIGKILL, signal.SIGSTOP]),
    )
    for answer, undisturbed in zip(answers, alone, strict=True):
        assert answer["output_ids"] == undisturbed["output_ids"]
        assert answer["text"] == undisturbed["text"]
        told, undisturbed_told = answer["meta_info"], undisturbed["meta_info"]
        for name in ("prompt_tokens", "completion_tokens", "finish_reason"):
            assert told[name] == undisturbed_told[name], name
        for name in ("input_token_logprobs", "output_token_logprobs"):
            assert (name in told) == (name in undisturbed_told)
            for here, there in zip(told.get(name, ()), undisturbed_told.get(name, ()), strict=True):
                assert here[1] == there[1]
                assert here[0] == pytest.approx(there[0], abs=2e-3), name
    watched.wait_idle(30)
    assert watched.log.count("was replaced in") == 2
    assert "has not turned for" in watched.log
