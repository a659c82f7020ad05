"""How much of the remaining `max_new_tokens` of running requests admission believes.

Requests usually stop before their limit, so reserving all of it wastes the pool; reserving too
little ends in retractions. Source of the rule: SGLang's scheduler.
"""

from __future__ import annotations

INITIAL_RATIO = 0.7
FLOOR_FACTOR = 0.14
DECAY_STEPS = 600
# Steps every running request is assumed to go on after a retraction.
RETRACT_DECODE_STEPS = 20


class NewTokenRatio:
    """Falls linearly from the initial value to the floor over DECAY_STEPS decode passes, jumps up
    at a retraction, and is reset when nothing runs."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.change_conservativeness(conservativeness)

    def change_conservativeness(self, conservativeness: float) -> None:
        """Larger admits later and retracts less; begins anew from the initial value."""
        self.conservativeness = conservativeness
        self.initial = min(1.0, INITIAL_RATIO * conservativeness)
        self.floor = self.initial * FLOOR_FACTOR
        self._decay = (self.initial - self.floor) / DECAY_STEPS
        self.value = self.initial

    def decay(self) -> None:
        """A decode pass went by without a retraction."""
        self.value = max(self.value - self._decay, self.floor)

    def on_retract(self, sum_outputs: int, sum_max_new_tokens: int, num_rows: int) -> None:
        """What the rows that stay have really used of their limits, and 20 tokens a row more."""
        estimate = (sum_outputs + RETRACT_DECODE_STEPS * num_rows) / (sum_max_new_tokens + 1)
        self.value = min(1.0, estimate)

    def reset(self) -> None:
        self.value = self.initial
