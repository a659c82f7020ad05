"""One pass of the scheduler, from its choice until its tokens are given out."""

from __future__ import annotations

from dataclasses import dataclass, field

from srt.device_copy import HostCopy
from srt.forward_batch import ForwardBatch
from srt.journal import StepRecord
from srt.managers.req import Req
from srt.managers.req_logprobs import LogprobPlan
from srt.managers.schedule_batch import ScheduleBatch


@dataclass
class Pass:
    """`batch` holds the rows that sample, as they were when the pass was launched; `extended`
    everyone who computed part of a prompt."""

    phase: str  # "P" prefill, "D" decode, "M" a prefill with decode rows riding along
    batch: ScheduleBatch
    forward: ForwardBatch
    record: StepRecord
    extended: list[Req] = field(default_factory=list)
    chunked: Req | None = None  # of `extended`, who is in mid-chunk after it
    sampling_rows: list[int] | None = None  # rows of `forward` that sample; None: all
    tokens: HostCopy | None = None  # [len(batch)] int64, once launched
    logprobs: LogprobPlan | None = None  # None: nobody asks
    has_late_ends: bool = False  # someone in it ended after its launch

    @property
    def is_extend(self) -> bool:
        return self.phase != "D"
