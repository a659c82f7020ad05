from __future__ import annotations

import asyncio
import io
import sys

import pytest
from fake_scheduler import serving_fake, spelling, until

from srt.chat import ChatClient, ChatError, main
from srt.managers.io_struct import TokenizedGenerateReq


def chat(tmp_path, argv, script=None, **args):
    """Exit code of the command, run against a server, and the prompts that reached it."""

    async def scenario():
        async with serving_fake(tmp_path, script or spelling("I am né"), **args) as http:
            code = await asyncio.to_thread(main, [*argv, "--url", http.url])
            sent = http.fake.of_type(TokenizedGenerateReq)
            return code, [http.manager.tokenizer.decode(r.input_ids) for r in sent]

    return asyncio.run(scenario())


def test_one_question_prints_its_answer_and_nothing_else(tmp_path, capsys):
    code, prompts = chat(tmp_path, ["Who?", "--system", "Be brief", "--temperature", "0"])
    assert code == 0
    assert capsys.readouterr().out == "I am né\n"
    assert prompts == ["[system]Be brief[user]Who?[assistant]"]


def test_a_conversation_remembers_until_told_to_forget(tmp_path, capsys, monkeypatch):
    lines = "Who?\n\nAnd I?\n/new\nAgain\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, prompts = chat(tmp_path, [])
    assert code == 0
    assert prompts == [
        "[user]Who?[assistant]",
        "[user]Who?[assistant]I am né[user]And I?[assistant]",
        "[user]Again[assistant]",
    ]
    assert capsys.readouterr().out.count("I am né") == 3


def test_a_refused_question_leaves_the_conversation_as_it_was(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n" + "x" * 300 + "\nBye\n"))
    code, prompts = chat(tmp_path, [])
    assert code == 0
    assert prompts[-1] == "[user]Hi[assistant]I am né[user]Bye[assistant]"
    assert "longer than the model's context" in " ".join(capsys.readouterr().err.split())


def test_a_wrong_key_is_said_and_ends_with_1(tmp_path, capsys):
    code, _ = chat(tmp_path, ["Who?", "--api-key", "no"], api_key="yes")
    assert code == 1
    assert "401" in capsys.readouterr().err
    (tmp_path / "b").mkdir()
    code, _ = chat(tmp_path / "b", ["Who?", "--api-key", "yes"], api_key="yes")
    assert code == 0


def test_without_a_server_it_says_how_to_start_one(capsys):
    assert main(["Who?", "--url", "http://127.0.0.1:1"]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "http://127.0.0.1:1" in error and "--start-server" in error
    assert main(["--url", "http://127.0.0.1:1"]) == 1


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_a_wrong_url_is_named(url):
    with pytest.raises(ChatError, match="--url"):
        ChatClient(url)


def test_options_for_a_server_need_start_server(capsys):
    with pytest.raises(SystemExit):
        main(["Who?", "--", "--context-length", "100"])
    assert "--start-server" in capsys.readouterr().err


def test_leaving_an_answer_early_ends_it_on_the_server(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=3) as http:

            def first_piece():
                pieces = ChatClient(http.url).stream([{"role": "user", "content": "x"}], None, None)
                piece = next(pieces)
                pieces.close()
                return piece

            assert await asyncio.to_thread(first_piece) in ("a", "ab", "abc")
            await until(lambda: not http.fake.live and http.manager.num_live == 0)

    asyncio.run(scenario())
