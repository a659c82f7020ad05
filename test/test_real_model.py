"""The default model through the whole path: many requests at once answer as each would alone."""

import asyncio
import random
import re

import pytest
from greedy_reference import GreedyReference

from srt.engine import Engine

UNICODE = [
    "请用中文介绍一下北京的历史和文化。",
    "Repeat: 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🤦🏾‍♂️ 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🤦🏾‍♂️ 👩‍👩‍👧‍👦 🏳️‍🌈",
    "Combining: é ñ å ị̂ ö́ é ñ å ị̂ ö́ é ñ",
    "كرر: السلام عليكم ورحمة الله. السلام عليكم ورحمة الله. السلام",
    "שלום עולם. שלום עולם. שלום",
]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def reference(default_model):
    return GreedyReference(default_model)


@pytest.fixture(scope="module")
def engine(default_model):
    with Engine(str(default_model), dtype="float32", max_total_tokens=20_000) as made:
        yield made


def pristine(engine):
    """Rows, slots and locks are back to their start values."""
    state = engine.internal_state()
    return (
        state["num_running_reqs"] == 0
        and state["num_waiting_reqs"] == 0
        and state["num_used_tokens"] == 0
        and state["num_locked_tokens"] == 0
        and state["free_rows"] == state["max_running_requests"]
    )


async def run_mixed(engine, count, max_prompt, max_new, seed):
    """Concurrent requests of mixed lengths, streamed and plain, some stopped, some left early."""
    rng = random.Random(seed)
    vocab = engine.tokenizer.vocab_size
    answers = []

    async def one(i):
        ids = [rng.randrange(3, vocab) for _ in range(rng.randint(1, max_prompt))]
        params = {**GREEDY, "max_new_tokens": rng.randint(1, max_new)}
        kind = i % 4
        if kind == 1:
            params |= {"stop": [" the", "a"], "stop_token_ids": [28, 30]}
        await asyncio.sleep(rng.random() * 0.2)
        if kind == 0:
            answer = await engine.async_generate(input_ids=ids, sampling_params=params)
            answers.append((ids, params, answer))
            return
        chunks = []
        stream = await engine.async_generate(input_ids=ids, sampling_params=params, stream=True)
        async for chunk in stream:
            assert not chunks or chunk["text"].startswith(chunks[-1]["text"])
            chunks.append(chunk)
            if kind == 3 and len(chunks) == 3:
                await stream.aclose()
                return
        answers.append((ids, params, chunks[-1]))

    await asyncio.gather(*(one(i) for i in range(count)))
    return answers


def check_mixed(engine, reference, answers):
    for ids, params, answer in answers:
        reference.assert_greedy(ids, answer["output_ids"])
        plain = engine.generate(input_ids=ids, sampling_params=params)
        if plain["output_ids"] == answer["output_ids"]:  # else a tie, which the reference judged
            assert plain["text"] == answer["text"]
            assert plain["meta_info"]["finish_reason"] == answer["meta_info"]["finish_reason"]


def wait_until_pristine(engine):
    return any(pristine(engine) for _ in range(200))


def test_a_dozen_mixed_requests_answer_as_each_does_alone_and_leave_nothing(engine, reference):
    answers = asyncio.run(run_mixed(engine, 12, max_prompt=120, max_new=24, seed=1))
    assert len(answers) >= 9
    check_mixed(engine, reference, answers)
    assert wait_until_pristine(engine)


@pytest.mark.slow
def test_64_mixed_requests_answer_as_each_does_alone_and_leave_nothing(engine, reference):
    answers = asyncio.run(run_mixed(engine, 64, max_prompt=200, max_new=64, seed=2))
    assert len(answers) >= 48
    for ids, _, answer in answers:
        reference.assert_greedy(ids, answer["output_ids"])
    check_mixed(engine, reference, answers[:8])
    assert wait_until_pristine(engine)


@pytest.mark.parametrize(
    "prompt", [*UNICODE[:2], *(pytest.param(text, marks=pytest.mark.slow) for text in UNICODE[2:])]
)
def test_text_cut_anywhere_streams_as_it_is_told_whole(engine, prompt):
    """Every limit from 1 to 20 at once: no chunk ends in a replacement character that a later one
    turns into text, and stream and plain agree."""
    limits = [{**GREEDY, "max_new_tokens": n} for n in range(1, 21)]
    plain = engine.generate([prompt] * 20, limits)
    last = {}
    for chunk in engine.generate([prompt] * 20, limits, stream=True):
        before = last.get(chunk["index"])
        assert before is None or chunk["text"].startswith(before["text"])
        last[chunk["index"]] = chunk
    for i, answer in enumerate(plain):
        assert answer["meta_info"]["finish_reason"]["type"] in ("length", "stop")
        assert answer["meta_info"]["completion_tokens"] <= i + 1
        assert last[i]["text"] == answer["text"] and last[i]["output_ids"] == answer["output_ids"]


def test_five_prompts_at_once_repeat_their_own_numbers(engine, reference):
    prompts = [f"Repeat the number {n}: {n} {n} {n}" for n in (17, 4242, 98765, 3, 600613)]
    together = engine.generate(prompts, {**GREEDY, "max_new_tokens": 12})
    for prompt, answer in zip(prompts, together, strict=True):
        reference.assert_greedy(engine.tokenizer.encode(prompt), answer["output_ids"])


def test_a_stop_string_that_spans_tokens_never_shows_any_part(engine):
    prompt = "The history of the city of Rome begins"
    text = engine.generate(prompt, {**GREEDY, "max_new_tokens": 40})["text"]
    for start in range(5, 60, 11):
        stop = text[start : start + 7]
        cut = text.index(stop)
        shown = ""
        for chunk in engine.generate(
            prompt, {**GREEDY, "max_new_tokens": 40, "stop": stop}, stream=True
        ):
            shown = chunk["text"]
            assert text[:cut].startswith(shown)
        assert shown == text[:cut]
        assert chunk["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_the_same_seed_gives_the_same_text_in_any_company(engine):
    params = {"temperature": 1.0, "max_new_tokens": 16, "sampling_seed": 7}
    alone = engine.generate("Once upon a time", params)["text"]
    crowd = [{"temperature": 1.0, "max_new_tokens": 16, "sampling_seed": s} for s in range(6)]
    together = engine.generate(["Once upon a time"] * 7, [*crowd, params])
    assert together[6]["text"] == alone
    assert len({answer["text"] for answer in together[:6]}) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "overlap", "number", "longest", "pool"),
    [("none", "off", 16, 150, 600), ("auto", "on", 40, 300, 1200)],
)
def test_a_pool_too_small_for_the_load_changes_no_answer(
    default_model, quantization, overlap, number, longest, pool, capfd
):
    """Requests with long outputs in a pool for a few: retractions, and the same tokens. As float32
    the model takes three times as long, so there are fewer and shorter ones."""
    reference = GreedyReference(default_model, quantization)
    rng = random.Random(3)
    with Engine(
        str(default_model),
        dtype="float32",
        quantization=quantization,
        max_total_tokens=pool,
        schedule_conservativeness=0.0,
        admission="ratio",
        overlap_schedule=overlap,
    ) as engine:
        vocab = engine.tokenizer.vocab_size
        prompts = [
            [rng.randrange(3, vocab) for _ in range(rng.randint(5, 60))] for _ in range(number)
        ]
        params = [{**GREEDY, "max_new_tokens": rng.randint(60, longest)} for _ in prompts]
        last = {}
        for chunk in engine.generate(input_ids=prompts, sampling_params=params, stream=True):
            before = last.get(chunk["index"])
            if before is not None:
                assert chunk["text"].startswith(before["text"])
                assert chunk["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            last[chunk["index"]] = chunk
        assert len(last) == number
        for i, ids in enumerate(prompts):
            reference.assert_greedy(ids, last[i]["output_ids"])
            assert last[i]["text"] == engine.tokenizer.decode(last[i]["output_ids"])
        retractions = sum(chunk["meta_info"]["num_retractions"] for chunk in last.values())
        assert retractions > 0
        assert wait_until_pristine(engine)
    log = capfd.readouterr().err
    counted = sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", log))
    assert counted == retractions


@pytest.mark.slow
def test_over_an_int8_cache_every_answer_is_to_the_token_what_it_is_alone(default_model):
    """Twelve requests, of which one is taken back and computed again at every tenth step."""
    rng = random.Random(5)
    with Engine(
        str(default_model),
        kv_cache_dtype="int8",
        max_total_tokens=2000,
        retract_every=10,
        disable_radix_cache=True,
    ) as engine:
        vocab = engine.tokenizer.vocab_size
        prompts = [[rng.randrange(3, vocab) for _ in range(rng.randint(5, 90))] for _ in range(12)]
        params = [
            {**GREEDY, "max_new_tokens": rng.randint(40, 120), "ignore_eos": True} for _ in prompts
        ]
        together = engine.generate(input_ids=prompts, sampling_params=params)
        assert sum(answer["meta_info"]["num_retractions"] for answer in together) > 0
        for ids, its, answer in zip(prompts, params, together, strict=True):
            alone = engine.generate(input_ids=ids, sampling_params=its)
            assert alone["output_ids"] == answer["output_ids"]
