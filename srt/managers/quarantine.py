"""Which request kills the scheduler: the one that was there at crash after crash."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

# A request that got so many tokens between two crashes did not cause the second by what caused the
# first: the crash that it would bring about comes at once when it is tried again. One token comes
# from computing its prompt and its outputs again, the next from where the first crash was.
PROGRESS_TOKENS = 2


class Quarantine:
    """After a crash everyone is tried again together. Whoever was in the batch at two crashes in a
    row, without progress in between, is a suspect. One that was alone in the batch is condemned.
    Others are tried one after the other, so that their batch mates' innocence shows, and the one
    that was on trial at the next crash, again without progress, is condemned. So is hardly anybody
    for being there when something else kills schedulers."""

    def __init__(self) -> None:
        self.on_trial: str | None = None
        self._untried: deque[str] = deque()
        # Members at the last crash and how many outputs they had.
        self._members: dict[str, int] = {}
        self._trial_start = 0  # outputs of the one on trial when its trial began

    def on_crash(self, members: Iterable[str], num_outputs: Mapping[str, int]) -> list[str]:
        """`members` of the batch at the crash; `num_outputs` of every live request. Returns the
        condemned, who must not be tried again."""
        present = {rid: num_outputs[rid] for rid in members if rid in num_outputs}
        before, self._members = self._members, present
        trial, self.on_trial = self.on_trial, None
        if trial is not None and trial in present and not self._got_on(num_outputs, trial):
            self._untried.clear()  # found: the others need not be kept waiting
            return [trial]
        if trial is not None or self._untried:
            # It says nothing of the suspects that were not in it.
            if trial is not None and trial in num_outputs and trial not in present:
                self._untried.appendleft(trial)
            return []
        suspects = [
            rid
            for rid, count in present.items()
            if rid in before and count - before[rid] < PROGRESS_TOKENS
        ]
        if len(present) == 1:
            return suspects
        self._untried.extend(suspects)
        return []

    def _got_on(self, num_outputs: Mapping[str, int], trial: str) -> bool:
        return num_outputs[trial] - self._trial_start >= PROGRESS_TOKENS

    @property
    def held(self) -> set[str]:
        """Who must not be submitted yet."""
        return set(self._untried)

    def next_trial(self, num_outputs: Mapping[str, int]) -> str | None:
        """The suspect to submit now, if the one before has ended or got on."""
        trial = self.on_trial
        if trial is not None and trial in num_outputs and not self._got_on(num_outputs, trial):
            return None
        self.on_trial = None
        while self._untried:
            rid = self._untried.popleft()
            if rid in num_outputs:
                self.on_trial, self._trial_start = rid, num_outputs[rid]
                return rid
        return None
