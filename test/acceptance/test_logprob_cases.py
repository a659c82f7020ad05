"""CASES H11 and H21 to H23, and that logprobs are the model's own, however computed."""

from __future__ import annotations

import http.client
import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import openai
import pytest
import torch
from greedy_reference import GreedyReference
from real_server import RealServer, at_once

ENDLESS = {"temperature": 0, "ignore_eos": True}
CLOSE = 2e-3


def ids_of(seed: int, length: int) -> list[int]:
    return [(seed * 131 + i * i * 7 + i * 31) % 90 + 5 for i in range(length)]


def logprobs_of(reference: GreedyReference, tokens: list[int]) -> torch.Tensor:
    """[len, vocab]: of the token after each prefix."""
    return reference.logits(tokens).double().log_softmax(-1)


def check_prompt(
    reference: GreedyReference, ids: list[int], start: int, meta: dict[str, Any]
) -> None:
    told = meta["input_token_logprobs"]
    assert [triple[1] for triple in told] == ids[start:]
    assert told[0][0] is None
    truth = logprobs_of(reference, ids)
    for i, (logprob, token_id, text) in enumerate(told[1:], start=start + 1):
        assert logprob == pytest.approx(float(truth[i - 1, token_id]), abs=CLOSE)
        assert text is None


def check_outputs(reference: GreedyReference, ids: list[int], answer: dict[str, Any]) -> None:
    told, outputs = answer["meta_info"]["output_token_logprobs"], answer["output_ids"]
    assert [triple[1] for triple in told] == outputs
    assert answer["meta_info"]["output_token_logprobs_length"] == len(outputs)
    truth = logprobs_of(reference, ids + outputs)
    for i, (logprob, token_id, _) in enumerate(told):
        assert logprob == pytest.approx(float(truth[len(ids) + i - 1, token_id]), abs=CLOSE)


@pytest.mark.parametrize("start", [0, 1, 130, 299])
def test_the_prompt_is_told_from_the_start_that_was_asked_for(
    roomy: RealServer, reference: GreedyReference, start: int
) -> None:
    """In chunks of 128, and again when the whole prompt is in the cache."""
    ids = ids_of(start, 300)
    for _ in range(2):
        answer = roomy.ask(
            "/generate",
            input_ids=ids,
            sampling_params={**ENDLESS, "max_new_tokens": 5},
            return_logprob=True,
            logprob_start_len=start,
        )
        check_prompt(reference, ids, start, answer["meta_info"])
        check_outputs(reference, ids, answer)
    assert answer["meta_info"]["cached_tokens"] == start // 16 * 16


def test_without_a_start_only_outputs_are_told_and_the_cache_is_used(
    roomy: RealServer, reference: GreedyReference
) -> None:
    ids = ids_of(37, 100)
    for cached in (0, 96):
        answer = roomy.ask(
            "/generate",
            input_ids=ids,
            sampling_params={**ENDLESS, "max_new_tokens": 3},
            return_logprob=True,
        )
        assert answer["meta_info"]["input_token_logprobs"] == []
        check_outputs(reference, ids, answer)
        assert answer["meta_info"]["cached_tokens"] == cached


def test_alternatives_and_asked_for_tokens_are_told_at_every_place(
    roomy: RealServer, reference: GreedyReference
) -> None:
    ids, wanted = ids_of(7, 20), [3, 77, 40]
    answer = roomy.ask(
        "/generate",
        input_ids=ids,
        sampling_params={"temperature": 0.8, "top_k": 5, "max_new_tokens": 6, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=4,
        token_ids_logprob=wanted,
    )
    meta = answer["meta_info"]
    truth = logprobs_of(reference, ids + answer["output_ids"])
    assert meta["input_top_logprobs"][0] is None and meta["input_token_ids_logprobs"][0] is None
    tops = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
    asked = meta["input_token_ids_logprobs"][1:] + meta["output_token_ids_logprobs"]
    assert len(tops) == len(asked) == 19 + 6
    for i, (top, some) in enumerate(zip(tops, asked, strict=True)):
        best = truth[i].topk(4)
        assert [t[0] for t in top] == pytest.approx(best.values.tolist(), abs=CLOSE)
        assert [t[0] for t in top] == sorted((t[0] for t in top), reverse=True)
        assert [t[1] for t in some] == wanted
        assert [t[0] for t in some] == pytest.approx(truth[i, wanted].tolist(), abs=CLOSE)


def test_texts_stand_beside_the_ids_when_asked_for(roomy: RealServer) -> None:
    answer = roomy.ask(
        "/generate",
        text="abc",
        sampling_params={**ENDLESS, "max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert "".join(triple[2] for triple in meta["input_token_logprobs"]).endswith("abc")
    assert all(isinstance(top[0][2], str) for top in meta["output_top_logprobs"])


def test_each_prompt_of_a_batch_may_ask_for_its_own(roomy: RealServer) -> None:
    answers = roomy.ask(
        "/generate",
        input_ids=[[5, 6, 7], [8, 9, 10], [11, 12, 13]],
        sampling_params={**ENDLESS, "max_new_tokens": 2},
        return_logprob=[True, False, True],
        logprob_start_len=[0, -1, 1],
        top_logprobs_num=[0, 3, 2],
        token_ids_logprob=[None, [1], [2, 3]],
    )
    first, second, third = (answer["meta_info"] for answer in answers)
    assert len(first["input_token_logprobs"]) == 3 and "output_top_logprobs" not in first
    assert "output_token_logprobs" not in second
    assert len(third["input_token_logprobs"]) == 2
    assert [len(top) for top in third["output_top_logprobs"]] == [2, 2]
    assert [[t[1] for t in ids] for ids in third["output_token_ids_logprobs"]] == [[2, 3]] * 2


def test_h11_no_tokens_but_the_prompts_probabilities(
    roomy: RealServer, reference: GreedyReference
) -> None:
    """H11: max_new_tokens 0 with return_logprob, beside running requests."""
    ids = ids_of(21, 200)

    def neighbour(seed: int) -> Any:
        return roomy.generate(ids_of(seed, 10), ignore_eos=True, max_new_tokens=60)

    def silent() -> Any:
        return roomy.ask(
            "/generate",
            input_ids=ids,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )

    alone = neighbour(1)["output_ids"]
    answers = at_once(lambda: neighbour(1), silent, lambda: neighbour(2), silent)
    assert answers[0]["output_ids"] == alone
    for answer in (answers[1], answers[3]):
        assert (answer["text"], answer["output_ids"]) == ("", [])
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert answer["meta_info"]["output_token_logprobs"] == []
        check_prompt(reference, ids, 0, answer["meta_info"])


def test_retractions_repeat_and_lose_nothing(tight: RealServer, reference: GreedyReference) -> None:
    """Prompts are told once although they are computed again."""
    prompts = [ids_of(i, 5 + 3 * i) for i in range(12)]
    # Tokens that are sure to come are reserved; those of whoever may end sooner are not.
    params = {"temperature": 0, "max_new_tokens": 100, "min_new_tokens": 100}
    chunks = tight.stream(
        "/generate",
        input_ids=prompts,
        sampling_params=params,
        return_logprob=True,
        logprob_start_len=0,
    )
    last = {chunk["index"]: chunk for chunk in chunks}
    assert sum(chunk["meta_info"]["num_retractions"] for chunk in last.values()) > 0
    for i, ids in enumerate(prompts):
        check_prompt(reference, ids, 0, last[i]["meta_info"])
        check_outputs(reference, ids, last[i])


def test_a_stream_ends_with_the_lists_of_the_plain_answer(roomy: RealServer) -> None:
    body = {
        "input_ids": ids_of(60, 40),
        "sampling_params": {**ENDLESS, "max_new_tokens": 9},
        "return_logprob": True,
        "logprob_start_len": 10,
        "top_logprobs_num": 2,
    }
    plain = roomy.ask("/generate", **body)["meta_info"]
    names = [name for name in plain if "logprobs" in name]
    assert len(names) == 5
    lengths = []
    for chunk in roomy.stream("/generate", **body):
        meta = chunk["meta_info"]
        assert len(meta["output_token_logprobs"]) == len(chunk["output_ids"])
        lengths.append(len(chunk["output_ids"]))
    assert lengths == sorted(set(lengths)) and lengths[-1] == 9
    for name in names:
        assert json.dumps(meta[name]) == json.dumps(plain[name]), name


def client_of(server: RealServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")


def test_h21_a_chat_stream_tells_what_the_plain_answer_tells(roomy: RealServer) -> None:
    """H21: also where a chunk holds several tokens."""
    client = client_of(roomy)

    def ask(stream: bool) -> Any:
        return client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=12,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
            stream=stream,
            extra_body={"ignore_eos": True, "stream_interval": 4},
        )

    plain = ask(False).choices[0]
    streamed = [
        token
        for chunk in ask(True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content
    ]
    assert [token.model_dump() for token in streamed] == [
        token.model_dump() for token in plain.logprobs.content
    ]
    assert len(streamed) == 12
    for token in streamed:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob
        assert token.token == bytes(token.bytes).decode("utf-8", "replace")


def test_completions_tell_tokens_offsets_and_alternatives(roomy: RealServer) -> None:
    client = client_of(roomy)

    def ask(**fields: Any) -> Any:
        return client.completions.create(
            model="m", prompt="Hi there", max_tokens=6, temperature=0, logprobs=2, **fields
        )

    plain = ask().choices[0]
    assert len(plain.logprobs.tokens) == len(plain.logprobs.top_logprobs) <= 6
    echoed = ask(echo=True).choices[0]
    prompt_len = len(echoed.logprobs.tokens) - len(plain.logprobs.tokens)
    assert echoed.text.startswith("Hi there") and prompt_len > 0
    assert echoed.logprobs.token_logprobs[0] is None and echoed.logprobs.top_logprobs[0] is None
    assert echoed.logprobs.token_logprobs[prompt_len:] == plain.logprobs.token_logprobs
    for i, (token, offset) in enumerate(
        zip(plain.logprobs.tokens, plain.logprobs.text_offset, strict=True)
    ):
        if "\ufffd" not in plain.text[: offset + len(token)] and token in plain.text:
            assert plain.text[offset : offset + len(token)] == token, i
    parts = [chunk.choices[0].logprobs for chunk in ask(stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for part in parts for value in getattr(part, name)]
        assert joined == getattr(plain.logprobs, name), name


@pytest.mark.parametrize("stream", [False, True])
def test_h22_impossible_tokens_make_valid_json(roomy: RealServer, stream: bool) -> None:
    """H22: filters and biases of -100 leave numbers, never NaN or Infinity."""

    def strict(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    best = roomy.ids("abc", max_new_tokens=1)[0]
    for body in (
        {"echo": True, "logprobs": 5, "top_k": 1},
        {"logprobs": 5, "logit_bias": {str(best): -100}},
    ):
        fields = {"prompt": "abc", "max_tokens": 3, "temperature": 0, **body}
        if stream:
            objects = list(roomy.stream("/v1/completions", **fields))
        else:
            objects = [roomy.ask("/v1/completions", **fields)]
        json.loads(json.dumps(objects), parse_constant=strict)
        numbers = [
            number
            for event in objects
            for number in event["choices"][0]["logprobs"]["token_logprobs"]
            if number is not None
        ]
        assert numbers and all(math.isfinite(number) for number in numbers)


def chunk_times(server: RealServer, path: str, body: dict[str, Any]) -> list[float]:
    """When each chunk of a stream ended, read without a look at what is in it."""
    times = []
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)) as connection:
        data = json.dumps({**body, "stream": True})
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        with closing(connection.getresponse()) as response:
            assert response.status == 200
            while line := response.readline():
                if line == b"\n":
                    times.append(time.monotonic())
    return times


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_h23_a_late_chunk_costs_what_an_early_one_does(roomy: RealServer, path: str) -> None:
    """H23: 8 streams of 900 tokens with five alternatives each, and /health meanwhile."""
    tokens = 900
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hello"}],
        **{"max_tokens": tokens, "temperature": 0, "ignore_eos": True},
        **{"logprobs": True, "top_logprobs": 5},
    }
    if path == "/generate":
        params = {**ENDLESS, "max_new_tokens": tokens}
        body = {"text": "Hello", "sampling_params": params, "return_logprob": True}
        body["top_logprobs_num"] = 5

    def healthy() -> float:
        waits = []
        for _ in range(20):
            begin = time.monotonic()
            assert roomy.get("/health")[0] == 200
            waits.append(time.monotonic() - begin)
            time.sleep(0.1)
        return max(waits)

    with ThreadPoolExecutor(9) as pool:
        streams = [pool.submit(chunk_times, roomy, path, body) for _ in range(8)]
        assert pool.submit(healthy).result() < 2.0
        for future in streams:
            times = future.result()
            third = len(times) // 3
            early, late = times[third] - times[0], times[-2] - times[-third - 2]
            assert late < 4 * early + 0.5


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/generate", {"return_logprob": "yes"}, "return_logprob"),
        ("/generate", {"return_logprob": True, "logprob_start_len": -2}, "at least -1, got -2"),
        ("/generate", {"return_logprob": True, "logprob_start_len": 9}, r"logprob_start_len \(9\)"),
        ("/generate", {"return_logprob": True, "top_logprobs_num": 129}, r"\[0, 128\], got 129"),
        ("/generate", {"return_logprob": True, "token_ids_logprob": [999]}, "token id 999"),
        ("/generate", {"return_logprob": True, "token_ids_logprob": "a"}, "token_ids_logprob"),
        ("/generate", {"return_logprob": [True, True]}, "return_logprob"),
        ("/v1/completions", {"logprobs": 21}, r"logprobs must be in \[0, 20\], got 21"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 3}, "needs logprobs to be true"),
        ("/v1/chat/completions", {"logprobs": 3}, "logprobs"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(
    roomy: RealServer, path: str, body: dict[str, Any], problem: str
) -> None:
    prompt: dict[str, Any] = {
        "/generate": {"input_ids": [5, 6, 7]},
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    }[path]
    assert re.search(problem, roomy.refused(path, **prompt, **body))
