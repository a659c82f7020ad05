from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing

import pytest
from fake_scheduler import (
    CONTEXT_LEN,
    EOS,
    POOL_SIZE,
    VOCAB_SIZE,
    ids,
    running_manager,
    spelling,
    until,
)

from srt.generate_api import error_of
from srt.managers.io_struct import AbortReq, FinishReason, FinishType, TokenizedGenerateReq
from srt.managers.request_preparer import GenerateReqInput, choice_seed
from srt.managers.tokenizer_manager import ServerStatus
from srt.request_error import RequestError


def call(prompt="Hello", *, params=None, **fields):
    prompts = prompt if fields.get("is_batch") else [prompt]
    return GenerateReqInput(
        prompts=prompts, sampling_params=[params or {}] * len(prompts), **fields
    )


async def finish(manager, call_input):
    """The final states of a call, in order."""
    states = {}
    async with aclosing(manager.generate(call_input)) as outputs:
        async for state in outputs:
            if state.finish_reason is not None:
                assert state.index not in states, "a request ended twice"
                states[state.index] = state
    return [states[i] for i in sorted(states)]


async def refusal(manager, call_input):
    with pytest.raises(RequestError) as caught:
        await finish(manager, call_input)
    return caught.value


def test_every_request_ends_once_and_leaves_nothing_behind(tmp_path):
    async def scenario():
        async with running_manager(tmp_path) as (manager, fake):
            calls = [
                call(f"p{i}", params={"max_new_tokens": 1 + i % 7}, stream=bool(i % 2))
                for i in range(40)
            ]
            done = await asyncio.gather(*(finish(manager, c) for c in calls))
            for i, [state] in enumerate(done):
                assert state.finish_reason.type is FinishType.LENGTH
                assert state.text == "abcdefg"[: 1 + i % 7]
            assert manager.num_live == 0
            assert manager._name_to_rids == {} and manager.control._waiting == {}
            assert len(asyncio.all_tasks()) == 3  # this one, to and from the scheduler
            assert not fake.of_type(AbortReq)

    asyncio.run(scenario())


def test_memory_returns_to_its_start_after_many_requests(tmp_path):
    async def scenario():
        async with running_manager(tmp_path) as (manager, _):
            await finish(manager, call(params={"max_new_tokens": 3, "stop": ["zz"]}))
            gc.collect()
            before = len(gc.get_objects())
            for _ in range(50):
                await finish(manager, call(params={"max_new_tokens": 3, "stop": ["zz"]}))
            gc.collect()
            # The fake's own list of messages grows by a few objects for each request.
            assert len(gc.get_objects()) - before < 50 * 8

    asyncio.run(scenario())


def test_a_stop_string_ends_the_request_here_and_in_the_scheduler(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, passes=7) as (manager, fake):
            [state] = await finish(manager, call(params={"stop": ["de"], "max_new_tokens": 50}))
            assert state.text == "abc"
            assert state.output_ids == ids("abcde")
            assert state.finish_reason == FinishReason(FinishType.STOP, matched="de")
            await until(lambda: bool(fake.of_type(AbortReq)) and not fake.live)
            assert [a.finished for a in fake.of_type(AbortReq)] == [True]

    asyncio.run(scenario())


def test_no_part_of_a_stop_string_is_ever_shown(tmp_path):
    async def scenario():
        async with running_manager(tmp_path) as (manager, _):
            shown = []
            async with aclosing(
                manager.generate(call(params={"stop": ["cdef"], "max_new_tokens": 50}, stream=True))
            ) as states:
                async for state in states:
                    shown.append(state.text)
            assert shown[-1] == "ab"
            assert all("ab".startswith(text) for text in shown)

    asyncio.run(scenario())


def test_a_stop_string_waits_for_min_new_tokens(tmp_path):
    async def scenario():
        async with running_manager(tmp_path) as (manager, _):
            params = {"stop": ["c", "e"], "min_new_tokens": 4, "max_new_tokens": 50}
            [state] = await finish(manager, call(params=params))
            assert (state.text, len(state.output_ids)) == ("abcd", 5)

    asyncio.run(scenario())


def test_the_end_token_is_counted_but_not_shown(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, spelling("hi")) as (manager, _):
            [state] = await finish(manager, call(params={"skip_special_tokens": False}))
            assert state.text == "hi"
            assert state.output_ids == [*ids("hi"), EOS]
            assert state.finish_reason == FinishReason(FinishType.STOP, matched=EOS)
            params = {"skip_special_tokens": False, "no_stop_trim": True}
            [state] = await finish(manager, call(params=params))
            assert state.text == "hi<eos>"

    asyncio.run(scenario())


def test_a_character_is_shown_only_when_it_is_whole(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, spelling("né€")) as (manager, _):
            shown = []
            async with aclosing(manager.generate(call(stream=True))) as states:
                async for state in states:
                    shown.append(state.text)
            assert shown[-1] == "né€"
            assert not any("\ufffd" in text for text in shown)
            [state] = await finish(manager, call(params={"max_new_tokens": 2}))
            assert state.text == "n\ufffd"

    asyncio.run(scenario())


def test_a_slow_consumer_finds_everything_in_one_piece(tmp_path):
    async def scenario():
        async with running_manager(tmp_path) as (manager, _):
            seen = []
            async with aclosing(
                manager.generate(call(params={"max_new_tokens": 30}, stream=True))
            ) as states:
                async for state in states:
                    seen.append(len(state.output_ids))
                    # The client takes its time: everything comes before it looks again.
                    await until(lambda s=state: s.finish_reason is not None)
            assert seen[-1] == 30
            assert len(seen) <= 3

    asyncio.run(scenario())


def test_stream_interval_spaces_the_chunks_but_not_the_first(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, passes=0, stream_interval=3) as (manager, fake):
            seen = []
            async with aclosing(
                manager.generate(call(params={"max_new_tokens": 9}, stream=True))
            ) as states:
                fake.passes_left = 1
                async for state in states:
                    seen.append(len(state.output_ids))
                    fake.passes_left = 1 if len(seen) == 0 else 3
            assert seen == [1, 4, 7, 9]

    asyncio.run(scenario())


def test_leaving_early_aborts_the_request_and_frees_its_name(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, passes=0) as (manager, fake):
            async with aclosing(
                manager.generate(call(rid="me", params={"max_new_tokens": 90}, stream=True))
            ) as states:
                fake.passes_left = 1
                await anext(states)
            assert manager.num_live == 0
            await until(lambda: not fake.live)
            assert fake.of_type(AbortReq)
            fake.passes_left = 1
            [state] = await finish(manager, call(rid="me", params={"max_new_tokens": 1}))
            assert (state.rid, state.text) == ("me", "a")

    asyncio.run(scenario())


def test_a_token_for_a_request_that_left_does_not_reach_its_namesake(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, passes=0) as (manager, fake):
            first = asyncio.create_task(
                finish(manager, call(rid="x", params={"max_new_tokens": 9}))
            )
            await until(lambda: bool(fake.live))
            [old] = fake.live.values()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            second = asyncio.create_task(
                finish(manager, call(rid="x", params={"max_new_tokens": 2}))
            )
            await until(lambda: len(fake.of_type(TokenizedGenerateReq)) == 2)
            # A pass that was under way when the first left.
            fake.live = {old.request.rid: old} | fake.live
            old.num_out = 5
            fake.passes_left = 2
            [state] = await second
            assert state.text == "ab"

    asyncio.run(scenario())


def test_abort_is_by_exact_name_and_a_base_name_covers_its_batch(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, passes=0) as (manager, fake):
            tasks = [
                asyncio.create_task(finish(manager, c))
                for c in (
                    call(rid="req-1"),
                    call(rid="req-10", params={"max_new_tokens": 2}),
                    call(["p", "q"], rid="batch", is_batch=True),
                )
            ]
            await until(lambda: len(fake.live) == 4)
            manager.abort("req-1")
            manager.abort("batch")
            manager.abort("nobody")
            await until(lambda: len(fake.live) == 1)
            fake.passes_left = 2
            [one], [ten], batch = await asyncio.gather(*tasks)
            assert one.finish_reason.type is FinishType.ABORT and error_of(one) is None
            assert ten.finish_reason.type is FinishType.LENGTH
            assert [s.finish_reason.message for s in batch] == ["Aborted", "Aborted"]
            assert [s.rid for s in batch] == ["batch_0", "batch_1"]

    asyncio.run(scenario())


def test_abort_all_ends_everything(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, passes=0) as (manager, fake):
            tasks = [asyncio.create_task(finish(manager, call(f"p{i}"))) for i in range(5)]
            await until(lambda: len(fake.live) == 5)
            manager.abort_all()
            for [state] in await asyncio.gather(*tasks):
                assert state.finish_reason.type is FinishType.ABORT

    asyncio.run(scenario())


def test_a_live_name_cannot_be_used_twice(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, passes=0) as (manager, fake):
            first = asyncio.create_task(
                finish(manager, call(rid="x", params={"max_new_tokens": 1}))
            )
            await until(lambda: bool(fake.live))
            error = await refusal(manager, call(rid="x"))
            assert error.message == "Duplicate request ID detected: x"
            twice = call(["a", "b"], is_batch=True, rids=["y", "y"])
            assert "detected: y" in (await refusal(manager, twice)).message
            fake.passes_left = 1
            [state] = await first
            assert state.text == "a"
            assert manager.num_live == 0

    asyncio.run(scenario())


def test_choices_have_seeds_of_their_own_and_the_first_keeps_the_given_one(tmp_path):
    async def scenario():
        async with running_manager(tmp_path) as (manager, fake):
            params = {"n": 3, "sampling_seed": 7, "max_new_tokens": 2, "temperature": 1.0}
            states = await finish(manager, call(params=params, rid="base"))
            assert [s.index for s in states] == [0, 1, 2]
            seeds = [r.sampling_params.sampling_seed for r in fake.of_type(TokenizedGenerateReq)]
            assert seeds == [choice_seed(7, i) for i in range(3)]
            assert seeds[0] == 7 and len(set(seeds)) == 3
            assert len({s.rid for s in states} | {"base"}) == 4

    asyncio.run(scenario())


def test_a_fixed_random_seed_gives_every_run_the_same_seeds(tmp_path):
    async def seeds(folder):
        folder.mkdir()
        async with running_manager(folder, random_seed=5) as (manager, fake):
            for _ in range(3):
                await finish(manager, call(params={"max_new_tokens": 1}))
            return [r.sampling_params.sampling_seed for r in fake.of_type(TokenizedGenerateReq)]

    first = asyncio.run(seeds(tmp_path / "a"))
    assert len(set(first)) == 3
    assert first == asyncio.run(seeds(tmp_path / "b"))


def test_defaults_come_from_the_model_then_the_operator_then_the_request(tmp_path):
    async def temperature(params, **args):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        async with running_manager(folder, **args) as (manager, fake):
            await finish(manager, call(params={"max_new_tokens": 1, **params}))
            return fake.of_type(TokenizedGenerateReq)[0].sampling_params.temperature

    preferred = '{"temperature": 0.7}'
    assert asyncio.run(temperature({})) == 0.5
    assert asyncio.run(temperature({}, sampling_defaults="openai")) == 1.0
    assert asyncio.run(temperature({}, preferred_sampling_params=preferred)) == 0.7
    assert (
        asyncio.run(temperature({"temperature": 0.2}, preferred_sampling_params=preferred)) == 0.2
    )


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", {}, ["empty"]),
        ([], {}, ["input_ids cannot be empty."]),
        ([5, VOCAB_SIZE], {}, [str(VOCAB_SIZE), "vocabulary"]),
        ([-1], {}, ["-1", str(VOCAB_SIZE)]),
        ([200_000_000], {}, ["200000000", str(VOCAB_SIZE)]),
        ("a", {"logit_bias": {"200000000": 5}}, ["200000000", str(VOCAB_SIZE - 1)]),
        ("a", {"stop_token_ids": [10**9]}, [str(10**9)]),
        ("a", {"temperature": -1}, ["temperature"]),
        ("a" * CONTEXT_LEN, {}, [f"({CONTEXT_LEN} tokens) is longer than the model's context"]),
        ("a" * (CONTEXT_LEN + 1), {}, [f"({CONTEXT_LEN + 1} tokens)", f"({CONTEXT_LEN} tokens)"]),
        ("a" * POOL_SIZE, {}, [f"({POOL_SIZE} tokens)", f"({POOL_SIZE - 1} tokens)"]),
        ("a" * 100, {"max_new_tokens": 101}, ["201 tokens", "100 tokens from", "200 tokens"]),
        ("a" * 100, {"max_new_tokens": 51}, ["KV cache", "150 tokens", "151 tokens"]),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_numbers(tmp_path, prompt, params, words):
    async def scenario():
        async with running_manager(tmp_path) as (manager, fake):
            error = await refusal(manager, call(prompt, params=params))
            assert error.status == 400
            for word in words:
                assert word in error.message
            assert manager.num_live == 0
            [state] = await finish(manager, call(params={"max_new_tokens": 1}))
            assert state.text == "a"
            assert len(fake.of_type(TokenizedGenerateReq)) == 1

    asyncio.run(scenario())


def test_one_bad_member_refuses_the_whole_batch_before_anything_starts(tmp_path):
    async def scenario():
        async with running_manager(tmp_path) as (manager, fake):
            await refusal(manager, call(["good", ""], is_batch=True))
            await finish(manager, call(params={"max_new_tokens": 1}))
            assert len(fake.of_type(TokenizedGenerateReq)) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt_len", "params", "expected"),
    [
        (POOL_SIZE - 1, {}, 1),  # the default is cut to what fits
        (100, {}, 50),
        (100, {"max_new_tokens": None}, 50),
        (10, {}, 128),
        (100, {"max_new_tokens": 50}, 50),
        (10, {"max_new_tokens": None}, 140),
    ],
)
def test_a_limit_nobody_asked_for_is_cut_to_what_fits(tmp_path, prompt_len, params, expected):
    async def scenario():
        async with running_manager(tmp_path) as (manager, _):
            [state] = await finish(manager, call("a" * prompt_len, params=params))
            assert len(state.output_ids) == expected
            assert state.finish_reason.type is FinishType.LENGTH

    asyncio.run(scenario())


def test_auto_truncate_cuts_instead_of_refusing(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, allow_auto_truncate=True) as (manager, fake):
            [state] = await finish(manager, call("a" * 500))
            assert len(state.output_ids) == 1
            [state] = await finish(manager, call("a" * 100, params={"max_new_tokens": 500}))
            assert len(state.output_ids) == 50
            assert len(fake.of_type(TokenizedGenerateReq)[0].input_ids) == POOL_SIZE - 1

    asyncio.run(scenario())


def test_no_new_tokens_is_a_request_like_any_other(tmp_path):
    async def scenario():
        async with running_manager(tmp_path) as (manager, _):
            [state] = await finish(manager, call(params={"max_new_tokens": 0}))
            assert (state.text, state.output_ids) == ("", [])
            assert state.finish_reason.type is FinishType.LENGTH

    asyncio.run(scenario())


def test_the_schedulers_death_ends_every_request_with_an_error(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, passes=0) as (manager, fake):
            tasks = [asyncio.create_task(finish(manager, call(f"p{i}"))) for i in range(3)]
            await until(lambda: len(fake.live) == 3)
            await asyncio.to_thread(fake.die, "the card fell out")
            for [state] in await asyncio.gather(*tasks):
                error = error_of(state)
                assert error is not None and error.status == 500
                assert "the card fell out" in error.message
            assert manager.status is ServerStatus.DEAD and manager.died.is_set()
            error = await refusal(manager, call())
            assert error.status == 503 and "the card fell out" in error.message
            with pytest.raises(RequestError, match="card"):
                await manager.control.internal_state(1.0)

    asyncio.run(scenario())


def test_draining_finishes_what_runs_and_refuses_what_is_new(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, passes=0) as (manager, fake):
            running = asyncio.create_task(finish(manager, call(params={"max_new_tokens": 5})))
            await until(lambda: bool(fake.live))
            draining = asyncio.create_task(manager.drain(10.0))
            await until(lambda: manager.status is ServerStatus.DRAINING)
            assert (await refusal(manager, call())).status == 503
            fake.passes_left = 5
            assert await draining
            [state] = await running
            assert state.text == "abcde"

    asyncio.run(scenario())


def test_draining_ends_what_takes_too_long(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, passes=0) as (manager, fake):
            running = asyncio.create_task(finish(manager, call()))
            await until(lambda: bool(fake.live))
            assert not await manager.drain(0.01)
            [state] = await running
            assert state.finish_reason.type is FinishType.ABORT

    asyncio.run(scenario())


def test_a_pattern_that_never_ends_costs_only_its_own_request(tmp_path):
    async def scenario():
        script = spelling("a" * 60 + "!")
        async with running_manager(tmp_path, script) as (manager, _):
            bad = call(params={"stop_regex": "(a|a|aa)+$x", "max_new_tokens": 100})
            good = call(params={"max_new_tokens": 3})
            [[slow], [state]] = await asyncio.gather(finish(manager, bad), finish(manager, good))
            assert state.text == "aaa"
            error = error_of(slow)
            assert error is not None and error.status == 400 and "stop_regex" in error.message

    asyncio.run(scenario())


def test_a_long_text_is_tokenized_without_holding_up_the_loop(tmp_path):
    async def scenario():
        async with running_manager(tmp_path, allow_auto_truncate=True) as (manager, _):
            [state] = await finish(manager, call("a" * 50_000, params={"max_new_tokens": 1}))
            assert state.request.input_ids == ids("a" * (POOL_SIZE - 1))

    asyncio.run(scenario())


def test_a_message_that_cannot_be_sent_fails_its_own_request_only(tmp_path, monkeypatch):
    async def scenario():
        async with running_manager(tmp_path) as (manager, _):
            channel = manager._link._channel
            encode = channel.encode

            def picky(message):
                if getattr(message, "tenant", None) == "cursed":
                    raise OverflowError("too big for the wire")
                return encode(message)

            monkeypatch.setattr(channel, "encode", picky)
            with pytest.raises(OverflowError, match="too big"):
                await collect_all(manager, GenerateReqInput(["x"], [{}], tenant="cursed"))
            assert manager.num_live == 0
            states = await collect_all(
                manager, GenerateReqInput(["x"], [{"max_new_tokens": 2}], tenant="blessed")
            )
            assert states[-1].text == "ab"

    async def collect_all(manager, call):
        return [state async for state in manager.generate(call)]

    asyncio.run(scenario())
