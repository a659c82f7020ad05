"""A client that goes away takes its request with it."""

from __future__ import annotations

import json
import socket
from itertools import islice

import pytest
from real_server import GREEDY, RealServer, wait_until

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
