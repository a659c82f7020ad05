"""The text a client sees: whole characters, no stop strings, its own answer, plain and streamed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from real_server import GREEDY, RealServer, at_once

ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions"]
STORY = "The history of the city of Rome begins"
CHINESE = "请用中文介绍一下北京的历史和文化。"
EMOJI = "Repeat: 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🤦🏾‍♂️ 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🤦🏾‍♂️"


def streamed(server: RealServer, prompt: str, **params: Any) -> list[str]:
    """The text after each chunk of a greedy stream. It only ever grows."""
    texts = [""]
    for chunk in server.stream("/generate", text=prompt, sampling_params={**GREEDY, **params}):
        assert chunk["text"].startswith(texts[-1])
        texts.append(chunk["text"])
    return texts


def completed(server: RealServer, prompt: str, stream: bool, **params: Any) -> tuple[str, str]:
    """Text and finish reason of a greedy /v1/completions."""
    body = {**GREEDY, "prompt": prompt, **params}
    if not stream:
        [choice] = server.ask("/v1/completions", **body)["choices"]
        return choice["text"], choice["finish_reason"]
    chunks = [chunk["choices"][0] for chunk in server.stream("/v1/completions", **body)]
    return "".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]


def test_a_chinese_stream_shows_whole_characters(default_server: RealServer) -> None:
    """H01: no chunk holds a replacement character that later becomes text, and the stream gives
    what the plain answer gives."""
    params = {"max_new_tokens": 32, "ignore_eos": True}
    texts, plain = at_once(
        partial(streamed, default_server, CHINESE, **params),
        lambda: default_server.generate(CHINESE, **params)["text"],
    )
    assert texts[-1] == plain and any(ord(char) > 0x2E80 for char in plain)


def lone_bytes(count: int) -> dict[str, Any]:
    """Every token a continuation byte, which can never become a character."""
    return {"max_tokens": count, "logit_bias": {str(0x80 + 1): 100}, "ignore_eos": True}


def test_bytes_that_can_never_be_a_character_come_out_at_once(roomy: RealServer) -> None:
    """H02: the stream shows them while it runs, one replacement character a token."""
    events = roomy.stream("/v1/completions", prompt="x", **lone_bytes(200))
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 200
    assert max(map(len, pieces)) < 100 and pieces[0]


@pytest.mark.slow
def test_bytes_that_can_never_be_a_character_do_not_slow_a_stream_down(roomy: RealServer) -> None:
    """H02: the last 200 of 2000 tokens take no longer than the first 200."""
    times = [
        time.monotonic() for _ in roomy.stream("/v1/completions", prompt="x", **lone_bytes(2000))
    ]
    first, last = times[len(times) // 10] - times[0], times[-1] - times[-len(times) // 10]
    assert last < 3 * first + 0.2


@pytest.mark.parametrize("char", "é你👍")
def test_a_character_cut_by_the_limit_ends_normally(roomy: RealServer, char: str) -> None:
    """H03: every number of its bytes, plain and streamed alike."""
    for count in range(1, 6):
        params = {"max_new_tokens": count, "logit_bias": {str(char.encode()[0] + 1): 100}}
        plain = roomy.generate("x", **params)
        assert plain["meta_info"]["finish_reason"] == {"type": "length", "length": count}
        assert set(plain["text"]) == {"\N{REPLACEMENT CHARACTER}"}
        assert streamed(roomy, "x", **params)[-1] == plain["text"]


@pytest.mark.slow
def test_any_limit_inside_emoji_ends_normally(default_server: RealServer) -> None:
    """H03: max_new_tokens 1 to 20, plain and streamed alike."""
    params = [{**GREEDY, "max_new_tokens": n, "ignore_eos": True} for n in range(1, 21)]
    batch = {"text": [EMOJI] * 20, "sampling_params": params}
    plain, chunks = at_once(
        lambda: default_server.ask("/generate", **batch),
        lambda: list(default_server.stream("/generate", **batch)),
    )
    last = {chunk["index"]: chunk["text"] for chunk in chunks}
    for i, answer in enumerate(plain):
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": i + 1}
        assert last[i] == answer["text"]


@pytest.fixture(scope="module")
def story(default_process: RealServer) -> tuple[str, list[str]]:
    """What the default model says after STORY, and the pieces of it that its tokens are."""
    answer = default_process.generate(STORY, max_new_tokens=24)
    pieces = [
        default_process.ask("/detokenize", tokens=[token])["text"] for token in answer["output_ids"]
    ]
    assert "".join(pieces) == answer["text"]
    return answer["text"], pieces


def test_no_part_of_a_stop_string_is_ever_sent(
    default_server: RealServer, story: tuple[str, list[str]]
) -> None:
    """H04: seven characters that span tokens, on both streams."""
    text, _ = story
    stops = [text[start : start + 7] for start in (3, 21, 40)]
    params = [{"max_new_tokens": 24, "stop": stop} for stop in stops]
    calls = [partial(streamed, default_server, STORY, **one) for one in params]
    theirs = [
        partial(completed, default_server, STORY, True, max_tokens=24, stop=stop) for stop in stops
    ]
    results = at_once(*calls, *theirs)
    for stop, shown, (whole, reason) in zip(stops, results[:3], results[3:], strict=True):
        want = text[: text.index(stop)]
        assert shown[-1] == whole == want and reason == "stop"
        assert all(want.startswith(piece) for piece in shown)


def test_a_stop_inside_a_token_ends_the_request_at_that_token(
    default_server: RealServer, story: tuple[str, list[str]]
) -> None:
    """H05: and one that occurs only in the prompt ends nothing."""
    text, pieces = story
    at = next(i for i, piece in enumerate(pieces) if i > 2 and len(piece) > 5)
    stop = pieces[at][:-2]
    assert text.index(stop) == len("".join(pieces[:at])), "it must not occur earlier"
    cut, whole = at_once(
        partial(default_server.generate, STORY, max_new_tokens=24, stop=stop),
        partial(default_server.generate, STORY, max_new_tokens=24, stop="history of the city"),
    )
    assert cut["text"] == text[: text.index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["meta_info"]["completion_tokens"] == at + 1
    assert "history of the city" not in text and whole["text"] == text


def test_the_stop_is_kept_exactly_once_if_asked_for(
    default_server: RealServer, story: tuple[str, list[str]]
) -> None:
    """H06: both spellings, on /generate and /v1/completions, plain and streamed."""
    text, _ = story
    stop = text[21:28]
    want = {False: text[: text.index(stop)], True: text[: text.index(stop)] + stop}
    calls: list[Callable[[], str]] = []
    for keep in (False, True):
        ours = {"max_new_tokens": 24, "stop": stop, "no_stop_trim": keep}
        calls += [
            lambda p=ours: default_server.generate(STORY, **p)["text"],  # type: ignore[misc]
            lambda p=ours: streamed(default_server, STORY, **p)[-1],  # type: ignore[misc]
        ]
        for name in ("no_stop_trim", "include_stop_str_in_output"):
            theirs = {"max_tokens": 24, "stop": [stop], name: keep}
            calls += [
                lambda s=s, p=theirs: completed(default_server, STORY, s, **p)[0]  # type: ignore[misc]
                for s in (False, True)
            ]
    assert at_once(*calls) == [want[False]] * 6 + [want[True]] * 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "num_prompts", "n"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 1, 3),
        ("/v1/completions", {"prompt": ["one", "twelve"]}, 2, 2),
        ("/v1/completions", {"prompt": [[5, 6], [7]]}, 2, 1),
        ("/v1/completions", {"prompt": "one"}, 1, 5),
    ],
)
def test_several_choices_of_several_prompts_are_numbered_and_counted(
    roomy: RealServer, route: str, body: dict[str, Any], num_prompts: int, n: int, stream: bool
) -> None:
    """H07: the prompt counts once however many choices it has."""
    body = {**body, "n": n, "max_tokens": 6, "temperature": 1, "seed": 1, "ignore_eos": True}
    prompts = body.get("prompt")
    plain = roomy.ask(route, **body)
    texts = {
        choice["index"]: choice.get("text", choice.get("message", {}).get("content"))
        for choice in plain["choices"]
    }
    assert list(texts) == list(range(num_prompts * n))
    assert {choice["finish_reason"] for choice in plain["choices"]} == {"length"}
    usage = plain["usage"]
    assert usage["completion_tokens"] == 6 * num_prompts * n
    if prompts is not None:
        assert usage["prompt_tokens"] == (len(prompts) if n == 5 else sum(map(len, prompts)))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if not stream:
        return
    pieces = dict.fromkeys(texts, "")
    ends = dict.fromkeys(texts, 0)
    *events, last = roomy.stream(route, **body, stream_options={"include_usage": True})
    for event in events:
        [choice] = event["choices"]
        pieces[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert pieces == texts and set(ends.values()) == {1}
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == usage[name]


def answers_belong_to_their_prompts(server: RealServer, num_threads: int, rounds: int) -> None:
    params = {"max_new_tokens": 12, "ignore_eos": True}
    prompts = [f"{chr(97 + i)} is prompt number {i}" for i in range(num_threads)]
    alone = [server.ids(prompt, **params) for prompt in prompts]
    assert len(set(map(tuple, alone))) == num_threads

    def thread(prompt: str) -> list[list[int]]:
        return [server.ids(prompt, **params) for _ in range(rounds)]

    results = at_once(*(partial(thread, prompt) for prompt in prompts))
    assert results == [[ids] * rounds for ids in alone]


@pytest.mark.parametrize("num_threads", [2, 8])
def test_concurrent_clients_get_their_own_answers(roomy: RealServer, num_threads: int) -> None:
    """H08: the answers are those obtained alone."""
    answers_belong_to_their_prompts(roomy, num_threads, rounds=8)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [2, 8])
def test_many_answers_to_concurrent_clients_are_their_own(
    tight: RealServer, num_threads: int
) -> None:
    """H08: fifty each, where the pool overflows."""
    answers_belong_to_their_prompts(tight, num_threads, rounds=50)


def test_prompts_in_one_batch_answer_as_each_does_alone(default_server: RealServer) -> None:
    """H20: five prompts that each hold a number to repeat, with the default model on a CPU."""
    prompts = [f"Repeat this number exactly: {n}. The number is" for n in (17, 4242, 803, 96, 551)]
    alone = [default_server.ids(prompt, max_new_tokens=24) for prompt in prompts]
    together = default_server.ask(
        "/generate", text=prompts, sampling_params={"temperature": 0, "max_new_tokens": 24}
    )
    assert [answer["output_ids"] for answer in together] == alone
    assert len({tuple(ids) for ids in alone}) == 5
