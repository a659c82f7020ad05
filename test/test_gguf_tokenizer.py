"""The tokenizer of a GGUF file gives the tokens that its own library gives."""

from __future__ import annotations

import io
import json
import logging

import pytest
import sentencepiece
from tiny_gguf import write_gguf
from tiny_tokenizers import TEXTS, byte_level

from srt.gguf_metadata import read_header
from srt.gguf_tokenizer import build_tokenizer
from srt.tokenizer import load_tokenizer


def bpe_metadata(pre: str | None = "gpt-2", **changes: object) -> dict[str, object]:
    """The vocabulary and merges of the tiny byte-level tokenizer, as a GGUF file has them."""
    model = json.loads(byte_level().backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return {key: value for key, value in metadata.items() if value is not None}


def splits(tmp_path, pre: str, text: str) -> list[str]:
    """How `pre` cuts a text into words, before any merge."""
    backend = build_tokenizer(read_header(write_gguf(tmp_path / "m.gguf", bpe_metadata(pre))))
    return [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]


def test_a_byte_level_vocabulary_encodes_as_the_tokenizer_it_was_taken_from(tmp_path):
    original = byte_level()
    loaded = load_tokenizer(write_gguf(tmp_path / "m.gguf", bpe_metadata()))
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False)
        assert loaded.encode(text) == ids
        assert loaded.decode(ids) == text
    assert loaded.vocab_size == original.vocab_size
    assert loaded.special_ids == {0, 1}
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (0, (1,))


WORDS = "I'll pay 12345 now!\n\nÜbung don't"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", " now", "!", "\n", "\n", "Übung", " don", "'t"]),
        (
            "smollm",
            ["I", "'ll", " pay", " ", *"12345", " now", "!", "\n", "\n", "Übung", " don", "'t"],
        ),
        (
            "llama-bpe",
            ["I", "'ll", " pay", " ", "123", "45", " now", "!\n\n", "Übung", " don", "'t"],
        ),
        ("qwen2", ["I", "'ll", " pay", " ", *"12345", " now", "!\n\n", "Übung", " don", "'t"]),
        (
            "tekken",
            ["I", "'ll", " pay", " ", *"12345", " now", "!\n\n", "Übung", " don", "'t"],
        ),
    ],
)
def test_each_named_pre_tokenizer_cuts_words_as_its_models_do(tmp_path, pre, expected):
    assert splits(tmp_path, pre, WORDS) == expected


def test_an_unknown_pre_tokenizer_is_named_in_a_warning_and_a_missing_one_is_not(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        build_tokenizer(read_header(write_gguf(tmp_path / "a.gguf", bpe_metadata(None))))
        assert caplog.text == ""
        build_tokenizer(read_header(write_gguf(tmp_path / "b.gguf", bpe_metadata("brandnew"))))
    assert "'brandnew' is unknown" in caplog.text


@pytest.mark.parametrize(
    ("pre", "changes", "added"),
    [
        ("gpt-2", {}, ([], [])),
        ("gpt-2", {"add_bos_token": True}, ([0], [])),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
        ("llama-bpe", {}, ([0], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
    ],
)
def test_beginning_and_end_tokens_are_added_as_the_file_says(tmp_path, pre, changes, added):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", bpe_metadata(pre, **changes)))
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*added[0], *plain, *added[1]]
    assert tokenizer.encode_batch(["Hello"]) == [tokenizer.encode("Hello")]


def test_llama3_prefers_a_whole_word_of_the_vocabulary_to_its_merges(tmp_path):
    metadata = bpe_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "Xyzzy"]
    path = write_gguf(tmp_path / "m.gguf", metadata)
    word = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert load_tokenizer(path).encode("Xyzzy", add_special_tokens=False) == [word]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    path = write_gguf(tmp_path / "m.gguf", metadata)
    assert word not in load_tokenizer(path).encode("Xyzzy")


def test_chat_templates_of_a_file_are_found_by_name(tmp_path):
    metadata = {
        **bpe_metadata(),
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "with tools",
    }
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.render_chat(messages) == "<|start|>Hello"
    assert tokenizer.render_chat(messages, tools=[{"name": "f"}]) == "with tools"


@pytest.fixture(scope="module", params=[True, False], ids=["prefix_space", "no_prefix_space"])
def trained(request):
    """A real sentencepiece model, small, with byte fallback, as Llama's and Gemma's are."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        add_dummy_prefix=request.param,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        user_defined_symbols=["<|tool|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), request.param


def sentencepiece_metadata(sp, prefix_space: bool) -> dict[str, object]:
    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return 2
        if sp.is_byte(i):
            return 6
        if sp.id_to_piece(i) == "<|tool|>":
            return 4
        return 3 if sp.is_control(i) else 1

    ids = range(sp.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
        "tokenizer.ggml.bos_token_id": sp.bos_id(),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.add_space_prefix": prefix_space,
    }


def test_a_sentencepiece_vocabulary_encodes_as_sentencepiece_does(tmp_path, trained):
    sp, prefix_space = trained
    path = write_gguf(tmp_path / "m.gguf", sentencepiece_metadata(sp, prefix_space))
    tokenizer = load_tokenizer(path)
    for text in (*TEXTS, "", " ", "Hello   ", "日本 ≠ \x00", "世界世界", "12 345"):
        ids = sp.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        # Llama's vocabularies ask for a beginning unless the file says otherwise.
        assert tokenizer.encode(text) == [sp.bos_id(), *ids]
        assert tokenizer.decode(ids) == text == sp.decode(ids)


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path, trained):
    sp, prefix_space = trained
    path = write_gguf(tmp_path / "m.gguf", sentencepiece_metadata(sp, prefix_space))
    tokenizer = load_tokenizer(path)
    tool = sp.piece_to_id("<|tool|>")
    assert tokenizer.special_ids == {sp.unk_id(), sp.bos_id(), sp.eos_id()}
    assert tool in tokenizer.encode("Hello<|tool|>world")
    assert "<|tool|>" in tokenizer.decode(tokenizer.encode("Hello<|tool|>world"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; known: gpt2, llama"),
        ({"tokens": None}, "lacks the metadata key 'tokenizer.ggml.tokens'"),
        ({"merges": None}, "lacks the metadata key 'tokenizer.ggml.merges'"),
        ({"merges": ["abc"]}, "has 'abc', not two tokens"),
        ({"merges": ["qq zz"]}, "tokenizer.ggml.merges: "),
        ({"tokens": ["a", "b", "a"]}, "has 'a' at 0 and at 2"),
        ({"bos_token_id": 99_999}, "bos_token_id is 99999, and the vocabulary has"),
        ({"model": "llama", "scores": [1.0]}, "scores has 1 entries for"),
    ],
)
def test_a_broken_vocabulary_is_refused_by_name(tmp_path, changes, problem):
    path = write_gguf(tmp_path / "broken.gguf", bpe_metadata(**changes))
    with pytest.raises(ValueError, match=problem) as error:
        load_tokenizer(path)
    assert "broken.gguf" in str(error.value)


@pytest.mark.slow
def test_the_default_models_tokenizer_is_the_one_transformers_loads(default_model):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
    ours = load_tokenizer(default_model)
    texts = [*TEXTS, WORDS, "x" * 300, "def f(a):\n    return a  # 1234567890", "<|im_start|>hi"]
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    messages = [{"role": "user", "content": "What is 12 * 12?"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.render_chat(messages) == expected
    assert ours.encode_chat(messages) == theirs.encode(expected, add_special_tokens=False)
    assert ours.eos_token_ids[0] == theirs.eos_token_id == 2


@pytest.mark.slow
def test_the_default_models_tokenizer_is_ready_in_half_a_second(default_model):
    import time

    began = time.thread_time()
    load_tokenizer(default_model)
    assert time.thread_time() - began < 0.5
