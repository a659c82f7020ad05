"""Bodies that no client library would send, to every route that takes one."""

from __future__ import annotations

import json
import random
import socket

import psutil
import pytest
from fuzz_server import exchange, fuzz_settings, fuzzed_server
from hypothesis import given
from hypothesis import strategies as st

from srt.openapi_document import OPERATIONS

GOOD = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2, "stop": ["x"], "n": 2}},
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "logit_bias": {"5": 1}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/tokenize": {"prompt": ["a"]},
    "/detokenize": {"tokens": [5]},
    "/abort_request": {"rid": "a"},
    "/start_profile": {"num_steps": 1},
    "/v1/scheduler": {"max_running_requests": 8},
    "/set_internal_state": {"server_args": {"max_running_requests": 8}},
}
ROUTES = [
    (o.method, o.path) for o in OPERATIONS if o.body is not None and o.path != "/pause_generation"
]
ODD_VALUES = [
    b"null", b"true", b"-1", b"0", b"1e999", b"-1e999", b"NaN", b"Infinity", b"1.5", b'""', b'"x"',
    b"[]", b"{}", b"[null]", b"[[]]", b'{"":1}', b"9" * 400, b"-" + b"9" * 30,
    b"9223372036854775808", b'"\\ud800"', b'"\\u0000"', b'"\xff"', b'"a\\nb"',
    b"[" * 600 + b"]" * 600,
    b'{"a":' * 600,
    b'"' + b"x" * 5000 + b'"', b"[" + b"1," * 5000 + b"1]",
]  # fmt: skip
CONTENT_TYPES = [None, "application/json", "text/plain", "application/json; charset=utf-16", "a\tb"]


def good_body(path):
    return GOOD.get(path) or GOOD[path.removeprefix("/v1")]


@st.composite
def mutated_bodies(draw):
    """A route, and bytes that once were a good body for it."""
    method, path = draw(st.sampled_from(ROUTES))
    body = good_body(path)
    fields = sorted({*body, *body.get("sampling_params", {})})
    data = json.dumps(body).encode()
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["value", "add", "twice", "cut", "flip", "insert", "raw"]))
        if kind == "value":  # of a field or, at random, of a member
            name = json.dumps(draw(st.sampled_from(fields))).encode() + b": "
            if name in data:
                before, after = data.split(name, 1)
                end = min((i for i in (after.find(b","), after.find(b"}")) if i >= 0), default=0)
                data = before + name + draw(st.sampled_from(ODD_VALUES)) + after[end:]
        elif kind in ("add", "twice"):
            known = [
                "stream",
                "rid",
                "user",
                "timeout",
                "return_logprob",
                "n",
                "model",
                "stop",
                "echo",
            ]
            name = draw(st.sampled_from(fields if kind == "twice" else known)).encode()
            value = draw(st.sampled_from(ODD_VALUES))
            data = data[:-1] + b',"' + name + b'":' + value + b"}"
        elif kind == "cut":
            data = data[: draw(st.integers(0, len(data)))]
        elif kind == "flip" and data:
            at = draw(st.integers(0, len(data) - 1))
            data = data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
        elif kind == "insert":
            at = draw(st.integers(0, len(data)))
            data = data[:at] + draw(st.sampled_from(ODD_VALUES)) + data[at:]
        elif kind == "raw":
            data = draw(st.sampled_from(ODD_VALUES) | st.binary(max_size=40))
    return method, path, data, draw(st.sampled_from(CONTENT_TYPES))


def check(url, case):
    """Answered, and not as a failure of ours; a refusal is short and says something."""
    method, path, data, content_type = case
    headers = {} if content_type is None else {"Content-Type": content_type}
    status, answer = exchange(url, method, path, data, headers)
    assert status < 500, (case, status, answer[:300])
    if status >= 400:
        assert len(answer) < 6000 and json.loads(answer)["message"], (case, answer)
    assert exchange(url, "GET", "/health", None, {})[0] == 200


def fuzz(tmp_path, num_examples):
    process = psutil.Process()
    with fuzzed_server(tmp_path) as http:

        @fuzz_settings(num_examples)
        @given(mutated_bodies())
        def run(case):
            check(http.url, case)

        check(http.url, ("POST", "/generate", json.dumps(GOOD["/generate"]).encode(), None))
        before = process.memory_info().rss
        run()
        assert process.memory_info().rss - before < 200 * 2**20


def test_no_broken_body_is_our_failure(tmp_path):
    fuzz(tmp_path, 150)


@pytest.mark.slow
def test_no_broken_body_is_our_failure_at_length(tmp_path):
    fuzz(tmp_path, 2000)


@pytest.mark.parametrize("seed", range(3))
def test_no_random_bytes_in_place_of_http_are_our_failure(tmp_path, seed):
    rng = random.Random(seed)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nX-Y: z\r\n\r\n{}"
    with fuzzed_server(tmp_path) as http:
        host, port = http.url.removeprefix("http://").split(":")
        for _ in range(60):
            data = bytearray(head)
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with socket.create_connection((host, int(port)), timeout=10) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                answer = b""
                while part := sock.recv(65536):
                    answer += part
            assert b"HTTP/1.1 5" not in answer and b"HTTP/1.0 5" not in answer, (data, answer)
        assert exchange(http.url, "GET", "/health", None, {})[0] == 200
