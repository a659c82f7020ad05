"""One request inside the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from srt.managers.io_struct import FinishReason, ResumeInfo, TokenizedGenerateReq
from srt.managers.req_logprobs import ReqLogprobs
from srt.mem_cache.radix_cache import TokenArray, TreeNode
from srt.sampling_params import SamplingParams


@dataclass
class ReqKV:
    """What a request has only while it is admitted; None otherwise, so that retracting is one
    assignment. Tokens [0, cached_len) sit in slots of the radix tree, held by the lock on `node`;
    the rest, up to ReqMemory.kv_len, in slots the request owns itself."""

    row: int  # of req_to_token
    cached_len: int
    node: TreeNode
    admitted_len: int  # cached_len at admission
    # Tokens whose KV is known to be numbers, so that others may read it: a pass over them or after
    # them gave logits that were. None once the prompt is computed: all but the newest output's.
    good_len: int | None


@dataclass(frozen=True)
class Blocker:
    """Why a waiting request was not admitted, in the units of `kind`: requests for `slots`, tokens
    for `kv` and `prefill_budget`, passes for `decode_turn`; `prefix`: tokens that a request in the
    same pass is computing for it; `batching`: requests that a full batch needs, or the one batch
    that must end. Short by needed + reserved - available."""

    kind: str
    needed: int = 0
    available: int = 0
    reserved: int = 0


@dataclass(eq=False)
class Req:
    """A request from arrival to its one terminal output. Times are seconds of the scheduler's
    clock."""

    rid: str
    input_ids: TokenArray  # [prompt_len]
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]  # the request's own stop tokens; empty with ignore_eos
    priority: int = 0
    extra_key: str | None = None
    tenant: str | None = None
    arrival_time: float = 0.0
    logprobs: ReqLogprobs | None = None
    output_ids: list[int] = field(default_factory=list)
    kv: ReqKV | None = None
    finish_reason: FinishReason | None = None
    blocker: Blocker | None = None
    queued_at: float = 0.0  # when it last entered the waiting queue
    bypassed: int = 0  # requests behind it admitted while it did not fit
    cached_tokens: int = 0  # of the first admission
    queue_time: float = 0.0  # of the first admission
    was_admitted: bool = False  # at least once, perhaps by a scheduler that is gone
    num_retractions: int = 0
    retracted_len: int = 0  # tokens with KV at the last retraction
    recomputed_tokens: int = 0  # tokens whose KV was computed again after retractions

    @classmethod
    def from_message(cls, message: TokenizedGenerateReq, max_new_tokens: int, now: float) -> Req:
        params = message.sampling_params
        resume = message.resume or ResumeInfo(age=0.0)
        arrival_time = now - resume.age
        return cls(
            rid=message.rid,
            input_ids=np.array(message.input_ids, dtype=np.int32),
            params=params,
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset() if params.ignore_eos else frozenset(params.stop_token_ids),
            priority=message.priority,
            extra_key=message.extra_key,
            tenant=message.tenant,
            arrival_time=arrival_time,
            logprobs=ReqLogprobs.from_message(message),
            output_ids=list(message.output_ids),
            queued_at=arrival_time,
            cached_tokens=resume.cached_tokens,
            queue_time=resume.queue_time,
            was_admitted=resume.was_admitted,
            num_retractions=resume.num_retractions,
            recomputed_tokens=resume.recomputed_tokens,
        )

    @property
    def prompt_len(self) -> int:
        return len(self.input_ids)

    @property
    def fill_len(self) -> int:
        """Tokens a prefill must cover: the prompt and every output so far."""
        return len(self.input_ids) + len(self.output_ids)

    @property
    def cacheable_len(self) -> int:
        """Tokens that may come from the prefix cache: all but one, whose logits are needed, and
        none that it is asked about."""
        most = None if self.logprobs is None else self.logprobs.max_cached
        return self.fill_len - 1 if most is None else min(self.fill_len - 1, most)

    @property
    def remaining(self) -> int:
        """Tokens it may still produce."""
        return self.max_new_tokens - len(self.output_ids)

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    def tokens(self, end: int) -> TokenArray:
        """Tokens [0, end) of prompt and outputs."""
        if end <= len(self.input_ids):
            return self.input_ids[:end]
        outputs = np.array(self.output_ids[: end - len(self.input_ids)], dtype=np.int32)
        return np.concatenate([self.input_ids, outputs])
