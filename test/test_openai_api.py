from __future__ import annotations

import asyncio

import pytest
from fake_scheduler import ids, serving_fake, spelling

from srt.managers.io_struct import TokenizedGenerateReq

HELLO = [{"role": "user", "content": "hello"}]


def test_a_chat_is_rendered_answered_and_counted(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, spelling("hi there")) as http:
            body = {"messages": HELLO, "model": "any", "temperature": 0}
            status, answer = await http.post("/v1/chat/completions", body)
            assert status == 200
            assert answer["object"] == "chat.completion" and answer["model"] == "any"
            [choice] = answer["choices"]
            assert choice["message"] == {
                "role": "assistant",
                "content": "hi there",
                "reasoning_content": None,
                "tool_calls": None,
            }
            assert (choice["index"], choice["finish_reason"], choice["matched_stop"]) == (
                0,
                "stop",
                0,
            )
            [sent] = http.fake.of_type(TokenizedGenerateReq)
            assert sent.input_ids == ids("[user]hello[assistant]")
            # No limit given: up to the end of what fits.
            assert sent.sampling_params.max_new_tokens == 150 - len(sent.input_ids)
            usage = answer["usage"]
            assert usage["prompt_tokens"] == len(sent.input_ids)
            assert usage["completion_tokens"] == 9
            assert usage["total_tokens"] == usage["prompt_tokens"] + 9
            assert usage["prompt_tokens_details"] == {"cached_tokens": 2}

    asyncio.run(scenario())


def test_a_chat_stream_has_role_then_text_then_end_then_usage(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, spelling("hé!")) as http:
            body = {"messages": HELLO, "stream_options": {"include_usage": True}}
            *events, usage = await http.stream("/v1/chat/completions", body)
            deltas = [event["choices"][0]["delta"] for event in events]
            assert deltas[0] == {"role": "assistant", "content": "", "reasoning_content": None}
            assert "".join(delta.get("content", "") for delta in deltas) == "hé!"
            assert all(delta["content"] for delta in deltas[1:-1])
            assert deltas[-1] == {}
            reasons = [event["choices"][0]["finish_reason"] for event in events]
            assert reasons == [None] * (len(events) - 1) + ["stop"]
            assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
            assert {event["object"] for event in events} == {"chat.completion.chunk"}
            assert len({event["id"] for event in [*events, usage]}) == 1

    asyncio.run(scenario())


def test_usage_is_in_a_stream_only_if_asked_for(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            body = {"prompt": "x", "max_tokens": 2}
            events = await http.stream("/v1/completions", body)
            assert all(event["choices"] and event["usage"] is None for event in events)
            body["stream_options"] = {"continuous_usage_stats": True}
            events = await http.stream("/v1/completions", body)
            assert all(event["usage"]["completion_tokens"] for event in events)

    asyncio.run(scenario())


def test_a_server_may_send_usage_unless_asked_not_to(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, stream_response_default_include_usage=True) as http:
            body = {"prompt": "a", "max_tokens": 3}
            assert (await http.stream("/v1/completions", body))[-1]["choices"] == []
            body["stream_options"] = {"include_usage": False}
            events = await http.stream("/v1/completions", body)
            assert all(event["choices"] for event in events)

    asyncio.run(scenario())


def test_a_completion_stream_gives_the_text_in_pieces(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            events = await http.stream("/v1/completions", {"prompt": "x", "max_tokens": 8})
            assert "".join(event["choices"][0]["text"] for event in events) == "abcdefgh"
            assert events[-1]["choices"][0]["finish_reason"] == "length"

    asyncio.run(scenario())


def test_choices_are_numbered_over_prompts_and_the_prompt_counts_once(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 3}
            _, answer = await http.post("/v1/completions", body)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            assert answer["usage"]["prompt_tokens"] == 3
            assert answer["usage"]["completion_tokens"] == 12
            last = {}
            for event in await http.stream("/v1/completions", body):
                [choice] = event["choices"]
                last[choice["index"]] = last.get(choice["index"], "") + choice["text"]
            assert last == dict.fromkeys(range(4), "abc")

    asyncio.run(scenario())


@pytest.mark.parametrize("prompt", ["ab", ["ab"], ids("ab"), [ids("ab")]])
def test_a_prompt_may_be_text_or_ids_alone_or_in_a_list(tmp_path, prompt):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            body = {"prompt": prompt, "max_tokens": 2, "echo": True, "best_of": 1, "logprobs": None}
            _, answer = await http.post("/v1/completions", body)
            assert answer["choices"][0]["text"] == "abab"
            assert http.fake.of_type(TokenizedGenerateReq)[0].input_ids == ids("ab")

    asyncio.run(scenario())


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}, {"max_completion_tokens": None}])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HELLO})],
)
def test_no_limit_means_what_fits_absent_or_null(tmp_path, path, body, limit):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            _, answer = await http.post(path, {**body, **limit})
            assert answer["usage"]["total_tokens"] == 150
            assert answer["choices"][0]["finish_reason"] == "length"

    asyncio.run(scenario())


def test_sampling_parameters_arrive_under_their_own_names(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            body = {
                "prompt": "x",
                "max_completion_tokens": 5,
                "seed": 11,
                "min_tokens": 2,
                "stop": "zz",
                "include_stop_str_in_output": True,
                "logit_bias": {"7": -1},
                "top_k": 4,
                "user": "someone",
            }
            assert (await http.post("/v1/completions", body))[0] == 200
            params = http.fake.of_type(TokenizedGenerateReq)[0].sampling_params
            assert (params.sampling_seed, params.min_new_tokens, params.stop) == (11, 2, ("zz",))
            assert params.no_stop_trim and params.logit_bias == {7: -1.0} and params.top_k == 4
            assert params.max_new_tokens == 5

    asyncio.run(scenario())


def test_text_parts_are_joined_and_other_parts_refused(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
            assert (await http.post("/v1/chat/completions", body))[0] == 200
            [sent] = http.fake.of_type(TokenizedGenerateReq)
            assert sent.input_ids == ids("[user]a\nb[assistant]")
            parts.append({"type": "image_url", "image_url": {"url": "x"}})
            status, answer = await http.post("/v1/chat/completions", body)
            assert status == 400 and "image_url" in answer["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {}, "Prompt cannot be empty"),
        ("/v1/completions", {"prompt": ""}, "Prompt cannot be empty"),
        ("/v1/completions", {"prompt": ["a", ""]}, "Prompt cannot be empty"),
        ("/v1/completions", {"prompt": [200_000_000]}, "200000000"),
        ("/v1/completions", {"prompt": {"a": 1}}, "invalid type: map"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens must be positive"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "5"}, 'string "5"'),
        ("/v1/completions", {"prompt": "a", "max_tokens": 500}, "501 tokens"),
        ("/v1/completions", {"prompt": "a", "logprobs": 30}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n must be"),
        ("/v1/completions", {"prompt": "a", "stream_options": 5}, "stream_options"),
        ("/v1/chat/completions", {"messages": []}, "Messages cannot be empty."),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": [5]}, "messages[0]"),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "content"),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "tool_choice": "required"},
            "Tools cannot be empty if tool choice is set to required.",
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "tool_choice": {"function": {"name": "f"}}},
            "tool_choice",
        ),
        ("/v1/chat/completions", {"messages": HELLO, "return_token_ids": True}, "return_token_ids"),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "response_format": {"type": "json_object"}},
            "json_object",
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_a_400_in_openais_shape(tmp_path, path, body, words, stream):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            status, answer = await http.post(path, {**body, "stream": stream})
            assert status == 400
            assert words in answer["error"]["message"]
            assert answer["error"]["code"] == 400 and answer["code"] == 400
            assert not http.fake.of_type(TokenizedGenerateReq)

    asyncio.run(scenario())


def test_openais_own_client_works_and_knows_our_errors(tmp_path):
    openai = pytest.importorskip("openai")

    async def scenario():
        async with serving_fake(tmp_path, spelling("well"), api_key="key") as http:
            url = f"{http.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
                chat = client.chat.completions
                answer = await chat.create(model="m", messages=HELLO)
                assert answer.choices[0].message.content == "well"
                stream = await chat.create(
                    model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
                )
                chunks = [chunk async for chunk in stream]
                pieces = [c.delta.content or "" for chunk in chunks for c in chunk.choices]
                assert "".join(pieces) == "well" and chunks[-1].usage.completion_tokens == 5
                assert [model.id async for model in client.models.list()]
                with pytest.raises(openai.BadRequestError, match="temperature"):
                    await client.completions.create(model="m", prompt="a", temperature=-1)
            async with openai.AsyncOpenAI(base_url=url, api_key="no", max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()

    asyncio.run(scenario())
