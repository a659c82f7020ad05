"""The text of a stream is the text of its tokens, final as soon as it is shown."""

from __future__ import annotations

import functools
import sys
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    TEXTS,
    byte_level,
    metaspace,
    sentencepiece,
    word_level,
    word_piece,
)

from srt.default_model import fetch_default_model
from srt.managers.detokenizer import Detokenizer
from srt.tokenizer import Tokenizer, load_tokenizer

FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece_no_prefix": functools.partial(sentencepiece, prefix_space=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "word_level": word_level,
}


@functools.cache
def tokenizer_of(family: str) -> Tokenizer:
    return FAMILIES[family]()


def pieces(tokenizer: Tokenizer, ids: Sequence[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans(), spaces=st.booleans())
def test_pieces_of_any_tokens_add_up_to_the_decoded_text(family, data, skip, spaces):
    tokenizer = tokenizer_of(family)
    # One past the vocabulary too: models have padded vocabularies and may sample such an id.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=40))
    options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    assert "".join(pieces(tokenizer, ids, **options)) == tokenizer.decode(ids, **options)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "sentencepiece"])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decode_is_what_the_tokenizers_library_decodes(family, data, skip):
    tokenizer = tokenizer_of(family)
    # Runs of byte tokens that are no UTF-8 differ on purpose, so sentencepiece leaves bytes out.
    first = 259 if family.startswith("sentencepiece") else 0
    ids = data.draw(st.lists(st.integers(first, tokenizer.vocab_size - 1), max_size=40))
    assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", ["byte_level", "sentencepiece", "sentencepiece_no_prefix"])
def test_streamed_text_is_the_text_that_was_encoded(family, text):
    tokenizer = tokenizer_of(family)
    ids = tokenizer.encode(text)
    streamed = pieces(tokenizer, ids)
    assert "".join(streamed) == text == tokenizer.backend.decode(ids)
    assert not any("\ufffd" in piece for piece in streamed)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_come_out_as_python_decodes_them(data):
    tokenizer = tokenizer_of("byte_level")
    alphabet = {tokenizer.token_bytes[i]: i for i in range(tokenizer.vocab_size)}
    ids = [alphabet[bytes([byte])] for byte in data]
    assert "".join(pieces(tokenizer, ids)) == data.decode("utf-8", "replace")
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


def test_an_incomplete_character_is_held_back_until_it_is_whole():
    tokenizer = tokenizer_of("sentencepiece_no_prefix")
    ids = [3 + byte for byte in "😀".encode()]
    assert pieces(tokenizer, ids) == ["", "", "", "😀", ""]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_character_cut_off_by_the_end_is_one_replacement_character(length):
    tokenizer = tokenizer_of("sentencepiece_no_prefix")
    ids = [3 + byte for byte in "😀".encode()[:length]]
    assert pieces(tokenizer, ids) == [""] * length + ["\ufffd"]
    assert tokenizer.decode(ids) == "\ufffd"


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece_no_prefix"])
def test_a_run_of_invalid_bytes_comes_out_at_once_and_leaves_nothing_behind(family):
    tokenizer = tokenizer_of(family)
    lone = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes[i] == b"\x80")
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(lone)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    assert all(detokenizer.push(lone) == "\ufffd" for _ in range(2000))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 2000  # bytes: no list of the run is kept
    assert detokenizer.finish() == ""


def test_special_tokens_are_shown_only_if_asked_for():
    tokenizer = tokenizer_of("byte_level")
    ids = [0, *tokenizer.encode("Hello", add_special_tokens=False), 1]
    assert "".join(pieces(tokenizer, ids)) == "Hello"
    shown = "".join(pieces(tokenizer, ids, skip_special_tokens=False))
    assert shown == "<|start|>Hello<|end|>"


def test_a_special_token_between_the_bytes_of_a_character_ends_that_character_only_if_shown():
    tokenizer = tokenizer_of("sentencepiece_no_prefix")
    first, *rest = (3 + byte for byte in "好".encode())
    ids = [first, 2, *rest]
    assert "".join(pieces(tokenizer, ids)) == "好" == tokenizer.decode(ids)
    shown = "".join(pieces(tokenizer, ids, skip_special_tokens=False))
    assert shown == "\ufffd</s>\ufffd\ufffd" == tokenizer.decode(ids, False)


def test_spaces_between_special_tokens_can_be_left_out():
    tokenizer = tokenizer_of("word_level")
    ids = [1, 2, 3, 4, 1, 1]
    with_spaces = pieces(tokenizer, ids, skip_special_tokens=False)
    without = pieces(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(with_spaces) == "<a> <b> one two <a> <a>"
    assert "".join(without) == "<a><b> one two <a><a>"


def test_the_first_space_of_a_sentencepiece_text_is_dropped_unless_it_continues_another():
    tokenizer = tokenizer_of("sentencepiece")
    ids = [269, 270, 264]  # "▁He", "llo", "▁w"
    assert pieces(tokenizer, ids) == ["He", "llo", " w", ""]
    assert pieces(tokenizer, ids, continues_text=True) == [" He", "llo", " w", ""]


def test_only_one_of_several_leading_spaces_is_dropped():
    tokenizer = tokenizer_of("sentencepiece")
    ids = [259, 267, 269]  # "▁", "▁▁", "▁He"
    assert pieces(tokenizer, ids) == ["", "  ", " He", ""]
    assert tokenizer.decode(ids) == "   He" == tokenizer.backend.decode(ids)


@pytest.mark.parametrize("family", ["word_piece", "word_level"])
def test_a_long_stream_decodes_no_more_tokens_at_its_end_than_at_its_start(family):
    tokenizer = tokenizer_of(family)
    detokenizer = Detokenizer(tokenizer)
    for _ in range(50):
        detokenizer.push(3)
    window = detokenizer._window
    size = sys.getsizeof(window._shown) + len(window._shown)
    for _ in range(500):
        detokenizer.push(3)
    assert sys.getsizeof(window._shown) + len(window._shown) == size


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_the_default_models_stream_is_what_its_tokenizer_decodes(data, skip):
    tokenizer = default_tokenizer()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    streamed = "".join(pieces(tokenizer, ids, skip_special_tokens=skip))
    assert streamed == tokenizer.decode(ids, skip)
    assert streamed == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_streams_as_the_default_models_tokenizer_round_trips_it(text):
    tokenizer = default_tokenizer()
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.backend.decode(ids)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_text_of_many_scripts_survives_the_default_models_tokenizer_and_stream(text):
    tokenizer = default_tokenizer()
    streamed = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(streamed) == text
    assert not any("\ufffd" in piece for piece in streamed)


@functools.cache
def default_tokenizer() -> Tokenizer:
    # No fixture: hypothesis calls the test many times, and the tokenizer never changes.
    return load_tokenizer(fetch_default_model())
