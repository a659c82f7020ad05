"""Prompts: from seeds, or from the files people keep them in, without asking any hub."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from bench.prompt_text import (
    WORDS,
    TextSource,
    exact_text,
    length_between,
    load_sharegpt_rows,
    turns_of,
)
from bench.sessions import Dataset, DatasetError, Prompt, Session, Turn
from bench.sharegpt_file import cache_folder, cached_file, fetch_sharegpt
from bench.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from bench.options import Options


# A hash id of a Mooncake trace stands for this many tokens of the prompt (the trace's own
# definition).
MOONCAKE_BLOCK_TOKENS = 512
# Recorded agent sessions do not say how long their last reply was.
UNRECORDED_REPLY_TOKENS = 256


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank. Raises DatasetError for a bad one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DatasetError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DatasetError(f"{path}, line {number}: not a JSON object")
            yield number, row


def timestamp_of(row: dict[str, Any], where: str) -> float | None:
    value = row.get("timestamp")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DatasetError(f"{where}: timestamp must be a number of milliseconds, got {value!r}")
    return float(value)


def positive_int(row: dict[str, Any], key: str, where: str) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DatasetError(f"{where}: {key} must be an integer of at least 1, got {value!r}")
    return value


@dataclass
class Builder:
    """Makes one data set. Everything random comes from `rng`, so a seed decides it."""

    options: Options
    tokenizer: TextTokenizer
    rng: random.Random
    num_prompts: int
    sharegpt_folder: Path = field(default_factory=cache_folder)

    @property
    def path(self) -> Path:
        assert self.options.dataset_path is not None, "check() let a data set without a file pass"
        return Path(self.options.dataset_path)

    def finish_text(self, text: str, prompt_len: int | None = None) -> tuple[Prompt, int]:
        """(prompt, tokens) of a text as the options want it sent, wrapped as a message for chat."""
        options = self.options
        changed = prompt_len is None
        if options.prompt_suffix:
            text, changed = text + options.prompt_suffix, True
        if options.apply_chat_template:
            text = self.tokenizer.render_chat([{"role": "user", "content": text}])
            changed = True
        if options.tokenize_prompt:
            ids = self.tokenizer.encode(text)
            return ids, len(ids)
        length = len(self.tokenizer.encode(text)) if changed else prompt_len
        assert length is not None, "a text without a length was not counted"
        return self.wrap(text), length

    def wrap(self, text: str) -> Prompt:
        if self.options.api.kind.value == "chat":
            return [{"role": "user", "content": text}]
        return text

    def conversations(self, rows: Iterator[tuple[str, dict[str, Any]]]) -> list[Session]:
        """ShareGPT and custom rows: the first turn asks, the second says how long the answer is.
        Rows with fewer turns, or where either has fewer than 2 tokens, are passed over."""
        options = self.options
        sessions: list[Session] = []
        for where, row in rows:
            if len(sessions) == self.num_prompts:
                break
            texts = turns_of(row)
            if len(texts) < 2:
                continue
            prompt, prompt_len = self.finish_text(texts[0])
            output_len = options.sharegpt_output_len or len(self.tokenizer.encode(texts[1]))
            if prompt_len < 2 or (output_len < 2 and options.sharegpt_output_len is None):
                continue
            limit = options.sharegpt_context_len
            if limit is not None and prompt_len + output_len > limit:
                continue
            turn = Turn(prompt, prompt_len, output_len)
            sessions.append(Session((turn,), timestamp_of(row, where)))
        return sessions

    def sharegpt(self) -> Dataset:
        if self.options.dataset_path is None:
            path = fetch_sharegpt(self.sharegpt_folder)
        else:
            path = self.path
        rows = load_sharegpt_rows(path)[self.options.dataset_offset :]
        numbered = [(f"{path}, record {i}", row) for i, row in enumerate(rows)]
        if not self.options.use_trace_timestamps:
            self.rng.shuffle(numbered)  # a recorded order in time must be kept
        return Dataset(self.conversations(iter(numbered)), f"conversations of {path.name}")

    def custom(self) -> Dataset:
        rows = self.skip_offset(read_jsonl(self.path))
        return Dataset(self.conversations(rows), f"conversations of {self.path.name}")

    def skip_offset(
        self, rows: Iterator[tuple[int, dict[str, Any]]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        for i, (number, row) in enumerate(rows):
            if i >= self.options.dataset_offset:
                yield f"{self.path}, line {number}", row

    def openai(self) -> Dataset:
        """Recorded chat requests; keys beside messages, lengths and timestamp go out as they
        are."""
        own = {"messages", "max_tokens", "max_completion_tokens", "timestamp", "model", "stream"}
        sessions: list[Session] = []
        for where, row in self.skip_offset(read_jsonl(self.path)):
            if len(sessions) == self.num_prompts:
                break
            messages = self.messages(row, where)
            key = "max_completion_tokens" if "max_completion_tokens" in row else "max_tokens"
            output_len = self.options.sharegpt_output_len or positive_int(row, key, where)
            extra = {k: v for k, v in row.items() if k not in own}
            turn = Turn(messages, self.count_messages(messages), output_len, extra=extra)
            sessions.append(Session((turn,), timestamp_of(row, where)))
        return Dataset(sessions, f"requests of {self.path.name}")

    def messages(self, row: Any, where: str) -> list[dict[str, Any]]:
        messages = row.get("messages") if isinstance(row, dict) else None
        if not isinstance(messages, list) or not messages:
            raise DatasetError(f"{where}: messages must be a list that is not empty")
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise DatasetError(f"{where}: every message must be an object with a role")
        return messages

    def count_messages(self, messages: list[dict[str, Any]]) -> int:
        """Tokens of the contents, without the template's own; the server's count goes first."""
        return sum(
            len(self.tokenizer.encode(m["content"]))
            for m in messages
            if isinstance(m.get("content"), str)
        )

    def agentic_trace(self) -> Dataset:
        """Sessions whose turns are replayed as recorded, each when the one before has ended."""
        try:
            document = orjson.loads(self.path.read_bytes())
        except orjson.JSONDecodeError as error:
            raise DatasetError(f"{self.path}: not JSON: {error}") from None
        recorded = document.get("conversations") if isinstance(document, dict) else None
        if not isinstance(recorded, list):
            raise DatasetError(f"{self.path}: expected an object with a list `conversations`")
        sessions: list[Session] = []
        budget = self.num_prompts
        for i, rows in enumerate(recorded[self.options.dataset_offset :]):
            where = f"{self.path}, conversation {i + self.options.dataset_offset}"
            if not isinstance(rows, list) or not rows:
                raise DatasetError(f"{where}: expected a list of turns that is not empty")
            if not budget:
                break
            rows = rows[: self.options.agentic_max_turns][:budget]
            budget -= len(rows)
            prompts = [self.messages(row, f"{where}, turn {k}") for k, row in enumerate(rows)]
            turns = []
            for k, messages in enumerate(prompts):
                following = prompts[k + 1] if k + 1 < len(prompts) else []
                recorded_len = rows[k].get("prompt_tokens")
                known = isinstance(recorded_len, int)
                prompt_len = recorded_len if known else self.count_messages(messages)
                output_len = self.recorded_reply_len(messages, following)
                turns.append(Turn(messages, prompt_len, output_len))
            sessions.append(Session(tuple(turns), timestamp_of(rows[0], where)))
        return Dataset(sessions, f"sessions of {self.path.name}")

    def recorded_reply_len(
        self, messages: list[dict[str, Any]], following: list[dict[str, Any]]
    ) -> int:
        """Tokens of the assistant's message that the next turn shows behind this turn's
        messages."""
        if self.options.sharegpt_output_len is not None:
            return self.options.sharegpt_output_len
        for message in following[len(messages) :]:
            if message["role"] == "assistant" and isinstance(message.get("content"), str):
                return max(1, len(self.tokenizer.encode(message["content"])))
        return UNRECORDED_REPLY_TOKENS

    def random_text(self) -> Dataset:
        options = self.options
        lens = self.random_lengths()
        given = Path(options.dataset_path) if options.dataset_path else None
        source = TextSource(
            self.tokenizer,
            self.rng,
            given or cached_file(self.sharegpt_folder),
            sum(input_len for input_len, _ in lens),
        )
        sessions = []
        for input_len, output_len in lens:
            text, prompt_len = exact_text(source.take, input_len, self.tokenizer)
            prompt, prompt_len = self.finish_text(text, prompt_len)
            sessions.append(Session((Turn(prompt, prompt_len, output_len),)))
        return Dataset(sessions, f"random lengths over {source.note}")

    def random_ids(self) -> Dataset:
        sessions = []
        for input_len, output_len in self.random_lengths():
            prompt: Prompt
            if self.options.tokenize_prompt and not self.options.apply_chat_template:
                prompt, prompt_len = self.take_random_ids(input_len), input_len
            else:
                text, prompt_len = exact_text(self.take_random_ids, input_len, self.tokenizer)
                prompt, prompt_len = self.finish_text(text, prompt_len)
            sessions.append(Session((Turn(prompt, prompt_len, output_len),)))
        return Dataset(sessions, "random token ids")

    def take_random_ids(self, num: int) -> list[int]:
        return self.tokenizer.random_ids(num, self.rng)

    def random_lengths(self) -> list[tuple[int, int]]:
        options, ratio = self.options, self.options.random_range_ratio
        return [
            (
                length_between(options.random_input_len, ratio, self.rng),
                length_between(options.random_output_len, ratio, self.rng),
            )
            for _ in range(self.num_prompts)
        ]

    def random_part(self, longest: int) -> tuple[str, int]:
        """Random text for a part of a generated prompt; its length is nominal with fast prepare."""
        length = length_between(longest, self.options.gsp_range_ratio, self.rng)
        if self.options.gsp_fast_prepare:
            return self.tokenizer.decode(self.take_random_ids(length)), length
        return exact_text(self.take_random_ids, length, self.tokenizer)

    def generated_shared_prefix(self) -> Dataset:
        options = self.options
        total = options.gsp_num_groups * options.gsp_prompts_per_group
        if options.num_prompts is not None and options.num_prompts > total:
            raise DatasetError(
                f"--num-prompts {options.num_prompts} exceeds --gsp-num-groups * "
                f"--gsp-prompts-per-group = {total}"
            )
        groups = list(range(options.gsp_num_groups))
        if options.gsp_zipf_alpha is not None:
            weights = [1 / (rank + 1) ** options.gsp_zipf_alpha for rank in groups]
            members = sorted(self.rng.choices(groups, weights, k=total))
        else:
            members = [group for group in groups for _ in range(options.gsp_prompts_per_group)]
        system = [self.random_part(options.gsp_system_prompt_len) for _ in groups]
        keys = [f"{self.rng.getrandbits(64):016x}" for _ in groups]
        sessions = [self.shared_prefix_session(system[g], keys[g]) for g in members]
        if not options.gsp_ordered:
            self.rng.shuffle(sessions)
        return Dataset(sessions[: options.num_prompts], "generated prompts with shared prefixes")

    def shared_prefix_session(self, system: tuple[str, int], key: str) -> Session:
        options, turns = self.options, []
        for k in range(options.gsp_num_turns):
            text, length = self.random_part(options.gsp_question_len)
            if k == 0:
                text, length = f"{system[0]}\n\n{text}", system[1] + length
            # Joined parts encode to a token more or less, so an exact length is counted anew.
            known = length if options.gsp_fast_prepare or k else None
            prompt, prompt_len = self.finish_text(text, known)
            turns.append(Turn(prompt, prompt_len, options.gsp_output_len, follows_reply=k > 0))
        return Session(tuple(turns), routing_key=key if options.gsp_send_routing_key else None)

    def mooncake(self) -> Dataset:
        """Records of a Mooncake trace: the same hash id is the same text, so prefixes are shared as
        they were, and a block has the 512 tokens it had."""
        blocks: dict[int, str] = {}
        sessions: list[Session] = []
        for where, row in self.skip_offset(read_jsonl(self.path)):
            if len(sessions) == self.num_prompts:
                break
            ids = row.get("hash_ids")
            if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
                raise DatasetError(f"{where}: hash_ids must be a list of integers, not empty")
            recorded = positive_int(row, "input_length", where) if "input_length" in row else None
            output_len = positive_int(row, "output_length", where)
            for hash_id in ids:
                if hash_id not in blocks:
                    blocks[hash_id] = self.mooncake_block(hash_id)
            last = blocks[ids[-1]]
            if recorded is not None:
                tail = recorded - MOONCAKE_BLOCK_TOKENS * (len(ids) - 1)
                if not 0 < tail <= MOONCAKE_BLOCK_TOKENS:
                    raise DatasetError(
                        f"{where}: input_length {recorded} does not fit {len(ids)} blocks of "
                        f"{MOONCAKE_BLOCK_TOKENS}"
                    )
                last = self.tokenizer.decode(self.tokenizer.encode(last)[:tail])
            prompt, prompt_len = self.finish_text("".join(blocks[i] for i in ids[:-1]) + last)
            turns = [Turn(prompt, prompt_len, output_len)]
            if self.options.mooncake_num_rounds > 1:
                again, again_len = self.finish_text(last)
                repeat = Turn(again, again_len, output_len, follows_reply=True)
                turns += [repeat] * (self.options.mooncake_num_rounds - 1)
            sessions.append(Session(tuple(turns), timestamp_of(row, where)))
        return Dataset(sessions, f"trace {self.path.name}, {MOONCAKE_BLOCK_TOKENS} tokens a block")

    def mooncake_block(self, hash_id: int) -> str:
        # Its own generator, so that a block does not depend on which records came before.
        rng = random.Random(f"{self.options.seed}/{hash_id}")
        words = " ".join(rng.choices(WORDS, k=MOONCAKE_BLOCK_TOKENS))
        ids = self.tokenizer.encode(f" [{hash_id}] {words}")
        return self.tokenizer.decode(ids[:MOONCAKE_BLOCK_TOKENS])

    def build(self) -> Dataset:
        makers = {
            "sharegpt": self.sharegpt,
            "random": self.random_text,
            "random-ids": self.random_ids,
            "generated-shared-prefix": self.generated_shared_prefix,
            "custom": self.custom,
            "openai": self.openai,
            "mooncake": self.mooncake,
            "agentic-trace": self.agentic_trace,
        }
        return makers[self.options.dataset_name]()


def build_dataset(options: Options, tokenizer: TextTokenizer) -> Dataset:
    """The sessions to send, whole and in order; the same options give the same. Raises DatasetError
    when the data yields none, or lacks the timestamps that are asked for."""
    num_prompts = 1000 if options.num_prompts is None else options.num_prompts
    dataset = Builder(options, tokenizer, random.Random(options.seed), num_prompts).build()
    if not dataset.sessions:
        raise DatasetError(f"--dataset-name {options.dataset_name} yields no usable prompt")
    if options.use_trace_timestamps:
        without = sum(session.timestamp_ms is None for session in dataset.sessions)
        if without:
            raise DatasetError(
                f"--use-trace-timestamps: {without} of {len(dataset.sessions)} records of "
                f"{options.dataset_path} have no timestamp"
            )
    return dataset
