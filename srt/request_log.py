"""One log line when a request arrives and one when it ends, without its text unless asked for."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec

from srt.managers.req_state import ReqState

logger = logging.getLogger(__name__)

# Characters of text, and token ids, that level 2 shows.
MAX_CHARS = 2048
MAX_IDS = 64


class RequestLog:
    """Level 0 has numbers and ids, 1 sampling parameters too, 2 also what was said, cut to
    MAX_CHARS, 3 all of it."""

    def __init__(self, level: int, as_json: bool) -> None:
        self._level = level
        self._as_json = as_json

    def on_start(self, state: ReqState, text: str | None, is_stream: bool) -> None:
        """`text`: the prompt, None if it came as ids."""
        request = state.request
        record: dict[str, Any] = {
            "rid": state.rid,
            "prompt_tokens": len(request.input_ids),
            "stream": is_stream,
            "priority": request.priority,
            "tenant": request.tenant,
        }
        if self._level >= 1:
            record["sampling_params"] = msgspec.to_builtins(request.sampling_params)
        if self._level >= 2:
            if text is None:
                record["input_ids"] = self._cut(request.input_ids, MAX_IDS)
            else:
                record["text"] = self._cut(text, MAX_CHARS)
        self._write("Receive", {"obj": record})

    def on_end(self, state: ReqState) -> None:
        """The request has ended, or its client has left (finish_reason null)."""
        reason = state.finish_reason
        out: dict[str, Any] = {
            "finish_reason": None if reason is None else reason.type.value,
            "message": None if reason is None else reason.message,
            "completion_tokens": len(state.output_ids),
            "cached_tokens": state.cached_tokens,
            "num_retractions": state.num_retractions,
            "queue_time": state.queue_time,
        }
        if state.finished_time is not None:
            out["e2e_latency"] = state.finished_time - state.created_time
        if self._level >= 2:
            out["text"] = self._cut(state.text, MAX_CHARS)
        record = {"rid": state.rid, "prompt_tokens": len(state.request.input_ids)}
        self._write("Finish", {"obj": record, "out": out})

    def _cut(self, value: Any, limit: int) -> Any:
        return value if self._level >= 3 else value[:limit]

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        if self._as_json:
            logger.info(json.dumps({"event": event, **fields}, ensure_ascii=False))
            return
        text = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        logger.info(f"{event}: {text}")
