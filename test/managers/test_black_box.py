"""What outlives a scheduler: the members of its last pass, its passes, its last heartbeat."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from srt.managers.black_box import (
    NUM_PASSES,
    SIZE,
    BlackBox,
    BlackBoxReader,
    black_box_path,
    create_black_box,
)


@pytest.fixture
def box(tmp_path: Path) -> tuple[BlackBox, BlackBoxReader]:
    path = black_box_path(tmp_path)
    create_black_box(path)
    return BlackBox(path), BlackBoxReader(path)


def test_an_empty_box_has_no_members_and_is_not_late(box):
    _, reader = box
    assert reader.rids() == [] and reader.passes() == []
    assert time.monotonic() - reader.last_beat() < 0.1


def test_a_loop_that_stops_turning_grows_late(box):
    writer, reader = box
    writer.beat()
    beat = reader.last_beat()
    assert 0 <= time.monotonic() - beat < 1
    time.sleep(0.01)
    assert reader.last_beat() == beat
    writer.beat()
    assert reader.last_beat() > beat


def test_the_members_are_those_of_the_last_pass_and_who_came_after_it(box):
    writer, reader = box
    writer.on_pass(0, "P", ["a", "b"], 9, 9, 0)
    assert reader.rids() == ["a", "b"]
    writer.on_arrival("c")
    assert reader.rids() == ["a", "b", "c"]
    writer.on_pass(1, "D", ["a"], 1, 10, 1)
    assert reader.rids() == ["a"]


def test_the_last_passes_are_kept_in_order(box):
    writer, reader = box
    for step in range(NUM_PASSES + 5):
        writer.on_pass(step, "D", ["a"], 1, step, 2)
    passes = reader.passes()
    assert [each["step"] for each in passes] == list(range(5, NUM_PASSES + 5))
    assert passes[-1]["phase"] == "D" and passes[-1]["used"] == NUM_PASSES + 4


def test_more_names_than_there_is_room_for_are_left_out(box):
    writer, reader = box
    writer.on_pass(0, "D", ["x" * SIZE], 1, 1, 0)
    assert reader.rids() == [] and len(reader.passes()) == 1
