from __future__ import annotations

import gzip
import json

import pytest
from scheduler_harness import Harness

from srt.managers.io_struct import ControlOut, ProfileOptions, StartProfileReq, StopProfileReq


class Profiled(Harness):
    """Answers to orders are collected by their id."""

    def order(self, message):
        self.channel.inbox.append(message)
        self.scheduler.receive(0)
        [answer] = [m for m in self.channel.outbox if isinstance(m, ControlOut)]
        self.channel.outbox.remove(answer)
        return answer


def options(folder, **changes):
    values = {
        "output_dir": str(folder),
        "prefix": "",
        "num_steps": 10_000,
        "start_step": 0,
        "activities": ["CPU"],
        "with_stack": False,
        "record_shapes": False,
    }
    return ProfileOptions(**{**values, **changes})


def traces(folder):
    return sorted(folder.glob("*.trace.json.gz"))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_profile_of_so_many_passes_writes_itself(tmp_path, overlap):
    harness = Profiled(overlap=overlap)
    wish = options(tmp_path / "new", num_steps=3, prefix="p-")
    assert harness.order(StartProfileReq(7, wish)) == ControlOut(7, None)
    harness.send("A", [1, 2, 3], 20)
    for _ in range(2):
        harness.step()
    assert traces(tmp_path / "new") == []
    harness.run()
    [path] = traces(tmp_path / "new")
    assert path.name.startswith("p-") and path.name.endswith("-TP-0.trace.json.gz")
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert len(harness.outputs["A"]) == 20


def test_a_profile_starts_at_the_pass_that_was_asked_for(tmp_path):
    harness = Profiled()
    harness.order(StartProfileReq(1, options(tmp_path, start_step=5, num_steps=1)))
    harness.send("A", [1, 2, 3], 20)
    for _ in range(4):
        harness.step()
    assert traces(tmp_path) == []
    harness.step()
    assert len(traces(tmp_path)) == 1


def test_a_stop_writes_what_there_is(tmp_path):
    harness = Profiled()
    harness.order(StartProfileReq(1, options(tmp_path)))
    again = harness.order(StartProfileReq(2, options(tmp_path)))
    assert again.error == "Profiling is already in progress; /stop_profile ends it."
    harness.send("A", [1, 2, 3], 4)
    harness.run()
    answer = harness.order(StopProfileReq(3))
    assert [answer.result] == [str(path) for path in traces(tmp_path)]
    assert harness.order(StopProfileReq(4)).error == "Profiling is not in progress."


def test_a_profile_without_a_pass_is_no_trace(tmp_path):
    harness = Profiled()
    harness.order(StartProfileReq(1, options(tmp_path)))
    assert harness.order(StopProfileReq(2)).error == (
        "Nothing was profiled: no pass ran since the start."
    )
    assert harness.order(StartProfileReq(3, options(tmp_path))).error is None


def test_a_folder_that_cannot_be_written_is_an_error_and_serving_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    harness = Profiled()
    harness.order(StartProfileReq(1, options(tmp_path / "file" / "x", num_steps=2)))
    harness.send("A", [1, 2, 3], 6)
    harness.run()
    assert len(harness.outputs["A"]) == 6
    harness.order(StartProfileReq(2, options(tmp_path / "file" / "x")))
    harness.send("B", [1, 2, 3], 6)
    harness.run()
    assert "could not be written" in harness.order(StopProfileReq(3)).error


def test_a_gpu_that_is_not_there_cannot_be_profiled(tmp_path):
    answer = Profiled().order(StartProfileReq(1, options(tmp_path, activities=["GPU"])))
    assert answer.error == "activities asks for GPU, but torch finds no CUDA device."
