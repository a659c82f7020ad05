"""Server-sent events from bytes, tolerant of everything the format allows."""

from __future__ import annotations

# One event holds at most a whole answer with its log probabilities; more is not an event stream.
MAX_LINE_BYTES = 64 * 1024 * 1024


class SseDecoder:
    """Feed it bytes as they come; it returns the data of each event completed by them. Comments,
    the fields event, id and retry, CRLF, data without a space and data over several lines are legal
    (WHATWG HTML, section 9.2). Data without its blank line at the end comes out of `finish`."""

    def __init__(self) -> None:
        self.partial = b""
        self.data: list[bytes] = []

    def feed(self, block: bytes) -> list[bytes]:
        """Raises ValueError when a line grows past MAX_LINE_BYTES."""
        *lines, self.partial = (self.partial + block).split(b"\n")
        if len(self.partial) > MAX_LINE_BYTES:
            raise ValueError(f"a line of the event stream exceeds {MAX_LINE_BYTES} bytes")
        events = []
        for line in lines:
            event = self.take_line(line.rstrip(b"\r"))
            if event is not None:
                events.append(event)
        return events

    def take_line(self, line: bytes) -> bytes | None:
        if not line:
            event, self.data = self.data, []
            return b"\n".join(event) if event else None
        if line.startswith(b"data:"):
            value = line[5:]
            self.data.append(value[1:] if value.startswith(b" ") else value)
        return None

    def finish(self) -> list[bytes]:
        """What the end of the stream completes: at most one event."""
        events = self.feed(b"\n\n")
        return events
