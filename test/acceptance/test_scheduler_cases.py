"""Pools that overflow, prompts that never fit, priorities, chunks, caches: right answers still."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from greedy_reference import GreedyReference
from real_server import GREEDY, RealServer, at_once, serve, start, whole_again

POOL_SIZE = 320  # of the tight server, in pages of 16
VOCAB_SIZE = 257
# Nobody stops early, and unlike with ignore_eos the scheduler does not count on it.
ENDLESS = {**GREEDY, "logit_bias": {"0": -100, "123": -100}}


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def counts(server: RealServer) -> tuple[int, int, int]:
    """Retracted, finished and aborted requests since the start."""
    state = server.state
    ended = state["ended"]
    return (
        sum(state["retracted_requests"].values()),
        ended.get("length", 0) + ended.get("stop", 0),
        ended.get("abort", 0),
    )


# --- retraction ---


def test_a_request_that_fills_the_pool_is_refused_or_ends_at_the_limit(tight: RealServer) -> None:
    """H32: prompt 0.5 P; with max_new_tokens P it is refused with the numbers, without a limit it
    fills the pool and ends."""
    ids = prompt(1, POOL_SIZE // 2)
    message = tight.refused(
        "/generate",
        input_ids=ids,
        sampling_params={"max_new_tokens": POOL_SIZE, "ignore_eos": True},
    )
    for number in (POOL_SIZE, POOL_SIZE // 2, POOL_SIZE * 3 // 2):
        assert f"{number} tokens" in message
    meta = tight.generate(ids, max_new_tokens=None, ignore_eos=True)["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": POOL_SIZE // 2}
    assert meta["completion_tokens"] == POOL_SIZE // 2
    half = tight.generate(ids, max_new_tokens=POOL_SIZE // 2, ignore_eos=True)["meta_info"]
    assert half["completion_tokens"] == POOL_SIZE // 2 and half["num_retractions"] == 0


def eleven_that_grow(
    server: RealServer, reference: GreedyReference, params: dict[str, Any]
) -> list[int]:
    """Answers of eleven requests in a pool for six, checked; each one's number of retractions."""
    prompts = [prompt(i, 10) for i in range(11)]
    answers = server.ask(
        "/generate", input_ids=prompts, sampling_params={**params, "max_new_tokens": 42}
    )
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == 42
        if "ignore_eos" in params:  # the reference knows no bias
            reference.assert_greedy(ids, answer["output_ids"])
        else:
            assert answer["output_ids"] == server.ids(ids, **params, max_new_tokens=42)
    return [answer["meta_info"]["num_retractions"] for answer in answers]


def test_eleven_requests_that_grow_in_a_pool_for_six_all_finish(
    tight: RealServer, reference: GreedyReference
) -> None:
    """H33: with overlap, whether the scheduler knows from the start how long they get or not."""
    eleven_that_grow(tight, reference, {**GREEDY, "ignore_eos": True})
    assert sum(eleven_that_grow(tight, reference, ENDLESS)) > 0


def many_share_a_prefix(server: RealServer, number: int, prefix: int, outputs: int) -> None:
    """Requests that share a prefix, too many for the pool: each answers as it does alone."""
    prompts = [prompt(1, prefix) + prompt(100 + i, 1 + i % 5) for i in range(number)]
    params = {**ENDLESS, "max_new_tokens": outputs}
    before = counts(server)[0]
    answers = server.ask("/generate", input_ids=prompts, sampling_params=params)
    assert counts(server)[0] > before
    for i in range(0, number, 7):
        assert answers[i]["output_ids"] == server.ids(prompts[i], **params)
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["completion_tokens"] == len(answer["output_ids"]) == outputs
        assert 0 <= meta["cached_tokens"] < meta["prompt_tokens"]
    # What each resume found in the cache is part of what it had.
    for record in server.journal(512):
        for entry in record.get("admitted", []):
            assert 0 <= entry["cached"] < entry["fill_len"]


def test_requests_with_a_common_prefix_resume_through_the_cache(tight: RealServer) -> None:
    """H34: those pushed back meet their own pages when they return."""
    many_share_a_prefix(tight, number=28, prefix=60, outputs=40)


@pytest.mark.slow
def test_256_requests_with_a_common_prefix_resume_through_the_cache(tight: RealServer) -> None:
    """H34: 256 requests; the pool holds the outputs of a few."""
    many_share_a_prefix(tight, number=256, prefix=60, outputs=40)


def steps_of_a_light_load(server: RealServer) -> int:
    assert server.get("/flush_cache?timeout=10")[0] == 200
    before = server.state["num_steps"]
    server.ids(prompt(9, 20), **ENDLESS, max_new_tokens=50)
    steps: int = server.state["num_steps"] - before
    return steps


@pytest.mark.slow
def test_an_overload_is_paid_for_once_and_over_when_it_is_over(tight: RealServer) -> None:
    """H35: retractions per finished request are bounded, and a light load afterwards takes as many
    passes as before."""
    before, light = counts(tight), steps_of_a_light_load(tight)
    prompts = [prompt(i, 5 + i % 40) for i in range(60)]
    params = [{**ENDLESS, "max_new_tokens": 40 + 7 * i % 90} for i in range(60)]
    answers = tight.ask("/generate", input_ids=prompts, sampling_params=params)
    retracted, finished, aborted = (
        now - then for now, then in zip(counts(tight), before, strict=True)
    )
    assert (finished, aborted) == (61, 0)
    assert 0 < retracted < 4 * len(prompts)
    assert max(answer["meta_info"]["num_retractions"] for answer in answers) < 40
    tight.wait_idle()
    assert steps_of_a_light_load(tight) == light


# --- the queue ---


def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody(tight: RealServer) -> None:
    """H36: prompts of P - page - 1, P - 1, P and P + 1 tokens, each followed by a small one."""
    for length in (POOL_SIZE - 17, POOL_SIZE - 1, POOL_SIZE, POOL_SIZE + 1):
        body = {"input_ids": prompt(length, length), "sampling_params": {"max_new_tokens": 1}}
        (status, answer), small = at_once(
            partial(tight.post, "/generate", **body),
            lambda n=length: tight.post(  # type: ignore[misc]
                "/generate",
                input_ids=prompt(n + 1000, 4),
                sampling_params={"max_new_tokens": 3, "ignore_eos": True},
            ),
        )
        assert small[0] == 200 and small[1]["meta_info"]["completion_tokens"] == 3
        if length < POOL_SIZE:
            assert status == 200 and answer["meta_info"]["completion_tokens"] == 1
        else:
            assert status == 400
            message = answer["error"]["message"]
            assert f"{length} tokens" in message and f"{POOL_SIZE - 1} tokens" in message


def test_small_requests_pass_a_big_one_that_does_not_fit_yet(tight: RealServer) -> None:
    """H37: the small ones have their first token before the big one, which is served, too."""
    params = {**ENDLESS, "max_new_tokens": 150}
    holder = tight.stream("/generate", input_ids=prompt(1, 150), sampling_params=params)
    next(holder)
    prompts = [prompt(2, 250), *(prompt(10 + i, 8) for i in range(10))]
    limits = [{**ENDLESS, "max_new_tokens": 4} for _ in prompts]
    order = []
    for chunk in tight.stream("/generate", input_ids=prompts, sampling_params=limits):
        if chunk["index"] not in order:
            order.append(chunk["index"])
    assert sorted(order) == list(range(11))
    assert order[-1] == 0, "the big one went first"
    *_, last = holder
    assert last["meta_info"]["completion_tokens"] == 150
    assert last["meta_info"]["num_retractions"] == 0


def first_admissions(server: RealServer) -> list[str]:
    """Clients' ids in the order of their first admission, of the passes the journal holds."""
    order: list[str] = []
    for record in server.journal(512):
        for entry in record.get("admitted", []):
            rid = entry["rid"]
            if rid not in order:
                order.append(rid)
    return order


def test_an_important_request_goes_next_and_the_others_still_end(tight: RealServer) -> None:
    """H38: the pool taken by priority 0 and more of it waiting, then one of 100."""
    params = {**ENDLESS, "max_new_tokens": 60}
    prompts = [prompt(200 + i, 6) for i in range(20)]
    alone = [tight.ids(ids, **params) for ids in prompts]
    crowd = tight.stream(
        "/generate", input_ids=prompts, sampling_params={**params, "stream_interval": 1000}
    )
    chunks = list(islice(crowd, 3))
    important = tight.ask(
        "/generate",
        input_ids=prompt(300, 6),
        sampling_params={**params, "max_new_tokens": 2},
        priority=100,
    )
    assert important["meta_info"]["completion_tokens"] == 2
    assert tight.state["num_waiting_reqs"] > 0, "it overtook nobody"
    chunks += crowd
    last = {chunk["index"]: chunk for chunk in chunks}
    assert [last[i]["output_ids"] for i in range(20)] == alone


def test_a_request_of_low_priority_ends_after_many_of_high(tight: RealServer) -> None:
    """H38: equal priorities start in the order of arrival, the low one last but surely."""
    params = {**ENDLESS, "max_new_tokens": 12}
    # None of the others fits beside it, so that all have arrived when the first can start.
    blocker = tight.stream(
        "/generate",
        input_ids=prompt(400, 100),
        sampling_params={**params, "max_new_tokens": 200},
        priority=9,
    )
    next(blocker)
    low, high = at_once(
        lambda: tight.ask(
            "/generate",
            input_ids=prompt(500, 200),
            sampling_params=params,
            priority=0,
            rid="low",
        ),
        lambda: tight.ask(
            "/generate",
            input_ids=[prompt(600 + i, 200) for i in range(12)],
            sampling_params=params,
            priority=9,
            rid="high",
        ),
    )
    assert low["meta_info"]["completion_tokens"] == 12
    assert {answer["meta_info"]["completion_tokens"] for answer in high} == {12}
    assert len(list(blocker)) > 0
    order = [rid for rid in first_admissions(tight) if rid.startswith(("high", "low"))]
    assert order == [*(f"high_{i}" for i in range(12)), "low"]


# --- the cache ---


def a_cached_prompt_computes_one_token(
    server: RealServer, page_size: int, is_cached: bool = True
) -> None:
    for length in (15, 16, 17, 63, 64, 65):
        first, again = (
            server.generate(prompt(700 + length, length), max_new_tokens=1, ignore_eos=True)
            for _ in range(2)
        )
        assert first["output_ids"] == again["output_ids"]
        meta = again["meta_info"]
        assert meta["cached_tokens"] == is_cached * ((length - 1) // page_size * page_size)
        assert meta["cached_tokens"] < meta["prompt_tokens"]


def test_a_prompt_wholly_in_the_cache_computes_a_token_again(roomy: RealServer) -> None:
    """H39: lengths around a page and around four pages of 16."""
    a_cached_prompt_computes_one_token(roomy, 16)


def content_driven_out_is_never_found(server: RealServer, rounds: int) -> None:
    params = {"max_new_tokens": 8, "ignore_eos": True}
    first = prompt(800, 90)
    want = server.ids(first, **params)
    for turn in range(rounds):
        for i in range(5):
            # Some share a part of the prompt, of whole pages or not.
            shared = first[: (turn * 5 + i) * 11 % 90]
            server.ids(shared + prompt(801 + turn * 5 + i, 90 - len(shared)), **params)
        assert server.ids(first, **params) == want


def test_a_page_given_away_is_not_found_under_its_old_prefix(tight: RealServer) -> None:
    """H40: a pool for three prompts; five others drive the first one out, again and again."""
    evicted = tight.state["evicted_tokens"]
    content_driven_out_is_never_found(tight, rounds=5)
    assert tight.state["evicted_tokens"] > evicted


@pytest.mark.slow
def test_thirty_rounds_of_driving_out_change_no_answer(tight: RealServer) -> None:
    """H40: thirty rounds."""
    content_driven_out_is_never_found(tight, rounds=30)


def mixed_load(server: RealServer, seed: int, number: int) -> None:
    """Shared prefixes, stops, hang-ups, aborts by id and overflow at once."""
    rng = random.Random(seed)

    def one(i: int, kind: int, length: int, outputs: int) -> None:
        params = {**ENDLESS, "max_new_tokens": outputs}
        body: dict[str, Any] = {
            "input_ids": prompt(900 + i % 3, 40)[: length // 2] + prompt(i, 1 + length // 2),
            "sampling_params": params,
        }
        if kind == 0:
            stream = server.stream("/generate", **body)
            assert len(list(islice(stream, 3)))
            stream.close()
        elif kind == 1:
            rid = f"aborted-{seed}-{i}"
            stream = server.stream("/generate", **body, rid=rid)
            first = next(stream)
            server.abort(rid)
            # To a slow reader the first chunk may have been the last.
            *_, last = first, *stream
            assert last["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        elif kind == 2:
            body["sampling_params"] = {**params, "stop_token_ids": list(range(1, VOCAB_SIZE, 3))}
            meta = server.ask("/generate", **body)["meta_info"]
            assert meta["finish_reason"]["type"] in ("stop", "length")
        else:
            answer = server.ask("/generate", **body)
            assert len(answer["output_ids"]) == outputs

    calls = [
        partial(one, i, rng.randrange(5), rng.randint(1, 120), rng.randint(4, 100))
        for i in range(number)
    ]

    def overflow() -> None:
        prompts = [prompt(seed * 100 + i, 10) for i in range(12)]
        params = {**ENDLESS, "max_new_tokens": 60}
        server.ask("/generate", input_ids=prompts, sampling_params=params)

    before = counts(server)[0]
    for begin in range(0, number, 20):
        at_once(overflow, *calls[begin : begin + 20])
    assert counts(server)[0] > before


def test_the_books_balance_after_a_mixed_load(tight: RealServer) -> None:
    """H41: used and locked are zero again, free and cached make up the pool; the server runs its
    own check of every slot, too, whenever it is idle."""
    mixed_load(tight, seed=1, number=40)
    tight.wait_idle()


@pytest.mark.slow
def test_the_books_balance_after_a_long_mixed_load(tight: RealServer) -> None:
    """H41: at every idle moment of it."""
    for seed in range(2, 6):
        mixed_load(tight, seed, number=60)
        tight.wait_idle()


# --- chunks ---

AROUND_THE_CHUNK = (127, 128, 129, 255, 256, 257, 1000)


def prompts_around_the_chunk_finish(server: RealServer, reference: GreedyReference) -> None:
    prompts = [prompt(1000 + length, length) for length in AROUND_THE_CHUNK]
    params = {**GREEDY, "max_new_tokens": 6, "ignore_eos": True}
    answers = server.ask("/generate", input_ids=prompts, sampling_params=params)
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer["output_ids"]) == 6
        reference.assert_greedy(ids, answer["output_ids"])


def test_prompts_around_the_chunk_size_finish_with_one_in_mid_chunk(
    roomy: RealServer, reference: GreedyReference
) -> None:
    """H42: all at once, chunks of 128; the answers are those of each alone."""
    before = roomy.state["num_steps"]
    prompts_around_the_chunk_finish(roomy, reference)
    records = [record for record in roomy.journal(512) if record["step"] >= before]
    extends = [record for record in records if "P" in record["phase"]]
    assert max(sum(record["lens"]) for record in extends) <= 128
    assert max(len(record.get("inner", [])) for record in records) == 1


VARIANTS = {
    "page 1, no overlap, whole prompts": (
        1,
        ["--chunked-prefill-size", "-1", "--max-prefill-tokens", "64"],
    ),
    "page 64, overlap, chunks": (
        64,
        ["--overlap-schedule", "on", "--chunked-prefill-size", "128"],
    ),
    "page 16, no cache, mixed passes": (
        16,
        ["--chunked-prefill-size", "128", "--disable-radix-cache", "--enable-mixed-chunk"],
    ),
    "page 1, overlap, forced retractions": (
        1,
        ["--overlap-schedule", "on", "--retract-every", "3", "--chunked-prefill-size", "128"],
    ),
}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def variant_process(
    request: pytest.FixtureRequest, tiny_folder: Path
) -> Iterator[tuple[int, RealServer]]:
    page_size, argv = request.param
    pool = ("--max-total-tokens", "1152", "--max-running-requests", "11")
    server = start(tiny_folder, *pool, "--page-size", str(page_size), *argv)
    for started in serve(server):
        yield page_size, started


@pytest.fixture
def variant(variant_process: tuple[int, RealServer]) -> Iterator[tuple[int, RealServer]]:
    page_size, process = variant_process
    for server in whole_again(process):
        yield page_size, server


@pytest.mark.slow
def test_every_variant_gives_the_answers_of_each_request_alone(
    variant: tuple[int, RealServer], reference: GreedyReference
) -> None:
    """H42, H43: prompts around the chunk size with the cache on and off, and with chunking off
    and prompts above the prefill limit."""
    _, server = variant
    prompts_around_the_chunk_finish(server, reference)
    prompts_around_the_chunk_finish(server, reference)


@pytest.mark.slow
def test_every_variant_finishes_a_crowd(
    variant: tuple[int, RealServer], reference: GreedyReference
) -> None:
    """H33: overlap on and off, pages of 1, 16 and 64."""
    _, server = variant
    eleven_that_grow(server, reference, {**GREEDY, "ignore_eos": True})
    eleven_that_grow(server, reference, ENDLESS)


@pytest.mark.slow
def test_every_variant_computes_one_token_of_a_cached_prompt(
    variant: tuple[int, RealServer],
) -> None:
    """H39: pages of 64 and of 1."""
    page_size, server = variant
    is_cached = "--disable-radix-cache" not in server.argv
    a_cached_prompt_computes_one_token(server, page_size, is_cached)


def test_a_prompt_above_the_prefill_limit_runs_whole_without_chunking(
    tiny_folder: Path, reference: GreedyReference
) -> None:
    """H43: chunking off, a prompt of five times the limit, beside small ones."""
    argv = ("--chunked-prefill-size", "-1", "--max-prefill-tokens", "64", "--max-total-tokens")
    for server in serve(start(tiny_folder, *argv, "1024")):
        prompts = [prompt(1, 320), *(prompt(2 + i, 9) for i in range(5))]
        params = {**GREEDY, "max_new_tokens": 5, "ignore_eos": True}
        answers = server.ask("/generate", input_ids=prompts, sampling_params=params)
        for ids, answer in zip(prompts, answers, strict=True):
            reference.assert_greedy(ids, answer["output_ids"])
        server.wait_idle()


# --- starting ---


def test_without_a_gpu_and_without_options_the_pool_is_sized_from_memory(
    default_server: RealServer,
) -> None:
    """H59: one line says what was decided."""
    lines = [line for line in default_server.log.splitlines() if "max_total_num_tokens=" in line]
    assert len(lines) == 1 and "available_cpu_mem=" in lines[0]
    size = default_server.state["max_total_num_tokens"]
    assert f"max_total_num_tokens={size}," in lines[0] and size > 0
