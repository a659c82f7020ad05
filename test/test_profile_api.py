from __future__ import annotations

import asyncio

import pytest
from fake_scheduler import serving_fake

from srt.managers.io_struct import ProfileOptions


def test_a_profile_is_started_and_stopped_as_sglangs_clients_do_it(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, profile_dir=str(tmp_path)) as http:
            body = {
                "output_dir": str(tmp_path / "run1"),
                "num_steps": "5",
                "start_step": 12,
                "activities": ["CPU", "CPU"],
                "profile_prefix": "mine",
                "with_stack": True,
                "merge_profiles": False,
            }
            assert await http.post("/start_profile", body) == (200, "Start profiling.\n")
            stopped = (200, "Stop profiling. This will take some time.\n")
            assert await http.get("/stop_profile") == stopped
            assert (await http.get("/start_profile"))[0] == 200
            folder = str(tmp_path.resolve())
            assert http.fake.profiles == [
                ProfileOptions(f"{folder}/run1", "mine-", 5, 12, ["CPU"], True, False),
                ProfileOptions(folder, "", 10_000, 0, ["CPU"], False, False),
            ]

    asyncio.run(scenario())


def test_a_trace_never_leaves_the_operators_folder(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path, profile_dir=str(tmp_path / "traces")) as http:
            (tmp_path / "traces").mkdir()
            (tmp_path / "traces" / "link").symlink_to(tmp_path)
            for folder in ("/etc", "..", "a/../../b", "link/x", "\0", str(tmp_path / "traces2")):
                status, answer = await http.post("/start_profile", {"output_dir": folder})
                assert (status, answer["error"]["param"]) == (400, "output_dir"), folder
            assert http.fake.profiles == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"num_steps": 0}, "num_steps must be in [1, 10000], got 0"),
        ({"num_steps": "many"}, "num_steps"),
        ({"num_steps": "9" * 50}, "num_steps must be in [1, 10000]"),
        ({"start_step": 1.5}, "start_step"),
        ({"activities": ["MEM"]}, "activities must be of CPU, GPU, got 'MEM'"),
        ({"activities": [["CPU"]]}, "activities must be of CPU, GPU"),
        ({"profile_prefix": "../x"}, "profile_prefix"),
        ({"profile_by_stage": True}, "profile_by_stage is not supported"),
        ([], "map"),
    ],
)
def test_a_wrong_wish_for_a_profile_is_refused_by_name(tmp_path, body, words):
    async def scenario():
        async with serving_fake(tmp_path, profile_dir=str(tmp_path)) as http:
            status, answer = await http.post("/start_profile", body)
            assert status == 400 and words in answer["error"]["message"]

    asyncio.run(scenario())


def test_what_the_scheduler_says_against_it_is_the_answer(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            status, answer = await http.post("/stop_profile", None)
            assert status == 400
            assert answer["error"]["message"] == "Profiling is not in progress."

    asyncio.run(scenario())
