"""No part of a stop string is ever shown, and a stop is found wherever it begins or ends."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.managers.stop_matcher import (
    REGEX_WINDOW,
    Match,
    StopMatcher,
    StopRegexTimeout,
)
from srt.stop_regex import MAX_STOP_REGEX_BYTES, compile_stop_regex


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, Match | None]:
    """All text released up to the stop, or up to the end."""
    shown = ""
    for piece in pieces:
        released, match = matcher.push(piece)
        shown += released
        if match is not None:
            return shown, match
    return shown + matcher.finish(), None


def expected(text: str, stops: list[str], no_stop_trim: bool) -> tuple[str, Match | None]:
    """By definition: the stop that ends first, the longest of those that end there."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if no_stop_trim else end - len(stop)], Match(stop)


small_text = st.text(alphabet="ab", max_size=24)
small_stop = st.text(alphabet="ab", min_size=1, max_size=6)


@settings(max_examples=500, deadline=None)
@given(
    text=small_text,
    stops=st.lists(small_stop, min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    no_stop_trim=st.booleans(),
)
def test_the_first_stop_is_found_however_the_text_is_cut_into_pieces(
    text, stops, cuts, no_stop_trim
):
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    found = run(StopMatcher(stops, no_stop_trim=no_stop_trim), pieces)
    assert found == expected(text, stops, no_stop_trim)


@settings(max_examples=300, deadline=None)
@given(text=small_text, stops=st.lists(small_stop, min_size=1, max_size=4))
def test_what_was_shown_never_ends_in_the_beginning_of_a_stop(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for i, char in enumerate(text):
        released, match = matcher.push(char)
        shown += released
        if match is not None:
            break
        held = text[len(shown) : i + 1]
        possible = [s[:n] for s in stops for n in range(1, len(s)) if text[: i + 1].endswith(s[:n])]
        # Exactly the longest possible beginning is held: nothing leaks, nothing waits in vain.
        assert held == max(possible, key=len, default="")


def test_a_stop_that_spans_tokens_is_cut_before_it_and_never_shown():
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("42 <") == ("42 ", None)
    assert matcher.push("/ans") == ("", None)
    assert matcher.push("wer> and more") == ("", Match("</answer>"))


def test_a_stop_inside_one_token_cuts_that_token():
    assert StopMatcher(["half"]).push("onehalfother") == ("one", Match("half"))


def test_text_held_for_a_stop_that_does_not_come_is_released():
    matcher = StopMatcher(["stop!"])
    assert matcher.push("a sto") == ("a ", None)
    assert matcher.push("ry") == ("story", None)
    assert matcher.push("st") == ("", None)
    assert matcher.finish() == "st"
    assert matcher.finish() == ""


def test_a_stop_that_begins_inside_another_ones_failed_beginning_is_found():
    assert run(StopMatcher(["aab"]), ["a", "a", "a", "b"]) == ("a", Match("aab"))
    assert run(StopMatcher(["abcx", "bcd"]), list("abcd")) == ("a", Match("bcd"))


def test_of_two_stops_that_end_together_the_longer_one_wins():
    assert run(StopMatcher(["b", "ab"]), ["xab"]) == ("x", Match("ab"))
    assert run(StopMatcher(["ab", "b"]), ["xab"]) == ("x", Match("ab"))


def test_no_stop_trim_keeps_the_stop_exactly_once():
    matcher = StopMatcher(["END"], no_stop_trim=True)
    assert run(matcher, ["one E", "ND EN", "D"]) == ("one END", Match("END"))


def test_stops_of_any_characters_are_found():
    for stop in ("]", "^", "-", "\\", "\n\n", "[a]", "😀", "\u200d", "."):
        assert run(StopMatcher([stop]), list(f"x-y{stop}z") if stop != "-" else ["xy-z"]) in (
            (f"x-y{stop}z".split(stop)[0], Match(stop)),
            ("xy", Match(stop)),
        )


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])


def test_a_huge_stop_string_costs_nothing_until_the_output_spells_it():
    huge = "ab" * 500_000
    began = time.thread_time()
    matcher = StopMatcher([huge] * 32)
    for _ in range(1000):
        matcher.push("abx ")
    assert time.thread_time() - began < 0.5


def test_time_for_a_piece_does_not_grow_with_what_is_held_back():
    matcher = StopMatcher(["a" * 100_000, "a" * 90_000 + "b"])

    def seconds() -> float:
        began = time.thread_time()
        for _ in range(2000):
            matcher.push("aaaa")
        return time.thread_time() - began

    first, *_, last = [seconds() for _ in range(10)]
    assert len(matcher._held) == 80_000
    # Held text is sliced and joined, which copies it, but nothing scans it again.
    assert last < 20 * first


def test_a_pattern_ends_the_request_and_cuts_nothing():
    matcher = StopMatcher(stop_regex=[r"\d{3}"])
    assert run(matcher, ["a 1", "2", "34 tail", "never"]) == ("a 1234 tail", Match(r"\d{3}"))


def test_a_stop_string_in_the_same_piece_wins_over_a_pattern():
    assert StopMatcher(["b"], ["a"]).push("xabc") == ("xa", Match("b"))


def test_a_pattern_releases_text_held_for_a_stop_string():
    matcher = StopMatcher(["12345"], ["23"])
    assert run(matcher, ["x1", "2", "3"]) == ("x123", Match("23"))


def test_patterns_see_the_true_beginning_of_the_output():
    assert run(StopMatcher(stop_regex=["^b"]), ["a", "b"]) == ("ab", None)
    assert run(StopMatcher(stop_regex=["^ab"]), ["a", "b"]) == ("ab", Match("^ab"))
    long = ["x" * 700] * 10 + ["b"]
    assert run(StopMatcher(stop_regex=[r"\Ab"]), long)[1] is None
    assert run(StopMatcher(stop_regex=["(?<=x)b"]), long)[1] == Match("(?<=x)b")
    assert run(StopMatcher(stop_regex=["(?m)^b"]), [*long[:-1], "\n", "b"])[1] is not None


def test_a_match_may_begin_one_window_before_the_piece_and_not_earlier():
    for gap, found in ((REGEX_WINDOW - 1, True), (REGEX_WINDOW, False)):
        matcher = StopMatcher(stop_regex=["S.*E"])
        pieces = ["y" * 5000, "S", *["x"] * gap, "E"]
        assert (run(matcher, pieces)[1] is not None) is found


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", "*", "(?P<n>a)(?P<n"])
def test_a_broken_pattern_is_refused_by_name(pattern):
    with pytest.raises(ValueError, match="is not a valid regular expression") as error:
        StopMatcher(stop_regex=[pattern])
    assert repr(pattern) in str(error.value)


def test_a_pattern_over_the_size_limit_is_refused_with_its_size():
    compile_stop_regex("a" * MAX_STOP_REGEX_BYTES)
    with pytest.raises(ValueError, match="stop_regex is 258 bytes, over the 256-byte limit"):
        compile_stop_regex("é" * 129)


def test_a_pattern_that_backtracks_without_end_is_stopped_in_time():
    matcher = StopMatcher(stop_regex=[r"(a|aa)+$"])
    began = time.thread_time()
    with pytest.raises(StopRegexTimeout, match=r"\(a\|aa\)"):
        for _ in range(100):
            matcher.push("a" * 50 + "b")
    assert time.thread_time() - began < 1.0


def test_thirty_two_honest_patterns_stay_inside_their_time():
    matcher = StopMatcher(stop_regex=[rf"never{i}\d+" for i in range(32)])
    assert run(matcher, ["some words "] * 1000)[1] is None
