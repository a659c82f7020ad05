"""Priority, fairness, prefixes, phases, overlap and mixed passes, through the real loop."""

import pytest
from fake_runner import tokens_alone
from scheduler_harness import Harness

from srt.managers.req import Blocker


def prompt(seed, length):
    return [(seed * 131 + i * 17) % 997 for i in range(length)]


def alone(harness, ids, max_new):
    return tokens_alone(ids, max_new, harness.vocab_size, set())


# --- priority ---


def test_an_important_request_pushes_aside_the_least_important_and_both_end():
    harness = Harness(max_running=2, policy="priority", preempt_threshold=10)
    harness.send("low", prompt(1, 8), 40, priority=0)
    harness.send("middle", prompt(2, 8), 40, priority=5)
    for _ in range(3):
        harness.step()
    harness.send("high", prompt(3, 8), 40, priority=20)
    harness.step()
    assert len(harness.outputs["high"]) == 1, "it must start in the next pass"
    assert harness.scheduler.live["low"].num_retractions == 1
    assert harness.scheduler.live["middle"].num_retractions == 0
    harness.run()
    for rid, seed in [("low", 1), ("middle", 2), ("high", 3)]:
        assert harness.outputs[rid] == alone(harness, prompt(seed, 8), 40)
    assert harness.scheduler.counters.retracted_requests == {"priority": 1}


def test_a_difference_up_to_the_threshold_pushes_nobody_aside():
    harness = Harness(max_running=1, policy="priority", preempt_threshold=10)
    harness.send("low", prompt(1, 8), 20, priority=0)
    harness.step()
    harness.send("high", prompt(2, 8), 5, priority=10)
    for _ in range(5):
        harness.step()
    assert harness.scheduler.live["low"].num_retractions == 0
    harness.run()


def test_equal_priorities_keep_their_order_of_arrival_and_low_ones_still_end():
    harness = Harness(max_running=1, policy="priority", preempt_threshold=0)
    harness.send("low", prompt(0, 5), 3, priority=-1)
    for i in range(5):
        harness.send(f"r{i}", prompt(i + 1, 5), 3, priority=7)
    harness.run()
    ends = list(harness.finished)
    assert [rid for rid in ends if rid != "low"] == [f"r{i}" for i in range(5)]
    assert harness.outputs["low"] == alone(harness, prompt(0, 5), 3)


def test_preemption_makes_room_in_the_pool_too():
    harness = Harness(pool_size=100, max_running=8, policy="priority", preempt_threshold=1)
    harness.send("low", prompt(1, 40), 50, priority=0, ignore_eos=True)
    harness.step()
    harness.send("high", prompt(2, 40), 20, priority=9)
    harness.step()
    assert len(harness.outputs["high"]) == 1
    harness.run()
    assert harness.outputs["low"] == alone(harness, prompt(1, 40), 50)


# --- fairness ---


def test_a_quiet_tenant_is_not_held_back_by_a_busy_one():
    harness = Harness(max_running=1, policy="fair")
    for i in range(20):
        harness.send(f"busy-{i}", prompt(i, 10), 5, tenant="busy")
    harness.step()
    harness.send("quiet", prompt(77, 10), 5, tenant="quiet")
    harness.run()
    ends = list(harness.finished)
    assert ends.index("quiet") <= 2


def test_service_follows_the_weights():
    harness = Harness(max_running=1, policy="fair")
    harness.scheduler.waiting_queue.policy._weights = {"gold": 3.0}
    for i in range(40):
        harness.send(f"gold-{i}", prompt(i, 10), 5, tenant="gold")
        harness.send(f"tin-{i}", prompt(100 + i, 10), 5, tenant="tin")
    while len(harness.finished) < 24:
        harness.step()
    gold = sum(rid.startswith("gold") for rid in harness.finished)
    assert 16 <= gold <= 20
    harness.run()


def test_a_tenant_that_comes_back_has_saved_up_nothing():
    harness = Harness(max_running=1, policy="fair")
    harness.send("early", prompt(999, 5), 1, tenant="lazy")
    harness.run()
    for i in range(10):
        harness.send(f"busy-{i}", prompt(i, 50), 10, tenant="busy")
    for _ in range(40):
        harness.step()
    for i in range(10):
        harness.send(f"lazy-{i}", prompt(50 + i, 50), 10, tenant="lazy")
    before = set(harness.finished)
    while len(harness.finished) < len(before) + 6:
        harness.step()
    recent = [rid for rid in harness.finished if rid not in before]
    assert 2 <= sum(rid.startswith("busy") for rid in recent) <= 4
    harness.run()


def test_counters_of_tenants_do_not_grow_without_bound(monkeypatch):
    monkeypatch.setattr("srt.managers.schedule_policy.MAX_TENANTS", 20)
    harness = Harness(policy="fair")
    for i in range(100):
        harness.send(f"r{i}", prompt(i, 3), 1, tenant=f"t{i}")
        harness.run()
    assert len(harness.scheduler.waiting_queue.policy.counters) <= 20


# --- prefixes ---


def test_with_lpm_two_requests_do_not_compute_the_same_prefix():
    common = prompt(5, 200)
    computed = {}
    for policy in ("fcfs", "lpm"):
        harness = Harness(policy=policy, pool_size=8192)
        for i in range(4):
            harness.send(f"r{i}", common + prompt(i, 3), 4)
        harness.step()
        if policy == "lpm":
            assert harness.scheduler.live["r1"].blocker == Blocker("prefix", 200, 0)
        harness.run()
        computed[policy] = harness.scheduler.counters.prompt_tokens
        for i in range(4):
            assert harness.outputs[f"r{i}"] == alone(harness, common + prompt(i, 3), 4)
    assert computed["fcfs"] > 800
    assert computed["lpm"] < 220


# --- phases ---


@pytest.mark.parametrize("phase", ["interleave", "slo", "decode-first"])
@pytest.mark.parametrize("mixed", [False, True])
def test_no_stream_waits_for_more_than_a_bounded_number_of_passes(phase, mixed):
    harness = Harness(phase=phase, mixed=mixed, chunk=64, max_running=64, pool_size=60_000)
    harness.send("stream", prompt(1, 5), 60)
    harness.step()
    gap = longest = 0
    for i in range(400):
        if i % 3 == 0:
            harness.send(f"long-{i}", prompt(i + 2, 700), 3)
        before = len(harness.outputs["stream"])
        harness.step()
        gap = 0 if len(harness.outputs["stream"]) > before else gap + 1
        longest = max(longest, gap)
        if "stream" in harness.finished:
            break
    assert "stream" in harness.finished
    assert longest <= (0 if mixed else 4)


def test_in_a_mixed_pass_everyone_who_decodes_rides_along():
    harness = Harness(mixed=True, chunk=32)
    harness.send("a", prompt(1, 8), 30)
    harness.send("b", prompt(2, 8), 30)
    harness.step()
    harness.send("long", prompt(3, 100), 5)
    chosen = harness.step()
    assert chosen.phase == "M"
    assert chosen.forward.extend_lens_cpu == [30, 1, 1], "decode rows come out of the budget"
    harness.run()
    for rid, seed, length, max_new in [("a", 1, 8, 30), ("b", 2, 8, 30), ("long", 3, 100, 5)]:
        assert harness.outputs[rid] == alone(harness, prompt(seed, length), max_new)


# --- overlap ---


def test_with_overlap_a_stop_costs_one_pass_and_gives_no_extra_token():
    harness = Harness(overlap=True)
    ids = prompt(1, 6)
    third = alone(harness, ids, 3)[2]
    harness.send("a", ids, 50, stop_token_ids=(third,))
    harness.run()
    assert harness.outputs["a"] == alone(harness, ids, 3)
    decodes = [b for b in harness.runner.batches if b.mode.value == "decode"]
    assert len(decodes) == 3, "two tokens and the one that is dropped"


def test_with_overlap_a_length_limit_costs_nothing_since_it_is_known():
    harness = Harness(overlap=True)
    harness.send("a", prompt(1, 6), 3)
    harness.run()
    assert len([b for b in harness.runner.batches if b.mode.value == "decode"]) == 2


def test_with_overlap_the_next_pass_is_launched_before_the_last_is_processed():
    harness = Harness(overlap=True)
    harness.send("a", prompt(1, 6), 5)
    harness.step()
    assert harness.outputs["a"] == [] and len(harness.runner.batches) == 1
    harness.step()
    assert len(harness.outputs["a"]) == 1 and len(harness.runner.batches) == 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_for_six_serves_eleven_that_grow(overlap, page_size):
    harness = Harness(
        overlap=overlap, page_size=page_size, pool_size=6 * 80, max_running=11, conservativeness=0.0
    )
    for i in range(11):
        harness.send(f"r{i}", prompt(i, 16), 64)
    harness.run()
    assert harness.scheduler.counters.retracted_requests["kv"] > 0
    for i in range(11):
        assert harness.outputs[f"r{i}"] == alone(harness, prompt(i, 16), 64)


def test_an_abort_while_its_pass_is_in_flight_ends_it_once():
    harness = Harness(overlap=True)
    harness.send("a", prompt(1, 6), 50)
    harness.send("b", prompt(2, 6), 10)
    for _ in range(3):
        harness.step()
    harness.abort("a")
    harness.run()
    assert harness.outputs["a"] == alone(harness, prompt(1, 6), 50)[: len(harness.outputs["a"])]
    assert harness.outputs["b"] == alone(harness, prompt(2, 6), 10)
    assert harness.memory.available == harness.memory.slots.size
