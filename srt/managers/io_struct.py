"""Every message that crosses between the HTTP process and the scheduler process.

They are msgspec structs in msgpack; nothing here imports torch, and nothing is ever pickled.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from srt.sampling_params import SamplingParams


class FinishType(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class FinishReason(msgspec.Struct, array_like=True):
    """Why a request ended. `matched` is the stop token id or the stop string, for STOP only.
    `status_code` is the HTTP status of an ABORT that was the server's doing; None if a client
    asked."""

    type: FinishType
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None


# --- HTTP process -> scheduler
# ---------------------------------------------------------------------


class ResumeInfo(msgspec.Struct, array_like=True):
    """What a scheduler knew of a request whose process is gone. `age`: seconds since it was first
    queued; the rest as in StartedInfo, of use only if it `was_admitted`."""

    age: float
    was_admitted: bool = False
    cached_tokens: int = 0
    queue_time: float = 0.0
    num_retractions: int = 0
    recomputed_tokens: int = 0


class TokenizedGenerateReq(msgspec.Struct, tag=True):
    """One request, tokenized. `output_ids` are tokens already given to the client (a resubmitted
    request, see `resume`); they count against `max_new_tokens`. Times are `time.time()` seconds."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    output_ids: list[int] = []
    arrival_time: float = 0.0
    priority: int = 0
    extra_key: str | None = None
    tenant: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    resume: ResumeInfo | None = None


class AbortReq(msgspec.Struct, tag=True):
    """Drop `rid`. Exact match; an unknown rid is ignored. With `finished` the HTTP process has
    already ended the request itself, so no terminal output is sent back; `stopped` says that it did
    so because a stop string matched: then the answer is whole, not aborted."""

    rid: str
    finished: bool = False
    stopped: bool = False


class FlushCacheReq(msgspec.Struct, tag=True):
    """Drop every cached prefix; refused while anything is waiting or running, for up to `timeout`
    s."""

    id: int
    timeout: float = 0.0


class InternalStateReq(msgspec.Struct, tag=True):
    id: int


class RequestsReq(msgspec.Struct, tag=True):
    """Every live request, or `rid`: state, queue position, blocker, counts, times."""

    id: int
    rid: str | None = None


class JournalReq(msgspec.Struct, tag=True):
    """The last records of the journal's ring."""

    id: int
    last: int


class PauseReq(msgspec.Struct, tag=True):
    """Stop choosing passes, or go on. Requests keep their memory, unless `retract` sends those that
    run back to the queue."""

    id: int
    paused: bool
    retract: bool = False


class UpdateSchedulerReq(msgspec.Struct, tag=True):
    """Change settings while serving: all of `values` or, if one is wrong, none."""

    id: int
    values: dict[str, Any]


class ProfileOptions(msgspec.Struct):
    """Trace passes from the scheduler's pass number `start_step` on, or from now if that is over:
    `num_steps` of them, or less if the end is asked for before, into a file in `output_dir`."""

    output_dir: str
    prefix: str
    num_steps: int
    start_step: int
    activities: list[str]  # CPU, GPU
    with_stack: bool
    record_shapes: bool


class StartProfileReq(msgspec.Struct, tag=True):
    id: int
    options: ProfileOptions


class StopProfileReq(msgspec.Struct, tag=True):
    id: int


SchedulerInput = (
    TokenizedGenerateReq
    | AbortReq
    | FlushCacheReq
    | InternalStateReq
    | RequestsReq
    | JournalReq
    | PauseReq
    | UpdateSchedulerReq
    | StartProfileReq
    | StopProfileReq
)

# --- scheduler -> HTTP process
# ---------------------------------------------------------------------


class ReadyMsg(msgspec.Struct, tag=True):
    """The scheduler can take work. What the HTTP process must know about it to refuse early."""

    max_total_num_tokens: int
    max_req_input_len: int
    max_running_requests: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    context_len: int
    memory: dict[str, float] = {}


class FailedMsg(msgspec.Struct, tag=True):
    """The scheduler could not start or died; it exits after sending this."""

    error: str
    traceback: str = ""


class StartedInfo(msgspec.Struct, array_like=True):
    """Sent with a request's first token of an admission (so again after a retraction)."""

    cached_tokens: int
    queue_time: float
    num_retractions: int = 0
    recomputed_tokens: int = 0


class TokenLogprobs(msgspec.Struct, array_like=True):
    """One position's log-probabilities: the token's own, the best `k`, and the asked-for ids.
    Pairs are (logprob, token_id). `logprob` None: the first prompt token has none."""

    logprob: float | None
    token_id: int
    top: list[tuple[float, int]] | None = None
    ids: list[tuple[float, int]] | None = None


class BatchTokenOut(msgspec.Struct, tag=True):
    """What one pass produced: `token_ids[i]` is the new token of `rids[i]`, or -1 when the request
    ended without one. `started`, `finished` and the logprob tables are keyed by i."""

    rids: list[str]
    token_ids: list[int]
    finished: dict[int, FinishReason] = {}
    started: dict[int, StartedInfo] = {}
    output_logprobs: dict[int, TokenLogprobs] = {}
    input_logprobs: dict[int, list[TokenLogprobs]] = {}


class FlushCacheOut(msgspec.Struct, tag=True):
    id: int
    success: bool
    message: str = ""


class InternalStateOut(msgspec.Struct, tag=True):
    id: int
    state: dict[str, Any]


class ControlOut(msgspec.Struct, tag=True):
    """The answer to any other question or order. With `error` nothing was done."""

    id: int
    result: Any
    error: str | None = None


SchedulerOutput = (
    ReadyMsg | FailedMsg | BatchTokenOut | FlushCacheOut | InternalStateOut | ControlOut
)
