"""The log lines operators parse: one a prefill pass, one each N decode passes, one a retraction."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from srt.managers.retraction import Retraction

logger = logging.getLogger(__name__)

# At most one line of advice in so many seconds.
ADVICE_INTERVAL = 30.0


@dataclass(frozen=True)
class LoadSnapshot:
    """What every line says about the load; token counts are KV slots of live requests."""

    num_running: int
    num_queued: int
    num_used: int
    size: int

    @property
    def usage(self) -> float:
        return self.num_used / self.size


class SchedulerLog:
    """Formats and counts; the scheduler says what happened. Throughputs are over the time since the
    last line of the same kind."""

    def __init__(
        self,
        decode_log_interval: int,
        graph_kind: str,
        clock: Callable[[], float],
        graph_rows: int = 0,
    ) -> None:
        self._interval = decode_log_interval
        self._graph_kind = graph_kind  # "cuda" or "cpu", the word operators' regexes expect
        self._graph_rows = graph_rows  # of the largest decode pass that is replayed
        self._clock = clock
        self._last_prefill = self._last_decode = clock()
        self._decode_steps = 0
        self._decode_tokens = 0
        self._last_advice = self._last_broken = -ADVICE_INTERVAL
        self._num_broken = 0  # not in a line yet
        self.gen_throughput = 0.0  # tokens/s of the last decode interval

    def on_prefill(
        self, num_reqs: int, num_new: int, num_cached: int, num_pending: int, load: LoadSnapshot
    ) -> None:
        now = self._clock()
        elapsed = max(now - self._last_prefill, 1e-9)
        self._last_prefill = now
        logger.info(
            f"Prefill batch, #new-seq: {num_reqs}, #new-token: {num_new}, "
            f"#cached-token: {num_cached}, token usage: {load.usage:.2f}, "
            f"#running-req: {load.num_running}, #queue-req: {load.num_queued}, "
            f"#pending-token: {num_pending}, {self._graph_kind} graph: False, "
            f"input throughput (token/s): {num_new / elapsed:.2f}"
        )

    def on_decode(self, num_tokens: int, load: Callable[[], LoadSnapshot]) -> None:
        self._decode_steps += 1
        self._decode_tokens += num_tokens
        if self._decode_steps < self._interval:
            return
        now = self._clock()
        self.gen_throughput = self._decode_tokens / max(now - self._last_decode, 1e-9)
        self.on_idle()
        current = load()
        logger.info(
            f"Decode batch, #running-req: {current.num_running}, #token: {current.num_used}, "
            f"token usage: {current.usage:.2f}, "
            f"{self._graph_kind} graph: {0 < current.num_running <= self._graph_rows}, "
            f"gen throughput (token/s): {self.gen_throughput:.2f}, #queue-req: {current.num_queued}"
        )

    def on_idle(self) -> None:
        """A new interval begins; time without work must not lower the next throughput."""
        self._last_decode = self._clock()
        self._decode_steps = self._decode_tokens = 0

    def on_retract(self, event: Retraction) -> None:
        counts = f"#retracted_reqs: {len(event.victims)}, #new_tokens_gained: {event.gained}"
        if event.cause == "forced":
            logger.warning(f"Testing retraction. {counts}")
            return
        if event.cause == "priority":
            logger.warning(f"Retract requests for one of higher priority. {counts}")
            return
        if event.cause == "pause":
            logger.warning(f"Retract all requests for a pause. {counts}")
            return
        logger.warning(
            f"KV cache pool is full. Retract requests. {counts}, "
            f"#new_token_ratio: {event.old_ratio:.4f} -> {event.new_ratio:.4f}"
        )
        now = self._clock()
        if now - self._last_advice >= ADVICE_INTERVAL:
            self._last_advice = now
            logger.warning(
                "Retracted requests are computed again later. If this repeats, raise "
                "--schedule-conservativeness (admit later), lower --max-running-requests, or "
                "give the KV pool more room with --mem-fraction-static or --max-total-tokens."
            )

    def on_last_aborted(self, rid: str) -> None:
        logger.warning(f"retract_decode: aborted last request {rid} due to OOM")

    def on_broken(self, rid: str) -> None:
        """A broken model may break every request: one line in ADVICE_INTERVAL tells of them."""
        self._num_broken += 1
        now = self._clock()
        if now - self._last_broken >= ADVICE_INTERVAL:
            self._last_broken = now
            logger.error(
                f"NaN or infinity in the logits: aborted request {rid}, #aborted since the last "
                f"such line: {self._num_broken}"
            )
            self._num_broken = 0
