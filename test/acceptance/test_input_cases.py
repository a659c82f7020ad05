"""What clients send by mistake or in malice: refused with the numbers, and nobody else notices."""

from __future__ import annotations

import gzip
import json
import socket
from itertools import islice

import pytest
from real_server import GREEDY, RealServer, at_once, message_of

CONTEXT_LEN = 2048
VOCAB_SIZE = 257
ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions"]


def prompt_for(route: str, text: str = "hello") -> dict[str, object]:
    if route == "/generate":
        return {"text": text}
    if route == "/v1/completions":
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def body_for(route: str, **params: object) -> dict[str, object]:
    """A small request to `route`; `params` where that route has its sampling parameters."""
    if route == "/generate":
        return {**prompt_for(route), "sampling_params": {"max_new_tokens": 4, **params}}
    return {**prompt_for(route), "max_tokens": 4, **params}


def test_a_prompt_must_leave_room_for_one_token_of_the_context(roomy: RealServer) -> None:
    """H09: one rule for C - 1, C and C + 1; a refusal names both numbers."""
    ids = [5] * CONTEXT_LEN
    answer = roomy.generate(ids[:-1], max_new_tokens=1, ignore_eos=True)
    assert answer["meta_info"]["prompt_tokens"] == CONTEXT_LEN - 1
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    for prompt in (ids, [*ids, 5]):
        message = roomy.refused(
            "/generate", input_ids=prompt, sampling_params={"max_new_tokens": 1}
        )
        assert str(len(prompt)) in message and str(CONTEXT_LEN) in message
        assert message == roomy.refused("/v1/completions", prompt=prompt, max_tokens=1)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}])
@pytest.mark.parametrize("route", ROUTES[1:])
def test_no_limit_means_up_to_what_fits(
    tight: RealServer, route: str, limit: dict[str, None]
) -> None:
    """H10: null and absent generate to EOS or to what fits, and finish_reason tells which."""
    plain = tight.ask(route, **prompt_for(route), temperature=0, ignore_eos=True, **limit)
    assert plain["choices"][0]["finish_reason"] == "length"
    assert plain["usage"]["total_tokens"] == 320
    ending = {"logit_bias": {"0": 100}, "temperature": 0}
    ended = tight.ask(route, **prompt_for(route), **ending, **limit)
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == 1


def test_no_new_tokens_are_none_and_cost_nobody_anything(roomy: RealServer) -> None:
    """H11: max_new_tokens 0, again and again beside running requests."""
    alone = [roomy.ids(f"neighbour {i}", max_new_tokens=60, ignore_eos=True) for i in range(4)]

    def none() -> None:
        for stream in (False, True):
            for _ in range(25):
                body = {"text": "nothing", "sampling_params": {"max_new_tokens": 0}}
                if stream:
                    *_, answer = roomy.stream("/generate", **body)
                else:
                    answer = roomy.ask("/generate", **body)
                assert answer["text"] == "" and answer["output_ids"] == []
                assert answer["meta_info"]["completion_tokens"] == 0
                assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}

    results = at_once(
        none,
        none,
        *(
            lambda i=i: roomy.ids(f"neighbour {i}", max_new_tokens=60, ignore_eos=True)
            for i in range(4)
        ),
    )
    assert results[2:] == alone


def test_a_prompt_that_fits_with_a_limit_that_does_not_is_refused_with_true_numbers(
    roomy: RealServer,
) -> None:
    """H12: prompt C - 200 and 400 new tokens."""
    ids = [5] * (CONTEXT_LEN - 200)
    message = roomy.refused("/generate", input_ids=ids, sampling_params={"max_new_tokens": 400})
    for number in (CONTEXT_LEN, CONTEXT_LEN - 200, 400, CONTEXT_LEN + 200):
        assert f" {number} " in message
    assert roomy.refused("/v1/completions", prompt=ids, max_tokens=400) == message


@pytest.mark.parametrize("bad", [VOCAB_SIZE, 200_000_000, 2**62, 2**64 - 1, 10**30, -1])
def test_a_token_id_outside_the_vocabulary_is_refused_by_name(roomy: RealServer, bad: int) -> None:
    """H13: in a prompt on each route that takes ids, alone or among good ones."""
    for ids in ([bad], [1, 2, bad, 3]):
        for message in (
            roomy.refused("/generate", input_ids=ids),
            roomy.refused("/generate", input_ids=[[1], ids]),
            roomy.refused("/v1/completions", prompt=ids),
        ):
            if bad < 2**63:
                assert str(bad) in message and str(VOCAB_SIZE) in message


@pytest.mark.parametrize("bad", [VOCAB_SIZE, 200_000_000, 10**30, -1])
@pytest.mark.parametrize("route", ROUTES)
def test_a_bias_for_a_token_outside_the_vocabulary_is_refused_by_name(
    roomy: RealServer, route: str, bad: int
) -> None:
    """H13: as a key of logit_bias."""
    message = roomy.refused(route, **body_for(route, logit_bias={str(bad): 5}))
    assert str(bad)[:40] in message and "logit_bias" in message


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"text": ""}),
        ("/generate", {"text": []}),
        ("/generate", {"text": ["good", ""]}),
        ("/generate", {"input_ids": []}),
        ("/generate", {"input_ids": [[]]}),
        ("/generate", {"input_ids": [[1, 2], []]}),
        ("/generate", {}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": [""]}),
        ("/v1/completions", {"prompt": ["good", ""]}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [[]]}),
        ("/v1/completions", {"prompt": [[1], []]}),
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {}),
    ],
)
def test_an_empty_prompt_is_refused(roomy: RealServer, route: str, body: dict[str, object]) -> None:
    """H14: also as one member of a batch, whose other members do not start."""
    before = roomy.state["num_steps"]
    assert roomy.refused(route, **body)
    assert roomy.state["num_steps"] == before


GOOD = json.dumps({"text": "你好，世界", "sampling_params": {"max_new_tokens": 2}})


@pytest.mark.parametrize("path", [*ROUTES, "/abort_request", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (json.dumps({"text": "你好，世界"}, ensure_ascii=False).encode("gbk"), "application/json"),
        (GOOD.encode("utf-16"), "application/json"),
        (GOOD[: len(GOOD) // 2].encode(), "application/json"),
        (b"{:", "application/json"),
        (b"", "application/json"),
        (b"\x00" * 64, "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"text": "\\ud800"}', "application/json"),
        (b'"text"', "application/json"),
        (b"null", None),
        (GOOD.encode(), "text/plain"),
        (b"text=hello", "application/x-www-form-urlencoded"),
    ],
    ids=range(12),
)
def test_a_body_that_is_no_json_object_in_utf8_is_refused(
    roomy: RealServer, path: str, data: bytes, content_type: str | None
) -> None:
    """H15: another encoding, cut off, broken, empty, or of another type."""
    status, answer = roomy.raw(path, data, content_type)
    assert status == 400, answer
    assert 0 < len(message_of(answer)) < 2100


def test_a_body_cut_off_by_the_network_harms_nobody(roomy: RealServer) -> None:
    """H15: the rest of the announced body never comes."""
    for data in (GOOD[:20].encode(), b""):
        with socket.create_connection(("127.0.0.1", roomy.port)) as sock:
            head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(GOOD)}\r\n\r\n".encode() + data)
    assert len(roomy.ids("next", max_new_tokens=2, ignore_eos=True)) == 2


NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
]


@pytest.mark.parametrize("route", ROUTES)
def test_numbers_that_are_not_finite_are_refused_while_others_run(
    roomy: RealServer, route: str
) -> None:
    """H17: NaN and infinities in raw JSON, as literals and as numbers too large for a float."""
    alone = roomy.ids("neighbour", max_new_tokens=150, ignore_eos=True)
    stream = roomy.stream(
        "/generate",
        text="neighbour",
        sampling_params={**GREEDY, "max_new_tokens": 150, "ignore_eos": True},
    )
    chunks = list(islice(stream, 2))
    for name in NUMBERS:
        for value in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"nan"', "true", "[1]"):
            data = json.dumps(body_for(route, **{name: "VALUE"})).replace('"VALUE"', value)
            status, answer = roomy.raw(route, data.encode())
            assert status == 400, (name, value, answer)
    chunks += stream
    assert chunks[-1]["output_ids"] == alone


@pytest.mark.parametrize("route", ROUTES)
def test_a_stop_token_outside_the_vocabulary_is_refused_and_harms_no_neighbour(
    roomy: RealServer, route: str
) -> None:
    """H18: with a minimum length, which would forbid that token in the logits."""
    alone = roomy.ids("neighbour", max_new_tokens=40, ignore_eos=True)
    minimum = "min_new_tokens" if route == "/generate" else "min_tokens"

    def bad() -> None:
        for token in (10**9, VOCAB_SIZE, -1, -(10**9)):
            body = body_for(route, stop_token_ids=[token], **{minimum: 3})
            assert str(token) in roomy.refused(route, **body)

    _, ids = at_once(bad, lambda: roomy.ids("neighbour", max_new_tokens=40, ignore_eos=True))
    assert ids == alone


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", 5),
        ("text", {"a": 1}),
        ("text", [["x"]]),
        ("input_ids", 5),
        ("input_ids", [1.0]),
        ("input_ids", [True]),
        ("input_ids", [[1], 2]),
        ("input_ids", [1, [2]]),
        ("input_ids", [None]),
        ("input_ids", "12"),
        ("sampling_params", 1),
        ("sampling_params", [{}]),
        ("sampling_params", {"no_such_name": 1}),
        ("sampling_params", {"max_new_tokens": 2**40}),
        ("sampling_params", {"max_new_tokens": -1}),
        ("sampling_params", {"max_new_tokens": 1.5}),
        ("sampling_params", {"max_new_tokens": 2, "min_new_tokens": 3}),
        ("sampling_params", {"n": 0}),
        ("sampling_params", {"n": 10**6}),
        ("sampling_params", {"top_k": 0}),
        ("sampling_params", {"top_k": -2}),
        ("sampling_params", {"sampling_seed": 2**70}),
        ("sampling_params", {"stop": [1]}),
        ("sampling_params", {"stop": ["x"] * 33}),
        ("sampling_params", {"stop_regex": "("}),
        ("sampling_params", {"stop_token_ids": "1"}),
        ("sampling_params", {"logit_bias": [1]}),
        ("sampling_params", {"logit_bias": {"a": 1}}),
        ("sampling_params", {"logit_bias": {"1": None}}),
        ("sampling_params", {"stream_interval": 0}),
        ("stream", "yes"),
        ("stream", 1),
        ("rid", 5),
        ("rid", ""),
        ("rid", ["a", "b"]),
        ("priority", "high"),
        ("priority", 2**70),
        ("extra_key", 5),
        ("user", ["x"]),
        ("return_logprob", "yes"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(roomy: RealServer, field: str, value: object) -> None:
    body: dict[str, object] = {"sampling_params": {"max_new_tokens": 2}, field: value}
    if field not in ("text", "input_ids"):
        body["text"] = "hello"
    status, answer = roomy.post("/generate", **body)
    assert status == 400, answer
    named = next(iter(value)) if isinstance(value, dict) and field != "text" else field
    assert named in message_of(answer) or field in message_of(answer)


def send_bytes(server: RealServer, *header: bytes, data: bytes = GOOD.encode()) -> bytes:
    """The answer to a POST with `header` lines, which a decent client would not let through."""
    lines = [b"POST /generate HTTP/1.1", b"Host: x", b"Content-Type: application/json", *header]
    head = b"\r\n".join([*lines, b"Content-Length: %d" % len(data)])
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(head + b"\r\n\r\n" + data)
        return sock.recv(10_000)


def test_a_header_in_another_encoding_is_refused_and_harms_nobody(roomy: RealServer) -> None:
    """H15: it once took the connection to the scheduler down, and everybody with it."""
    answer = send_bytes(roomy, b"X-Tenant: \xff\xfe")
    assert answer.startswith(b"HTTP/1.1 400 ") and b"X-Tenant" in answer
    answer = send_bytes(roomy, "X-Tenant: Müller".encode())
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_body_that_is_not_compressed_as_it_says_is_refused(roomy: RealServer) -> None:
    """H15: garbage, and one that unpacks to more than a body may have."""
    answer = send_bytes(roomy, b"Content-Encoding: gzip")
    assert answer.startswith(b"HTTP/1.1 400 ") and b"gzip" in answer
    bomb = gzip.compress(bytes(70 << 20))
    answer = send_bytes(roomy, b"Content-Encoding: gzip", data=bomb)
    assert answer.startswith(b"HTTP/1.1 413 ")
    answer = send_bytes(roomy, b"Content-Encoding: gzip", data=gzip.compress(GOOD.encode()))
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("message", [5, {}, {"role": 7}, {"role": "user", "content": [[]]}])
def test_a_refusal_does_not_repeat_a_large_input(roomy: RealServer, message: object) -> None:
    """H16: 5000 messages, each of a wrong shape."""
    data = json.dumps({"messages": [message] * 5000}).encode()
    status, answer = roomy.raw("/v1/chat/completions", data)
    assert status == 400
    assert "messages" in message_of(answer) and len(json.dumps(answer)) < 4096
