from __future__ import annotations

import asyncio
import json
import logging

import pytest
from fake_scheduler import serving_fake, spelling, until

SECRET, ANSWER = "my secret question " * 4, "my secret answer"


def lines_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "srt.request_log"]


def log_of(tmp_path, caplog, body, **args):
    async def scenario():
        caplog.set_level(logging.INFO)
        async with serving_fake(tmp_path, spelling(ANSWER), **args) as http:
            assert (await http.post("/generate", {"rid": "mine", **body}))[0] == 200
            await until(lambda: http.manager.num_live == 0)
            await http.get("/health_generate")

    asyncio.run(scenario())
    return lines_of(caplog)


def test_nothing_is_logged_of_a_request_by_default(tmp_path, caplog):
    assert log_of(tmp_path, caplog, {"text": SECRET}) == []


@pytest.mark.parametrize("level", [0, 1])
def test_a_request_is_logged_without_its_text(tmp_path, caplog, level):
    body = {"text": SECRET, "sampling_params": {"temperature": 0.25}}
    args = {"log_requests": True, "log_requests_level": level}
    receive, finish = log_of(tmp_path, caplog, body, **args)
    assert receive.startswith("Receive: obj={'rid': 'mine', 'prompt_tokens': 76")
    assert finish.startswith("Finish: obj={'rid': 'mine'") and "'finish_reason': 'stop'" in finish
    assert "secret" not in receive + finish and "input_ids" not in receive
    assert ("0.25" in receive) == (level == 1)


def test_level_2_shows_the_start_and_level_3_everything(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("srt.request_log.MAX_CHARS", 20)
    (tmp_path / "a").mkdir()
    args = {"log_requests": True, "log_requests_format": "json"}
    lines = log_of(tmp_path / "a", caplog, {"text": SECRET}, log_requests_level=2, **args)
    receive, finish = map(json.loads, lines)
    assert (receive["event"], receive["obj"]["text"]) == ("Receive", SECRET[:20])
    assert (finish["event"], finish["out"]["text"]) == ("Finish", ANSWER[:20])
    caplog.clear()
    (tmp_path / "b").mkdir()
    lines = log_of(tmp_path / "b", caplog, {"text": SECRET}, log_requests_level=3, **args)
    assert json.loads(lines[0])["obj"]["text"] == SECRET


def test_a_client_that_left_is_logged_as_such(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    async def scenario():
        async with serving_fake(tmp_path, passes=0, log_requests=True) as http:
            left = asyncio.create_task(http.post("/generate", {"text": SECRET}))
            await until(lambda: bool(http.fake.live))
            left.cancel()
            await until(lambda: http.manager.num_live == 0)

    asyncio.run(scenario())
    assert "'finish_reason': None" in lines_of(caplog)[1]
