"""Compiles a client's stop pattern, unless that alone would take the server's time or memory."""

from __future__ import annotations

import math

import regex

MAX_STOP_REGEX_BYTES = 256
# The engine copies what must be repeated: `a{1000000000}` is a billion copies of some 270 bytes.
# So many copies take some 15 MB and 50 ms.
MAX_COPIES = 50_000
_COUNT = regex.compile(r"\{(\d+)")


def compile_stop_regex(pattern: str) -> regex.Pattern[str]:
    """ValueError, with a message for the client, if it is too large, repeats too much or is no
    pattern."""
    size = len(pattern.encode(errors="surrogatepass"))
    if size > MAX_STOP_REGEX_BYTES:
        raise ValueError(f"stop_regex is {size} bytes, over the {MAX_STOP_REGEX_BYTES}-byte limit")
    if _most_copies(pattern) > MAX_COPIES:
        raise ValueError(
            f"stop_regex {pattern!r} repeats too much: its counts must not multiply to more than "
            f"{MAX_COPIES} characters"
        )
    try:
        return regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"stop_regex {pattern!r} is not a valid regular expression: {error}"
        ) from error


def _most_copies(pattern: str) -> float:
    """At least as many characters as the pattern has when its counts are written out. The count of
    a single character or class adds, that of anything else may hold other counts and multiplies."""
    text = "".join(pattern.split())  # in verbose patterns, space may stand before a count
    may_comment = "#" in text
    added: float = len(text)
    factor: float = 1
    for found in _COUNT.finditer(text):
        count = int(found[1]) if len(found[1]) < 10 else math.inf
        if may_comment or text[: found.start()].endswith((")", "}", "?", "+", "*")):
            factor *= max(1, count)
        else:
            added += count
    return added * factor
