from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from fake_scheduler import (
    CONTEXT_LEN,
    POOL_SIZE,
    VOCAB_SIZE,
    events_of,
    ids,
    serving_fake,
    spelling,
    until,
)

from srt.http_server import HttpServer
from srt.managers.io_struct import AbortReq, FinishReason, FinishType, TokenizedGenerateReq
from srt.server_args import ServerArgs


def few(n=3, **params):
    return {"max_new_tokens": n, **params}


def test_generate_answers_with_text_ids_and_numbers(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            body = {"text": "hello", "sampling_params": few(), "rid": "mine", "parallel_batch": 1}
            status, answer = await http.post("/generate", body)
            assert status == 200
            assert (answer["text"], answer["output_ids"]) == ("abc", ids("abc"))
            meta = answer["meta_info"]
            assert meta["id"] == "mine"
            assert meta["finish_reason"] == {"type": "length", "length": 3}
            assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 3)
            assert (meta["cached_tokens"], meta["queue_time"]) == (2, 0.25)
            assert meta["cached_tokens_details"] == {"device": 2, "host": 0}
            assert 0 < meta["first_token_latency"] <= meta["e2e_latency"]
            assert meta["response_sent_to_client_ts"] > 0
            assert meta["dp_rank"] is None and meta["num_retractions"] == 0
            assert meta["reasoning_tokens"] == 0 and "prompt_token_ids" not in answer
            async with http.session.put("/generate", json=body) as response:
                assert response.status == 200

    asyncio.run(scenario())


def test_a_batch_is_answered_in_the_order_of_its_prompts(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            body = {
                "input_ids": [[5, 6], [7], [8]],
                "rid": "b",
                "sampling_params": [few(3), few(1), few(2)],
            }
            _, answer = await http.post("/generate", body)
            assert [a["text"] for a in answer] == ["abc", "a", "ab"]
            assert [a["meta_info"]["id"] for a in answer] == ["b_0", "b_1", "b_2"]
            _, answer = await http.post("/generate", {"text": ["x"], "sampling_params": few()})
            assert isinstance(answer, list) and len(answer) == 1

    asyncio.run(scenario())


def test_the_prompts_ids_are_in_the_answer_if_asked_for(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            http.fake.passes_left = 100
            body = {"text": ["hi", "yo"], "sampling_params": few()}
            body["return_prompt_token_ids"] = True
            _, answer = await http.post("/generate", body)
            assert [a["prompt_token_ids"] for a in answer] == [ids("hi"), ids("yo")]
            events = await http.stream("/generate", {**body, "text": "hi"})
            for event in (events[0], events[-1]):
                assert event["prompt_token_ids"] == ids("hi")

    asyncio.run(scenario())


def test_several_choices_are_a_list(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            body = {"text": ["x", "y"], "sampling_params": {"max_new_tokens": 1, "n": 3}}
            _, answer = await http.post("/generate", body)
            assert len(answer) == 6
            assert len({a["meta_info"]["id"] for a in answer}) == 6

    asyncio.run(scenario())


def test_a_stream_is_cumulative_and_every_chunk_has_its_counts(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            http.fake.passes_left = 6
            events = await http.stream("/generate", {"text": "x", "sampling_params": few(6)})
            assert events[-1]["text"] == "abcdef"
            for before, after in pairwise(events):
                assert after["text"].startswith(before["text"])
                assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
                assert before["meta_info"]["finish_reason"] is None
            for event in events:
                assert event["meta_info"]["completion_tokens"] == len(event["output_ids"])
                assert "index" not in event
            last = events[-1]["meta_info"]
            assert last["finish_reason"] == {"type": "length", "length": 6}
            assert last["e2e_latency"] > 0

    asyncio.run(scenario())


def test_an_incremental_stream_gives_every_token_once(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, incremental_streaming_output=True) as http:
            events = await http.stream("/generate", {"text": "x", "sampling_params": few(9)})
            assert "".join(e["text"] for e in events) == "abcdefghi"
            assert [i for e in events for i in e["output_ids"]] == ids("abcdefghi")
            assert events[-1]["meta_info"]["completion_tokens"] == 9

    asyncio.run(scenario())


def test_a_batch_stream_says_which_prompt_a_chunk_is_of(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            body = {"text": ["x", "y"], "sampling_params": [few(2), few(4)]}
            last = {}
            for event in await http.stream("/generate", body):
                last[event["index"]] = event
            assert [last[i]["text"] for i in (0, 1)] == ["ab", "abcd"]

    asyncio.run(scenario())


def test_no_new_tokens_is_answered_with_an_empty_text(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            body = {"text": "x", "sampling_params": {"max_new_tokens": 0}}
            _, answer = await http.post("/generate", body)
            assert (answer["text"], answer["output_ids"]) == ("", [])
            assert answer["meta_info"]["completion_tokens"] == 0
            assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
            [event] = await http.stream("/generate", body)
            assert event["text"] == ""

    asyncio.run(scenario())


BAD_BODIES = [
    ({}, "Either text, input_ids or input_embeds should be provided."),
    ({"text": "a", "input_ids": [5]}, "Either text, input_ids"),
    ({"text": ""}, "empty"),
    ({"text": ["a", ""]}, "empty"),
    ({"text": []}, "empty"),
    ({"text": 5}, "invalid type: integer `5`"),
    ({"text": ["a", 5]}, "invalid type: integer `5`"),
    ({"input_ids": []}, "input_ids cannot be empty."),
    ({"input_ids": [[5], []]}, "input_ids cannot be empty."),
    ({"input_ids": [5, True]}, "boolean `true`"),
    ({"input_ids": [5, 1.5]}, "floating point `1.5`"),
    ({"input_ids": "abc"}, 'string "abc"'),
    ({"input_ids": [200_000_000]}, f"200000000, which is outside the vocabulary of {VOCAB_SIZE}"),
    ({"text": "a", "stream": "yes"}, 'invalid type: string "yes", expected a boolean'),
    ({"text": "a", "sampling_params": 5}, "expected struct SamplingParams"),
    ({"text": "a", "sampling_params": {"nope": 1}}, "unknown field `nope`, expected one of"),
    ({"text": "a", "sampling_params": {"max_new_tokens": "8"}}, 'invalid type: string "8"'),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "at least 0, got -1."),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "1 members for 2 prompts"),
    ({"text": "a", "sampling_params": {"stop_regex": "("}}, "stop_regex"),
    ({"text": "a", "rid": 5}, "invalid type: integer `5`"),
    ({"text": ["a", "b"], "rid": ["x"]}, "1 members for 2 prompts"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "Duplicate request ID detected: x"),
    ({"text": "a", "return_hidden_states": True}, "return_hidden_states is not supported"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": -2}, "top_logprobs_num must be in"),
    ({"text": "a", "lora_path": "x"}, "lora_path is not supported"),
    ({"text": "a", "image_data": "x"}, "image_data is not supported"),
    ({"text": "a" * CONTEXT_LEN}, f"({CONTEXT_LEN} tokens) is longer than the model's context"),
    ({"text": "a" * POOL_SIZE}, f"({POOL_SIZE} tokens) exceeds the maximum allowed length"),
    ([], "invalid type: sequence, expected struct GenerateRequest"),
]


@pytest.mark.parametrize(("body", "words"), BAD_BODIES)
def test_a_bad_request_is_a_real_400_streamed_or_not(tmp_path, body, words):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            bodies = [body, {**body, "stream": True}] if isinstance(body, dict) else [body]
            if isinstance(body, dict) and "stream" in body:
                bodies = [body]
            for each in bodies:
                status, answer = await http.post("/generate", each)
                assert status == 400
                assert words in answer["message"]
                assert answer["object"] == "error" and answer["code"] == 400
                error = answer["error"]
                assert words in (error if isinstance(error, str) else error["message"])
            assert not http.fake.of_type(TokenizedGenerateReq)

    asyncio.run(scenario())


def test_every_null_and_every_off_value_is_accepted(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            names = ["rid", "stream", "return_logprob", "lora_path", "session_params", "priority"]
            body = {"text": "a", "sampling_params": {"json_schema": None, **few()}}
            body |= dict.fromkeys(names)
            assert (await http.post("/generate", body))[0] == 200
            body |= {"return_logprob": False, "return_routed_experts": False, "lora_path": [None]}
            body |= {"logprob_start_len": -1, "top_logprobs_num": 0, "input_embeds": None}
            assert (await http.post("/generate", body))[0] == 200
            assert (await http.post("/generate", {"text": "a", "sampling_params": None}))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        ('{"text": "你好"}'.encode("gbk"), "application/json"),
        (b'{"text": "hel', "application/json"),
        (b"{:", "application/json"),
        (b"", "application/json"),
        (b"\xff\xfe\x00", "application/json"),
        (b'{"text": NaN}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"text": "a"}', "text/plain"),
        (b"text=a", "application/x-www-form-urlencoded"),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_what_is_not_json_is_refused_and_the_server_lives(tmp_path, data, content_type, path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            headers = {"Content-Type": content_type}
            async with http.session.post(path, data=data, headers=headers) as response:
                assert response.status == 400
                assert (await response.json())["message"]
            body = {"text": "a", "sampling_params": few()}
            assert (await http.post("/generate", body))[0] == 200

    asyncio.run(scenario())


def test_an_error_is_small_however_large_the_request(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            bodies = [
                ("/v1/chat/completions", {"messages": [{"role": {"x": "y" * 1000}}] * 5000}),
                ("/v1/chat/completions", {"messages": ["z" * 100_000]}),
                ("/generate", {"text": "a", "sampling_params": {"n" * 1_000_000: 1}}),
                ("/generate", {"text": "a", "sampling_params": "q" * 1_000_000}),
                ("/generate", {"text": ["a", "a"], "rid": ["r" * 1_000_000] * 2}),
            ]
            for path, body in bodies:
                status, answer = await http.post(path, body)
                assert status == 400
                assert len(json.dumps(answer)) < 8192

    asyncio.run(scenario())


def test_a_body_over_the_limit_is_413(tmp_path):
    async def scenario():
        limit = 100_000
        async with serving_fake(tmp_path, max_body_bytes=limit) as http:
            headers = {"Content-Type": "application/json"}
            data = b" " * (limit + 1)
            response = await http.session.post("/generate", data=data, headers=headers)
            assert response.status == 413
            assert str(limit) in (await response.json())["message"]

    asyncio.run(scenario())


def test_unknown_routes_and_methods_have_the_flat_error(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            status, answer = await http.get("/nope")
            assert (status, answer["object"], answer["code"]) == (404, "error", 404)
            status, answer = await http.get("/generate")
            assert (status, answer["code"]) == (405, 405)

    asyncio.run(scenario())


def test_a_refusal_by_the_scheduler_is_an_http_error_streamed_or_not(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            http.fake.abort_with = FinishReason(
                FinishType.ABORT, message="The request queue is full.", status_code=503
            )
            for stream in (False, True):
                for path, field in (("/generate", "text"), ("/v1/completions", "prompt")):
                    body = {field: "x", "stream": stream}
                    async with http.session.post(path, json=body) as response:
                        assert response.status == 503
                        assert response.headers["Retry-After"]
                        answer = await response.json()
                    assert answer["message"] == "The request queue is full."
                    assert answer["error"]["code"] == 503

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(tmp_path, stream):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            body = {"text": "x", "stream": stream, "sampling_params": few(100)}
            request = asyncio.create_task(http.post("/generate", body))
            await until(lambda: bool(http.fake.live))
            if stream:
                http.fake.passes_left = 3
                await until(lambda: http.fake.num_passes == 3)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await until(lambda: not http.fake.live)
            await until(lambda: http.manager.num_live == 0)
            http.fake.passes_left = 3
            assert (await http.post("/generate", {"text": "y", "sampling_params": few()}))[0] == 200

    asyncio.run(scenario())


def test_many_clients_that_go_away_leave_a_server_that_serves(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            for _ in range(3):
                body = {"text": "x", "stream": True, "sampling_params": few(100)}
                load = [asyncio.create_task(http.post("/generate", body)) for _ in range(60)]
                await until(lambda: len(http.fake.live) == 60)
                for request in load:
                    request.cancel()
                await asyncio.gather(*load, return_exceptions=True)
                await until(lambda: not http.fake.live and http.manager.num_live == 0)
            http.fake.passes_left = 3
            assert (await http.post("/generate", {"text": "y", "sampling_params": few()}))[0] == 200

    asyncio.run(scenario())


def test_abort_request_ends_it_with_200_and_finish_reason_abort(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            body = {"text": "x", "rid": "req-1"}
            one = asyncio.create_task(http.post("/generate", body))
            ten = asyncio.create_task(
                http.post("/generate", {"text": "x", "rid": "req-10", "sampling_params": few()})
            )
            await until(lambda: len(http.fake.live) == 2)
            assert await http.post("/abort_request", {"rid": "req-1"}) == (200, "")
            assert await http.post("/abort_request", {"rid": ""}) == (200, "")
            assert await http.post("/abort_request", {"rid": "unknown"}) == (200, "")
            status, answer = await one
            assert status == 200
            assert answer["meta_info"]["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
            assert (await http.post("/abort_request", {"rid": 5}))[0] == 400
            await http.post("/abort_request", {"abort_all": True})
            assert (await ten)[1]["meta_info"]["finish_reason"]["type"] == "abort"

    asyncio.run(scenario())


def test_a_dead_scheduler_gives_500_to_the_running_and_503_to_the_new(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            plain = asyncio.create_task(http.post("/generate", {"text": "x"}))
            stream = asyncio.create_task(
                http.post("/generate", {"text": "x", "stream": True, "rid": "s"})
            )
            await until(lambda: len(http.fake.live) == 2)
            await asyncio.to_thread(http.fake.die, "out of luck")
            for request in (plain, stream):
                status, answer = await request
                assert status == 500
                assert "out of luck" in answer["message"]
            assert (await http.get("/health"))[0] == 503
            assert (await http.get("/health_generate"))[0] == 503
            assert (await http.post("/generate", {"text": "x"}))[0] == 503

    asyncio.run(scenario())


def test_a_stream_whose_scheduler_dies_ends_with_an_abort_and_done(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            post = http.session.post
            requests = [
                asyncio.ensure_future(post(path, json={field: "x", "stream": True}))
                for path, field in (("/generate", "text"), ("/v1/completions", "prompt"))
            ]
            await until(lambda: len(http.fake.live) == 2)
            http.fake.passes_left = 2
            responses = await asyncio.gather(*requests)
            for response in responses:
                assert (await response.content.readline()).startswith(b"data: {")
            await asyncio.to_thread(http.fake.die, "out of luck")
            events = [events_of(await response.text()) for response in responses]
            reason = events[0][-1]["meta_info"]["finish_reason"]
            assert (reason["type"], reason["status_code"]) == ("abort", 500)
            assert "out of luck" in events[1][-1]["error"]["message"]

    asyncio.run(scenario())


def test_a_server_that_starts_says_503_until_it_is_open(tmp_path):
    async def scenario():
        from aiohttp.test_utils import TestClient, TestServer

        async with TestClient(TestServer(HttpServer(ServerArgs()).app)) as client:
            assert (await client.get("/ping")).status == 200
            for path in ("/health", "/ready", "/health_generate", "/v1/models", "/server_info"):
                assert (await client.get(path)).status == 503, path
            response = await client.post("/generate", json={"text": "a"})
            assert response.status == 503
            assert "starting" in (await response.json())["message"]

    asyncio.run(scenario())


def test_health_follows_the_drain(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            for path in ("/health", "/ready", "/health_generate", "/ping", "/"):
                assert (await http.get(path))[0] == 200, path
            for path in ("/health", "/ready", "/ping", "/"):
                async with http.session.head(path) as response:
                    assert response.status == 200, path
            assert http.fake.of_type(TokenizedGenerateReq)  # health_generate really generates
            await http.manager.drain(1.0)
            for path in ("/health", "/ready", "/health_generate"):
                assert (await http.get(path))[0] == 503, path
            assert (await http.post("/generate", {"text": "a"}))[0] == 503

    asyncio.run(scenario())


def test_models_and_model_info_describe_the_model(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, served_model_name="tiny", model_path="a/b") as http:
            _, models = await http.get("/v1/models")
            [card] = models["data"]
            assert (card["id"], card["max_model_len"], card["object"]) == (
                "tiny",
                CONTEXT_LEN,
                "model",
            )
            assert (await http.get("/v1/models/tiny"))[0] == 200
            status, answer = await http.get("/v1/models/other/name")
            assert status == 404
            assert answer["error"]["code"] == "model_not_found"
            assert answer["error"]["message"] == "The model 'other/name' does not exist"
            for path in ("/model_info", "/get_model_info"):
                _, info = await http.get(path)
                assert (info["model_path"], info["tokenizer_path"]) == ("a/b", "a/b")
                assert info["is_generation"] is True and info["model_type"] == "llama"

    asyncio.run(scenario())


def test_server_info_has_all_arguments_and_no_secret(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, api_key="s3cret", port=4321) as http:
            headers = {"Authorization": "Bearer s3cret"}
            for path in ("/server_info", "/get_server_info"):
                status, info = await http.get(path, headers=headers)
                assert status == 200
                assert "s3cret" not in json.dumps(info)
                assert info["port"] == 4321 and info["tokenizer_path"]
                assert info["scheduler_info"]["max_total_num_tokens"] == POOL_SIZE
                [state] = info["internal_states"]
                assert state["effective_max_running_requests_per_dp"] == 8
                assert state["memory_usage"]["token_capacity"] == POOL_SIZE
                assert state["memory_usage"]["graph"] == 0.5
                assert state["last_gen_throughput"] == 1.5
                assert state["num_running_reqs"] == 0

    asyncio.run(scenario())


def test_requests_are_shown_under_their_clients_names(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            body = {"text": ["x", "y"], "rid": "b", "sampling_params": few()}
            batch = asyncio.create_task(http.post("/generate", body))
            one = asyncio.create_task(http.post("/generate", {"text": "x", "rid": "a/1"}))
            await until(lambda: len(http.fake.live) == 3)

            async def rids(path):
                return sorted(view["rid"] for view in (await http.get(path))[1]["requests"])

            assert await rids("/v1/requests") == ["a/1", "b_0", "b_1"]
            assert await rids("/v1/requests/a/1") == ["a/1"]
            assert await rids("/v1/requests/b") == ["b_0", "b_1"]
            assert (await http.get("/v1/requests/c"))[0] == 404
            http.fake.passes_left = 3
            await batch
            _, answer = await http.get("/v1/journal?last=2")
            assert answer == {"records": [{"step": 1}, {"step": 2}]}
            for last in ("0", "-1", "x", "1.5", "9" * 30):
                assert (await http.get(f"/v1/journal?last={last}"))[0] == 400
            one.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("args", "body", "expected"),
    [
        ({}, {}, 0),
        ({"default_priority_value": 3}, {}, 3),
        ({"default_priority_value": 3}, {"priority": -2}, -2),
    ],
)
def test_priority_and_tenant_reach_the_scheduler(tmp_path, args, body, expected):
    async def scenario():
        async with serving_fake(tmp_path, **args) as http:
            headers = {"X-Tenant": "acme"}
            for path, field in (("/generate", "text"), ("/v1/completions", "prompt")):
                request = {field: "x", **body}
                assert (await http.post(path, request, headers=headers))[0] == 200
                assert (await http.post(path, {**request, "user": "bob"}, headers=headers))[
                    0
                ] == 200
            sent = http.fake.of_type(TokenizedGenerateReq)
            assert [r.tenant for r in sent] == ["acme", "bob"] * 2
            assert {r.priority for r in sent} == {expected}

    asyncio.run(scenario())


def test_a_priority_is_refused_where_priorities_are_off_and_that_is_asked_for(tmp_path):
    async def status(folder, **args):
        folder.mkdir()
        async with serving_fake(folder, abort_on_priority_when_disabled=True, **args) as http:
            return (await http.post("/generate", {"text": "x", "priority": 1}))[0]

    assert asyncio.run(status(tmp_path / "a")) == 503
    assert asyncio.run(status(tmp_path / "b", enable_priority_scheduling=True)) == 200


def test_flush_cache_says_whether_it_did(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            status, text = await http.post("/flush_cache?timeout=1.5", None)
            assert status == 200 and text.startswith("Cache flushed.\nPlease check backend logs")
            assert (await http.get("/flush_cache"))[0] == 200
            request = asyncio.create_task(http.post("/generate", {"text": "x"}))
            await until(lambda: bool(http.fake.live))
            status, text = await http.get("/flush_cache")
            assert status == 400 and text.startswith("Flush cache failed.\n")
            assert (await http.get("/flush_cache?timeout=soon"))[0] == 400
            assert (await http.get("/flush_cache?timeout=-1"))[0] == 400
            request.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "key"}, 401),
        ({"Authorization": "Bearer kéy"}, 401),
        ({"Authorization": "Bearer key"}, 200),
    ],
)
def test_the_api_key_guards_all_but_health(tmp_path, headers, expected):
    async def scenario():
        async with serving_fake(tmp_path, api_key="key") as http:
            for path in ("/v1/models", "/model_info", "/"):
                status, answer = await http.get(path, headers=headers)
                assert status == expected, path
                if status == 401:
                    assert answer == {"error": "Unauthorized"}
            body = {"text": "x", "sampling_params": few()}
            assert (await http.post("/generate", body, headers=headers))[0] == expected
            assert (await http.get("/health", headers=headers))[0] == 200
            assert (await http.get("/ready", headers=headers))[0] == 200
            async with http.session.options("/generate", headers=headers) as response:
                assert response.status == 200

    asyncio.run(scenario())


def test_tokenize_and_detokenize_are_each_others_inverse(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            for prefix in ("", "/v1"):
                _, answer = await http.post(f"{prefix}/tokenize", {"prompt": "né"})
                assert answer == {"tokens": ids("né"), "count": 3, "max_model_len": CONTEXT_LEN}
                body = {"tokens": answer["tokens"]}
                assert await http.post(f"{prefix}/detokenize", body) == (200, {"text": "né"})
            _, answer = await http.post("/tokenize", {"prompt": ["a", "bc"]})
            assert answer["tokens"] == [ids("a"), ids("bc")] and answer["count"] == [1, 2]
            body = {"tokens": [ids("a"), ids("bc")]}
            assert (await http.post("/detokenize", body))[1] == {"text": ["a", "bc"]}
            _, answer = await http.post(
                "/tokenize", {"messages": [{"role": "user", "content": "x"}]}
            )
            assert answer["tokens"] == ids("[user]x[assistant]")
            for body in ({}, {"prompt": 5}, {"prompt": ["a", 5]}, {"messages": []}):
                assert (await http.post("/tokenize", body))[0] == 400, body
            for body in ({}, {"tokens": "a"}, {"tokens": [VOCAB_SIZE]}, {"tokens": [[5], 6]}):
                assert (await http.post("/detokenize", body))[0] == 400, body

    asyncio.run(scenario())


def test_two_requests_with_one_id_do_not_disturb_each_other(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            body = {"text": "x", "rid": "same", "sampling_params": few()}
            first = asyncio.create_task(http.post("/generate", body))
            await until(lambda: bool(http.fake.live))
            status, answer = await http.post("/generate", body)
            assert (status, answer["message"]) == (400, "Duplicate request ID detected: same")
            http.fake.passes_left = 6
            assert (await first)[1]["text"] == "abc"
            assert (await http.post("/generate", body))[1]["text"] == "abc"

    asyncio.run(scenario())


def test_the_end_of_a_stream_that_is_read_to_the_end_aborts_nothing(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, spelling("fine")) as http:
            events = await http.stream("/generate", {"text": "x"})
            assert events[-1]["text"] == "fine"
            assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 0}
            assert (await http.get("/health_generate"))[0] == 200
            assert not http.fake.of_type(AbortReq)

    asyncio.run(scenario())
