"""Tokens are counted with the server's own tokenizer, from its files or by its routes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from stub_server import StubServer
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.tokenizer import LocalTokenizer, ServerTokenizer, TokenizerError, load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A word-level tokenizer with one special token and a chat template."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "<end>", "red", "green", "blue"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.enable_truncation(2)  # lengths must be true all the same
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "eos_token": {"content": "<end>"},
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def load(asked: str | None, names: list[str], url: str = "http://127.0.0.1:1"):
    return load_tokenizer(asked, names, url, "m", {})


def test_a_folder_or_a_file_given_by_name_is_used(folder):
    for name in (folder, folder / "tokenizer.json"):
        tokenizer = load(str(name), [])
        assert isinstance(tokenizer, LocalTokenizer)
        assert tokenizer.encode("red green blue") == [2, 3, 4]
        assert tokenizer.decode([4, 2]) == "blue red"
        assert tokenizer.description == str(name)


def test_the_first_of_the_servers_names_with_files_here_is_used(folder):
    tokenizer = load(None, ["/nowhere/model.gguf", str(folder)])
    assert tokenizer.description == str(folder)


def test_random_ids_are_no_special_tokens(folder):
    ids = load(str(folder), []).random_ids(200, random.Random(0))
    assert set(ids) == {0, 2, 3, 4}


def test_the_chat_template_of_the_folder_is_applied(folder):
    messages = [{"role": "user", "content": "hi"}]
    assert load(str(folder), []).render_chat(messages) == "user: hi<end>assistant:"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load(str(folder), []).render_chat(messages) == "hi!"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="holds no chat template"):
        load(str(folder), []).render_chat(messages)


def test_a_name_that_leads_nowhere_is_an_error_that_says_so(tmp_path):
    with pytest.raises(TokenizerError, match=r"expected a folder with tokenizer\.json"):
        load(str(tmp_path), [])


def test_the_servers_routes_are_asked_when_no_file_is_here():
    with StubServer() as server:
        tokenizer = load(None, ["/nowhere/model.gguf"], server.url)
        assert isinstance(tokenizer, ServerTokenizer)
        assert tokenizer.encode("abc") == [97, 98, 99]
        assert tokenizer.encode("") == []
        assert tokenizer.decode([98, 97]) == "ba"
        assert set(tokenizer.random_ids(50, random.Random(0))) <= set(tokenizer.known_ids)
        assert server.url in tokenizer.description
        assert server.sent("/tokenize")[-1]["add_special_tokens"] is False
        tokenizer.close()
        assert tokenizer.encode("a") == [97]  # a lost connection is opened again
        tokenizer.close()


def test_a_server_without_the_route_or_none_at_all_is_an_error():
    with StubServer(tokenize=False) as server, pytest.raises(TokenizerError, match="HTTP 404"):
        load(None, [], server.url)
    with pytest.raises(TokenizerError, match="pass --tokenizer"):
        load(None, [], server.url)
