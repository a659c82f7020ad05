"""Server-sent events from bytes, tolerant of everything the format allows."""

from __future__ import annotations

import re
from typing import NamedTuple

# One event holds at most a whole answer with its log probabilities; more is not an event stream.
MAX_LINE_BYTES = 64 * 1024 * 1024
LINE_END = re.compile(rb"\r\n|\n|\r")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    data: bytes
    is_error: bool = False  # its field `event` says so, or its data came in a field `error`


class SseDecoder:
    """Feed it bytes as they come; it returns each event completed by them. A byte order mark at the
    start, comments, the fields event, id and retry, lines ended by LF, CR LF or CR, data without a
    space and data over several lines are legal (WHATWG HTML, section 9.2). A field `error` with the
    data of an error is not, but some releases of llama.cpp send it. Data without its blank line at
    the end comes out of `finish`."""

    def __init__(self) -> None:
        self.partial = b""
        self.after_cr = False  # the next byte may be the second half of CR LF
        self.at_start = True
        self.data: list[bytes] = []
        self.is_error = False

    def feed(self, block: bytes) -> list[Event]:
        """Raises ValueError when a line grows past MAX_LINE_BYTES."""
        if self.after_cr and block:
            block = block.removeprefix(b"\n")
            self.after_cr = False
        self.after_cr = self.after_cr or block.endswith(b"\r")
        *lines, self.partial = LINE_END.split(self.partial + block)
        if len(self.partial) > MAX_LINE_BYTES:
            raise ValueError(f"a line of the event stream exceeds {MAX_LINE_BYTES} bytes")
        if self.at_start and lines:
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
            self.at_start = False
        found = (self.take_line(line) for line in lines)
        return [event for event in found if event is not None]

    def take_line(self, line: bytes) -> Event | None:
        if not line:
            event = Event(b"\n".join(self.data), self.is_error) if self.data else None
            self.data, self.is_error = [], False
            return event
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name in (b"data", b"error"):
            self.data.append(value)
        self.is_error = self.is_error or name == b"error" or (name, value) == (b"event", b"error")
        return None

    def finish(self) -> list[Event]:
        """What the end of the stream completes: at most one event."""
        return self.feed(b"\n\n")
