"""What requests want to know about probabilities: the questions of a pass, and their answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from srt.device_copy import HostCopy, to_device
from srt.logprob_query import LogprobQuery
from srt.managers.io_struct import TokenizedGenerateReq, TokenLogprobs

if TYPE_CHECKING:
    from srt.managers.req import Req


@dataclass
class ReqLogprobs:
    """One request's wish. Prompt tokens [start, prompt_len) are asked about, each once, however
    often the prompt is computed: `next_position` is the first that no pass was asked about yet.
    Answers about the prompt wait in `prompt` until they go out with the first token."""

    num_top: int
    token_ids: list[int] | None
    prompt_len: int
    next_position: int
    prompt: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def from_message(cls, message: TokenizedGenerateReq) -> ReqLogprobs | None:
        """None if the message asks for nothing."""
        if not message.return_logprob:
            return None
        prompt_len, start = len(message.input_ids), message.logprob_start_len
        # A request that comes back with outputs has told its client about the prompt.
        wants_prompt = 0 <= start < prompt_len and not message.output_ids
        wish = cls(message.top_logprobs_num, message.token_ids_logprob, prompt_len, prompt_len)
        if wants_prompt:
            # Nothing is known before the first one, so nothing is said about it.
            wish.prompt.append(TokenLogprobs(None, message.input_ids[start], None, None))
            wish.next_position = start + 1
        return wish

    @property
    def max_cached(self) -> int | None:
        """Tokens that the prefix cache may serve at most: what follows must be computed. None: any
        number."""
        return None if self.next_position >= self.prompt_len else self.next_position - 1

    def take_prompt(self) -> list[TokenLogprobs]:
        """What is known about the prompt and was not taken."""
        taken, self.prompt = self.prompt, []
        return taken


@dataclass(frozen=True)
class _PromptSpan:
    wish: ReqLogprobs
    token_ids: list[int]


class LogprobPlan:
    """The questions of one pass, by request."""

    def __init__(self) -> None:
        self._prompts: list[_PromptSpan] = []
        self._sampled: list[Req] = []
        self.query: LogprobQuery | None = None
        self._arriving: HostCopy | None = None

    @classmethod
    def of(
        cls,
        reqs: Sequence[Req],
        starts: Sequence[int],
        lens: Sequence[int],
        sampling_rows: Iterable[int],
        device: str | torch.device,
    ) -> LogprobPlan | None:
        """For a pass that computes tokens [start, start + len) of each request and samples one for
        those in `sampling_rows`. None if nobody asks. Counts as asked what it asks."""
        plan = cls()
        hidden_rows: list[int] = []
        offset = 0
        for req, start, length in zip(reqs, starts, lens, strict=True):
            wish = req.logprobs
            if wish is not None:
                first, end = wish.next_position, min(start + length, wish.prompt_len - 1) + 1
                if first < end:
                    assert first - 1 >= start, f"{req.rid}: token {first - 1} is cached"
                    hidden_rows += range(offset + first - 1 - start, offset + end - 1 - start)
                    plan._prompts.append(_PromptSpan(wish, req.input_ids[first:end].tolist()))
                    wish.next_position = end
            offset += length
        rows = [row for row in sampling_rows if reqs[row].logprobs is not None]
        plan._sampled = [reqs[row] for row in rows]
        if not hidden_rows and not rows:
            return None

        def column(values: list[int]) -> torch.Tensor:
            return to_device(torch.tensor(values, dtype=torch.int64), device)

        wishes = plan._wishes()
        extra = [(at, i) for at, wish in enumerate(wishes) for i in wish.token_ids or ()]
        plan.query = LogprobQuery(
            hidden_rows=column(hidden_rows),
            targets=column([i for span in plan._prompts for i in span.token_ids]),
            sampled_rows=column(rows),
            num_top=max(wish.num_top for wish in wishes),
            extra_questions=[at for at, _ in extra],
            extra_ids=column([i for _, i in extra]),
        )
        return plan

    def _wishes(self) -> list[ReqLogprobs]:
        """Of each question."""
        prompts = [span.wish for span in self._prompts for _ in span.token_ids]
        return prompts + [req.logprobs for req in self._sampled if req.logprobs is not None]

    def fetch(self) -> None:
        """The pass is launched: let its answers come to the host."""
        assert self.query is not None and self.query.answer is not None, "the pass has not run"
        answer = self.query.answer
        self._arriving = HostCopy(answer.chosen, answer.top, answer.top_ids, answer.extra)

    def settle(self, tokens: dict[str, int]) -> dict[str, TokenLogprobs]:
        """Give the answers about prompts to their requests, and return those about sampled tokens,
        `tokens` by rid, by rid. Waits for the device."""
        assert self._arriving is not None, "nothing was fetched"
        chosen, top, top_ids, extra_list = (x.tolist() for x in self._arriving.wait())
        extra = iter(extra_list)
        at = 0

        def said(wish: ReqLogprobs, token_id: int) -> TokenLogprobs:
            nonlocal at
            best = extra_ids = None
            if wish.num_top:
                pairs = zip(top[at], top_ids[at], strict=True)
                best = list(pairs)[: wish.num_top]
            if wish.token_ids is not None:
                extra_ids = [(next(extra), i) for i in wish.token_ids]
            at += 1
            return TokenLogprobs(chosen[at - 1], token_id, best, extra_ids)

        for span in self._prompts:
            span.wish.prompt += [said(span.wish, token_id) for token_id in span.token_ids]
        found = {}
        for req in self._sampled:
            assert req.logprobs is not None
            found[req.rid] = said(req.logprobs, tokens.get(req.rid, -1))
        return found
