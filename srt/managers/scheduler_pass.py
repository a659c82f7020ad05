"""One pass of the scheduler, from its choice until its tokens are given out."""

from __future__ import annotations

from collections.abc import Iterable
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
    # [rows of `forward`] int64, once launched; those that do not sample are there to say whether
    # they are broken.
    tokens: HostCopy | None = None
    logprobs: LogprobPlan | None = None  # None: nobody asks
    has_late_ends: bool = False  # someone in it ended after its launch

    def ends(self) -> Iterable[tuple[Req, int]]:
        """Each of `extended` with the tokens it has KV for once the pass has run."""
        # They come first in `forward`, before those that ride along.
        return zip(self.extended, self.forward.seq_lens_cpu, strict=False)

    def reqs_of(self, rows: Iterable[int]) -> list[Req]:
        """The requests of `rows` of `forward`, those that do not sample included."""
        sampling = range(len(self.batch)) if self.sampling_rows is None else self.sampling_rows
        of_row = dict(enumerate(self.extended))
        of_row |= zip(sampling, self.batch.reqs, strict=True)
        return [of_row[row] for row in rows]

    @property
    def is_extend(self) -> bool:
        return self.phase != "D"
