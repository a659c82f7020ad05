"""The requests of chaos.py, the clients that send them, and the judgement of what came back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
# Longer than any pause of a stream while its scheduler is replaced.
STUCK_SECONDS = 180.0
SLOW_READER_SECONDS = 0.2
SLOW_READS = 20
REFUSED_PAUSE_SECONDS = 0.2
# Logits closer than this are a tie, which float32 sums in another order may decide otherwise.
TIE = 1e-3


@dataclass(frozen=True)
class Case:
    """A request and the answer it gets from a server that nobody disturbs."""

    body: dict[str, Any]
    output_ids: list[int]
    text: str
    finish: str
    completion_tokens: int


def make_bodies(count: int, max_new_tokens: int, seed: int = 0) -> list[dict[str, Any]]:
    """Greedy and seeded requests; with stop strings, penalties, minima and logprobs among them."""
    rng = random.Random(seed)
    words = ("the", "king", "river", "code", "model", "why", "water", "function", "seven", "light")
    bodies = []
    for i in range(count):
        params: dict[str, Any] = {"temperature": 0.0}
        if i % 2:
            params = {"temperature": 0.9, "sampling_seed": i, "top_p": (1.0, 0.9)[i // 2 % 2]}
        params["max_new_tokens"] = rng.randint(max(1, max_new_tokens // 2), max_new_tokens)
        kind = i % 6
        if kind == 1:
            params |= {"frequency_penalty": 0.4, "presence_penalty": 0.2}
        elif kind == 2:
            params["stop"] = ["\n\n", " zebra"]
        elif kind == 3:
            params |= {"repetition_penalty": 1.1, "min_new_tokens": params["max_new_tokens"] // 2}
        elif kind == 4:
            params["ignore_eos"] = True
        text = f"{i}: " + " ".join(rng.choices(words, k=rng.randint(3, 40)))
        body: dict[str, Any] = {"text": text, "sampling_params": params}
        if kind == 5:
            body |= {"return_logprob": True, "top_logprobs_num": 1}
        bodies.append(body)
    return bodies


async def reference(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Case:
    async with http.post(f"{url}/generate", json=body, timeout=NO_TIMEOUT) as response:
        answer = await response.json()
        assert response.status == 200, f"the undisturbed server refused {body}: {answer}"
    meta = answer["meta_info"]
    return Case(
        body,
        answer["output_ids"],
        answer["text"],
        meta["finish_reason"]["type"],
        meta["completion_tokens"],
    )


@dataclass
class Tally:
    """Every request that was sent is in exactly one of the counts."""

    sent: int = 0
    right: int = 0
    tied: int = 0  # another token where two logits are equal up to rounding
    refused: int = 0
    left: int = 0  # aborted by its client
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refusal_seconds: list[float] = field(default_factory=list)
    # Of each chunk of each stream: when it came and when the one before it did.
    gaps: list[tuple[float, float]] = field(default_factory=list)

    @property
    def num_accounted(self) -> int:
        bad = len(self.lost) + len(self.duplicated) + len(self.wrong)
        return self.right + self.tied + self.refused + self.left + bad


@dataclass(frozen=True)
class Manner:
    """How a client behaves."""

    stream: bool = True
    leaves_after: int | None = None  # chunks
    pause: float = 0.0  # seconds between two reads


def any_manner(rng: random.Random) -> Manner:
    dice = rng.random()
    if dice < 0.1:
        return Manner(leaves_after=rng.randint(1, 20))
    if dice < 0.2:
        return Manner(pause=SLOW_READER_SECONDS)
    return Manner(stream=dice < 0.8)


class Client:
    """Sends one request after the other and judges each answer."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, cases: list[Case], tally: Tally
    ) -> None:
        self._http, self._url = http, url
        self._cases, self._tally = cases, tally
        self.mismatches: list[tuple[Case, list[int]]] = []

    async def run(self, until: float, rng: random.Random) -> None:
        while time.monotonic() < until:
            if not await self.ask_any(rng):
                await asyncio.sleep(REFUSED_PAUSE_SECONDS)

    async def ask_any(self, rng: random.Random) -> bool:
        """False if it was refused."""
        return await self.ask(rng.choice(self._cases), any_manner(rng))

    async def ask(self, case: Case, manner: Manner) -> bool:
        """False if it was refused."""
        tally, begin = self._tally, time.monotonic()
        tally.sent += 1
        name = f"{case.body['text'][:20]!r}"
        try:
            async with self._http.post(
                f"{self._url}/generate",
                json={**case.body, "stream": manner.stream},
                timeout=NO_TIMEOUT,
            ) as response:
                if response.status != 200:
                    self._on_refusal(name, response.status, await response.text(), begin)
                    return False
                if manner.stream:
                    answer = await self._read(name, response, manner)
                else:
                    answer = await asyncio.wait_for(response.json(), STUCK_SECONDS)
            if answer is not None:
                self._judge(name, case, answer)
        except asyncio.TimeoutError:
            tally.lost.append(f"{name}: nothing came for {STUCK_SECONDS:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            tally.lost.append(f"{name}: {type(error).__name__}: {error}")
        return True

    def _on_refusal(self, name: str, status: int, text: str, begin: float) -> None:
        if status in (429, 503) and text:
            self._tally.refused += 1
            self._tally.refusal_seconds.append(time.monotonic() - begin)
        else:
            self._tally.lost.append(f"{name}: status {status}: {text[:200]}")

    async def _read(
        self, name: str, response: aiohttp.ClientResponse, manner: Manner
    ) -> dict[str, Any] | None:
        """The last chunk; None if the request is accounted for already."""
        tally, last, num_chunks, before = self._tally, None, 0, 0.0
        while True:
            line = await asyncio.wait_for(response.content.readline(), STUCK_SECONDS)
            if not line:
                tally.lost.append(f"{name}: the stream broke off after {num_chunks} chunks")
                return None
            if line == b"data: [DONE]\n":
                return last
            if not line.strip():
                continue
            chunk: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            if last is not None:
                had = last["output_ids"]
                if chunk["output_ids"][: len(had)] != had:
                    tally.duplicated.append(f"{name}: {had[-3:]} was taken back or repeated")
                    return None
            now, num_chunks = time.monotonic(), num_chunks + 1
            if before and not manner.pause:
                tally.gaps.append((before, now))
            before, last = now, chunk
            if num_chunks == manner.leaves_after:
                tally.left += 1
                response.close()
                return None
            if manner.pause and num_chunks <= SLOW_READS:
                await asyncio.sleep(manner.pause)

    def _judge(self, name: str, case: Case, answer: dict[str, Any]) -> None:
        tally, meta = self._tally, answer["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] == "abort":
            tally.lost.append(f"{name}: aborted: {reason.get('message')}")
        elif answer["output_ids"] != case.output_ids:
            self.mismatches.append((case, answer["output_ids"]))
        elif (answer["text"], reason["type"], meta["completion_tokens"]) != (
            case.text,
            case.finish,
            case.completion_tokens,
        ):
            tally.wrong.append(f"{name}: the tokens are right, but not text, reason or count")
        else:
            tally.right += 1


async def judge_mismatch(
    http: aiohttp.ClientSession, url: str, case: Case, got: list[int], tally: Tally
) -> None:
    """Other tokens than expected: forgiven once, where the two logits are a tie and nothing but the
    greatest logit decides."""
    pairs = list(zip(case.output_ids, got, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    words = (
        f"{case.body['text'][:20]!r}: token {at} of {len(got)} ({len(case.output_ids)} expected)"
    )
    params = case.body["sampling_params"]
    is_plain = params["temperature"] == 0 and not {
        name for name in params if name.endswith("_penalty")
    }
    if at < len(pairs) and is_plain:
        prompt = await _ids_of(http, url, case.body["text"])
        body = {
            "input_ids": prompt + got[:at],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [case.output_ids[at], got[at]],
        }
        async with http.post(f"{url}/generate", json=body, timeout=NO_TIMEOUT) as response:
            meta = (await response.json())["meta_info"]
        (expected, *_), (found, *_) = meta["output_token_ids_logprobs"][0]
        if abs(expected - found) <= TIE:
            tally.tied += 1
            return
        words += f", {expected - found:.4f} behind"
    tally.wrong.append(words)


async def _ids_of(http: aiohttp.ClientSession, url: str, text: str) -> list[int]:
    async with http.post(f"{url}/tokenize", json={"prompt": text}) as response:
        ids: list[int] = (await response.json())["tokens"]
        return ids
