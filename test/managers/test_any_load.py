"""Whatever arrives, whatever is aborted, however small the pool: the same tokens as alone, one end
each."""

import logging

import pytest
from fake_runner import tokens_alone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness

from srt.managers.io_struct import FinishType

VOCAB, EOS = 50, 7
# Passes in a row that may leave out a request that decodes; riding along, none do.
MAX_GAP = {"prefill-first": 10**9, "decode-first": 1, "interleave": 1, "slo": 4}
COMMON = [1, 2, 3, 4, 5, 6, 8, 9] * 3

requests = st.fixed_dictionaries(
    {
        "common": st.integers(0, len(COMMON)),  # tokens of the shared prefix
        "own": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        "max_new": st.integers(0, 40),
        "ignore_eos": st.booleans(),
        "stops": st.sampled_from([(), (3, 4)]),
        "priority": st.integers(0, 3),
        "tenant": st.sampled_from([None, "a", "b"]),
        "steps_before": st.integers(0, 4),
        "abort_after": st.none() | st.integers(0, 30),
    }
)
servers = st.fixed_dictionaries(
    {
        "num_pages": st.integers(1, 64),
        "page_size": st.sampled_from([1, 16]),
        "max_running": st.integers(1, 8),
        "chunk": st.sampled_from([None, 16, 48]),
        "max_prefill_tokens": st.sampled_from([16, 64, 16384]),
        "policy": st.sampled_from(["fcfs", "lpm", "lof", "random", "priority", "fair"]),
        "phase": st.sampled_from(["prefill-first", "decode-first", "interleave", "slo"]),
        "decodes": st.sampled_from([1, 3]),
        "admission": st.sampled_from(["ratio", "estimated"]),
        "overlap": st.booleans(),
        "mixed": st.booleans(),
        "disable_radix": st.booleans(),
        "retract_every": st.sampled_from([0, 0, 2, 5]),
        "conservativeness": st.sampled_from([0.0, 0.3, 1.0]),
        "max_queue_age": st.sampled_from([None, 3.0]),
        "preempt_threshold": st.sampled_from([None, 0, 1]),
    }
)


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Tens of thousands of log lines would only be kept for a report nobody reads."""
    logger = logging.getLogger("srt")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(server=servers, load=st.lists(requests, min_size=1, max_size=16))
def test_tokens_are_those_of_each_request_alone(server, load):
    page_size = server["page_size"]
    options = {key: value for key, value in server.items() if key != "num_pages"}
    harness = Harness(
        pool_size=server["num_pages"] * page_size, vocab_size=VOCAB, eos=(EOS,), **options
    )
    size = harness.memory.slots.size
    aborts: dict[int, list[str]] = {}
    want: dict[str, list[int] | None] = {}
    now = 0
    gaps: dict[str, int] = {}
    max_gap = 0 if server["mixed"] else MAX_GAP[server["phase"]]

    def step():
        nonlocal now, gaps
        for rid in aborts.pop(now, []):
            harness.abort(rid)
        chosen = harness.step()
        now += 1
        running = harness.scheduler.running_batch
        if chosen is not None and running is not None:
            left_out = [rid for rid in running.rids if rid not in chosen.record.rids]
            gaps = {rid: gaps.get(rid, 0) + 1 for rid in left_out}
            assert max(gaps.values(), default=0) <= max_gap

    for i, item in enumerate(load):
        rid = f"r{i}"
        ids = COMMON[: item["common"]] + item["own"]
        stops = () if item["ignore_eos"] else item["stops"]
        harness.send(
            rid,
            ids,
            item["max_new"],
            ignore_eos=item["ignore_eos"],
            stop_token_ids=item["stops"],
            priority=item["priority"],
            tenant=item["tenant"],
        )
        room = size - len(ids)
        all_stops = set() if item["ignore_eos"] else {EOS, *stops}
        limit = min(item["max_new"], room)
        want[rid] = None if room < 1 else tokens_alone(ids, limit, VOCAB, all_stops)
        if item["abort_after"] is not None:
            aborts.setdefault(now + item["abort_after"], []).append(rid)
        for _ in range(item["steps_before"]):
            step()
    for _ in range(20_000):
        if not harness.scheduler.live and not harness.channel.inbox:
            break
        step()
    assert set(harness.finished) == set(want), "someone got no end"
    for rid, tokens in want.items():
        end = harness.finished[rid]
        if tokens is None:
            assert end.status_code == 400 and harness.outputs[rid] == []
        elif end.type is FinishType.ABORT:
            assert end.status_code is None, f"{rid} ended with {end}"
            assert harness.outputs[rid] == tokens[: len(harness.outputs[rid])]
        else:
            assert harness.outputs[rid] == tokens
    harness.step()
    harness.memory.check([])
    assert harness.memory.available == size
    assert harness.memory.rows.available == harness.memory.rows.num_rows
    assert not harness.scheduler._started
