"""Requests whose logits are not numbers: each ends with an error, and nothing else happens."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from fake_runner import tokens_alone
from scheduler_harness import Harness

from srt.managers.io_struct import FinishType
from srt.managers.scheduler_view import internal_state

POISON = 996
PROMPT = list(range(10, 30))


def alone(prompt: list[int], max_new: int) -> list[int]:
    return tokens_alone(prompt, max_new, 997, set())


def harness(**options: object) -> Harness:
    made = Harness(**options)  # type: ignore[arg-type]
    made.runner.poison = {POISON}
    return made


def assert_broken(h: Harness, rid: str) -> None:
    reason = h.finished[rid]
    assert (reason.type, reason.status_code) == (FinishType.ABORT, 500)
    assert "NaN or infinity" in (reason.message or "")


@pytest.fixture(params=[False, True], ids=["step", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("place", [0, 5, 19])
def test_a_broken_prompt_ends_alone(overlap, chunk, mixed, place) -> None:
    h = harness(overlap=overlap, chunk=chunk, mixed=mixed)
    prompts = {f"good{i}": [*PROMPT[: i + 3], i] for i in range(4)}
    broken = [*PROMPT[:place], POISON, *PROMPT[place:]]
    for rid, prompt in prompts.items():
        h.send(rid, prompt, 12)
    h.step()
    h.send("bad", broken, 12)
    h.send("none wanted", broken, 0)
    h.run()
    for rid, prompt in prompts.items():
        assert h.outputs[rid] == alone(prompt, 12)
    assert h.outputs["bad"] == []
    assert_broken(h, "bad")
    assert_broken(h, "none wanted")
    assert internal_state(h.scheduler)["broken_requests"] == 2


def test_a_token_that_breaks_its_row_ends_it_with_what_it_had(overlap) -> None:
    """The fourth output is poison: it is given out, since only the pass that reads it breaks."""
    h = harness(overlap=overlap)
    other = [3, 1, 4]
    outputs = alone(PROMPT, 10)
    h.runner.poison = {outputs[3]}
    assert h.runner.poison.isdisjoint([*PROMPT, *outputs[:3], *other, *alone(other, 10)])
    h.send("bad", PROMPT, 10, frequency_penalty=0.5, presence_penalty=0.1)
    h.send("good", other, 10)
    h.run()
    assert h.outputs["bad"] == outputs[:4]
    assert_broken(h, "bad")
    assert h.outputs["good"] == alone(other, 10)
    # What was shared before stays, nothing is added.
    assert shared_len(h, [*PROMPT, *outputs]) == len(PROMPT)


def shared_len(h: Harness, tokens: list[int]) -> int:
    return h.memory.tree.match_len(np.array(tokens, dtype=np.int32), None)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("place", [0, 8, 17, 20])
def test_broken_kv_is_never_shared(overlap, page_size, place) -> None:
    """In chunks of 8 tokens: those before the one that breaks are good and stay."""
    h = harness(overlap=overlap, chunk=8, page_size=page_size)
    broken = [*PROMPT[:place], POISON, *PROMPT[place:]]
    h.send("bad", broken, 5)
    h.run()
    assert_broken(h, "bad")
    cached = shared_len(h, [*broken, 1])
    assert cached == place // 8 * 8
    # The same prompt with weights that mean something is answered from what is left.
    h.runner.poison = set()
    h.send("again", broken, 5)
    h.run()
    assert h.outputs["again"] == alone(broken, 5)


@pytest.mark.parametrize("turns", range(1, 6))
def test_what_an_aborted_request_computed_unseen_is_not_shared(turns) -> None:
    """With a pass in flight over a token whose logits nobody has looked at."""
    h = harness(overlap=True, chunk=8)
    broken = [*PROMPT, POISON, *PROMPT]
    h.send("bad", broken, 5)
    for _ in range(turns):
        h.step()
    h.abort("bad")
    h.run()
    assert shared_len(h, [*broken, 1]) <= 16


def test_the_log_names_one_broken_request_and_counts_the_rest(caplog) -> None:
    h = harness()
    with caplog.at_level(logging.ERROR):
        for i in range(5):
            h.send(f"bad{i}", [i, POISON], 5)
        h.run()
        h.clock.now += 100.0
        h.send("late", [7, POISON], 5)
        h.run()
    lines = [r.getMessage() for r in caplog.records if "NaN or infinity" in r.getMessage()]
    assert [("bad0" in line, "late" in line) for line in lines] == [(True, False), (False, True)]
    assert lines[1].endswith(": 5")
