from __future__ import annotations

import asyncio

import pytest
from fake_scheduler import serving_fake, until

from srt.managers.io_struct import AbortReq, TokenizedGenerateReq
from srt.managers.queue_limit import MAX_RETRY_SECONDS, QUEUE_FULL, QueueLimit
from srt.request_error import RequestError


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def full_queue(limit, rate, clock=None):
    """A queue at its limit from which `rate` requests a second have been admitted."""
    clock = clock or Clock()
    queue = QueueLimit(limit, clock)
    for _ in range(20):
        queue.on_sent()
        queue.on_admitted()
        clock.now += 1 / rate
    for _ in range(limit):
        queue.on_sent()
    return queue


def refusal(queue, num_new=1):
    with pytest.raises(RequestError) as caught:
        queue.check(num_new)
    return caught.value


def test_one_more_than_the_limit_is_refused_and_none_before():
    queue = QueueLimit(2)
    for _ in range(2):
        queue.check(1)
        queue.on_sent()
    error = refusal(queue)
    assert (error.status, error.message, error.retry_after) == (503, QUEUE_FULL, 1)
    queue.on_left()
    queue.check(1)


def test_the_refused_learn_their_place_and_when_to_come_back():
    error = refusal(full_queue(limit=19, rate=2.0))
    queue = error.body()["queue"]
    assert (queue["length"], queue["limit"], queue["position"]) == (19, 19, 20)
    assert queue["estimated_wait_seconds"] == pytest.approx(10.0, rel=0.1)
    assert error.retry_after == 5
    assert error.body()["error"]["queue"] == queue


def test_a_slow_queue_asks_nobody_to_come_back_in_hours():
    assert refusal(full_queue(limit=1000, rate=0.5)).retry_after == MAX_RETRY_SECONDS


def test_old_admissions_say_nothing():
    clock = Clock()
    queue = full_queue(limit=5, rate=2.0, clock=clock)
    clock.now += 3600
    assert queue.drain_rate() is None
    assert refusal(queue).details["queue"]["estimated_wait_seconds"] is None


def test_a_call_that_can_never_fit_is_told_so():
    error = refusal(QueueLimit(3), num_new=4)
    assert error.status == 400 and "4" in error.message and "3" in error.message


def test_without_a_limit_everyone_may_wait():
    queue = QueueLimit(None)
    for _ in range(10_000):
        queue.check(1)
        queue.on_sent()


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_503_before_anything_is_sent(tmp_path, stream):
    async def scenario():
        async with serving_fake(tmp_path, passes=0, max_queued_requests=2) as http:
            body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
            waiting = [asyncio.create_task(http.post("/generate", body)) for _ in range(2)]
            await until(lambda: len(http.fake.live) == 2)
            for path, field in (("/generate", "text"), ("/v1/completions", "prompt")):
                async with http.session.post(path, json={field: "x", "stream": stream}) as response:
                    assert response.status == 503
                    assert int(response.headers["Retry-After"]) >= 1
                    answer = await response.json()
                    assert answer["message"] == "The request queue is full."
                    assert answer["queue"]["position"] == 3
            assert len(http.fake.of_type(TokenizedGenerateReq)) == 2
            http.fake.passes_left = 2
            assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
            http.fake.passes_left = 2
            assert (await http.post("/generate", body))[0] == 200
            assert http.manager.queue.num_waiting == 0

    asyncio.run(scenario())


def test_who_has_a_token_does_not_wait_and_who_leaves_makes_room(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, passes=1, max_queued_requests=1) as http:
            body = {"text": "x", "sampling_params": {"max_new_tokens": 9}}
            running = asyncio.create_task(http.post("/generate", body))
            await until(lambda: http.fake.num_passes == 1 and http.manager.queue.num_waiting == 0)
            waiting = asyncio.create_task(http.post("/generate", body))
            await until(lambda: len(http.fake.live) == 2)
            assert (await http.post("/generate", body))[0] == 503
            waiting.cancel()
            await until(lambda: http.manager.queue.num_waiting == 0)
            http.fake.passes_left = 100
            assert (await http.post("/generate", body))[0] == 200
            assert (await running)[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["server", "request"])
@pytest.mark.parametrize(
    ("passes", "limit", "words"),
    [
        (0, "queue", "Request waiting timeout reached."),
        (0, "total", "Request waiting timeout reached."),
        (1, "total", "Request running timeout reached."),
    ],
)
def test_a_request_ends_with_503_when_its_time_is_over(tmp_path, where, passes, limit, words):
    names = {"queue": ("queue_timeout",) * 2, "total": ("request_timeout", "timeout")}[limit]
    seconds = 0.25 if passes else 0.02  # so that a token can come before
    args = {names[0]: seconds} if where == "server" else {names[0]: 50.0}
    fields = {} if where == "server" else {names[1]: seconds}

    async def scenario():
        async with serving_fake(tmp_path, passes=passes, **args) as http:
            for path, field in (("/generate", "text"), ("/v1/completions", "prompt")):
                http.fake.passes_left = passes
                status, answer = await http.post(path, {field: "x", **fields})
                assert (status, answer["message"]) == (503, words)
                await until(lambda: not http.fake.live)
            assert len(http.fake.of_type(AbortReq)) == 2
            assert http.manager.num_live == 0 and http.manager.queue.num_waiting == 0

    asyncio.run(scenario())


def test_a_request_in_time_is_left_alone(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, queue_timeout=30.0, request_timeout=60) as http:
            body = {"text": "x", "timeout": 40, "sampling_params": {"max_new_tokens": 2}}
            assert (await http.post("/generate", body))[0] == 200
            for bad in (0, -1, "5", True):
                assert (await http.post("/generate", {"text": "x", "timeout": bad}))[0] == 400
                assert (await http.post("/generate", {"text": "x", "queue_timeout": bad}))[0] == 400

    asyncio.run(scenario())
