from __future__ import annotations

import asyncio

import pytest
from fake_scheduler import CONTEXT_LEN, POOL_SIZE, serving_fake, until

from srt.managers.io_struct import PauseReq, UpdateSchedulerReq
from srt.server_args import ServerArgs


def few(n=3):
    return {"max_new_tokens": n}


def test_settings_are_read_changed_and_read_back(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, max_queued_requests=5) as http:
            before = {
                "max_running_requests": 8,
                "phase_policy": "interleave",
                "max_queued_requests": 5,
            }
            assert await http.get("/v1/scheduler") == (200, before)
            change = {"phase_policy": "slo", "max_queued_requests": None}
            async with http.session.patch("/v1/scheduler", json=change) as response:
                assert (response.status, await response.json()) == (200, {**before, **change})
            assert (await http.get("/v1/scheduler"))[1] == {**before, **change}
            assert http.manager.queue.limit is None
            body = {"server_args": {"max_running_requests": 4}}
            status, answer = await http.post("/set_internal_state", body)
            assert (status, answer["updated"]) == (200, True)
            assert answer["server_args"]["max_running_requests"] == 4

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"nope": 1, "max_queued_requests": 3}, "unknown field 'nope'"),
        ({"max_queued_requests": 0, "phase_policy": "slo"}, "at least 1 or null, got 0"),
        ({"max_queued_requests": True}, "got True"),
        ([], "expected a map"),
    ],
)
def test_a_wrong_setting_changes_nothing(tmp_path, body, words):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            async with http.session.patch("/v1/scheduler", json=body) as response:
                assert response.status == 400
                assert words in (await response.json())["message"]
            assert http.manager.queue.limit is None
            assert http.fake.settings["phase_policy"] == "interleave"

    asyncio.run(scenario())


def test_set_internal_state_needs_its_map(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            for body in ({}, {"server_args": 5}, []):
                assert (await http.post("/set_internal_state", body))[0] == 400, body
            assert not http.fake.of_type(UpdateSchedulerReq)

    asyncio.run(scenario())


def test_generation_pauses_in_place_and_goes_on(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            body = {"text": "x", "sampling_params": few()}
            request = asyncio.create_task(http.post("/generate", body))
            await until(lambda: bool(http.fake.live))
            status, answer = await http.post("/pause_generation", {"mode": "in_place"})
            assert (status, answer["status"]) == (200, "ok")
            http.fake.passes_left = 3
            assert (await http.get("/get_internal_state"))[1]["paused"] is True
            assert http.fake.num_passes == 0
            assert (await http.post("/continue_generation", None))[0] == 200
            assert (await request)[1]["text"] == "abc"

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [{"json": {"mode": "abort"}}, {}])
def test_a_pause_that_aborts_ends_the_live_requests_first(tmp_path, body):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            request = asyncio.create_task(http.post("/generate", {"text": "x"}))
            await until(lambda: bool(http.fake.live))
            async with http.session.post("/pause_generation", **body) as response:
                assert response.status == 200
            assert (await request)[1]["meta_info"]["finish_reason"]["type"] == "abort"
            assert http.fake.paused and not http.fake.live

    asyncio.run(scenario())


def test_a_pause_can_ask_for_the_memory_too(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            assert (await http.post("/pause_generation", {"mode": "retract"}))[0] == 200
            assert [(m.paused, m.retract) for m in http.fake.of_type(PauseReq)] == [(True, True)]

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["soon", 5])
def test_a_pause_that_is_not_possible_is_a_400_that_names_the_mode(tmp_path, mode):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            status, answer = await http.post("/pause_generation", {"mode": mode})
            assert status == 400 and "mode" in answer["message"] and str(mode) in answer["message"]
            assert not http.fake.of_type(PauseReq)

    asyncio.run(scenario())


def test_loads_tell_the_load_in_the_sections_asked_for(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            status, load = await http.get("/v1/loads")
            assert status == 200
            assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 3)
            assert (load["num_used_tokens"], load["num_total_tokens"]) == (30, 50)
            assert load["max_total_num_tokens"] == POOL_SIZE and load["token_usage"] == 0.2
            assert (load["utilization"], load["cache_hit_rate"]) == (0.2, 0.0)
            assert load["gen_throughput"] == 0.0
            assert load["memory"]["num_free_tokens"] == POOL_SIZE - 40
            assert load["queues"] == {"waiting": 2, "grammar": 0, "paused": 0, "retracted": 1}
            assert load["loads"][0]["num_waiting_reqs"] == 3
            _, load = await http.get("/v1/loads?include=queues,memory")
            assert "queues" in load and "memory" in load and "token_usage" not in load
            status, text = await http.get("/v1/loads?format=prometheus")
            assert status == 200 and "\nsglang:num_queue_reqs{" in text
            for query in ("include=cores", "format=xml"):
                assert (await http.get(f"/v1/loads?{query}"))[0] == 400

    asyncio.run(scenario())


KEYS = {"none": None, "normal": "n", "admin": "a", "wrong": "w"}
ADMIN_ROUTES = [
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("PATCH", "/v1/scheduler"),
    ("POST", "/set_internal_state"),
    ("GET", "/get_internal_state"),
    ("GET", "/start_profile"),
    ("POST", "/start_profile"),
    ("GET", "/stop_profile"),
    ("POST", "/stop_profile"),
]
NORMAL_ROUTES = [("GET", "/v1/models"), ("GET", "/v1/requests"), ("GET", "/v1/scheduler")]
OPEN_ROUTES = [("GET", "/health"), ("GET", "/metrics"), ("GET", "/ready")]


@pytest.mark.parametrize(
    ("args", "normal", "admin"),
    [
        # Who may use normal routes, and who the administrator's.
        ({}, {"none", "normal", "admin", "wrong"}, {"none", "normal", "admin", "wrong"}),
        ({"api_key": "n"}, {"normal"}, {"normal"}),
        ({"admin_api_key": "a"}, {"none", "normal", "admin", "wrong"}, {"admin"}),
        ({"api_key": "n", "admin_api_key": "a"}, {"normal", "admin"}, {"admin"}),
    ],
)
def test_keys_open_what_they_should_and_nothing_else(tmp_path, args, normal, admin):
    async def scenario():
        async with serving_fake(tmp_path, **args) as http:
            for routes, allowed in (
                (OPEN_ROUTES, set(KEYS)),
                (NORMAL_ROUTES, normal),
                (ADMIN_ROUTES, admin),
            ):
                for method, path in routes:
                    for who, key in KEYS.items():
                        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                        json = None if method == "GET" else {}
                        async with http.session.request(
                            method, path, json=json, headers=headers
                        ) as response:
                            is_allowed = response.status != 401
                            assert is_allowed == (who in allowed), (method, path, who)

    asyncio.run(scenario())


def test_keys_of_a_file_work_and_name_their_tenants(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst alice\nsecond\n\n", encoding="utf-8")

    async def scenario():
        async with serving_fake(tmp_path, api_key="third", api_key_file=str(keys)) as http:
            for key in ("first", "second", "third"):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"text": "x", "sampling_params": few()}
                assert (await http.post("/generate", body, headers=headers))[0] == 200
            for key in ("ours", "alice", "#", ""):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await http.get("/v1/models", headers=headers))[0] == 401, key
            sent = [m.tenant for m in http.fake.received if hasattr(m, "tenant")]
            assert sent == ["alice", None, None]

    asyncio.run(scenario())


@pytest.mark.parametrize("text", [None, "", "# nothing\n"])
def test_a_file_without_keys_is_refused(tmp_path, text):
    from srt.http_server import HttpServer

    keys = tmp_path / "keys"
    if text is not None:
        keys.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="--api-key-file"):
        HttpServer(ServerArgs(api_key_file=str(keys)))


@pytest.mark.parametrize(
    ("allowed", "origin", "expected"),
    [
        ("*", "https://a.example", "*"),
        ("https://a.example, https://b.example", "https://b.example", "https://b.example"),
        ("https://a.example", "https://c.example", None),
        ("none", "https://a.example", None),
    ],
)
def test_only_the_pages_of_allowed_origins_may_read_answers(tmp_path, allowed, origin, expected):
    async def scenario():
        async with serving_fake(tmp_path, cors_allow_origins=allowed) as http:
            headers = {"Origin": origin}
            for method in ("GET", "OPTIONS"):
                async with http.session.request(method, "/v1/models", headers=headers) as response:
                    assert response.headers.get("Access-Control-Allow-Origin") == expected

    asyncio.run(scenario())


def test_a_route_of_the_administrator_is_listed_as_one(tmp_path):
    """Every route that changes something for everybody must be among ADMIN_ROUTES above."""

    async def scenario():
        async with serving_fake(tmp_path) as http:
            changing = {
                (route.method, route.resource.canonical)
                for route in http.server.app.router.routes()
                if route.method not in ("GET", "HEAD")
            }
            of_clients = {
                (method, path)
                for method, path in changing
                if path.startswith("/v1/") and path != "/v1/scheduler"
            } | {(m, f"/{p}") for m in ("POST", "PUT") for p in ("generate", "tokenize")}
            of_clients |= {("POST", "/detokenize")}
            assert changing - of_clients <= set(ADMIN_ROUTES)
            assert http.manager.context_len == CONTEXT_LEN

    asyncio.run(scenario())
