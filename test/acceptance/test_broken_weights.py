"""A model whose weights hold NaN for one token: who meets it gets an error, nobody else notices."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_scheduler import ids
from real_server import GREEDY, RealServer, at_once, message_of, serve, start, whole_again
from safetensors.torch import load_file, save_file

POISON = "Q"


@pytest.fixture(scope="module")
def broken_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][ids(POISON)[0]] = float("nan")
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(params=["off", "on"], ids=["step", "overlap"], scope="module")
def broken_process(broken_folder: Path, request: pytest.FixtureRequest) -> Iterator[RealServer]:
    options = ("--chunked-prefill-size", "16", "--max-total-tokens", "4096")
    yield from serve(start(broken_folder, *options, "--overlap-schedule", request.param))


@pytest.fixture
def broken(broken_process: RealServer) -> Iterator[RealServer]:
    yield from whole_again(broken_process)


def good_bodies() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i in range(6):
        params: dict[str, Any] = {"max_new_tokens": 60, "logit_bias": {str(ids(POISON)[0]): -1e9}}
        params |= GREEDY if i % 2 else {"temperature": 1.0, "sampling_seed": i, "top_p": 0.9}
        body: dict[str, Any] = {"text": f"good {i} " * (i + 1), "sampling_params": params}
        if i > 3:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        found.append(body)
    return found


@pytest.mark.slow
def test_a_request_that_meets_nan_ends_with_an_error_and_harms_nobody(broken: RealServer) -> None:
    alone = [broken.ask("/generate", **body)["output_ids"] for body in good_bodies()]
    bad: list[dict[str, Any]] = [
        {"text": "x" * before + POISON + "y" * after, "sampling_params": {**GREEDY, **params}}
        for before in (0, 10, 40)
        for after in (0, 30)
        for params in ({}, {"temperature": 1.0, "top_k": 5}, {"max_new_tokens": 0})
    ]
    bad += [{**body, "return_logprob": True, "logprob_start_len": 0} for body in bad[:3]]
    # One is driven to the token that breaks it.
    bias = {**GREEDY, "logit_bias": {str(ids(POISON)[0]): 1e9}, "frequency_penalty": 1.0}
    bad.append({"text": "driven", "sampling_params": bias})
    good = [partial(broken.post, "/generate", **body) for body in good_bodies()]
    answers = at_once(*good, *(partial(broken.post, "/generate", **body) for body in bad))
    for (status, answer), undisturbed in zip(answers[: len(good)], alone, strict=False):
        assert status == 200, answer
        assert answer["output_ids"] == undisturbed
    for status, answer in answers[len(good) :]:
        assert status == 500, answer
        assert "NaN or infinity" in message_of(answer)
    # What was cached of broken prompts breaks nobody who shares their beginning.
    assert len(broken.ids("x" * 40 + "w", max_new_tokens=3)) == 3
    assert broken.state["broken_requests"] >= len(bad)
    assert b"regather:broken_logits_requests_total" in broken.get("/metrics")[1]
    assert broken.log.count("NaN or infinity in the logits") == 1


@pytest.mark.slow
def test_a_stream_that_meets_nan_ends_with_an_error_and_what_it_had(broken: RealServer) -> None:
    params = {**GREEDY, "logit_bias": {str(ids(POISON)[0]): 1e9}, "max_new_tokens": 9}
    *_, last = broken.stream("/generate", text="driven", sampling_params=params)
    reason = last["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 500), last
    assert "NaN or infinity" in message_of(reason), last
    assert last["text"] == POISON
    status, answer = broken.post("/v1/completions", prompt=POISON, model="any", max_tokens=3)
    assert status == 500, answer
    assert "NaN or infinity" in message_of(answer)
