"""What a server's bytes are taken to mean."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import sse
from bench.backends import (
    MAX_ERROR_CHARS,
    Answer,
    ApiKind,
    TextAssembler,
    build_body,
    judge,
    read_event,
)
from bench.metrics import Status
from bench.options import parse_options
from bench.sessions import Turn


def read(kind: ApiKind, *events: dict[str, Any]) -> tuple[Answer, list[bool]]:
    answer = Answer()
    return answer, [read_event(kind, json.dumps(event).encode(), answer) for event in events]


STREAM = (
    b'\xef\xbb\xbfdata: {"a": 1}\n\n: ping\n\nevent: x\r\nid: 3\r\n'
    b"data:two\r\ndata: lines\r\n\r\nretry: 5\n\ndata: cr\r\rerror: bad\n\ndata: last"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_how_the_bytes_arrive(cuts):
    decoder, events = sse.SseDecoder(), []
    borders = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(borders):
        events += decoder.feed(STREAM[start:end])
    assert events == [(b'{"a": 1}', False), (b"two\nlines", False), (b"cr", False), (b"bad", True)]
    assert decoder.finish() == [(b"last", False)]
    assert decoder.finish() == []


def test_a_line_without_end_is_refused_and_not_collected(monkeypatch):
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 100)
    decoder = sse.SseDecoder()
    decoder.feed(b"data: " + b"x" * 90)
    with pytest.raises(ValueError, match="exceeds 100 bytes"):
        decoder.feed(b"x" * 10)


@given(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=8))
def test_cumulative_text_is_taken_as_it_is(pieces):
    assembler = TextAssembler()
    for i in range(len(pieces)):
        assembler.push("".join(pieces[: i + 1]))
    assert assembler.text == "".join(pieces)


def test_incremental_text_is_joined_once_a_piece_does_not_extend_the_last():
    assembler = TextAssembler()
    for piece in ("a", "ab", "abc", " d", "a"):  # the first three could be cumulative
        assembler.push(piece)
    assert assembler.text == "aababc da"


def test_repeated_deltas_are_told_from_cumulative_text_by_the_output_ids():
    chunks = [
        {"text": "ha", "output_ids": [7], "meta_info": {"completion_tokens": n}} for n in (1, 2, 3)
    ]
    answer, brought = read(ApiKind.GENERATE, *chunks)
    assert answer.text == "hahaha"
    assert brought == [True, True, True]


def test_a_chunk_whose_count_did_not_grow_brings_nothing():
    finish = {"completion_tokens": 2, "finish_reason": {"type": "length", "length": 2}}
    answer, brought = read(
        ApiKind.GENERATE,
        {"text": "a", "meta_info": {"completion_tokens": 2, "finish_reason": None}},
        {"text": "a", "meta_info": finish},
    )
    assert brought == [True, False]
    assert (answer.tokens, answer.finish_reason) == (2, "length")


def test_a_token_whose_text_is_held_back_has_arrived_nevertheless():
    answer, brought = read(ApiKind.GENERATE, {"text": "", "meta_info": {"completion_tokens": 1}})
    assert brought == [True]
    assert judge(answer, 1, True)[0] is Status.OK


def test_a_chat_role_without_content_is_not_the_first_token():
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    reasoning = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    call = {
        "choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]
    }
    null = {"choices": [{"delta": {"content": None}, "finish_reason": "stop"}]}
    answer, brought = read(ApiKind.CHAT, role, reasoning, call, null)
    assert brought == [False, True, True, False]
    assert answer.text == "hmf{}"
    assert answer.finish_reason == "stop"


def test_repeated_openai_deltas_are_all_kept():
    chunk = {"choices": [{"text": "ha"}]}
    answer, _ = read(ApiKind.COMPLETIONS, chunk, chunk, chunk)
    assert answer.text == "hahaha"


def test_usage_is_read_from_every_chunk_that_has_it():
    usage = {
        "prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    answer, brought = read(
        ApiKind.COMPLETIONS, {"choices": [{"text": "ab"}], "usage": None},
        {"choices": [], "usage": usage},
    )  # fmt: skip
    assert brought == [True, False]
    assert (answer.tokens, answer.input_tokens, answer.cached_tokens) == (2, 9, 4)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"error": {"message": "too long", "code": 400}}, "too long"),
        ({"error": {"code": 500}}, '{"code":500}'),
        ({"error": "unknown field"}, "unknown field"),
        ({"object": "error", "message": "flat", "code": 503}, "flat"),
    ],
)
def test_errors_are_recognised_in_every_shape(event, message):
    for kind in ApiKind:
        answer, brought = read(kind, event)
        assert answer.failure == ("error_event", message)
        assert brought == [False]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b"3", b'{"choices": 3}', b'{"choices": [null]}', b'{"choices": ["x"]}'],
)
def test_what_is_not_understood_is_a_failure_and_never_an_exception(data):
    answer = Answer()
    read_event(ApiKind.CHAT, data, answer)
    assert answer.failure is not None
    assert answer.failure[0] == "malformed"


def test_the_first_failure_is_kept_and_bounded():
    answer = Answer()
    answer.fail("a", "x" * 5000)
    answer.fail("b", "later")
    assert answer.failure == ("a", "x" * MAX_ERROR_CHARS)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(tokens=4, has_output=True, done=True), (Status.OK, None)),
        (Answer(tokens=4, has_output=True), (Status.OK, None)),  # all tokens, no [DONE]
        (Answer(tokens=3, has_output=True, finish_reason="stop"), (Status.SHORT, None)),
        (Answer(tokens=3, has_output=True), (Status.ERROR, "truncated")),
        (Answer(has_output=True), (Status.ERROR, "truncated")),
        (Answer(has_output=True, done=True), (Status.OK, None)),  # nobody counted
        (Answer(has_output=True, finish_reason="stop"), (Status.SHORT, None)),
        (Answer(tokens=0, done=True, finish_reason="stop"), (Status.ERROR, "empty")),
        (Answer(done=True), (Status.ERROR, "empty")),
        (Answer(tokens=4, failure=("abort", "x"), done=True), (Status.ERROR, "abort")),
    ],
)
def test_an_answer_needs_tokens_and_a_proper_end(answer, expected):
    assert judge(answer, 4, ignore_eos=True)[:2] == expected


def test_a_natural_end_is_fine_when_it_is_allowed():
    ended = Answer(tokens=3, has_output=True, finish_reason="stop")
    assert judge(ended, 4, ignore_eos=False)[0] is Status.OK


@pytest.mark.parametrize(
    ("backend", "length_keys"),
    [
        ("sglang-oai", {"max_tokens"}),
        ("vllm-chat", {"max_completion_tokens"}),
        ("llama.cpp-chat", {"max_completion_tokens", "max_tokens"}),
    ],
)
def test_openai_bodies_ask_for_usage_and_the_exact_length(backend, length_keys):
    options = parse_options(["--backend", backend])
    body = build_body(options, "m", "hi", Turn("hi", 1, 9))
    assert {key for key in body if key.startswith("max_")} == length_keys
    assert all(body[key] == 9 for key in length_keys)
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["ignore_eos"], body["temperature"]) == ("m", True, 0.0)


def test_extra_body_keys_win_over_the_requests_own_and_those_over_the_options():
    options = parse_options(["--extra-request-body", '{"b": 1, "text": "other"}'])
    body = build_body(options, "m", "hi", Turn("hi", 1, 9, extra={"b": 2, "return_logprob": True}))
    assert (body["b"], body["text"], body["return_logprob"]) == (1, "other", True)
