"""A linear model of the time of a pass, learned while serving."""

from __future__ import annotations

import numpy as np

# Passes remembered: one of k passes ago weighs FORGETTING ** k.
FORGETTING = 0.995
MIN_SAMPLES = 8


class StepTimeModel:
    """seconds = c0 + c1 * new tokens + c2 * requests + c3 * tokens of KV read, by recursive least
    squares with exponential forgetting (see e.g. Haykin, "Adaptive Filter Theory", ch. 10).
    Coefficients below zero are not believed when a prediction is made: no pass gets faster by doing
    more."""

    # Features are scaled to about one, so that one prior variance serves all.
    _SCALE = np.array([1.0, 1e-2, 1e-1, 1e-4])

    def __init__(self) -> None:
        self._coefficients = np.zeros(4)
        self._covariance = np.eye(4) * 1e2
        self._num_samples = 0

    @property
    def is_ready(self) -> bool:
        return self._num_samples >= MIN_SAMPLES

    def observe(self, num_tokens: int, num_rows: int, num_kv_read: int, seconds: float) -> None:
        x = np.array([1.0, num_tokens, num_rows, num_kv_read]) * self._SCALE
        projected = self._covariance @ x
        gain = projected / (FORGETTING + x @ projected)
        self._coefficients = self._coefficients + gain * (seconds - x @ self._coefficients)
        covariance = (self._covariance - np.outer(gain, projected)) / FORGETTING
        # Directions that never vary would grow without end.
        if np.trace(covariance) < 1e4:
            self._covariance = covariance
        self._num_samples += 1

    def seconds(self, num_tokens: int, num_rows: int, num_kv_read: int) -> float:
        x = np.array([1.0, num_tokens, num_rows, num_kv_read]) * self._SCALE
        return float(x @ np.maximum(self._coefficients, 0.0))

    def tokens_within(self, seconds: float) -> int:
        """New tokens of one request whose pass takes at most `seconds`."""
        fixed = self.seconds(0, 1, 0)
        per_token = self.seconds(1, 1, 1) - fixed
        if seconds <= fixed:
            return 0
        return int((seconds - fixed) / per_token) if per_token > 0 else 1 << 30
