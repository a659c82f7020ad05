"""What is left behind when the scheduler cannot be kept alive: JSON lines without user text."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from srt.managers.req_state import ReqState


def write_crash_dump(
    folder: Path | None,
    description: str,
    passes: Iterable[Mapping[str, Any]],
    states: Iterable[ReqState],
) -> Path:
    """One line about the crash, one for each of the last passes, one for each live request; the
    path of the file. `folder` None: that for temporary files. OSError if it cannot be written."""
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = folder / f"regather-crash-{stamp}-{os.getpid()}.jsonl"
    lines: list[dict[str, Any]] = [{"crash": description, "time": time.time()}]
    lines += [{"pass": dict(each)} for each in passes]
    lines += [{"request": _facts(state)} for state in states]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def _facts(state: ReqState) -> dict[str, Any]:
    params = state.request.sampling_params
    return {
        "rid": state.rid,
        "prompt_tokens": len(state.request.input_ids),
        "completion_tokens": len(state.output_ids),
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "priority": state.request.priority,
        "num_retractions": state.num_retractions,
        "age_seconds": time.time() - state.created_time,
    }
