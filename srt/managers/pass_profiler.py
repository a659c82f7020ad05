"""Traces of the scheduler's passes by torch's profiler, started and stopped while it serves."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from srt.managers.io_struct import ProfileOptions

logger = logging.getLogger(__name__)


class ProfileError(ValueError):
    """Why a profile cannot be started, stopped or written; for the client."""


class PassProfiler:
    """At most one profile at a time. It costs a comparison a pass while there is none."""

    def __init__(self) -> None:
        self._wish: ProfileOptions | None = None  # asked for and not yet written
        self._profile: profile | None = None  # once its first pass has come
        self._num_passes = 0  # launched since the start of the scheduler
        self._passes_left = 0

    def start(self, wish: ProfileOptions) -> None:
        """Trace from the next pass on, or from pass `start_step` of the scheduler if that is
        later."""
        if self._wish is not None:
            raise ProfileError("Profiling is already in progress; /stop_profile ends it.")
        if "GPU" in wish.activities and not torch.cuda.is_available():
            raise ProfileError("activities asks for GPU, but torch finds no CUDA device.")
        self._wish = wish
        self._passes_left = wish.num_steps
        logger.info("Profiling at most %d passes into %s", self._passes_left, wish.output_dir)

    def stop(self) -> Path:
        """End the profile and write it. The trace's path."""
        if self._wish is None:
            raise ProfileError("Profiling is not in progress.")
        if self._profile is None:
            self._wish = None
            raise ProfileError("Nothing was profiled: no pass ran since the start.")
        return self._write(self._wish, self._profile)

    def before_pass(self) -> None:
        self._num_passes += 1
        wish = self._wish
        if wish is None or self._profile is not None or self._num_passes < wish.start_step:
            return
        names = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
        begun = profile(
            activities=[names[name] for name in wish.activities],
            record_shapes=wish.record_shapes,
            with_stack=wish.with_stack,
        )
        try:
            begun.start()
        except RuntimeError as error:  # another tool profiles this process
            logger.error("Profiling could not start: %s", error)
            self._wish = None
            return
        self._profile = begun

    def after_pass(self) -> None:
        """A pass is processed; the last one that was asked for writes the trace."""
        if self._wish is None or self._profile is None:
            return
        self._passes_left -= 1
        if self._passes_left > 0:
            return
        try:
            self._write(self._wish, self._profile)
        except ProfileError as error:
            logger.error("%s", error)

    def _write(self, wish: ProfileOptions, done: profile) -> Path:
        self._wish = self._profile = None
        folder = Path(wish.output_dir)
        # SGLang's name for the trace of its only rank.
        path = folder / f"{wish.prefix}{time.time():.6f}-TP-0.trace.json.gz"
        try:
            done.stop()
            folder.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise ProfileError(f"The profile could not be written to {path}: {error}") from error
        logger.info("Profiling ends: %s", path)
        return path
