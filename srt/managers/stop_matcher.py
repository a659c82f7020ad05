"""Stop strings and stop patterns of one request, looked for in its output text only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import regex

from srt.stop_regex import compile_stop_regex

REGEX_WINDOW = 1024  # characters before the new text in which a pattern's match may begin
# Seconds of CPU time that one request's patterns may use: this much at once, and this much more for
# each piece of text. An honest pattern takes microseconds.
REGEX_BURST = 0.1
REGEX_PER_PUSH = 0.001


class Match(NamedTuple):
    """What ended the request: the stop string, or the text of the pattern."""

    pattern: str


class StopRegexTimeout(ValueError):
    """A stop pattern took so long on the output that going on would freeze everyone."""


class StopMatcher:
    """Releases the text of one request as far as no stop can begin in it.

    The stop that *ends* first wins, and of several that end at the same character the longest one.
    So the result does not depend on where the tokens' borders are. Each stop string runs through
    the text once (Knuth, Morris and Pratt, 1977), whatever its length and however many pushes.

    A pattern is tried after every piece. It ends the request but cuts nothing, so the piece in
    which it matched is released whole; a stop string found in the same piece wins. Its match may
    begin at most `REGEX_WINDOW` characters before the piece; `$` is the end of the text so far.
    `regex` backtracks, so there is a time limit; `StopRegexTimeout` names who passed it.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        stop_regex: Sequence[str] = (),
        no_stop_trim: bool = False,
    ) -> None:
        """ValueError: an empty stop string, a pattern that is too long or that does not compile."""
        if "" in stop:
            raise ValueError("stop strings must not be empty, got ''.")
        self._by_first: dict[str, list[_Progress]] = {}
        for text in dict.fromkeys(stop):
            self._by_first.setdefault(text[0], []).append(_Progress(text))
        first_chars = "".join(map(regex.escape, self._by_first))
        self._first_char = regex.compile(f"[{first_chars}]") if first_chars else None
        self._active: list[_Progress] = []  # those in the middle of their string
        self._patterns = [compile_stop_regex(pattern) for pattern in stop_regex]
        self._regex_time_left = REGEX_BURST
        self._no_stop_trim = no_stop_trim
        self._held = ""  # not released: the longest possible beginning of a stop
        self._seen = ""  # the end of the text so far, for the patterns

    def push(self, text: str) -> tuple[str, Match | None]:
        """Text that is now safe to show, and the stop that has been found, if any. After a stop the
        request is over: nothing may be pushed any more."""
        found = self._find(text)
        buffered = self._held + text
        if found is not None:
            progress, end = found
            end += len(self._held)  # from an index of `text` to one of `buffered`
            keep = end if self._no_stop_trim else end - len(progress.stop)
            self._held = ""
            return buffered[:keep], Match(progress.stop)
        if (pattern := self._search(text)) is not None:
            self._held = ""
            return buffered, Match(pattern)
        safe = len(buffered) - max((progress.matched for progress in self._active), default=0)
        self._held = buffered[safe:]
        return buffered[:safe], None

    def finish(self) -> str:
        """The request ended otherwise: what was held back is plain text after all."""
        held, self._held = self._held, ""
        self._active = []
        return held

    def _find(self, text: str) -> tuple[_Progress, int] | None:
        """Advance every stop over `text`. The one completed first and its end in `text`, if any."""
        if self._first_char is None:
            return None
        pos = 0
        while pos < len(text):
            if not self._active:
                # Nothing is in progress, so everything up to the next first character is skipped.
                begin = self._first_char.search(text, pos)
                if begin is None:
                    return None
                pos = begin.start()
            char = text[pos]
            pos += 1
            starting = self._by_first.get(char, ())
            candidates = [*self._active, *(p for p in starting if not p.matched)]
            self._active = [progress for progress in candidates if progress.advance(char)]
            done = [progress for progress in self._active if progress.complete]
            if done:
                return max(done, key=lambda progress: len(progress.stop)), pos
        return None

    def _search(self, text: str) -> str | None:
        """The pattern that matches, the first in the caller's order."""
        if not self._patterns:
            return None
        self._seen += text
        start = max(0, len(self._seen) - len(text) - REGEX_WINDOW)
        self._regex_time_left = min(REGEX_BURST, self._regex_time_left + REGEX_PER_PUSH)
        for compiled in self._patterns:
            if self._matches(compiled, start):
                return str(compiled.pattern)
        if len(self._seen) > 4 * REGEX_WINDOW:  # forget in big steps, so that copying stays cheap
            self._seen = self._seen[-2 * REGEX_WINDOW :]
        return None

    def _matches(self, compiled: regex.Pattern[str], start: int) -> bool:
        began = time.thread_time()  # waiting for a core is not the pattern's doing
        try:
            # A start position, not a slice: `^` and lookbehind still see what is before it.
            match = compiled.search(self._seen, start, timeout=self._regex_time_left)
        except TimeoutError:
            match = None
        self._regex_time_left -= time.thread_time() - began
        if match is None and self._regex_time_left <= 0:
            raise StopRegexTimeout(
                f"stop_regex {compiled.pattern!r} took more than {REGEX_BURST * 1000:.0f} ms on "
                f"{len(self._seen) - start} characters of output."
            )
        return match is not None


class _Progress:
    """How much of one stop string the text's end has matched."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters
        # _borders[i]: the longest beginning of the stop, shorter than i + 1 characters, that is
        # also the end of its first i + 1. Made only as far as the text ever matched, so that a huge
        # stop string costs nothing until the output really begins to spell it.
        self._borders = [0]

    @property
    def complete(self) -> bool:
        return self.matched == len(self.stop)

    def advance(self, char: str) -> bool:
        """Take one character of text; False if no beginning of the stop is matched now. Must not be
        called once complete."""
        self.matched = self._extend(self.matched, char)
        if self.matched > len(self._borders):
            self._borders.append(self._extend(self._borders[-1], char))
        return self.matched > 0

    def _extend(self, length: int, char: str) -> int:
        """The longest beginning of the stop that ends a text, whose longest was `length`, once
        `char` is put behind it."""
        while self.stop[length] != char:
            if length == 0:
                return 0
            length = self._borders[length - 1]
        return length + 1
