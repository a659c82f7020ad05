"""What the scheduler tells about itself, and what may be changed while it serves."""

import re

import pytest
from scheduler_harness import Harness

from srt.managers.io_struct import (
    ControlOut,
    FlushCacheOut,
    FlushCacheReq,
    JournalReq,
    PauseReq,
    RequestsReq,
    UpdateSchedulerReq,
)
from srt.managers.scheduler_view import internal_state, requests_view


def prompt(seed, length):
    return [(seed * 131 + i * 17) % 997 for i in range(length)]


def ask(harness, message):
    harness.channel.inbox.append(message)
    harness.step()
    answers = [m for m in harness.channel.outbox if isinstance(m, ControlOut)]
    harness.channel.outbox.clear()
    (answer,) = answers
    assert answer.id == message.id
    return answer


def crowd():
    """One running, one in mid-chunk, one too big, one behind it."""
    harness = Harness(pool_size=300, max_running=8, chunk=32)
    harness.send("runs", prompt(1, 10), 150, ignore_eos=True)
    harness.step()
    harness.step()
    harness.send("chunked", prompt(2, 80), 10)
    harness.send("big", prompt(3, 150), 50)
    harness.send("behind", prompt(4, 5), 5)
    harness.step()
    return harness


def test_requests_tell_where_they_are_and_what_they_wait_for():
    harness = crowd()
    view = {item["rid"]: item for item in ask(harness, RequestsReq(1)).result}
    assert list(view)[:2] == ["big", "behind"], "the waiting come first, in order"
    assert {rid: item["state"] for rid, item in view.items()} == {
        "runs": "running",
        "chunked": "chunked",
        "big": "waiting",
        "behind": "waiting",
    }
    assert view["big"]["queue_position"] == 0 and view["runs"]["queue_position"] is None
    assert view["runs"]["blocker"] is None and view["runs"]["completion_tokens"] >= 2
    blocker = view["big"]["blocker"]
    assert blocker["kind"] in ("kv", "prefill_budget")
    short = blocker["needed"] + blocker["reserved"] - blocker["available"]
    assert blocker["short_by"] == short > 0
    assert view["chunked"]["kv_tokens"] in (32, 64)
    assert all("text" not in item and "input_ids" not in item for item in view.values())


def test_one_request_is_shown_alone_and_one_that_is_not_live_not_at_all():
    harness = crowd()
    assert [item["rid"] for item in ask(harness, RequestsReq(1, "chunked")).result] == ["chunked"]
    assert ask(harness, RequestsReq(2, "nobody")).result == []


def test_a_retracted_request_says_so():
    harness = Harness(pool_size=160, max_running=8, conservativeness=0.0)
    for i in range(11):
        harness.send(f"r{i}", prompt(i, 10 + i), 40)
    while not harness.scheduler.counters.retracted_requests:
        harness.step()
    states = [item["state"] for item in requests_view(harness.scheduler)]
    assert "retracted" in states
    state = internal_state(harness.scheduler)
    assert state["num_retracted_waiting"] == states.count("retracted")
    assert state["retracted_requests"]["kv"] >= 1 and state["retracted_output_tokens"] >= 0


def test_those_held_by_the_phase_wait_for_a_decode_turn():
    harness = Harness(phase="decode-first", chunk=32)
    harness.send("runs", prompt(1, 10), 50)
    harness.step()
    harness.send("late", prompt(2, 10), 5)
    harness.step()
    (late,) = requests_view(harness.scheduler, "late")
    assert late["blocker"]["kind"] == "decode_turn"


def test_pausing_stops_passes_and_keeps_everything():
    harness = Harness()
    harness.send("a", prompt(1, 10), 20)
    harness.step()
    assert ask(harness, PauseReq(1, True)).result == {"paused": True}
    before = list(harness.outputs["a"])
    harness.send("b", prompt(2, 10), 5)
    for _ in range(5):
        harness.step()
    assert harness.outputs["a"] == before and harness.outputs["b"] == []
    (waiting,) = requests_view(harness.scheduler, "b")
    assert waiting["blocker"]["kind"] == "paused"
    assert ask(harness, PauseReq(2, False)).result == {"paused": False}
    harness.run()
    assert len(harness.outputs["a"]) == 20 and len(harness.outputs["b"]) == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pause_that_retracts_frees_all_memory_and_loses_nothing(overlap, caplog):
    harness = Harness(pool_size=600, chunk=32, overlap=overlap)
    alone = Harness()
    loads = {"a": (prompt(1, 10), 20), "b": (prompt(2, 12), 30), "long": (prompt(3, 100), 4)}
    for rid, (ids, max_new) in loads.items():
        for each in (harness, alone):
            each.send(rid, ids, max_new)
    alone.run()
    for _ in range(4):
        harness.step()
    assert harness.memory.used > 0
    assert ask(harness, PauseReq(1, True, retract=True)).result == {"paused": True}
    assert harness.memory.used == 0 and not harness.scheduler.running_batch
    assert "Retract all requests for a pause. #retracted_reqs:" in caplog.text
    harness.channel.inbox.append(FlushCacheReq(2))
    harness.step()
    (flushed,) = [m for m in harness.channel.outbox if isinstance(m, FlushCacheOut)]
    assert flushed.success and harness.memory.tree.evictable_size == 0
    ask(harness, PauseReq(3, False))
    harness.run()
    assert harness.outputs == alone.outputs
    first = [rid for rid in harness.started if harness.started[rid].num_retractions]
    assert first, "nobody was sent back"


def test_the_journal_answers_with_its_last_records():
    harness = Harness()
    harness.send("a", prompt(1, 10), 5)
    harness.run()
    harness.send("b", prompt(2, 10), 1)
    records = ask(harness, JournalReq(1, 3)).result
    assert [record["phase"] for record in records] == ["D", "D", "D"]
    assert [record["step"] for record in records] == [2, 3, 4]
    assert records[-1]["rids"] == ["a"] and records[-1]["finished"] == {"a": "length"}
    assert set(records[-1]["ms"]) == {"receive", "choose", "run", "process"}


def test_settings_change_all_or_none_and_are_read_back(caplog):
    harness = Harness(max_running=8, page_size=16, chunk=64)
    answer = ask(
        harness,
        UpdateSchedulerReq(
            1,
            {
                "max_running_requests": 2,
                "chunked_prefill_size": 32,
                "schedule_policy": "lpm",
                "phase_policy": "slo",
                "schedule_conservativeness": 0.5,
                "admission": "estimated",
                "max_queue_age": 3,
            },
        ),
    )
    assert answer.error is None
    assert answer.result["max_running_requests"] == 2
    assert answer.result["schedule_policy"] == "lpm" and answer.result["phase_policy"] == "slo"
    for i in range(6):
        harness.send(f"r{i}", prompt(i, 40), 5)
    most = 0
    while harness.scheduler.live or harness.channel.inbox:
        chosen = harness.step()
        assert chosen is None or sum(chosen.forward.extend_lens_cpu) <= 32
        most = max(most, harness.scheduler.load().num_running)
    assert most == 2
    bad = ask(harness, UpdateSchedulerReq(2, {"max_running_requests": 3, "page_size": 2}))
    assert "unknown field 'page_size'" in bad.error
    assert bad.result["max_running_requests"] == 2, "nothing of a bad change is applied"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"max_running_requests": 9},
            r"max_running_requests must be an integer in \[1, 8\], got 9",
        ),
        ({"max_running_requests": True}, "got True"),
        ({"chunked_prefill_size": 8}, "chunked_prefill_size must be an integer at least 16, got 8"),
        ({"schedule_conservativeness": -1}, r"in \[0.0, 100.0\], got -1"),
        ({"schedule_policy": "best"}, "schedule_policy must be one of fcfs, .*, got 'best'"),
        ({"max_queue_age": "soon"}, "max_queue_age must be a number at least 0.0, got 'soon'"),
    ],
)
def test_a_wrong_setting_is_refused_with_field_value_and_limit(values, message):
    harness = Harness(max_running=8, page_size=16)
    answer = ask(harness, UpdateSchedulerReq(1, values))
    assert re.search(message, answer.error)


def test_changing_the_policy_keeps_everyone_who_waits():
    harness = Harness(max_running=1)
    for i in range(5):
        harness.send(f"r{i}", prompt(i, 5), 3 + i)
    harness.step()
    ask(harness, UpdateSchedulerReq(1, {"schedule_policy": "lof"}))
    harness.run()
    assert list(harness.finished) == ["r0", "r4", "r3", "r2", "r1"]
