"""A model folder's tokenizer: its special tokens, its templates, and no torch in the process."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
import sentencepiece
from tiny_tokenizers import TEXTS, byte_level
from tiny_tokenizers import sentencepiece as sentencepiece_tokenizer

from srt.chat_template import ChatTemplateError
from srt.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def write_folder(path, config=None, **files):
    byte_level().backend.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return path


CONFIG = {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"}


def test_a_folder_is_loaded_with_its_special_tokens(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, CONFIG))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.vocab_size == byte_level().vocab_size
    assert tokenizer.encode("Hello") == byte_level().encode("Hello")


def test_a_tokenizer_json_is_enough(tmp_path):
    write_folder(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("Hello")[0] == 0
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [0], []),  # as tokenizer.json says
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [1]),
        ({"add_eos_token": True}, [0], [1]),
        ({"add_bos_token": True}, [0], []),
    ],
)
def test_the_config_decides_which_tokens_are_added(tmp_path, flags, before, after):
    tokenizer = load_tokenizer(write_folder(tmp_path, {**CONFIG, **flags}))
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*before, *plain, *after]
    assert tokenizer.encode_batch(["Hello", ""]) == [
        [*before, *plain, *after],
        [*before, *after],
    ]


def test_special_tokens_that_only_the_config_names_become_special(tmp_path):
    config = {**CONFIG, "pad_token": "<pad>", "additional_special_tokens": ["<|tool|>"]}
    tokenizer = load_tokenizer(write_folder(tmp_path, config))
    ids = tokenizer.encode("a<|tool|>b<pad>", add_special_tokens=False)
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|tool|>b<pad>"


def test_truncation_and_padding_left_in_a_tokenizer_json_are_switched_off(tmp_path):
    backend = byte_level().backend
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert len(tokenizer.encode("a")) == 2


def test_text_that_is_no_unicode_is_a_value_error_that_says_where():
    tokenizer = byte_level()
    with pytest.raises(ValueError, match=r"text 0 is not valid Unicode: character 2 .*ud800"):
        tokenizer.encode("ok\ud800")
    with pytest.raises(ValueError, match="text 1 is not valid Unicode: character 0"):
        tokenizer.encode_batch(["ok", "\udfff"])
    with pytest.raises(TypeError):
        tokenizer.encode(5)


def test_decode_of_nothing_and_of_unknown_ids_is_nothing():
    tokenizer = byte_level()
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "in config"}, {}, "in config"),
        ({"chat_template": "in config"}, {"chat_template__jinja": "in file"}, "in file"),
        (
            {"chat_template": "in config"},
            {"chat_template__json": json.dumps({"chat_template": "in json"})},
            "in json",
        ),
        ({"chat_template": [{"name": "default", "template": "named"}]}, {}, "named"),
    ],
)
def test_the_newest_form_of_a_chat_template_wins(tmp_path, config, files, expected):
    tokenizer = load_tokenizer(write_folder(tmp_path, {**CONFIG, **config}, **files))
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(MESSAGES) == expected


def test_a_template_for_tools_is_used_when_there_are_tools(tmp_path):
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    tokenizer = load_tokenizer(write_folder(tmp_path, {**CONFIG, "chat_template": templates}))
    assert tokenizer.render_chat(MESSAGES) == "plain"
    assert tokenizer.render_chat(MESSAGES, tools=[{"name": "f"}]) == "1 tools"


def test_a_chat_prompt_has_one_beginning_token(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, {**CONFIG, "chat_template": TEMPLATE}))
    ids = tokenizer.encode_chat(MESSAGES)
    assert ids == [0, *tokenizer.encode("Hello", add_special_tokens=False), 1]


def test_a_template_given_with_the_request_replaces_the_models(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, {**CONFIG, "chat_template": TEMPLATE}))
    rendered = tokenizer.render_chat(MESSAGES, chat_template="{{ eos_token }}{{ mood }}", mood="up")
    assert rendered == "<|end|>up"


def test_a_model_without_a_chat_template_says_what_to_do(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, CONFIG))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template: pass one with --chat-template"):
        tokenizer.encode_chat(MESSAGES)


def test_several_templates_without_a_default_are_listed(tmp_path):
    templates = [{"name": "rag", "template": "r"}, {"name": "base", "template": "b"}]
    tokenizer = load_tokenizer(write_folder(tmp_path, {**CONFIG, "chat_template": templates}))
    with pytest.raises(ChatTemplateError, match="no default: base, rag"):
        tokenizer.render_chat(MESSAGES)


def test_a_folder_without_a_tokenizer_says_which_files_were_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_refused_by_name(tmp_path, name):
    write_folder(tmp_path, CONFIG)
    (tmp_path / name).write_text("{ not json", encoding="utf-8")
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path)


def test_loading_and_using_a_tokenizer_imports_neither_torch_nor_transformers(tmp_path):
    write_folder(tmp_path, {**CONFIG, "chat_template": TEMPLATE})
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import srt.gguf_checkpoint, srt.model_files\n"
        "from srt.managers.detokenizer import Detokenizer\n"
        "from srt.managers.stop_matcher import StopMatcher\n"
        "from srt.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(Path(sys.argv[1]))\n"
        "tokenizer.encode_chat([{'role': 'user', 'content': 'x'}])\n"
        "Detokenizer(tokenizer).push(5)\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def write_sentencepiece(path) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (path / "tokenizer.model").write_bytes(model.getvalue())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.slow
def test_a_sentencepiece_folder_is_converted_once_and_then_kept(tmp_path, monkeypatch):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    sp = write_sentencepiece(folder)
    tokenizer = load_tokenizer(folder, cache)
    for text in TEXTS[:-1]:  # the last begins with a space, of which transformers makes one less
        assert tokenizer.encode(text) == [sp.bos_id(), *sp.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    kept = list((cache / "tokenizers").iterdir())
    assert [path.suffix for path in kept] == [".json"]
    monkeypatch.setattr(subprocess, "run", None)  # a second conversion would fail
    assert load_tokenizer(folder, cache).encode("Hello") == tokenizer.encode("Hello")


@pytest.mark.slow
def test_a_sentencepiece_model_that_cannot_be_converted_says_so(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, and transformers could not"):
        load_tokenizer(tmp_path, tmp_path / "cache")
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("make", [byte_level, sentencepiece_tokenizer])
def test_a_folder_gives_the_tokens_that_transformers_gives(tmp_path, make):
    from transformers import AutoTokenizer

    made: Tokenizer = make()
    made.backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        **made.special_tokens,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    chat = theirs.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    assert ours.encode_chat(MESSAGES, add_generation_prompt=False) == list(chat)
