from __future__ import annotations

import asyncio

import pytest
from fake_scheduler import ids, serving_fake, spelling, until

from srt.managers.io_struct import TokenizedGenerateReq

CHAT = "/v1/chat/completions"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_forbids_the_system_role_is_a_400_with_its_words(tmp_path, stream):
    """H54."""
    template = tmp_path / "template.jinja"
    template.write_text(NO_SYSTEM)

    async def scenario():
        async with serving_fake(tmp_path) as http:
            http.manager.tokenizer.chat_templates = {"default": template.read_text()}
            messages = [{"role": "system", "content": "be kind"}, user("hello")]
            status, answer = await http.post(CHAT, {"messages": messages, "stream": stream})
            assert status == 400 and "System role not supported" in answer["message"]
            assert (await http.post(CHAT, {"messages": messages[1:], "max_tokens": 1}))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"messages": [assistant("hi")]}, "[assistant]hi[assistant]"),
        ({"messages": [user("a"), assistant("b")]}, "[user]a[assistant]b[assistant]"),
        (
            {"messages": [user("a"), assistant("b")], "continue_final_message": True},
            "[user]a[assistant]b",
        ),
    ],
)
def test_the_generation_prompt_comes_exactly_once(tmp_path, body, prompt):
    """H55."""

    async def scenario():
        async with serving_fake(tmp_path) as http:
            assert (await http.post(CHAT, {**body, "max_tokens": 1}))[0] == 200
            [sent] = http.fake.of_type(TokenizedGenerateReq)
            assert sent.input_ids == ids(prompt)
            status, answer = await http.post(CHAT, {"messages": []})
            assert (status, answer["message"]) == (400, "Messages cannot be empty.")

    asyncio.run(scenario())


def test_the_second_turn_of_a_tool_conversation_is_accepted(tmp_path):
    """H56: content null beside tool_calls, as OpenAI's clients send it."""

    async def scenario():
        async with serving_fake(tmp_path) as http:
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            messages = [
                user("weather?"),
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            ]
            status, answer = await http.post(CHAT, {"messages": messages, "max_tokens": 1})
            assert status == 200, answer

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_usage_of_a_stream_is_that_of_the_plain_reply(tmp_path, path):
    """H46 with H07: n = 2."""

    async def scenario():
        async with serving_fake(tmp_path, spelling("fine")) as http:
            prompt = {"prompt": "x"} if path != CHAT else {"messages": [user("x")]}
            body = {**prompt, "n": 2, "stream_options": {"include_usage": True}}
            usage = (await http.post(path, {**body, "stream_options": None}))[1]["usage"]
            *events, last = await http.stream(path, body)
            assert last["choices"] == [] and last["usage"] == usage
            assert all(event["usage"] is None and event["choices"] for event in events)
            assert usage["completion_tokens"] == 10

    asyncio.run(scenario())


def test_a_busy_server_is_healthy(tmp_path):
    """H48: the scheduler in a long pass, its queue full."""

    async def scenario():
        async with serving_fake(tmp_path, passes=0, max_queued_requests=2) as http:
            body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
            waiting = [asyncio.create_task(http.post("/generate", body)) for _ in range(2)]
            await until(lambda: http.manager.queue.num_waiting == 2)
            http.fake.is_deaf = True
            assert (await http.post("/generate", body))[0] == 503
            for path in ("/health", "/ready", "/ping"):
                assert (await http.get(path))[0] == 200
            http.fake.passes_left = 1
            assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]

    asyncio.run(scenario())


def test_no_embeddings_come_from_a_model_that_generates(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            status, answer = await http.post("/v1/embeddings", {"input": "x"})
            assert status == 400 and "no embedding model" in answer["error"]["message"]

    asyncio.run(scenario())


def test_openais_client_sees_a_full_queue_as_a_server_error_and_streams_choices(tmp_path):
    openai = pytest.importorskip("openai")

    async def scenario():
        async with serving_fake(tmp_path, spelling("well"), max_queued_requests=3) as http:
            url = f"{http.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
                stream = await client.completions.create(model="m", prompt="a", n=2, stream=True)
                texts = ["", ""]
                async for chunk in stream:
                    texts[chunk.choices[0].index] += chunk.choices[0].text
                assert texts == ["well", "well"]
                plain = await client.completions.create(
                    model="m", prompt="ab", echo=True, stop=["l"], seed=3, max_tokens=9
                )
                assert plain.choices[0].text == "abwe"
                assert plain.choices[0].finish_reason == "stop"
                assert plain.usage.prompt_tokens_details.cached_tokens == 2
                model = await client.models.retrieve((await client.models.list()).data[0].id)
                assert model.owned_by == "sglang"
                with pytest.raises(openai.NotFoundError):
                    await client.models.retrieve("other")
                http.fake.passes_left = 0
                waiting = asyncio.create_task(
                    client.completions.create(model="m", prompt="a", n=3, max_tokens=1)
                )
                await until(lambda: http.manager.queue.num_waiting == 3)
                with pytest.raises(openai.InternalServerError, match="queue is full") as caught:
                    await client.completions.create(model="m", prompt="a")
                assert caught.value.status_code == 503
                http.fake.passes_left = 9
                assert len((await waiting).choices) == 3
                with pytest.raises(openai.BadRequestError, match="tools"):
                    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
                    await client.chat.completions.create(
                        model="m", messages=[user("x")], tools=[tool]
                    )
                with pytest.raises(openai.BadRequestError, match="embedding"):
                    await client.embeddings.create(model="m", input="x")

    asyncio.run(scenario())
