"""Which request kills the scheduler: the one that was there at crash after crash."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

# A request that got so many tokens between two crashes did not cause the second by what caused the
# first: the crash that it would bring about comes at once when it is tried again.
PROGRESS_TOKENS = 8


class Quarantine:
    """After a crash everyone is tried again together. Whoever was in the batch at two crashes in a
    row, without progress in between, is a suspect: a single one is condemned; several are tried one
    after the other, so that their batch mates' innocence shows, and the one that was on trial at
    the next crash is condemned."""

    def __init__(self) -> None:
        self.on_trial: str | None = None
        self._untried: deque[str] = deque()
        # Members at the last crash and how many outputs they had.
        self._members: dict[str, int] = {}

    def on_crash(self, members: Iterable[str], num_outputs: Mapping[str, int]) -> list[str]:
        """`members` of the batch at the crash; `num_outputs` of every live request. Returns the
        condemned, who must not be tried again."""
        present = {rid: num_outputs[rid] for rid in members if rid in num_outputs}
        before, self._members = self._members, present
        trial, self.on_trial = self.on_trial, None
        if trial is not None and trial in present:
            condemned = [trial]
            self._untried.clear()  # found: the others need not be kept waiting
        elif trial is not None or self._untried:
            condemned = []  # the one on trial was not in it, so this says nothing of the suspects
            if trial is not None:
                self._untried.appendleft(trial)
        else:
            suspects = [
                rid
                for rid, count in present.items()
                if rid in before and count - before[rid] < PROGRESS_TOKENS
            ]
            condemned = suspects if len(suspects) == 1 else []
            self._untried.extend(suspects if len(suspects) > 1 else [])
        return condemned

    @property
    def held(self) -> set[str]:
        """Who must not be submitted yet."""
        return set(self._untried)

    def next_trial(self, num_outputs: Mapping[str, int]) -> str | None:
        """The suspect to submit now, if the one before has ended or got on."""
        trial = self.on_trial
        if trial is not None and trial in num_outputs:
            progress = num_outputs[trial] - self._members.get(trial, 0)
            if progress < PROGRESS_TOKENS:
                return None
        self.on_trial = None
        while self._untried:
            rid = self._untried.popleft()
            if rid in num_outputs:
                self.on_trial = rid
                return rid
        return None
