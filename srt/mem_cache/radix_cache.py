"""Token prefix to KV slots: a compressed radix tree with lock counts and LRU eviction.

Source of the idea: "SGLang: Efficient Execution of Structured Language Model Programs"
(RadixAttention), NeurIPS 2024.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from srt.mem_cache.token_to_kv_pool import Int64Array, TokenToKVPool

TokenArray = npt.NDArray[np.int32]
EMPTY_SLOTS: Int64Array = np.empty(0, dtype=np.int64)


class TreeNode:
    """A run of tokens, all with KV. Locks count the live requests that read it or anything below
    it."""

    __slots__ = ("children", "edge", "in_heap", "key", "last_access", "lock_ref", "parent", "value")

    def __init__(
        self, edge: bytes, key: TokenArray, value: Int64Array, parent: TreeNode | None
    ) -> None:
        self.edge = edge  # its name among its parent's children: the first page of tokens
        self.key = key  # [m] tokens, m a multiple of the page size
        self.value = value  # [m] their slots
        self.parent = parent  # None: the root, or a node that was evicted
        self.children: dict[bytes, TreeNode] = {}
        self.lock_ref = 0
        self.last_access = 0
        self.in_heap = False


@dataclass(frozen=True)
class PrefixMatch:
    """`slots` [m] of the longest cached prefix; `node` is where it ends, to be locked by who uses
    it."""

    slots: Int64Array
    node: TreeNode


class RadixCache:
    """Owns the slots of every token in the tree. Keys are whole pages; a namespace (`extra_key`) is
    part of the name of the first edge. With `disable` nothing is ever matched or kept: the same
    interface, a chunk cache.

    Invariants: evictable + protected = tokens in the tree; a node's lock_ref is at least that of
    each of its children; no locked node is ever evicted.
    """

    def __init__(self, pool: TokenToKVPool, disable: bool = False) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.disable = disable
        self.evictable_size = 0  # tokens nobody holds
        self.protected_size = 0  # tokens under a lock
        self.evicted_tokens = 0  # since the start
        self._clock = 0
        self._root = TreeNode(b"", np.empty(0, dtype=np.int32), EMPTY_SLOTS, None)
        # Leaves that may be evictable: (last_access, tie breaker, node). Entries are checked when
        # popped, so that a hit costs no heap operation.
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._pushes = 0

    # --- lookup ---

    def match_len(self, tokens: TokenArray, extra_key: str | None = None) -> int:
        """Cached tokens at the front of `tokens`. Changes nothing; for ordering the queue."""
        node = self._root
        done, end = 0, self._whole_pages(len(tokens))
        while done < end:
            child = node.children.get(self._edge(tokens, done, extra_key))
            if child is None:
                break
            same = self._common(child.key, tokens[done:end])
            done += same
            if same < len(child.key):
                break
            node = child
        return done

    def match_prefix(self, tokens: TokenArray, extra_key: str | None = None) -> PrefixMatch:
        """The longest cached prefix of `tokens`. Splits the node it ends in, so that a lock holds
        exactly the match; marks the path as just used."""
        node = self._root
        self._clock += 1
        done, end = 0, self._whole_pages(len(tokens))
        values = []
        while done < end:
            child = node.children.get(self._edge(tokens, done, extra_key))
            if child is None:
                break
            same = self._common(child.key, tokens[done:end])
            if same < len(child.key):
                child = self._split(child, same)
            child.last_access = self._clock
            values.append(child.value)
            done += same
            node = child
        return PrefixMatch(np.concatenate(values) if values else EMPTY_SLOTS, node)

    # --- growth ---

    def insert(self, tokens: TokenArray, slots: Int64Array, extra_key: str | None = None) -> int:
        """Put the whole pages of `tokens` [m] with `slots` [m] into the tree and return how many
        tokens were there before. Slots beyond those now belong to the tree; slots of the tokens
        that were there stay the caller's, who frees those that differ from the tree's."""
        end = self._whole_pages(min(len(tokens), len(slots)))
        if self.disable or end == 0:
            return 0
        match = self.match_prefix(tokens[:end], extra_key)
        done = len(match.slots)
        if done < end:
            # Copies: a view would keep the caller's whole arrays alive.
            edge = self._edge(tokens, done, extra_key)
            leaf = TreeNode(edge, tokens[done:end].copy(), slots[done:end].copy(), match.node)
            leaf.last_access = self._clock
            match.node.children[edge] = leaf
            self.evictable_size += end - done
            self._push(leaf)
        return done

    # --- locks ---

    def lock(self, node: TreeNode) -> None:
        """Keep `node` and everything above it until the matching `unlock`."""
        current: TreeNode | None = node
        while current is not None and current.parent is not None:
            if current.lock_ref == 0:
                self.evictable_size -= len(current.key)
                self.protected_size += len(current.key)
            current.lock_ref += 1
            current = current.parent

    def unlock(self, node: TreeNode) -> None:
        current: TreeNode | None = node
        while current is not None and current.parent is not None:
            assert current.lock_ref > 0, f"unlock of a node with lock_ref {current.lock_ref}"
            current.lock_ref -= 1
            if current.lock_ref == 0:
                self.evictable_size += len(current.key)
                self.protected_size -= len(current.key)
                if not current.children:
                    self._push(current)
            current = current.parent

    # --- eviction ---

    def evict(self, num_tokens: int) -> int:
        """Free at least `num_tokens` slots of the least recently used leaves if there are so many
        evictable; returns how many. A leaf longer than what is still needed loses only its tail."""
        freed = 0
        while freed < num_tokens and self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.lock_ref or node.children or node.parent is None:
                continue
            if stamp != node.last_access:
                self._push(node)
                continue
            freed += self._trim(node, num_tokens - freed)
        return freed

    def reset(self) -> int:
        """Drop everything nobody holds; returns the tokens dropped."""
        return self.evict(self.evictable_size)

    def _trim(self, node: TreeNode, num_tokens: int) -> int:
        drop = min(len(node.key), -(-num_tokens // self.page_size) * self.page_size)
        keep = len(node.key) - drop
        self.pool.free(node.value[keep:])
        self.evictable_size -= drop
        self.evicted_tokens += drop
        if keep:
            node.key, node.value = node.key[:keep].copy(), node.value[:keep].copy()
            self._push(node)
            return drop
        parent = node.parent
        assert parent is not None, "a root is never evicted"
        del parent.children[node.edge]
        node.parent = None
        if not parent.children and parent.lock_ref == 0:
            self._push(parent)
        return drop

    # --- books ---

    def owned_pages(self) -> Int64Array:
        """One slot of every page in the tree, [pages]. Raises if the tree's own books are wrong."""
        evictable = protected = 0
        values = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            for child in node.children.values():
                if node.parent is not None and child.lock_ref > node.lock_ref:
                    raise RuntimeError(
                        f"child locked {child.lock_ref}, parent {node.lock_ref} times"
                    )
                stack.append(child)
            if node.parent is None:
                continue
            if len(node.key) != len(node.value) or len(node.key) % self.page_size:
                raise RuntimeError(f"node of {len(node.key)} tokens has {len(node.value)} slots")
            if node.lock_ref:
                protected += len(node.key)
            else:
                evictable += len(node.key)
            values.append(node.value[:: self.page_size])
        if (evictable, protected) != (self.evictable_size, self.protected_size):
            raise RuntimeError(
                f"radix books: {self.evictable_size} evictable + {self.protected_size} protected, "
                f"counted {evictable} + {protected}"
            )
        return np.concatenate(values) if values else EMPTY_SLOTS

    # --- inside ---

    def _edge(self, tokens: TokenArray, at: int, extra_key: str | None) -> bytes:
        page = tokens[at : at + self.page_size].tobytes()
        # Pages have one length, so no namespace can spell another's edge.
        return page if at or extra_key is None else extra_key.encode() + b"\0" + page

    def _whole_pages(self, num_tokens: int) -> int:
        return 0 if self.disable else num_tokens // self.page_size * self.page_size

    def _common(self, key: TokenArray, tokens: TokenArray) -> int:
        """Equal tokens at the front of both, whole pages."""
        length = min(len(key), len(tokens))
        differs = key[:length] != tokens[:length]
        first = int(differs.argmax())
        same = first if differs[first] else length
        return same // self.page_size * self.page_size

    def _split(self, node: TreeNode, at: int) -> TreeNode:
        """Cut `node` after `at` tokens; returns the new upper half."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node.key), f"split of {len(node.key)} at {at}"
        upper = TreeNode(node.edge, node.key[:at].copy(), node.value[:at].copy(), parent)
        upper.lock_ref = node.lock_ref
        upper.last_access = node.last_access
        parent.children[upper.edge] = upper
        node.key, node.value, node.parent = node.key[at:].copy(), node.value[at:].copy(), upper
        node.edge = self._edge(node.key, 0, None)
        upper.children[node.edge] = node
        return upper

    def _push(self, node: TreeNode) -> None:
        if not node.in_heap and node.parent is not None:
            node.in_heap = True
            self._pushes += 1
            heapq.heappush(self._heap, (node.last_access, self._pushes, node))
