"""Requests to empty the prefix cache, which wait until nobody uses it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from srt.managers.io_struct import FlushCacheOut, FlushCacheReq
from srt.managers.scheduler_log import LoadSnapshot
from srt.mem_cache.radix_cache import RadixCache

logger = logging.getLogger(__name__)


class CacheFlushes:
    """Those that were asked for and are not answered, with their deadlines."""

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._waiting: list[tuple[float, FlushCacheReq]] = []

    def add(self, message: FlushCacheReq, now: float) -> None:
        self._waiting.append((now + message.timeout, message))

    def answer(
        self,
        is_idle: bool,
        now: float,
        load: Callable[[], LoadSnapshot],
        send: Callable[[FlushCacheOut], None],
    ) -> None:
        """Flush if nothing is live; tell those whose time is over why it was not done."""
        waiting = []
        for deadline, message in self._waiting:
            if is_idle:
                self._tree.reset()
                logger.info("Cache flushed successfully!")
                send(FlushCacheOut(message.id, True))
            elif now >= deadline:
                snapshot = load()
                logger.warning(
                    "Cache not flushed because there are pending requests. "
                    f"#queue-req: {snapshot.num_queued}, #running-req: {snapshot.num_running}"
                )
                text = "Timed out waiting for idle state." if message.timeout else ""
                send(FlushCacheOut(message.id, False, text))
            else:
                waiting.append((deadline, message))
        self._waiting = waiting
