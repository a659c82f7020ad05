"""A client that goes away takes its request with it."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from itertools import islice

import pytest
from real_server import GREEDY, RealServer, message_of, wait_until

LONG = {**GREEDY, "max_new_tokens": 2000, "ignore_eos": True}


def generated(server: RealServer) -> int:
    tokens: int = server.state["generated_tokens"]
    return tokens


@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
def test_a_stream_that_is_left_computes_little_more(roomy: RealServer, route: str) -> None:
    """H28: the socket closes after the third chunk; a neighbour goes on."""
    before = generated(roomy)
    body = {"text": "left", "sampling_params": LONG}
    if route == "/v1/completions":
        body = {"prompt": "left", "max_tokens": 2000, "ignore_eos": True, **GREEDY}
    stream = roomy.stream(route, **body)
    assert len(list(islice(stream, 3))) == 3
    assert roomy.state["num_running_reqs"] == 1
    stream.close()
    wait_until(lambda: roomy.state["num_running_reqs"] == 0, "the end of the left request", 5)
    assert generated(roomy) - before < 1500
    assert roomy.state["ended"]["abort"] > 0
    roomy.wait_idle(5)


def test_a_plain_request_that_is_left_ends(roomy: RealServer) -> None:
    """H28: without stream nothing was ever sent, and still the connection is watched."""
    data = json.dumps({"text": "left", "sampling_params": LONG}).encode()
    head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    before = generated(roomy)
    with socket.create_connection(("127.0.0.1", roomy.port)) as sock:
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: roomy.state["num_running_reqs"] == 1, "the request to run", 5)
    wait_until(lambda: roomy.state["num_running_reqs"] == 0, "the end of the left request", 5)
    assert generated(roomy) - before < 1900


def test_a_request_left_while_it_waits_never_runs(tight: RealServer) -> None:
    """H28: others take turns in the pool; it leaves the queue with its client."""
    params = {**GREEDY, "max_new_tokens": 290, "ignore_eos": True}
    others = tight.stream(
        "/generate", text=["one", "two", "three", "four"], sampling_params=params, priority=1
    )
    next(others)
    data = json.dumps({"text": "waits", "rid": "waits", "sampling_params": params}).encode()
    head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", tight.port)) as sock:
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: tight.get("/v1/requests/waits")[0] == 200, "the request to wait", 5)
    wait_until(lambda: tight.get("/v1/requests/waits")[0] == 404, "the request to leave", 5)
    others.close()
    tight.wait_idle()
    admitted = {entry["rid"] for r in tight.journal() for entry in r.get("admitted", [])}
    assert not any(rid.startswith("waits#") for rid in admitted)


def test_clients_that_give_up_in_a_long_prefill_end_alone(roomy: RealServer) -> None:
    """H29: 15 chunks, left after the first few, 20 times; a stream beside them is undisturbed."""
    params = {**GREEDY, "max_new_tokens": 400, "ignore_eos": True}
    alone = roomy.ask("/generate", text="neighbour", sampling_params=params)["output_ids"]
    neighbour = roomy.stream("/generate", text="neighbour", sampling_params=params)
    next(neighbour)
    head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for i in range(20):
        ids = [(i * 37 + j * j) % 90 + 5 for j in range(1900)]
        data = json.dumps({"input_ids": ids, "sampling_params": LONG}).encode()
        with socket.create_connection(("127.0.0.1", roomy.port)) as sock:
            sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(0.02)
    *_, last = neighbour
    assert last["output_ids"] == alone
    roomy.wait_idle(10)


@pytest.mark.slow
def test_a_load_that_is_killed_again_and_again_leaves_nothing(roomy: RealServer) -> None:
    """H30: 300 connections at once, all cut after a moment, five times; then one request."""
    data = json.dumps({"text": "x", "sampling_params": LONG, "stream": True}).encode()
    head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    for _ in range(5):
        with ExitStack() as stack:
            for _ in range(300):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", roomy.port)))
                sock.sendall(request)
            time.sleep(0.5)
    assert len(roomy.ids("afterwards", max_new_tokens=3, ignore_eos=True)) == 3
    roomy.wait_idle(20)


def test_an_id_that_is_live_is_refused_and_free_afterwards(roomy: RealServer) -> None:
    """H31: twice at once, then once more."""
    params = {**GREEDY, "max_new_tokens": 60, "ignore_eos": True}
    body = {"text": "same", "rid": "same", "sampling_params": params}
    first = roomy.stream("/generate", **body)
    next(first)
    status, answer = roomy.post("/generate", **body)
    assert status == 400 and "Duplicate request ID detected: same" in message_of(answer)
    *_, last = first
    assert last["meta_info"]["completion_tokens"] == 60
    assert roomy.ask("/generate", **body)["output_ids"] == last["output_ids"]
