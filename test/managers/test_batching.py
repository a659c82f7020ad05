"""Static and dynamic batching on the real scheduler; one step is one second."""

from __future__ import annotations

import pytest
from fake_runner import tokens_alone
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness

from srt.managers.batching import BatchingState, RunToCompletion, make_batching
from srt.managers.scheduler_view import requests_view


def static(timeout: float = 100.0) -> RunToCompletion:
    return RunToCompletion("static", timeout)


def phases(harness: Harness, steps: int) -> list[tuple[str, list[str]]]:
    found = []
    for _ in range(steps):
        chosen = harness.step()
        found.append(("-", []) if chosen is None else (chosen.phase, chosen.record.rids))
    return found


def test_nobody_joins_a_static_batch_until_its_last_request_has_ended():
    harness = Harness(max_running=2, batching=static())
    for rid, max_new in (("a", 2), ("b", 4), ("c", 1), ("d", 1)):
        harness.send(rid, [1, 2], max_new)
    assert phases(harness, 5) == [
        ("P", ["a", "b"]), ("D", ["a", "b"]), ("D", ["b"]), ("D", ["b"]), ("P", ["c", "d"]),
    ]  # fmt: skip


def test_the_same_load_takes_the_row_of_whoever_ended_in_continuous_batching():
    harness = Harness(max_running=2)
    for rid, max_new in (("a", 2), ("b", 4), ("c", 1), ("d", 1)):
        harness.send(rid, [1, 2], max_new)
    assert phases(harness, 4) == [
        ("P", ["a", "b"]), ("D", ["a", "b"]), ("P", ["c"]), ("P", ["d"]),
    ]  # fmt: skip


def test_rows_that_a_static_batch_holds_without_use_are_counted():
    lengths = [1024, 200, 150, 128, 120, 118, 116, 112]
    assert sum(lengths) == 1968
    harness = Harness(
        pool_size=4096, max_running=8, context_len=1100, batching=static(), phase="interleave"
    )
    for number, length in enumerate(lengths):
        harness.send(str(number), [number + 1], length, ignore_eos=True)
    harness.run()
    counters = harness.scheduler.counters
    assert (counters.row_steps, counters.generated_tokens) == (8192, 1968)
    assert round(counters.generated_tokens / counters.row_steps, 3) == 0.240


def test_continuous_batching_has_no_rows_without_use():
    harness = Harness(max_running=4)
    for number in range(10):
        harness.send(str(number), [number + 1], number % 4 + 1)
    harness.run()
    counters = harness.scheduler.counters
    assert counters.row_steps == counters.generated_tokens


def test_a_batch_that_is_not_full_starts_when_its_oldest_request_has_waited_long_enough():
    harness = Harness(max_running=4, batching=RunToCompletion("dynamic", 3.0))
    harness.send("a", [1], 2)
    assert phases(harness, 2) == [("-", []), ("-", [])]
    harness.send("b", [1], 2)
    assert phases(harness, 3) == [("-", []), ("P", ["a", "b"]), ("D", ["a", "b"])]


def test_a_full_batch_starts_at_once():
    harness = Harness(max_running=2, batching=static())
    harness.send("a", [1], 1)
    assert phases(harness, 1) == [("-", [])]
    harness.send("b", [1], 1)
    assert phases(harness, 1) == [("P", ["a", "b"])]


def test_a_batch_forms_over_several_prefills_before_anyone_decodes():
    harness = Harness(
        max_running=3, max_prefill_tokens=4, chunk=4, phase="interleave", batching=static()
    )
    for rid, prompt in (("a", [1, 2, 3]), ("b", [11, 12, 13, 14, 15, 16]), ("c", [21, 22, 23, 24])):
        harness.send(rid, prompt, 3)
    kinds = [phase for phase, _ in phases(harness, 6)]
    assert kinds == ["P", "P", "P", "P", "D", "D"]
    assert harness.scheduler.counters.generated_tokens == 9


def test_what_does_not_fit_in_the_pool_waits_for_the_next_batch():
    harness = Harness(pool_size=20, max_running=3, batching=static(2.0))
    for first, rid in enumerate(("a", "b", "c")):
        harness.send(rid, [first, 2, 3], 5, ignore_eos=True)
    passes = [rids for phase, rids in phases(harness, 4) if phase == "P"]
    assert passes == [["a", "b"]]
    harness.run()
    assert len(harness.outputs["c"]) == 5


def test_a_waiting_request_is_told_that_it_waits_for_the_batch():
    harness = Harness(max_running=2, batching=static())
    harness.send("a", [1], 5)
    harness.step()
    [view] = requests_view(harness.scheduler)
    assert view["blocker"] == {
        "kind": "batching", "needed": 2, "available": 1, "reserved": 0, "short_by": 1,
    }  # fmt: skip
    harness.send("b", [1], 5)
    harness.send("c", [1], 5)
    harness.step()
    chosen = harness.step()
    assert chosen is not None
    assert [(e.rid, e.blocker) for e in chosen.record.refused] == [("c", "batching")]


def test_while_a_batch_waits_the_scheduler_rests_until_its_deadline_and_no_longer():
    harness = Harness(max_running=4, batching=RunToCompletion("dynamic", 2.5))
    harness.send("a", [1], 1)
    harness.step()  # at 0; the clock is at 1 then
    assert not harness.scheduler.has_work
    asked: list[int] = []
    recv = harness.channel.recv
    harness.channel.recv = lambda timeout_ms: (asked.append(timeout_ms), recv(timeout_ms))[1]
    harness.step()
    harness.step()
    assert asked == [1000, 500]


def test_an_aborted_request_leaves_a_batch_that_waits_to_be_full():
    harness = Harness(max_running=2, batching=static())
    harness.send("a", [1], 5)
    harness.step()
    harness.abort("a")
    harness.step()
    assert harness.finished["a"].type.value == "abort"
    harness.send("b", [1], 1)
    harness.send("c", [1], 1)
    assert phases(harness, 1) == [("P", ["b", "c"])]


def test_a_retracted_request_of_a_static_batch_comes_back_in_the_next_one():
    harness = Harness(
        pool_size=16, max_running=2, conservativeness=0.0, batching=static(2.0), disable_radix=True
    )
    harness.send("a", [1, 2, 3], 8)
    harness.send("b", [4, 5, 6], 9)
    harness.run()
    assert harness.scheduler.counters.retracted_requests["kv"] >= 1
    assert harness.outputs["a"] == tokens_alone([1, 2, 3], 8, 997, set())
    assert harness.outputs["b"] == tokens_alone([4, 5, 6], 9, 997, set())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 6)), max_size=12),
    st.sampled_from(["static", "dynamic"]),
    st.booleans(),
    st.booleans(),
)
def test_any_load_gives_the_tokens_each_request_gives_alone(load, name, overlap, mixed):
    harness = Harness(
        pool_size=60, max_running=3, chunk=5, max_prefill_tokens=8, phase="interleave",
        overlap=overlap, mixed=mixed, batching=RunToCompletion(name, 3.0),
    )  # fmt: skip
    for number, (prompt_len, max_new, pause) in enumerate(load):
        harness.send(str(number), [number * 13 + i for i in range(prompt_len)], max_new)
        for _ in range(pause):
            harness.step()
    harness.run()
    for number, (prompt_len, max_new, _) in enumerate(load):
        prompt = [number * 13 + i for i in range(prompt_len)]
        assert harness.outputs[str(number)] == tokens_alone(prompt, max_new, 997, set())
    counters = harness.scheduler.counters
    assert counters.row_steps >= counters.generated_tokens


def test_each_name_makes_its_kind_and_another_is_refused():
    assert make_batching("continuous").name == "continuous"
    state = BatchingState(0.5, 0, 1, 0.0, 4, False)
    assert make_batching("dynamic").admits(state), "after a tenth of a second"
    assert not make_batching("static").admits(state)
    assert make_batching("static", 0.5).admits(state)
    with pytest.raises(ValueError, match="batching must be one of"):
        make_batching("sometimes")
