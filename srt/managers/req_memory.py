"""A request's rows and KV slots: the only place that takes, shares and gives them back."""

from __future__ import annotations

import numpy as np

from srt.managers.req import Req, ReqKV
from srt.mem_cache.radix_cache import RadixCache
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.mem_cache.token_to_kv_pool import Int64Array, TokenToKVPool


class ReqMemory:
    """Ties the two pools and the radix tree together for requests."""

    def __init__(self, rows: ReqToTokenPool, slots: TokenToKVPool, tree: RadixCache) -> None:
        self.rows = rows
        self.slots = slots
        self.tree = tree
        # Tokens with slots of each row, by row. On the host and ahead of the device: a launched
        # pass counts as done, since whatever is launched later runs later.
        self._kv_lens: Int64Array = np.zeros(rows.num_rows + 1, dtype=np.int64)

    @property
    def available(self) -> int:
        """Slots that are free or become so by eviction."""
        return self.slots.available + self.tree.evictable_size

    @property
    def used(self) -> int:
        """Slots of live requests; cached prefixes nobody holds do not count."""
        return self.slots.size - self.available

    def kv_len(self, req: Req) -> int:
        """Tokens of an admitted request that have slots."""
        assert req.kv is not None, f"{req.rid} is not admitted"
        return int(self._kv_lens[req.kv.row])

    def cached_len(self, req: Req) -> int:
        """Tokens of `req` the tree has now; changes nothing. A whole-prompt hit leaves one token to
        compute, for its logits."""
        return self.tree.match_len(req.tokens(req.cacheable_len), req.extra_key)

    def admit(self, req: Req) -> None:
        """Give `req` a row and its cached prefix, locked. The caller has seen that a row is
        free."""
        row = self.rows.alloc()
        assert row is not None and req.kv is None, f"admit {req.rid}: row {row}, kv {req.kv}"
        match = self.tree.match_prefix(req.tokens(req.cacheable_len), req.extra_key)
        self.tree.lock(match.node)
        self.rows.write(row, 0, match.slots)
        cached = len(match.slots)
        self._kv_lens[row] = cached
        req.kv = ReqKV(row, cached, match.node, cached, good_len=cached)

    def extend(self, reqs: list[Req], seq_lens: list[int]) -> Int64Array:
        """Slots [n] for tokens [kv_len, seq_len) of each request, packed, and written to its row.
        The caller has seen that they fit."""
        row_ids = np.array([req.kv.row for req in reqs if req.kv is not None], dtype=np.int64)
        ends = np.array(seq_lens, dtype=np.int64)
        prefixes = self._kv_lens[row_ids]
        last_slots = self.rows.table[row_ids, np.maximum(prefixes - 1, 0)].astype(np.int64)
        size = self.slots.page_size
        pages = int((-(-ends // size) - -(-prefixes // size)).sum())
        self.evict_for(pages * size)
        slots = self.slots.alloc_extend(prefixes, ends, last_slots)
        assert slots is not None, f"no {pages} pages: {self.slots.available} slots free"
        start = 0
        for row, prefix, end in zip(row_ids.tolist(), prefixes.tolist(), seq_lens, strict=True):
            self.rows.write(row, prefix, slots[start : start + end - prefix])
            start += end - prefix
        self._kv_lens[row_ids] = ends
        return slots

    def extend_decode(self, rows: Int64Array, seq_lens: Int64Array) -> Int64Array:
        """A slot [b] for token seq_len - 1 of each row. The caller has seen that they fit."""
        self.evict_for(self.decode_need(seq_lens))
        last_slots = rows
        if self.slots.page_size > 1:
            last_slots = self.rows.table[rows, seq_lens - 2].astype(np.int64)
        slots = self.slots.alloc_decode(seq_lens, last_slots)
        assert slots is not None, f"no slots for {len(rows)}: {self.slots.available} free"
        self.rows.write_last(rows, seq_lens - 1, slots)
        self._kv_lens[rows] = seq_lens
        return slots

    def decode_need(self, seq_lens: Int64Array) -> int:
        """Slots (whole pages) that giving each request its token seq_len - 1 takes."""
        return (
            len(seq_lens) if self.slots.page_size == 1 else int(self.decode_needs(seq_lens).sum())
        )

    def decode_needs(self, seq_lens: Int64Array) -> Int64Array:
        """[b] the same for each request: a page where the last one is full, else nothing."""
        size = self.slots.page_size
        return ((seq_lens - 1) % size == 0) * np.int64(size)

    def evict_for(self, num_slots: int) -> None:
        """Evict cached prefixes until `num_slots` are free, or none is left to evict."""
        short = num_slots - self.slots.available
        if short > 0:
            self.tree.evict(short)

    def trust(self, req: Req, end: int, is_last: bool) -> None:
        """A pass over tokens [0, end) of `req` has given finite numbers; `is_last` if that was the
        end of its prompt."""
        if req.kv is not None:
            req.kv.good_len = None if is_last else end

    def distrust(self, req: Req) -> None:
        """What `req` computed is not to be shared: a pass over it gave NaN or infinity."""
        if req.kv is not None:
            req.kv.good_len = req.kv.cached_len

    def cache_unfinished(self, req: Req, end: int) -> None:
        """Share tokens [0, end) of `req`; a pass in flight may have given it slots beyond. Where
        the tree already had the same tokens, the row is pointed at the tree's slots and the
        request's own copies are freed."""
        kv = req.kv
        assert kv is not None, f"{req.rid} is not admitted"
        if self.tree.disable:
            return
        tokens = req.tokens(end)
        slots = self.rows.table[kv.row, :end].astype(np.int64)
        had = self.tree.insert(tokens, slots, req.extra_key)
        match = self.tree.match_prefix(tokens, req.extra_key)
        if had > kv.cached_len:
            self.rows.write(kv.row, kv.cached_len, match.slots[kv.cached_len : had])
            self.slots.free(slots[kv.cached_len : had])
        self.tree.lock(match.node)
        self.tree.unlock(kv.node)
        kv.node, kv.cached_len = match.node, len(match.slots)

    def release_kv(self, req: Req) -> None:
        """Take back everything `req` holds; finish, abort and retract all end here. What it
        computed, as far as it is known to be good, stays in the tree, evictable, for whoever comes
        with the same tokens: after a retraction, itself."""
        kv = req.kv
        assert kv is not None, f"{req.rid} is not admitted"
        kv_len = self.kv_len(req)
        slots = self.rows.table[kv.row, :kv_len].astype(np.int64)
        kept = kv.cached_len
        if not self.tree.disable:
            good = min(kv_len, req.fill_len - 1 if kv.good_len is None else kv.good_len)
            good = max(good, kv.cached_len)
            had = self.tree.insert(req.tokens(good), slots[:good], req.extra_key)
            self.slots.free(slots[kv.cached_len : had])
            kept = good // self.slots.page_size * self.slots.page_size
        self.slots.free(slots[kept:])
        self.tree.unlock(kv.node)
        self.rows.free(kv.row)
        req.kv = None

    def check(self, live: list[Req]) -> None:
        """Raise unless every slot is free, cached or owned by exactly one of the `live` requests,
        and every row free or theirs. O(pool size): tests and idle time."""
        kvs = [req.kv for req in live if req.kv is not None]
        size = self.slots.page_size
        owned = [self.tree.owned_pages()]
        for kv in kvs:
            own = self.rows.table[kv.row, kv.cached_len : self._kv_lens[kv.row] : size]
            owned.append(own.astype(np.int64))
        self.slots.check(np.concatenate(owned))
        self.rows.check([kv.row for kv in kvs])
        if not kvs and self.tree.protected_size:
            raise RuntimeError(
                f"nobody is admitted but {self.tree.protected_size} tokens are locked"
            )
