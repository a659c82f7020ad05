"""Attacks that have a name: each is refused with a 400 that says why, and the server lives."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time

import pytest
from fake_scheduler import http_bytes, ids, serving_fake

from srt.chat_template import ChatTemplateError, render_chat_template
from srt.managers.io_struct import TokenizedGenerateReq

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


def prompt_of(path):
    return {
        GENERATE: {"text": "x"},
        COMPLETIONS: {"prompt": "x"},
        CHAT: {"messages": [{"role": "user", "content": "x"}]},
    }[path]


def body_of(path, params):
    body = prompt_of(path)
    return {**body, "sampling_params": params} if path == GENERATE else {**body, **params}


HUGE = [
    ({"n": 10**9}, "n must be in [1, 128], got 1000000000"),
    ({"n": 10**30}, "n"),
    ({"stop": ["x"] * 100_000}, "at most 32 stop strings"),
    ({"stop": "x" * 1_000_000}, "at most 4096 characters, got 1000000"),
    ({"stop_regex": ["x"] * 33}, "at most 32 stop regexes"),
    ({"stop_regex": "x" * 257}, "257 bytes, over the 256-byte limit"),
    ({"stop_regex": "a{1000000000}"}, "repeats too much"),
    ({"stop_token_ids": list(range(100_000))}, "at most 1024 ids, got 100000"),
    ({"logit_bias": {str(i): 1 for i in range(100_000)}}, "at most 8192 tokens, got 100000"),
    ({"regex": "(a+)+$"}, "regex is not supported"),
    ({"json_schema": '{"type": "object"}'}, "json_schema is not supported"),
    ({"ebnf": "root ::= root root"}, "ebnf is not supported"),
    ({"structural_tag": "{}" * 1000}, "structural_tag is not supported"),
]


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
@pytest.mark.parametrize(("params", "words"), HUGE, ids=range(len(HUGE)))
def test_what_is_huge_or_not_built_is_refused_quickly_by_its_limit(tmp_path, path, params, words):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            began = time.perf_counter()
            status, answer = await http.post(path, body_of(path, params))
            assert status == 400 and words in answer["message"], answer
            assert len(json.dumps(answer)) < 6000
            assert time.perf_counter() - began < 5
            assert not http.fake.of_type(TokenizedGenerateReq)

    asyncio.run(scenario())


def test_many_prompts_in_one_small_body_are_refused_before_they_are_looked_at(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            for path, body in (
                (GENERATE, {"text": ["a"] * 200_000}),
                (GENERATE, {"input_ids": [[5]] * 200_000}),
                (COMPLETIONS, {"prompt": ["a"] * 200_000}),
                (COMPLETIONS, {"prompt": ["a"] * 100, "n": 128}),
            ):
                status, answer = await http.post(path, body)
                assert status == 400 and "at most 4096 requests" in answer["message"], answer

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "value", [b"[" * 1_000_000, b'{"a":' * 500_000, b"[" * 1000 + b"]" * 1000, b'"' * 3]
)
@pytest.mark.parametrize("name", [b"chat_template_kwargs", b"messages", b"metadata"])
def test_deep_json_is_refused_or_ignored(tmp_path, name, value):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            data = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "'
            data += name + b'": ' + value + b"}"
            headers = {"Content-Type": "application/json"}
            async with http.session.post(CHAT, data=data, headers=headers) as response:
                assert response.status in (200, 400), await response.text()
            assert (await http.get("/health"))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "header",
    [
        ["X-Bomb: " + "x" * 100_000],
        [f"X-{i}: y" for i in range(5000)],
        ["X: " + "y" * 8000] * 1000,
        ["A" * 100_000 + ": y"],
        ["X-Y: a\r b"],
        ["X-Y: a\x00b"],
        ["Transfer-Encoding: chunked"],  # beside a Content-Length: smuggling
    ],
    ids=range(7),
)
def test_a_bomb_of_headers_is_a_400(tmp_path, header):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            reader, writer = await http.connect(b"")
            writer.write(http_bytes(GENERATE, prompt_of(GENERATE), *header))
            try:
                answer = await asyncio.wait_for(reader.read(300), 10)
            except ConnectionResetError:
                answer = b""  # it hung up before it had read everything
            assert answer == b"" or b" 400 " in answer[:20], answer
            writer.close()
            assert not http.fake.received and (await http.get("/health"))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "rid", ["a\nb", "a\r\n[2026-01-01 00:00:00] forged", "\x1b[2J", "r" * 257, "\u2028", "\x00"]
)
@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
def test_an_id_that_could_disturb_a_log_is_refused(tmp_path, path, rid):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            status, answer = await http.post(path, {**prompt_of(path), "rid": rid})
            assert status == 400 and answer["param"] == "rid"
            assert "at most 256 printable characters" in answer["message"]
            assert "\n" not in answer["message"]
            assert (await http.post(path, {**prompt_of(path), "rid": "r" * 256}))[0] == 200

    asyncio.run(scenario())


MODELS = [
    "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd",
    "C:\\x",
    "a%00b", "a%0d%0aSet-Cookie:%20x", "${jndi:ldap://x}", "%", "\u202e", "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_models_name_opens_no_file_and_adds_no_header(tmp_path, name):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            for path in (f"/v1/models/{name}", f"/v1/requests/{name}"):
                request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
                reader, writer = await http.connect(request.encode())
                answer = await asyncio.wait_for(reader.read(), 10)
                assert b" 404 " in answer[:20] or b" 400 " in answer[:20], answer
                assert b"root:" not in answer and b"Set-Cookie" not in answer.split(b"\r\n\r\n")[0]
                assert len(answer) < 4096
                writer.close()
            # A client may name any model; there is one, and no name is ever a path.
            body = {"prompt": "x", "max_tokens": 1, "model": name}
            assert (await http.post(COMPLETIONS, body))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hello world " * 100_000}]}),
        (COMPLETIONS, {"prompt": "hello world " * 100_000}),
        ("/tokenize", {"prompt": "hello world " * 100_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hello world " * 100_000}]}),
    ],
)
def test_a_long_text_does_not_hold_up_the_others_while_it_is_tokenized(
    tmp_path, monkeypatch, path, body
):
    threads = []

    async def scenario():
        async with serving_fake(tmp_path) as http:
            tokenizer = http.manager.tokenizer
            encode_batch = tokenizer.encode_batch

            def noting(*args, **kwargs):
                threads.append(threading.current_thread())
                return encode_batch(*args, **kwargs)

            monkeypatch.setattr(tokenizer, "encode_batch", noting)
            assert (await http.post(path, body))[0] == (200 if path == "/tokenize" else 400)

    asyncio.run(scenario())
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize("bad", [-1, 10**9, 2**63, 10**19])
def test_an_echo_of_ids_that_no_token_has_is_refused(tmp_path, bad):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            for prompt in ([bad], [5, bad], [[5], [bad]]):
                status, answer = await http.post(COMPLETIONS, {"prompt": prompt, "echo": True})
                assert status == 400, answer

    asyncio.run(scenario())


@pytest.mark.parametrize("value", [[], {}, "deep"])
def test_a_setting_is_no_list_and_crosses_to_no_scheduler(tmp_path, value):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            data = json.dumps({"max_running_requests": value}).replace(
                '"deep"', "[" * 900 + "]" * 900
            )
            nested = f'{{"server_args": {data}}}'
            for method, path, body in (
                ("PATCH", "/v1/scheduler", data),
                ("POST", "/set_internal_state", nested),
            ):
                headers = {"Content-Type": "application/json"}
                async with http.session.request(method, path, data=body, headers=headers) as got:
                    assert got.status == 400
                    assert "`max_running_requests`" in (await got.json())["message"]
            assert not http.fake.received

    asyncio.run(scenario())


# --- chat templates ---


@pytest.mark.parametrize(
    "field", ["chat_template", "messages", "tools", "add_generation_prompt", "documents"]
)
def test_a_request_cannot_bring_a_template_nor_pass_fields_off_as_variables(tmp_path, field):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            bomb = "{% for i in range(10**9) %}{{ i }}{% endfor %}"
            body = {**prompt_of(CHAT), "max_tokens": 1}
            status, answer = await http.post(CHAT, {**body, "chat_template_kwargs": {field: bomb}})
            assert status == (200 if field == "documents" else 400), answer
            for path in (CHAT, "/tokenize"):
                status, answer = await http.post(path, {**body, "chat_template": bomb})
                assert status == 400 and "--chat-template" in answer["message"], answer
            sent = http.fake.of_type(TokenizedGenerateReq)
            assert all(request.input_ids == ids("[user]x[assistant]") for request in sent)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "text",
    ["{{ 7*7 }}", "{% for i in range(10**9) %}", "{{ raise_exception('x') }}", "[assistant]"],
)
def test_a_template_in_a_message_is_text(tmp_path, text):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            message = {"role": "user", "content": text}
            body = {"messages": [message], "max_tokens": 1}
            assert (await http.post(CHAT, body))[0] == 200
            [sent] = http.fake.of_type(TokenizedGenerateReq)
            assert sent.input_ids == ids(f"[user]{text}[assistant]")

    asyncio.run(scenario())


ESCAPES = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('x') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ messages.append(1) }}",
    "{{ '%c' % 1114112 * 10**12 }}",
    "{{ range(10**9) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ ('{0.__class__.__mro__}').format(messages) }}",
    "{{ namespace(__class__=1) }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_models_template_cannot_leave_its_sandbox(template):
    with pytest.raises(ChatTemplateError):
        text = render_chat_template(template, [{"role": "user", "content": "x"}])
        # What is undefined may also be nothing at all.
        raise ChatTemplateError if text == "" else AssertionError(text[:200])


def test_user_text_in_a_failure_forges_no_line(tmp_path, caplog, monkeypatch):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            monkeypatch.setattr(http.manager, "requests", lambda rid: 1 / 0)
            status, answer = await http.get("/v1/requests/a%0D[2026-01-01%2000:00:00]%20forged")
            assert (status, answer["message"]) == (500, "Internal server error.")

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    [record] = caplog.records
    assert "\r" not in record.getMessage() and "%0D" in record.getMessage()
