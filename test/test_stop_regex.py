from __future__ import annotations

import time

import pytest

from srt.sampling_params import SamplingParams, SamplingParamsError
from srt.stop_regex import compile_stop_regex

BOMBS = [
    "a{1000000000}",
    "a{99999999999999999999}",
    "(a{65535}){65535}",
    "((a{500}){500}){500}",
    "(?:a{9999}b){9999}",
    "(?:(?:x?){1000}){1000}",
    "((((((((((a{9}){9}){9}){9}){9}){9}){9}){9}){9}){9})",
    "(?x)(a {5000} # )\n ) {5000}",
    "(?x)((a{500}) #\n{500}) #\n{500}",
    "(a{300}?){300}",
    "(?:" + "abc" * 60 + "){5000}",
    "(?:a{50000,}){2}",
]
HONEST = [
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(?:\.\d{3})?Z",
    r"(\d{3}\.){3}\d{3}",
    r"(?:[A-Z][a-z]{1,30} ){2,5}",
    r"\{10\}",
    r"(foo|bar){100}",
    r"#{2}",
    "x{,900}",
]


@pytest.mark.parametrize("pattern", BOMBS)
def test_a_pattern_that_repeats_too_much_is_refused_before_it_is_compiled(pattern):
    began = time.perf_counter()
    with pytest.raises(SamplingParamsError, match=r"stop_regex .* repeats too much.*50000"):
        SamplingParams.parse({"stop_regex": pattern})
    assert time.perf_counter() - began < 0.1


@pytest.mark.parametrize("pattern", HONEST)
def test_a_pattern_of_the_usual_size_is_compiled(pattern):
    assert compile_stop_regex(pattern).pattern == pattern


@pytest.mark.parametrize("pattern", ["(", "a{2}{3}{", "[z-a]", "(?P<1>a)", "(" * 200])
def test_what_is_no_pattern_is_refused_with_the_reason(pattern):
    with pytest.raises(SamplingParamsError, match=r"is not a valid regular expression: ."):
        SamplingParams.parse({"stop_regex": pattern})
