"""How both processes write their log: `[time] message`, in lines that no user's text can forge."""

from __future__ import annotations

import logging
import re

_FORMAT = "[%(asctime)s] %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"
# Of a terminal, and everything that some reader of lines takes for the end of one.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def setup_logging(level: str) -> None:
    """The root logger writes to stderr from `level` ("info", ...) on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class LineFormatter(logging.Formatter):
    """A message may have several lines, as tracebacks do, and hold what a client sent. Only a
    record's first line begins with the time in brackets: others that begin with a bracket are
    moved right."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, _TIME)

    def format(self, record: logging.LogRecord) -> str:
        text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", super().format(record))
        # What could be encoded nowhere would cost the whole line.
        text = text.encode("utf-8", "backslashreplace").decode()
        return text.replace("\n[", "\n  [")
