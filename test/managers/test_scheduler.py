import logging
import re

import pytest
from fake_runner import tokens_alone
from scheduler_harness import Harness

from srt.managers.admission import MAX_BYPASS
from srt.managers.io_struct import (
    FinishType,
    FlushCacheOut,
    FlushCacheReq,
    InternalStateOut,
    InternalStateReq,
)
from srt.managers.length_predictor import MIN_SAMPLES

RETRACT_LINE = re.compile(
    r"(?:KV cache pool is full\. Retract requests\. |Testing retraction\. |"
    r"Decode out of memory happened\. ?)#retracted_reqs: (\d+)"
    r"(?:, #new_tokens_gained: (-?\d+))?.*?(?:, #new_token_ratio: ([\d.]+) -> ([\d.]+))?$"
)
PREFILL_LINE = re.compile(
    r"Prefill batch[.,]? .*#new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)"
)
DECODE_LINE = re.compile(
    r"Decode batch[.,]? .*#running-req: (\d+), #token: (\d+), (?:full )?token usage: ([\d.]+)"
)


def prompt(seed, length):
    return [(seed * 131 + i * 17) % 997 for i in range(length)]


def alone(harness, ids, max_new, stops=()):
    return tokens_alone(ids, max_new, harness.vocab_size, set(stops))


def is_pristine(harness):
    memory = harness.memory
    memory.check([])
    return (
        memory.available == memory.slots.size
        and memory.rows.available == memory.rows.num_rows
        and memory.tree.protected_size == 0
        and not harness.scheduler.live
        and not harness.scheduler._started
        and not harness.scheduler.waiting_queue
        and harness.scheduler.waiting_queue.num_tokens == 0
    )


# --- ends ---


def test_a_stop_token_ends_a_request_and_is_named():
    harness = Harness()
    ids = prompt(1, 5)
    third = alone(harness, ids, 3)[2]
    harness.send("a", ids, 50, stop_token_ids=(third,))
    harness.run()
    assert harness.outputs["a"] == alone(harness, ids, 50, [third])
    assert harness.finished["a"].type is FinishType.STOP
    assert harness.finished["a"].matched == third


def test_eos_ends_a_request_unless_it_ignores_eos():
    ids = prompt(1, 5)
    eos = alone(Harness(), ids, 4)[3]
    harness = Harness(eos=(990, eos))
    harness.send("heeds", ids, 20)
    harness.send("ignores", ids, 20, ignore_eos=True, stop_token_ids=(eos,))
    harness.run()
    assert harness.outputs["heeds"] == alone(harness, ids, 20, [eos])
    assert harness.finished["heeds"].matched == eos
    assert harness.outputs["ignores"] == alone(harness, ids, 20)
    assert harness.finished["ignores"].type is FinishType.LENGTH


def test_a_request_for_no_tokens_gets_none_and_leaves_its_prompt_cached():
    harness = Harness()
    ids = prompt(1, 9)
    harness.send("beside", prompt(2, 9), 20)
    for i in range(20):
        harness.send(f"none-{i}", ids, 0)
    harness.run()
    for i in range(20):
        assert harness.outputs[f"none-{i}"] == []
        assert harness.finished[f"none-{i}"].type is FinishType.LENGTH
    assert harness.outputs["beside"] == alone(harness, prompt(2, 9), 20)
    harness.send("again", ids, 1)
    harness.run()
    assert harness.started["again"].cached_tokens == 8
    assert is_pristine(harness)


def test_a_prompt_that_can_never_fit_is_refused_and_the_next_is_served():
    for page_size in (1, 16):
        harness = Harness(pool_size=64, page_size=page_size, context_len=1024)
        for length in (64 - page_size - 1, 63, 64, 65):
            harness.send(f"n{length}", prompt(length, length), 5)
            harness.send(f"small{length}", prompt(length + 100, 4), 3)
        harness.run()
        for length in (64, 65):
            end = harness.finished[f"n{length}"]
            assert end.type is FinishType.ABORT and end.status_code == 400
            assert f"({length} tokens)" in end.message and "(63 tokens)" in end.message
        assert len(harness.outputs["n63"]) == 1
        for length in (64 - page_size - 1, 63, 64, 65):
            assert len(harness.outputs[f"small{length}"]) == 3
        assert is_pristine(harness)


def test_outputs_are_cut_to_what_the_pool_holds():
    harness = Harness(pool_size=64, context_len=1024)
    harness.send("big", prompt(1, 32), 64, ignore_eos=True)
    harness.send("next", prompt(2, 5), 3)
    harness.run()
    assert len(harness.outputs["big"]) == 32
    assert harness.finished["big"].type is FinishType.LENGTH
    assert harness.outputs["next"] == alone(harness, prompt(2, 5), 3)


def test_a_resubmitted_request_goes_on_where_it_stopped():
    harness = Harness()
    ids = prompt(3, 10)
    whole = alone(harness, ids, 12)
    harness.send("a", ids, 12, output_ids=whole[:5])
    harness.run()
    assert harness.outputs["a"] == whole[5:]


# --- aborts ---


def test_an_abort_while_waiting_running_or_in_mid_chunk_gives_everything_back():
    harness = Harness(max_running=2, chunk=32)
    harness.send("running", prompt(1, 8), 100)
    harness.step()
    harness.step()
    harness.send("chunked", prompt(2, 100), 10)
    harness.send("waiting", prompt(3, 8), 10)
    harness.step()
    assert harness.scheduler.chunked_req.rid == "chunked"
    for rid in ("running", "chunked", "waiting"):
        harness.abort(rid)
    harness.run()
    assert {rid: end.message for rid, end in harness.finished.items()} == {
        "running": "Aborted",
        "chunked": "Aborted",
        "waiting": "Abort in waiting queue",
    }
    assert is_pristine(harness)


def test_an_abort_right_after_the_prefill_gives_everything_back():
    harness = Harness()
    harness.send("a", prompt(1, 8), 100)
    harness.send("b", prompt(2, 8), 10)
    harness.step()
    harness.abort("a")
    harness.run()
    assert len(harness.outputs["a"]) == 1
    assert harness.outputs["b"] == alone(harness, prompt(2, 8), 10)
    assert is_pristine(harness)


def test_an_abort_names_one_request_and_unknown_ids_nobody():
    harness = Harness()
    harness.send("req-1", prompt(1, 8), 20)
    harness.send("req-10", prompt(2, 8), 20)
    harness.step()
    harness.abort("req-1")
    harness.abort("req-2")
    harness.run()
    assert harness.finished["req-1"].type is FinishType.ABORT
    assert harness.outputs["req-10"] == alone(harness, prompt(2, 8), 20)


def test_a_request_its_client_has_ended_gets_no_second_end():
    harness = Harness()
    harness.send("a", prompt(1, 8), 20)
    harness.step()
    harness.abort("a", finished=True)
    harness.run()
    assert "a" not in harness.finished and is_pristine(harness)


def test_an_answer_that_a_stop_string_ended_counts_as_one_that_stopped():
    harness = Harness()
    for i in range(MIN_SAMPLES):
        harness.send(f"r{i}", prompt(i, 8), 20)
        for _ in range(3):
            harness.step()
        harness.abort(f"r{i}", finished=True, stopped=True)
        harness.run()
    assert dict(harness.scheduler.counters.ended) == {"stop": MIN_SAMPLES}
    # Their lengths tell about those to come, as those of all answers that end by themselves.
    assert harness.scheduler.admission.predictor.is_ready


# --- prefixes ---


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_prompt_wholly_in_the_cache_still_computes_one_token(page_size):
    lengths = [15, 16, 17, 63, 64, 65]
    harness = Harness(page_size=page_size, pool_size=4096)
    for length in lengths:
        for turn in range(2):
            harness.send(f"{length}-{turn}", prompt(length, length), 1)
            harness.run()
        assert harness.outputs[f"{length}-0"] == harness.outputs[f"{length}-1"]
        assert harness.started[f"{length}-1"].cached_tokens == (length - 1) // page_size * page_size
    assert is_pristine(harness)


def test_an_evicted_page_is_never_found_under_its_old_prefix():
    harness = Harness(pool_size=3 * 48, max_running=3)
    common = prompt(0, 10)
    want = {}
    for turn in range(30):
        for name in "ABCDEF":
            ids = common + prompt(ord(name), 20)
            rid = f"{name}{turn}"
            harness.send(rid, ids, 12)
            want[rid] = alone(harness, ids, 12)
            harness.run()
    assert harness.outputs == want


def test_namespaces_do_not_share_prefixes():
    harness = Harness()
    for rid, key in [("a", "x"), ("b", "y"), ("c", "x"), ("d", None)]:
        harness.send(rid, prompt(1, 20), 2, extra_key=key)
        harness.run()
    cached = {rid: started.cached_tokens for rid, started in harness.started.items()}
    assert cached == {"a": 0, "b": 0, "c": 19, "d": 0}


@pytest.mark.parametrize("disable_radix", [False, True])
def test_prompts_around_the_chunk_size_all_finish_with_one_in_mid_chunk(disable_radix):
    harness = Harness(chunk=128, pool_size=8192, context_len=2048, disable_radix=disable_radix)
    lengths = [127, 128, 129, 255, 256, 257, 1000]
    for length in lengths:
        harness.send(str(length), prompt(length, length), 8)
    while harness.step() is not None:
        admitted = [req for req in harness.scheduler.live.values() if req.kv is not None]
        assert sum(harness.memory.kv_len(req) < req.prompt_len for req in admitted) <= 1
    for length in lengths:
        assert harness.outputs[str(length)] == alone(harness, prompt(length, length), 8)


def test_without_chunking_a_prompt_over_the_prefill_limit_runs_whole():
    harness = Harness(max_prefill_tokens=50, chunk=None)
    harness.send("a", prompt(1, 300), 4)
    harness.send("b", prompt(2, 5), 4)
    harness.run()
    assert harness.runner.batches[0].extend_lens_cpu == [300]
    assert harness.outputs["a"] == alone(harness, prompt(1, 300), 4)


# --- retraction ---


def crowded(**options):
    """Requests that outgrow the pool: admission believes almost nothing of max_new_tokens."""
    harness = Harness(pool_size=160, max_running=8, conservativeness=0.0, **options)
    for i in range(11):
        harness.send(f"r{i}", prompt(i, 10 + i), 40, ignore_eos=i % 2 == 0)
    return harness


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("disable_radix", [False, True])
def test_retracted_requests_produce_what_they_would_alone(page_size, disable_radix, caplog):
    with caplog.at_level(logging.WARNING):
        harness = crowded(page_size=page_size, disable_radix=disable_radix)
        harness.run()
    for i in range(11):
        assert harness.outputs[f"r{i}"] == alone(harness, prompt(i, 10 + i), 40)
    lines = [r.message for r in caplog.records if "#retracted_reqs" in r.message]
    assert lines and all(RETRACT_LINE.match(line) for line in lines)
    total = sum(int(RETRACT_LINE.match(line)[1]) for line in lines)
    assert total == sum(s.num_retractions for s in harness.started.values())
    assert is_pristine(harness)


def test_nobody_is_admitted_in_a_step_that_retracted():
    harness = crowded(phase="interleave")
    scheduler = harness.scheduler
    steps = 0
    while True:
        queued = {req.rid for req in scheduler.waiting_queue}
        live = list(scheduler.live.values())
        retracted = sum(req.num_retractions for req in live)
        chosen = harness.step()
        if chosen is None:
            break
        if sum(req.num_retractions for req in live) > retracted:
            steps += 1
            assert not chosen.is_extend
            assert queued <= {req.rid for req in scheduler.waiting_queue}
    assert steps > 0 and is_pristine(harness)


def test_the_victim_has_the_fewest_outputs_and_of_those_the_longest_prompt():
    harness = Harness(pool_size=100, conservativeness=0.0)
    harness.send("early", prompt(1, 20), 60)
    for _ in range(5):
        harness.step()
    harness.send("short", prompt(2, 10), 40)
    harness.send("long", prompt(3, 25), 30)
    while not harness.scheduler.waiting_queue and harness.scheduler.live:
        harness.step()
    assert [req.rid for req in harness.scheduler.waiting_queue] == ["long"]


def test_a_retracted_request_goes_before_those_that_never_ran():
    harness = crowded()
    while not any(req.num_retractions for req in harness.scheduler.live.values()):
        harness.step()
    waiting = [req.num_retractions > 0 for req in harness.scheduler.waiting_queue.order(0.0)]
    assert waiting[0] and waiting == sorted(waiting, reverse=True)


def test_forced_retraction_logs_its_line_and_changes_no_token(caplog):
    with caplog.at_level(logging.WARNING):
        harness = Harness(retract_every=2)
        for i in range(4):
            harness.send(f"r{i}", prompt(i, 10), 20)
        harness.run()
    assert any(RETRACT_LINE.match(r.message) for r in caplog.records)
    for i in range(4):
        assert harness.outputs[f"r{i}"] == alone(harness, prompt(i, 10), 20)
    assert sum(s.num_retractions for s in harness.started.values()) > 4


def test_a_resume_computes_what_the_cache_no_longer_has():
    harness = crowded()
    extends = {}
    choose = harness.scheduler.get_next_batch_to_run

    def watch():
        chosen = choose()
        if chosen is not None and chosen.is_extend:
            lens = chosen.forward.extend_lens_cpu
            for req, extend_len in zip(chosen.batch.reqs, lens, strict=True):
                assert req.kv.admitted_len + extend_len == req.fill_len
                extends.setdefault(req.rid, []).append((req.kv.admitted_len, extend_len))
        return chosen

    harness.scheduler.get_next_batch_to_run = watch
    harness.run()
    resumed = [spans for spans in extends.values() if len(spans) > 1]
    assert resumed
    assert any(cached > 0 for spans in resumed for cached, _ in spans[1:])


def test_retractions_per_request_are_bounded_under_a_load_that_overflows():
    harness = Harness(pool_size=400, max_running=32, max_prefill_tokens=400)
    for i in range(200):
        harness.send(f"r{i}", prompt(i, 10), 60)
    harness.run()
    retractions = sum(s.num_retractions for s in harness.started.values())
    assert retractions <= 2 * 200


def test_sharing_a_long_prefix_survives_retraction():
    common = prompt(0, 100)
    harness = Harness(pool_size=400, max_running=32, conservativeness=0.0)
    want = {}
    for i in range(64):
        ids = common + prompt(i + 1, 3)
        harness.send(f"r{i}", ids, 25)
        want[f"r{i}"] = alone(harness, ids, 25)
    harness.run()
    assert harness.outputs == want and is_pristine(harness)


# --- order ---


def test_small_requests_pass_a_big_one_that_does_not_fit_but_only_so_often():
    harness = Harness(pool_size=200, max_running=8, context_len=200)
    harness.send("holder", prompt(1, 10), 120, ignore_eos=True)
    harness.step()
    harness.send("big", prompt(2, 150), 40)
    for i in range(2 * MAX_BYPASS):
        harness.send(f"small-{i}", prompt(i + 3, 4), 2)
    ended_before_big = 0
    while "big" not in harness.started:
        harness.step()
        ended_before_big = sum(rid.startswith("small") for rid in harness.finished)
    assert 10 < ended_before_big <= MAX_BYPASS + 8
    harness.run()
    assert harness.outputs["big"] == alone(harness, prompt(2, 150), 40)


def test_a_blocked_request_knows_what_it_waits_for():
    harness = Harness(pool_size=100, max_running=8)
    harness.send("holder", prompt(1, 10), 60, ignore_eos=True)
    harness.step()
    harness.send("big", prompt(2, 50), 40)
    harness.step()
    blocker = harness.scheduler.live["big"].blocker
    assert blocker.kind == "kv" and blocker.needed == 90
    assert blocker.needed + blocker.reserved > blocker.available


def test_with_a_decode_interval_arrivals_cannot_freeze_a_stream():
    harness = Harness(max_running=64, phase="interleave", pool_size=8192)
    harness.send("stream", prompt(1, 5), 40)
    harness.step()
    gap = longest = 0
    for i in range(60):
        harness.send(f"new-{i}", prompt(i + 2, 5), 2)
        before = len(harness.outputs["stream"])
        harness.step()
        gap = 0 if len(harness.outputs["stream"]) > before else gap + 1
        longest = max(longest, gap)
        if "stream" in harness.finished:
            break
    assert longest <= 1


# --- control messages and log ---


def test_flushing_needs_an_idle_server_and_makes_the_next_run_cold():
    harness = Harness()
    harness.send("a", prompt(1, 20), 5)
    harness.channel.inbox.append(FlushCacheReq(1))
    harness.step()
    assert harness.channel.outbox == [FlushCacheOut(1, False, "")]
    harness.channel.outbox.clear()
    harness.channel.inbox.append(FlushCacheReq(2, timeout=50.0))
    harness.run()
    assert harness.channel.outbox == [FlushCacheOut(2, True)]
    assert harness.memory.slots.available == harness.memory.slots.size
    harness.send("b", prompt(1, 20), 5)
    harness.run()
    assert harness.started["b"].cached_tokens == 0


def test_a_flush_that_never_sees_idle_times_out_with_the_words_clients_know():
    harness = Harness()
    harness.send("a", prompt(1, 20), 50)
    harness.channel.inbox.append(FlushCacheReq(1, timeout=5.0))
    for _ in range(10):
        harness.step()
    assert harness.channel.outbox == [FlushCacheOut(1, False, "Timed out waiting for idle state.")]


def test_the_internal_state_adds_up():
    harness = Harness(pool_size=256, max_running=2)
    for i in range(4):
        harness.send(f"r{i}", prompt(i, 10), 5)
    harness.step()
    harness.channel.inbox.append(InternalStateReq(7))
    harness.step()
    (answer,) = (m for m in harness.channel.outbox if isinstance(m, InternalStateOut))
    assert answer.id == 7
    assert answer.state["num_running_reqs"] == 2 and answer.state["num_waiting_reqs"] == 2
    assert answer.state["num_used_tokens"] == 20
    assert answer.state["max_total_num_tokens"] == 256


def test_log_lines_match_what_operators_parse(caplog):
    with caplog.at_level(logging.INFO):
        harness = Harness()
        harness.send("a", prompt(1, 20), 100)
        harness.send("b", prompt(2, 20), 100)
        harness.run()
    messages = [r.message for r in caplog.records]
    prefill = [PREFILL_LINE.match(m) for m in messages if m.startswith("Prefill")]
    decode = [DECODE_LINE.match(m) for m in messages if m.startswith("Decode")]
    assert [m.groups() for m in prefill] == [("2", "40", "0")]
    assert [m.groups()[:2] for m in decode] == [("2", "120"), ("2", "200")]
