from __future__ import annotations

import asyncio

import pytest
from fake_scheduler import serving_fake, until
from prometheus_client.parser import text_string_to_metric_families

from srt.histogram import Histogram
from srt.request_metrics import ITL_BUCKETS, MAX_TENANTS, TTFT_BUCKETS
from srt.scheduler_metrics import BLOCKERS

SGLANG_TTFT = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
SGLANG_ITL = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)


def few(n=3):
    return {"max_new_tokens": n}


async def scrape(http):
    """Values by (name, labels that are not of the whole server)."""
    status, text = await http.get("/metrics")
    assert status == 200
    common = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in common))
            assert (sample.name, labels) not in values
            values[sample.name, labels] = sample.value
    return values


def of(values, name, **labels):
    """The sum of the samples of `name` with these labels."""
    return sum(
        value
        for (found, pairs), value in values.items()
        if found == name and labels.items() <= dict(pairs).items()
    )


def test_dashboards_find_sglangs_names(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            await http.post("/generate", {"text": "x", "sampling_params": few()})
            names = {name for name, _ in await scrape(http)}
            for name in (
                *("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage"),
                *("kv_evictable_tokens", "gen_throughput", "cache_hit_rate", "num_retracted_reqs"),
                *("new_token_ratio", "max_total_num_tokens", "num_retracted_requests_total"),
                *("num_retracted_input_tokens_total", "num_retracted_output_tokens_total"),
                *("num_requests_total", "num_aborted_requests_total", "prompt_tokens_total"),
                *("generation_tokens_total", "cached_tokens_total"),
                *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
                *("e2e_request_latency_seconds_bucket", "queue_time_seconds_bucket"),
                *("http_requests_total", "http_responses_total", "http_requests_active"),
            ):
                assert f"sglang:{name}" in names, name

    asyncio.run(scenario())


def test_the_schedulers_figures_are_those_of_the_scrape(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            assert of(await scrape(http), "sglang:num_running_reqs") == 0
            body = {"text": "x", "sampling_params": few()}
            request = asyncio.create_task(http.post("/generate", body))
            await until(lambda: bool(http.fake.live))
            values = await scrape(http)
            assert of(values, "sglang:num_running_reqs") == 1
            assert of(values, "regather:live_requests") == 1
            assert of(values, "sglang:http_requests_active", endpoint="/generate") == 1
            assert of(values, "regather:scheduler_is_stale") == 0
            assert of(values, "regather:blocked_requests", blocker="kv") == 2
            assert of(values, "regather:blocked_requests", blocker="slots") == 0
            assert of(values, "sglang:num_retracted_requests_total") == 3
            assert of(values, "regather:retractions_total", cause="forced") == 1
            assert of(values, "regather:recomputed_tokens_total") == 7
            assert of(values, "regather:step_seconds_total", part="run") == 1.5
            assert of(values, "sglang:realtime_tokens_total", mode="decode") == 50
            http.fake.passes_left = 3
            await request

    asyncio.run(scenario())


def test_a_busy_or_dead_scheduler_does_not_stop_the_scrape(tmp_path, monkeypatch):
    monkeypatch.setattr("srt.http_metrics.SCRAPE_SECONDS", 0.01)

    async def scenario():
        async with serving_fake(tmp_path) as http:
            assert of(await scrape(http), "sglang:num_queue_reqs") == 3
            http.fake.is_deaf = True
            values = await scrape(http)
            assert of(values, "regather:scheduler_is_stale") == 1
            assert of(values, "sglang:num_queue_reqs") == 3  # the last that is known
            await asyncio.to_thread(http.fake.die, "out of luck")
            await until(lambda: http.manager.failure != "")
            assert of(await scrape(http), "regather:scheduler_is_stale") == 1

    asyncio.run(scenario())


def test_started_is_finished_and_aborted_and_tokens_agree_with_the_replies(tmp_path):
    """H47."""

    async def scenario():
        async with serving_fake(tmp_path, passes=0) as http:
            http.fake.passes_left = 4
            body = {"text": "hello", "sampling_params": few(4)}
            plain = [http.post("/generate", body) for _ in range(6)]
            streams = [http.stream("/generate", body) for _ in range(4)]
            gathered = asyncio.gather(*plain, *streams)
            await until(lambda: len(http.fake.live) + http.fake.num_passes > 0)
            http.fake.passes_left = 1000
            answers = await gathered
            http.fake.passes_left = 0
            for _ in range(3):
                left = asyncio.create_task(http.post("/generate", {**body, "stream": True}))
                await until(lambda: bool(http.fake.live))
                left.cancel()
                await until(lambda: not http.fake.live and http.manager.num_live == 0)
            told = [asyncio.create_task(http.post("/generate", body)) for _ in range(2)]
            await until(lambda: len(http.fake.live) == 2)
            await http.post("/abort_request", {"abort_all": True})
            answers += await asyncio.gather(*told)
            values = await scrape(http)
            assert of(values, "regather:num_started_requests_total") == 15
            assert of(values, "sglang:num_requests_total") == 10
            assert of(values, "sglang:num_requests_total", is_streaming="true") == 4
            assert of(values, "sglang:num_aborted_requests_total") == 5
            finals = [a[-1] if isinstance(a, list) else a[1] for a in answers]
            for name in ("prompt", "completion"):
                total = sum(answer["meta_info"][f"{name}_tokens"] for answer in finals)
                metric = "prompt" if name == "prompt" else "generation"
                # The three that were left have a prompt, and nobody got their reply.
                lost = 15 if name == "prompt" else 0
                assert of(values, f"sglang:{metric}_tokens_total") == total + lost
            assert of(values, "sglang:e2e_request_latency_seconds_count") == 10
            assert of(values, "sglang:time_to_first_token_seconds_count") == 10
            assert of(values, "sglang:inter_token_latency_seconds_count") == 30
            assert of(values, "sglang:queue_time_seconds_sum") == 10 * 0.25
            assert of(values, "sglang:cached_tokens_total", cache_source="device") == 20
            assert of(values, "regather:live_requests") == 0
            assert min(values.values()) >= 0

    asyncio.run(scenario())


def test_tokens_of_a_running_request_are_counted_already(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=2) as http:
            body = {"text": "hello", "user": "bob", "sampling_params": few(4)}
            request = asyncio.create_task(http.post("/generate", body))
            await until(lambda: http.manager.metrics.num_tokens == 2)
            values = await scrape(http)
            assert of(values, "sglang:generation_tokens_total") == 2
            assert of(values, "sglang:prompt_tokens_total") == 5
            assert of(values, "regather:tenant_generated_tokens_total", tenant="bob") == 2
            assert of(values, "sglang:gen_throughput") == 2
            http.fake.passes_left = 2
            await request
            values = await scrape(http)
            assert of(values, "sglang:generation_tokens_total") == 4
            assert of(values, "regather:tenant_prompt_tokens_total", tenant="bob") == 5

    asyncio.run(scenario())


def test_health_checks_are_not_counted_as_requests(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, max_queued_requests=1) as http:
            assert (await http.get("/health_generate"))[0] == 200
            values = await scrape(http)
            assert of(values, "regather:num_started_requests_total") == 0
            assert of(values, "sglang:time_to_first_token_seconds_count") == 0
            assert http.manager.queue.num_waiting == 0

    asyncio.run(scenario())


def test_clients_cannot_make_up_series_without_end(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            for i, method in enumerate(("GET", "PROPFIND", "PURGE")):
                async with http.session.request(method, f"/nowhere/{i}") as response:
                    assert response.status == 404
            for i in range(MAX_TENANTS + 3):
                body = {"text": "x", "user": f"t{i}", "sampling_params": few(1)}
                assert (await http.post("/generate", body))[0] == 200
            values = await scrape(http)
            routes = {dict(labels)["endpoint"] for name, labels in values if "http_req" in name}
            assert routes == {"(unknown)", "/generate", "/metrics"}
            methods = {d["method"] for name, pairs in values if "method" in (d := dict(pairs))}
            assert methods == {"GET", "POST", "(unknown)"}
            unknown = of(values, "sglang:http_responses_total", status_code="404")
            assert unknown == 3
            tenants = [
                labels for name, labels in values if name == "regather:tenant_requests_total"
            ]
            assert len(tenants) == MAX_TENANTS + 1
            assert of(values, "regather:tenant_requests_total", tenant="(other)") == 3

    asyncio.run(scenario())


def test_metrics_are_there_while_the_server_starts():
    async def scenario():
        from aiohttp.test_utils import TestClient, TestServer

        from srt.http_server import HttpServer
        from srt.server_args import ServerArgs

        async with TestClient(TestServer(HttpServer(ServerArgs()).app)) as client:
            assert (await client.get("/health")).status == 503
            response = await client.get("/metrics")
            assert response.status == 200
            assert 'endpoint="/health"' in await response.text()

    asyncio.run(scenario())


def test_buckets_hold_sglangs_and_finer_ones():
    assert set(SGLANG_TTFT) < set(TTFT_BUCKETS) and min(TTFT_BUCKETS) < 0.01
    assert set(SGLANG_ITL) < set(ITL_BUCKETS) and min(ITL_BUCKETS) < 0.002
    assert sorted(TTFT_BUCKETS) == list(TTFT_BUCKETS) and sorted(ITL_BUCKETS) == list(ITL_BUCKETS)
    assert "decode_turn" in BLOCKERS


@pytest.mark.parametrize("value", [0.0, 0.05, 0.1, 0.10001, 3.0, 1e9])
def test_a_value_falls_in_every_bucket_at_or_above_it(value):
    from prometheus_client.core import HistogramMetricFamily

    histogram = Histogram((0.1, 1.0, 3.0))
    histogram.observe(value)
    family = HistogramMetricFamily("x", "x", labels=[])
    histogram.add_to(family, [])
    counts = {s.labels["le"]: s.value for s in family.samples if s.name == "x_bucket"}
    assert counts == {le: float(value <= float(le)) for le in ("0.1", "1.0", "3.0", "+Inf")}
    assert [s.value for s in family.samples if s.name == "x_sum"] == [value]
