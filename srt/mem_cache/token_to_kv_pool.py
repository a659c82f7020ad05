"""Which KV slots are free. No tensors of K or V, so it runs and tests anywhere.

It lives on the host: what a pass writes is known before the pass runs, so no allocation ever waits
for the device, and freeing is two numpy copies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class TokenToKVPool:
    """Free pages of `page_size` slots; one slot holds one token's K and V in every layer.

    Slot = page * page_size + offset. Page 0 is nobody's: padded rows write there, so a stray write
    cannot corrupt a request. Pages 1..num_pages are handed out.

    Invariant: a page is on the free stack, or owned by the radix tree, or owned by exactly one live
    request, never two of them.
    """

    def __init__(self, size: int, page_size: int = 1) -> None:
        """`size`: slots to hand out, a multiple of `page_size`."""
        if size < page_size or size % page_size:
            raise ValueError(
                f"pool size {size} is not a positive multiple of page size {page_size}"
            )
        self.size = size
        self.page_size = page_size
        self.num_pages = size // page_size
        # [0, num_free) is free; what lies above is stale and never read. Low pages are on top, so a
        # small load touches little memory.
        self._stack: Int64Array = np.arange(self.num_pages, 0, -1, dtype=np.int64)
        self._num_free = self.num_pages

    @property
    def num_slots(self) -> int:
        """Rows a KV buffer needs: the slots and the padding page."""
        return self.size + self.page_size

    @property
    def available(self) -> int:
        """Free slots, whole pages only."""
        return self._num_free * self.page_size

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def alloc_pages(self, num_pages: int) -> Int64Array | None:
        """Pages [num_pages], or None if too few are free: waiting, evicting or retracting is the
        caller's decision, and running out is a normal day, not an error."""
        if num_pages > self._num_free:
            return None
        self._num_free -= num_pages
        # A copy, because the next free() overwrites this part of the stack.
        return self._stack[self._num_free : self._num_free + num_pages].copy()

    def alloc_extend(
        self, prefix_lens: Int64Array, seq_lens: Int64Array, last_slots: Int64Array
    ) -> Int64Array | None:
        """Slots [n] for tokens [prefix_len, seq_len) of each of b requests, packed; None if short.

        `last_slots` [b]: the slot of token prefix_len - 1, whose page is filled up first; read only
        where prefix_len is not a multiple of the page size.
        """
        if self.page_size == 1:
            return self.alloc_pages(int((seq_lens - prefix_lens).sum()))
        size = self.page_size
        old_pages = -(-prefix_lens // size)  # [b]
        new_pages = -(-seq_lens // size) - old_pages  # [b]
        pages = self.alloc_pages(int(new_pages.sum()))
        if pages is None:
            return None
        lens = seq_lens - prefix_lens
        rows = np.repeat(np.arange(len(lens)), lens)  # [n] request of each token
        starts = np.cumsum(lens) - lens
        positions = np.arange(len(rows)) - np.repeat(starts - prefix_lens, lens)  # [n]
        page_index = positions // size - old_pages[rows]  # [n]; -1: the page already begun
        first_page = np.cumsum(new_pages) - new_pages
        # The extra last element is what index -1 of an empty allocation would read; masked below.
        lookup = np.append(pages, 0)
        page = np.where(
            page_index < 0, (last_slots // size)[rows], lookup[(first_page[rows] + page_index)]
        )
        return page * size + positions % size

    def alloc_decode(self, seq_lens: Int64Array, last_slots: Int64Array) -> Int64Array | None:
        """Slots [b] for token seq_len - 1 of each request; `last_slots` [b]: those of seq_len -
        2."""
        if self.page_size == 1:
            return self.alloc_pages(len(seq_lens))
        border = (seq_lens - 1) % self.page_size == 0
        pages = self.alloc_pages(int(border.sum()))
        if pages is None:
            return None
        slots = last_slots + 1
        slots[border] = pages * self.page_size
        return slots

    def free(self, slots: Int64Array) -> None:
        """Give back whole pages, named by any one or more of their slots each, in order of
        position."""
        if len(slots) == 0:
            return
        if self.page_size == 1:
            pages = slots
        else:
            pages = slots // self.page_size
            pages = pages[np.append(True, pages[1:] != pages[:-1])]
        end = self._num_free + len(pages)
        assert end <= self.num_pages, f"freeing {len(pages)} leaves {end} free of {self.num_pages}"
        self._stack[self._num_free : end] = pages
        self._num_free = end

    def check(self, owned: Int64Array) -> None:
        """Raise unless the free pages and those of slots `owned` [n] partition 1..num_pages.
        `owned` names each page once. O(size): idle time and tests."""
        seen = np.concatenate([self._stack[: self._num_free], owned // self.page_size])
        seen.sort()
        if not np.array_equal(seen, np.arange(1, self.num_pages + 1)):
            raise RuntimeError(
                f"KV pool leak: {self._num_free} free + {len(owned)} owned "
                f"!= {self.num_pages} pages"
            )
