"""The waiting queue and its order.

Requests older than `max_queue_age` go first in every policy; then those that came back from a
retraction (within their class, where the policy has classes); then the rest by the policy's rule.
None of them looks at more requests than admission asks for, so a queue of 100,000 costs a step no
more than one of 100.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sortedcontainers import SortedKeyList

from srt.managers.req import Req
from srt.mem_cache.radix_cache import RadixCache

# Above this many waiting requests, matching each against the tree costs more than it saves.
LPM_MAX_QUEUE = 128
# Tenants whose counters are kept; beyond it, idle ones that a newcomer would overtake are
# forgotten.
MAX_TENANTS = 10_000


class WaitingQueue:
    """Requests that wait for admission. Owned by the scheduler; `order` says who goes first."""

    def __init__(self, policy: SchedulePolicy, max_age: float | None = None) -> None:
        self.policy = policy
        self.max_age = max_age
        self._by_age: OrderedDict[str, Req] = OrderedDict()  # by the time they were queued
        self.num_tokens = 0  # of prompts and outputs that a prefill must cover

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._by_age.values())

    def append(self, req: Req) -> None:
        self._enter(req)
        self.policy.add(req)

    def push_front(self, req: Req) -> None:
        """A retracted request goes first again."""
        self._enter(req)
        self.policy.add_front(req)

    def _enter(self, req: Req) -> None:
        assert req.rid not in self._by_age, f"{req.rid} is queued twice"
        self._by_age[req.rid] = req
        self.num_tokens += req.fill_len

    def remove(self, req: Req) -> None:
        del self._by_age[req.rid]
        self.num_tokens -= req.fill_len
        self.policy.discard(req)

    def oldest(self) -> Req | None:
        return next(iter(self._by_age.values()), None)

    def change_policy(self, policy: SchedulePolicy) -> None:
        """Everyone waiting keeps waiting, in the new order."""
        for req in self._by_age.values():
            if req.was_admitted:
                policy.add_front(req)
            else:
                policy.add(req)
        self.policy = policy

    def order(self, now: float) -> Iterator[Req]:
        """Every waiting request, best first. The queue must not change while this is read."""
        promoted = set()
        if self.max_age is not None:
            for req in self._by_age.values():
                if now - req.queued_at < self.max_age:
                    break
                promoted.add(req.rid)
                yield req
        for req in self.policy.order():
            if req.rid not in promoted:
                yield req


class SchedulePolicy:
    """First come, first served: the order of arrival."""

    name = "fcfs"

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Req] = OrderedDict()

    def add(self, req: Req) -> None:
        self._queue[req.rid] = req

    def add_front(self, req: Req) -> None:
        self._queue[req.rid] = req
        self._queue.move_to_end(req.rid, last=False)

    def discard(self, req: Req) -> None:
        del self._queue[req.rid]

    def order(self) -> Iterator[Req]:
        return iter(self._queue.values())

    def on_admitted(self, req: Req, new_tokens: int) -> None:
        """`req` was admitted and computes `new_tokens` of its prompt; orders without memory ignore
        it."""

    def on_tokens(self, reqs: list[Req]) -> None:
        """Each of `reqs` produced a token."""


class LongestPrefixMatch(SchedulePolicy):
    """Most cached tokens first, so that a prefix is used while it is cached; ties by arrival."""

    name = "lpm"

    def __init__(self, tree: RadixCache) -> None:
        super().__init__()
        self._tree = tree

    def order(self) -> Iterator[Req]:
        if len(self._queue) > LPM_MAX_QUEUE:
            return super().order()
        return iter(sorted(self._queue.values(), key=self._rank))

    def _rank(self, req: Req) -> tuple[bool, int]:
        matched = self._tree.match_len(req.tokens(req.cacheable_len), req.extra_key)
        return req.num_retractions == 0, -matched


class SortedPolicy(SchedulePolicy):
    """By a key fixed when a request is queued; equal keys by arrival. A request that returns goes
    before all others or, with `classes`, before those with its key."""

    def __init__(self, name: str, key: Callable[[Req], Any], classes: bool = False) -> None:
        super().__init__()
        self.name = name
        self._key = key
        self._classes = classes
        self._last = self._first = 0
        self._entries: SortedKeyList = SortedKeyList(key=lambda entry: entry[:2])
        self._entry_of: dict[str, tuple[Any, int, Req]] = {}

    def add(self, req: Req) -> None:
        self._last += 1
        self._put(req, self._last)

    def add_front(self, req: Req) -> None:
        if not self._classes:
            super().add_front(req)
            return
        self._first -= 1
        self._put(req, self._first)

    def _put(self, req: Req, place: int) -> None:
        entry = (self._key(req), place, req)
        self._entry_of[req.rid] = entry
        self._entries.add(entry)

    def discard(self, req: Req) -> None:
        if req.rid in self._queue:
            super().discard(req)
        else:
            self._entries.remove(self._entry_of.pop(req.rid))

    def order(self) -> Iterator[Req]:
        yield from super().order()
        for entry in self._entries:
            yield entry[2]


class FairPolicy(SchedulePolicy):
    """The tenant that was served least goes next: a virtual counter per tenant of input tokens plus
    weighted output tokens, divided by the tenant's weight. A tenant that comes back from idleness
    starts at the smallest counter of those waiting, so that nobody saves up service.

    Source: "Fairness in Serving Large Language Models" (OSDI 2024), the VTC algorithm.
    """

    name = "fair"

    def __init__(
        self, output_weight: float = 2.0, weights: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self._output_weight = output_weight
        self._weights = dict(weights or {})
        self.counters: dict[str, float] = {}
        self._waiting: dict[str, OrderedDict[str, Req]] = {}

    def add(self, req: Req) -> None:
        self._enter(req)

    def add_front(self, req: Req) -> None:
        self._enter(req)
        self._waiting[_tenant(req)].move_to_end(req.rid, last=False)

    def _enter(self, req: Req) -> None:
        tenant = _tenant(req)
        if tenant not in self._waiting:
            floor = min((self.counters[other] for other in self._waiting), default=0.0)
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)
            self._waiting[tenant] = OrderedDict()
            self._forget_idle(floor)
        self._waiting[tenant][req.rid] = req

    def discard(self, req: Req) -> None:
        tenant = _tenant(req)
        del self._waiting[tenant][req.rid]
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def order(self) -> Iterator[Req]:
        """Each request is charged its input when it is taken, so that one order alternates
        tenants."""
        heap = [(self.counters[tenant], tenant) for tenant in self._waiting]
        heapq.heapify(heap)
        queues = {tenant: iter(reqs.values()) for tenant, reqs in self._waiting.items()}
        while heap:
            counter, tenant = heap[0]
            req = next(queues[tenant], None)
            if req is None:
                heapq.heappop(heap)
                continue
            yield req
            heapq.heapreplace(heap, (counter + req.fill_len / self._weight(tenant), tenant))

    def on_admitted(self, req: Req, new_tokens: int) -> None:
        self._charge(_tenant(req), new_tokens)

    def on_tokens(self, reqs: list[Req]) -> None:
        for req in reqs:
            self._charge(_tenant(req), self._output_weight)

    def _charge(self, tenant: str, tokens: float) -> None:
        charged = tokens / self._weight(tenant)
        self.counters[tenant] = self.counters.get(tenant, 0.0) + charged

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _forget_idle(self, floor: float) -> None:
        """Bounded memory: an idle tenant at or below the floor loses nothing by being forgotten,
        and of the others the oldest go."""
        if len(self.counters) <= MAX_TENANTS:
            return
        idle = [tenant for tenant in self.counters if tenant not in self._waiting]
        idle.sort(key=lambda tenant: self.counters[tenant] > floor)
        for tenant in idle[: len(self.counters) - MAX_TENANTS * 9 // 10]:
            del self.counters[tenant]


def _tenant(req: Req) -> str:
    return req.tenant or ""


def make_policy(
    name: str,
    tree: RadixCache,
    seed: int | None = None,
    low_priority_first: bool = False,
    output_weight: float = 2.0,
    weights: Mapping[str, float] | None = None,
) -> SchedulePolicy:
    """The policy that `--schedule-policy` names. `low_priority_first`: small numbers are
    important."""
    if name == "fcfs":
        return SchedulePolicy()
    if name == "lpm":
        return LongestPrefixMatch(tree)
    if name == "lof":  # longest output first
        return SortedPolicy(name, lambda req: -req.max_new_tokens)
    if name == "random":
        rng = random.Random(seed)
        return SortedPolicy(name, lambda req: rng.random())
    if name == "priority":
        sign = 1 if low_priority_first else -1
        return SortedPolicy(name, lambda req: sign * req.priority, classes=True)
    if name == "fair":
        return FairPolicy(output_weight, weights)
    raise ValueError(f"schedule_policy must be one of {', '.join(POLICIES)}, got {name!r}")


POLICIES = ("fcfs", "lpm", "lof", "random", "priority", "fair")
