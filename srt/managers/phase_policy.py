"""Prefill or decode next, and how many tokens a prefill may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from srt.managers.step_time import StepTimeModel


@dataclass(frozen=True)
class PhaseState:
    """What a phase policy may look at. Times are seconds of the scheduler's clock."""

    now: float
    num_running: int
    num_kv_read: int  # tokens of the running requests: what a decode pass reads
    num_pending: int  # new tokens that wait for a prefill
    first_token_due: float  # arrival of the longest waiting request without a token
    last_token_at: float  # when the running requests last got a token


@dataclass(frozen=True)
class PassStats:
    """A pass that has run."""

    is_extend: bool
    num_tokens: int  # new ones
    num_rows: int
    num_kv_read: int  # tokens
    seconds: float


class PhasePolicy(Protocol):
    name: str

    def prefill_tokens(self, state: PhaseState, limit: int) -> int:
        """New tokens a prefill may take now, at most `limit`; 0: decode first. Asked only while
        there is something to prefill."""

    def on_launch(self, is_extend: bool) -> None:
        """A pass was chosen and starts."""

    def on_pass(self, stats: PassStats) -> None:
        """A pass has run; with overlap the next one is launched by then."""


class PrefillFirst:
    """Whoever can be admitted is, before anyone decodes. The reference of the worked schedules; a
    steady flow of arrivals holds running streams for as long as it lasts."""

    name = "prefill-first"

    def prefill_tokens(self, state: PhaseState, limit: int) -> int:
        return limit

    def on_launch(self, is_extend: bool) -> None:
        """The past does not matter."""

    def on_pass(self, stats: PassStats) -> None:
        """The past does not matter."""


class DecodeFirst:
    """A new prefill only when nobody decodes: the batch runs to its end. Smallest ITL, largest
    TTFT."""

    name = "decode-first"

    def prefill_tokens(self, state: PhaseState, limit: int) -> int:
        return 0 if state.num_running else limit

    def on_launch(self, is_extend: bool) -> None:
        """The past does not matter."""

    def on_pass(self, stats: PassStats) -> None:
        """The past does not matter."""


class Interleave:
    """After a prefill, at least `decodes` decode passes while `min_batch` requests or more are
    running: a stream waits for at most one prefill pass between two of its tokens."""

    name = "interleave"

    def __init__(self, decodes: int = 1, min_batch: int = 1) -> None:
        self._decodes = decodes
        self._min_batch = max(1, min_batch)
        self._owed = 0

    def prefill_tokens(self, state: PhaseState, limit: int) -> int:
        if state.num_running < self._min_batch:
            self._owed = 0
        return 0 if self._owed else limit

    def on_launch(self, is_extend: bool) -> None:
        self._owed = self._decodes if is_extend else max(0, self._owed - 1)

    def on_pass(self, stats: PassStats) -> None:
        """Times do not matter."""


class SloPolicy:
    """Whoever has the least slack goes next. The slack of decoding is what is left of the ITL
    target once the pass has run; that of prefilling what is left of the TTFT target of the longest
    waiting request once all that waits is computed. A prefill that may not delay the streams gets
    as many tokens as fit in their slack.
    """

    name = "slo"
    # A prefill of fewer tokens costs more than it brings.
    MIN_TOKENS = 32
    # Streams are served after so many prefill passes, whatever the model says.
    MAX_PREFILLS = 4

    def __init__(self, target_ttft: float, target_itl: float, page_size: int) -> None:
        """Targets in seconds."""
        self._ttft = target_ttft
        self._itl = target_itl
        self._min_tokens = -(-self.MIN_TOKENS // page_size) * page_size
        self._model = StepTimeModel()
        self._prefills = 0

    def prefill_tokens(self, state: PhaseState, limit: int) -> int:
        if state.num_running == 0:
            return limit
        if self._prefills >= self.MAX_PREFILLS:
            return 0
        if not self._model.is_ready:
            return 0 if self._prefills else limit
        decode_time = self._model.seconds(state.num_running, state.num_running, state.num_kv_read)
        prefill_time = self._model.seconds(state.num_pending, 1, state.num_pending)
        decode_slack = state.last_token_at + self._itl - state.now - decode_time
        prefill_slack = state.first_token_due + self._ttft - state.now - prefill_time
        fitting = min(limit, self._model.tokens_within(decode_slack))
        if fitting >= min(self._min_tokens, state.num_pending):
            return max(fitting, min(self._min_tokens, limit))
        return min(limit, self._min_tokens) if prefill_slack < decode_slack else 0

    def on_launch(self, is_extend: bool) -> None:
        self._prefills = self._prefills + 1 if is_extend else 0

    def on_pass(self, stats: PassStats) -> None:
        self._model.observe(stats.num_tokens, stats.num_rows, stats.num_kv_read, stats.seconds)


PHASES = ("prefill-first", "decode-first", "interleave", "slo")


def make_phase_policy(
    name: str,
    decodes: int = 1,
    min_batch: int = 1,
    target_ttft: float = 2.0,
    target_itl: float = 0.2,
    page_size: int = 1,
) -> PhasePolicy:
    """The policy that `--phase-policy` names; targets in seconds."""
    if name == "prefill-first":
        return PrefillFirst()
    if name == "decode-first":
        return DecodeFirst()
    if name == "interleave":
        return Interleave(decodes, min_batch)
    if name == "slo":
        return SloPolicy(target_ttft, target_itl, page_size)
    raise ValueError(f"phase_policy must be one of {', '.join(PHASES)}, got {name!r}")
