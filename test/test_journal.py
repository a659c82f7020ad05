"""The ring, the file, and reading it back."""

from __future__ import annotations

import pytest

from srt import journal as journal_module
from srt.journal import (
    AdmittedEntry,
    ArrivedEntry,
    Journal,
    RefusedEntry,
    RetractionEntry,
    StepRecord,
    client_rid,
    read_journal,
)


def record(step: int) -> StepRecord:
    return StepRecord(step, step * 0.5, "D", ["a", "b"], [], 10, 64, 0, 0.7)


FULL = StepRecord(
    step=3,
    time=1.5,
    phase="M",
    rids=["a", "b"],
    lens=[4, 1],
    used=12,
    size=64,
    queued=2,
    ratio=0.7,
    budget_left=3,
    inner=["a"],
    arrived=[ArrivedEntry("c", 1.25, 6)],
    admitted=[AdmittedEntry("a", 0, 9, 1)],
    refused=[RefusedEntry("c", "kv", 30, 20, 5)],
    retractions=[RetractionEntry("kv", ["d"], 7, 8, 0.5, 0.9)],
    finished={"b": "stop"},
    rows=8,
    ms={"run": 2.5},
)


def test_what_was_written_is_read_back(tmp_path):
    path = tmp_path / "j.jsonl"
    journal = Journal(str(path))
    journal.write(record(0))
    journal.write(FULL)
    assert read_journal(path) == [record(0), FULL]


def test_a_second_journal_goes_on_in_the_same_file(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal(str(path)).write(record(0))
    Journal(str(path)).write(record(0))
    assert read_journal(path) == [record(0), record(0)]


def test_the_ring_holds_the_last_records_oldest_first():
    journal = Journal(ring_size=3)
    for step in range(5):
        journal.write(record(step))
    assert [each["step"] for each in journal.last(2)] == [3, 4]
    assert [each["step"] for each in journal.last(99)] == [2, 3, 4]
    assert journal.last(0) == []


def test_a_full_file_is_turned_over_and_the_oldest_goes(tmp_path, monkeypatch):
    line = len(journal_module.msgspec.json.encode(record(0))) + 1
    monkeypatch.setattr(journal_module, "FILE_BYTES", 2 * line + 1)
    path = tmp_path / "j.jsonl"
    journal = Journal(str(path))
    for step in range(9):
        journal.write(record(step))
    steps = [
        [each.step for each in read_journal(tmp_path / name)]
        for name in ("j.jsonl.2", "j.jsonl.1", "j.jsonl")
    ]
    assert steps == [[4, 5], [6, 7], [8]]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_line_that_is_cut_off_at_the_end_is_left_out(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal(str(path)).write(record(0))
    whole = path.read_bytes()
    for end in (1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole + whole[:end])
        assert read_journal(path) == [record(0)]


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"step": "x"}', b'{"step": 1}', b"\xff\xfe"])
def test_any_other_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "j.jsonl"
    Journal(str(path)).write(record(0))
    whole = path.read_bytes()
    path.write_bytes(whole + line + b"\n" + whole)
    with pytest.raises(ValueError, match=r"j\.jsonl:2 is not a journal record: "):
        read_journal(path)


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    with pytest.raises(OSError, match="missing"):
        Journal(str(tmp_path / "missing" / "j.jsonl"))


@pytest.mark.parametrize(
    ("rid", "known_as"),
    [("a#0", "a"), ("a#b#12", "a#b"), ("5f3e", "5f3e"), ("#7", "#7"), ("a#b", "a#b")],
)
def test_a_client_knows_its_request_without_the_serial_number(rid, known_as):
    assert client_rid(rid) == known_as


def test_clients_read_the_ring_under_their_own_names():
    plain, journal, numbered = (
        Journal(),
        Journal(),
        {name: f"{name}#{ord(name)}" for name in "abcd"},
    )
    plain.write(FULL)
    text = journal_module.msgspec.json.encode(FULL).decode()
    for name, rid in numbered.items():
        text = text.replace(f'"{name}"', f'"{rid}"')
    journal.write(journal_module.msgspec.json.decode(text, type=StepRecord))
    assert journal.last(1) == plain.last(1)
