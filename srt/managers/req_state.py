"""What the HTTP process knows of one live request: its tokens, its text so far and how it ended."""

from __future__ import annotations

import time

import msgspec

from srt.managers.detokenizer import Detokenizer
from srt.managers.io_struct import (
    FinishReason,
    FinishType,
    ResumeInfo,
    StartedInfo,
    TokenizedGenerateReq,
    TokenLogprobs,
)
from srt.managers.stop_matcher import StopMatcher


class ReqState:
    """One request from its acceptance to its terminal output.

    `output_ids` holds every token the model gave, stop tokens included; `text` is what a client may
    see: no stop string, no part of one, no half character. Both only grow. `finish_reason` is set
    once, and nothing changes after that. Together with `request` they are all that is needed to
    submit the request again to another scheduler.
    """

    __slots__ = (
        "cached_tokens",
        "created_time",
        "detokenizer",
        "finish_reason",
        "finished_time",
        "first_token_time",
        "index",
        "input_logprobs",
        "is_member",
        "num_retractions",
        "output_ids",
        "output_logprobs",
        "queue_time",
        "recomputed_tokens",
        "request",
        "rid",
        "stop_matcher",
        "text",
    )

    def __init__(
        self,
        rid: str,
        request: TokenizedGenerateReq,
        index: int,
        is_member: bool,
        detokenizer: Detokenizer,
        stop_matcher: StopMatcher | None,
        created_time: float,
    ) -> None:
        self.rid = rid  # the client's name for it; request.rid is the scheduler's
        self.request = request
        self.index = index  # place among the choices of the client's call
        self.is_member = is_member  # of an answer that is a list
        self.detokenizer = detokenizer
        self.stop_matcher = stop_matcher  # None: nothing to look for
        self.output_ids: list[int] = []
        # Of the prompt tokens that were asked about, and of every output; empty if nobody asked.
        self.input_logprobs: list[TokenLogprobs] = []
        self.output_logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.num_retractions = 0
        self.recomputed_tokens = 0
        # `time.time()` seconds; durations in seconds, None until known.
        self.created_time = created_time
        self.queue_time: float | None = None
        self.first_token_time: float | None = None
        self.finished_time: float | None = None

    def start(self, started: StartedInfo) -> None:
        """Note an admission. Waiting and reuse are those of the first one; what a retraction costs
        is counted beside them."""
        if self.queue_time is None:
            self.queue_time = started.queue_time
            self.cached_tokens = started.cached_tokens
        self.num_retractions = started.num_retractions
        self.recomputed_tokens = started.recomputed_tokens

    def add_logprobs(
        self, prompt: list[TokenLogprobs] | None, output: TokenLogprobs | None
    ) -> None:
        """Take what came with a token, before it is added."""
        if prompt is not None:
            self.input_logprobs += prompt
        if output is not None:
            self.output_logprobs.append(output)

    def resumed_request(self, was_admitted: bool) -> TokenizedGenerateReq:
        """The request for a scheduler that has never seen it, to go on after the last output."""
        return msgspec.structs.replace(
            self.request,
            output_ids=list(self.output_ids),
            resume=ResumeInfo(
                age=max(0.0, time.time() - self.request.arrival_time),
                was_admitted=was_admitted,
                cached_tokens=self.cached_tokens,
                queue_time=self.queue_time or 0.0,
                num_retractions=self.num_retractions,
                recomputed_tokens=self.recomputed_tokens,
            ),
        )

    def add_token(self, token_id: int, finish: FinishReason | None) -> None:
        """Take one token (-1: none, the request just ends) and maybe the scheduler's finish reason.
        A stop string found now wins over `finish`."""
        if token_id >= 0:
            if self.first_token_time is None:
                self.first_token_time = time.time()
            self.output_ids.append(token_id)
            params = self.request.sampling_params
            is_stop_token = (
                finish is not None
                and finish.type is FinishType.STOP
                and finish.matched == token_id
                and not params.no_stop_trim
            )
            if not is_stop_token:
                self._release(self.detokenizer.push(token_id))
        if finish is not None and self.finish_reason is None:
            self.finish(finish)

    def finish(self, reason: FinishReason) -> None:
        """End the request. Text held back comes out now, unless a stop string completes in it."""
        assert self.finish_reason is None, f"{self.rid} ends twice"
        self._release(self.detokenizer.finish())
        if self.finish_reason is not None:
            return  # the flushed tail completed a stop string
        if self.stop_matcher is not None:
            self.text += self.stop_matcher.finish()
        self._end(reason)

    def _release(self, text: str) -> None:
        """Show `text`, less what is, or could become, a stop string."""
        if not text:
            return
        matcher = self.stop_matcher
        # Before min_new_tokens a stop string cannot end the request, so it is not looked for.
        if matcher is None or len(self.output_ids) < self.request.sampling_params.min_new_tokens:
            self.text += text
            return
        released, match = matcher.push(text)
        self.text += released
        if match is not None:
            self._end(FinishReason(FinishType.STOP, matched=match.pattern))

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.finished_time = time.time()
