"""Admission: which waiting requests the next prefill pass computes, and why the others wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from srt.managers.kv_budget import KVBudget
from srt.managers.req import Blocker, Req
from srt.managers.req_memory import ReqMemory

# A request waits for a prefix that another is computing only if that saves it so many tokens.
MIN_SHARED_PREFIX = 32


@dataclass(frozen=True)
class AdmissionLimits:
    """What bounds one prefill pass. `chunk` None: prompts are never split. With `wait_for_prefix` a
    request is held back while another computes a long prefix of its prompt."""

    max_running_requests: int
    max_prefill_tokens: int
    chunk: int | None
    max_requests: int | None = None
    wait_for_prefix: bool = False


class PrefillAdder:
    """Builds one prefill pass, request by request, within slots, token budget and KV."""

    def __init__(
        self,
        memory: ReqMemory,
        limits: AdmissionLimits,
        kv: KVBudget,
        token_budget: int,
        floor: int = 0,
    ) -> None:
        """`token_budget`: new tokens of the pass, at least 1. `floor`: slots to leave for requests
        that decode in the same pass."""
        self._memory = memory
        self._limits = limits
        self._kv = kv
        self._floor = floor
        self.budget_left = token_budget
        self.admitted: list[Req] = []
        self.seq_lens: list[int] = []  # tokens with KV after the pass, one per admitted
        self.chunked: Req | None = None  # whoever is in mid-chunk after the pass

    def add_chunked(self, req: Req) -> None:
        """Go on with the request in mid-chunk, with what fits, be it nothing."""
        start = self._memory.kv_len(req)
        begun_page = -start % self._memory.slots.page_size
        room = self._memory.available - self._floor + begun_page
        length = self._chunk_len(start, min(req.fill_len - start, room))
        self._kv.take(req, start)
        if length > 0:
            self._take(req, start, length)
        else:
            self.chunked = req

    def try_add(self, req: Req) -> Blocker | None:
        """Admit `req` (row, cached prefix, part in this pass), or say what it waits for."""
        limits, memory = self._limits, self._memory
        free_rows = memory.rows.available - (memory.rows.num_rows - limits.max_running_requests)
        if free_rows <= 0:
            return Blocker("slots", 1, 0)
        if limits.max_requests is not None and len(self.admitted) >= limits.max_requests:
            return Blocker("prefill_budget", 1, 0)
        # Locking a prefix can only lower what is available, so a request refused before it would be
        # refused after it, too.
        cached = memory.cached_len(req)
        blocker = (
            self._kv.blocker(req, cached)
            or self._budget_blocker(req, cached)
            or self._prefix_blocker(req, cached)
        )
        if blocker is not None:
            return blocker
        memory.admit(req)
        assert memory.kv_len(req) == cached, f"{req.rid}: {memory.kv_len(req)} != {cached}"
        blocker = self._kv.blocker(req, cached)
        if blocker is not None:
            memory.release_kv(req)
            return blocker
        self._kv.take(req, cached)
        self._take(req, cached, self._chunk_len(cached, req.fill_len - cached))
        return None

    def _budget_blocker(self, req: Req, cached: int) -> Blocker | None:
        uncached = req.fill_len - cached
        if uncached <= self.budget_left:
            return None
        blocker = Blocker("prefill_budget", uncached, self.budget_left)
        if self._limits.chunk is None:
            # Nobody may split it, so it goes alone or never.
            return blocker if self.admitted else None
        if self.chunked is not None or self._chunk_len(cached, uncached) <= 0:
            return blocker
        return None

    def _prefix_blocker(self, req: Req, cached: int) -> Blocker | None:
        """Is someone in this pass computing tokens that `req` would otherwise compute, too?"""
        if not self._limits.wait_for_prefix:
            return None
        others = (
            [*self.admitted] if self.chunked in self.admitted else [*self.admitted, self.chunked]
        )
        tokens = req.tokens(req.cacheable_len)
        for other in others:
            if other is None or other.extra_key != req.extra_key:
                continue
            shared = _common_len(tokens, other.tokens(other.fill_len))
            if shared - cached >= MIN_SHARED_PREFIX:
                return Blocker("prefix", shared - cached, 0)
        return None

    def _take(self, req: Req, start: int, length: int) -> None:
        self.admitted.append(req)
        self.seq_lens.append(start + length)
        self.budget_left = max(0, self.budget_left - length)
        if start + length < req.fill_len:
            self.chunked = req

    def _chunk_len(self, start: int, wanted: int) -> int:
        """Tokens of the next part. All but the last end at a page border, so that what they
        computed can be shared whole."""
        if wanted <= self.budget_left or self._limits.chunk is None:
            return wanted
        page_size = self._memory.slots.page_size
        return (start + self.budget_left) // page_size * page_size - start


def _common_len(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
