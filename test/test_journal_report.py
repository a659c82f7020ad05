"""The commands of `python -m srt.journal`, on files made for the test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from srt.journal import AdmittedEntry, RefusedEntry, RetractionEntry, StepRecord
from srt.journal_history import LEFT, History, State, follow
from srt.journal_report import find_rid, main, read_rotated
from srt.journal_stats import Stats, journal_stats
from srt.journal_table import short_names, step_table
from srt.journal_timeline import AGAIN, DECODE, DROPPED, HELD, PREFILL, WAIT, build_timeline
from srt.journal_timeline_page import PAGE

ROOT = Path(__file__).parents[1]


def prefill(step: int, *rids: str, size: int = 4, **fields: object) -> StepRecord:
    """All of the prompts of `rids`, `size` tokens each, in one pass."""
    fields.setdefault("admitted", [AdmittedEntry(rid, 0, size, 0) for rid in rids])
    return make(step, "P", list(rids), [size] * len(rids), **fields)


def decode(step: int, *rids: str, **fields: object) -> StepRecord:
    return make(step, "D", list(rids), [], **fields)


def make(step: int, phase: str, rids: list[str], lens: list[int], **fields: object) -> StepRecord:
    values: dict[str, object] = {
        "used": 8, "size": 64, "queued": len(fields.get("refused", [])), "ratio": 0.7, "rows": 4,
    }  # fmt: skip
    return StepRecord(step, float(step), phase, rids, lens, **(values | fields))  # type: ignore[arg-type]


def write(path: Path, *records: StepRecord) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return path


def cells(records: list[StepRecord], **options: object) -> list[list[str]]:
    lines = step_table(records, **options)  # type: ignore[arg-type]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# --- files ---


def test_older_files_are_read_before_the_newest(tmp_path):
    path = write(tmp_path / "j.jsonl", decode(4, "a"))
    write(tmp_path / "j.jsonl.1", decode(2, "a"), decode(3, "a"))
    write(tmp_path / "j.jsonl.2", prefill(0, "a"), decode(1, "a"))
    write(tmp_path / "j.jsonl.4", decode(9, "a"))  # not one of them: there is no 3
    assert [record.step for record in read_rotated(path)] == [0, 1, 2, 3, 4]
    path.unlink()
    assert [record.step for record in read_rotated(path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("command", [["show"], ["stats"], ["timeline", "-o", "out.html"]])
def test_a_bad_line_ends_each_command_with_its_file_and_number(tmp_path, capsys, command):
    path = write(tmp_path / "j.jsonl", prefill(0, "a"))
    old = write(tmp_path / "j.jsonl.1", prefill(0, "b"), decode(1, "b"))
    old.write_bytes(old.read_bytes() + b"no record\n")
    assert main([command[0], str(path), *command[1:]]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"journal: error: {old}:3 is not a journal record: ")


def test_a_file_that_is_missing_empty_or_a_folder_is_named(tmp_path, capsys):
    (tmp_path / "empty").touch()
    for name, text in (
        ("missing", "No such file"),
        ("empty", "has no journal record yet"),
        (".", "Is a directory"),
    ):
        assert main(["stats", str(tmp_path / name)]) == 1
        error = capsys.readouterr().err
        assert text in error and str(tmp_path) in error


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    path = write(tmp_path / "j.jsonl", prefill(0, "a"))
    assert main(["timeline", str(path), "-o", str(tmp_path / "no" / "out.html")]) == 1
    assert "out.html" in capsys.readouterr().err


def test_bad_options_are_refused(tmp_path, capsys):
    path = str(write(tmp_path / "j.jsonl", prefill(0, "a")))
    for options, text in (
        (["show", path, "--last", "0"], "--last: must be at least 1, got 0"),
        (["show", path, "--las", "3"], "unrecognized arguments: --las"),
        (["timeline", path], "the following arguments are required: -o"),
        (["draw", path], "invalid choice: 'draw'"),
    ):
        with pytest.raises(SystemExit) as end:
            main(options)
        assert end.value.code == 2
        assert text in capsys.readouterr().err


def test_the_module_runs_without_torch_and_bears_a_closed_pipe(tmp_path):
    records = [prefill(0, "a"), *(decode(step, "a") for step in range(1, 4000))]
    path = write(tmp_path / "j.jsonl", *records)
    # A pipe's buffer is smaller than the table, so `show` writes to a pipe that nobody reads.
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['journal', 'show', {str(path)!r}]\n"
        "try:\n    runpy.run_module('srt.journal', run_name='__main__')\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith(b"| step | pass")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=20) == 0
    process.stderr.close()


# --- the history ---


def test_a_restart_keeps_the_tokens_of_those_submitted_again():
    records = [
        prefill(0, "a", "b"),
        decode(1, "a", "b"),
        # Of a new scheduler. `a` brings its two tokens; `b` is another request of that name.
        prefill(0, "a", size=6),
        prefill(1, "b", size=9),
        decode(2, "a", "b", finished={"a": "stop"}),
    ]
    history = History()
    views = [view.restarted for view in follow(records, history)]
    assert views == [False, False, True, False, False]
    tracks = [(track.rid, track.tokens, track.outcome) for track in history.tracks]
    assert tracks == [("a", 4, "stop"), ("b", 2, LEFT), ("b", 2, "")]
    assert cells(records)[2][5] == "RESTARTED"


def test_a_rid_that_comes_back_after_its_end_is_a_new_request():
    records = [prefill(0, "a", finished={"a": "length"}), prefill(1, "a"), decode(2, "a")]
    history = History()
    assert len(list(follow(records, history))) == 3
    assert [(track.tokens, track.outcome) for track in history.tracks] == [(1, "length"), (2, "")]
    assert len(build_timeline(records, "t").rows) == 2


def test_who_runs_and_is_not_in_a_decode_has_left():
    records = [prefill(0, "a", "b"), prefill(1, "c"), decode(2, "a", "c"), decode(3, "a", "c")]
    history = History()
    left = [[track.rid for track in view.left] for view in follow(records, history)]
    assert left == [[], [], ["b"], []]
    assert history.track("b").state is State.ENDED
    assert cells(records)[2][5] == "end of b (left)"
    [row] = [row for row in build_timeline(records, "t").rows if row.rid == "b"]
    assert (row.end, row.outcome) == (0, LEFT)


def test_a_token_computed_after_the_end_is_not_counted():
    records = [prefill(0, "a", "b"), decode(1, "a", "b", finished={"a": "stop"})]
    records += [decode(2, "a", "b"), decode(3, "b")]
    stats = journal_stats(records)
    assert (stats.given_tokens, stats.dropped_tokens) == (6, 1)
    assert [row[2] for row in cells(records)] == ["1/1", "2/2", "2/3", "2/4"]
    timeline = build_timeline(records, "t")
    [row] = [row for row in timeline.rows if row.rid == "a"]
    assert named_spans(timeline, row) == [(PREFILL, 0, 1), (DECODE, 1, 1), (DROPPED, 2, 1)]
    assert (row.end, row.tokens) == (1, 2)


def test_a_file_may_begin_in_the_middle_of_a_request():
    records = [
        make(7, "M", ["a", "b"], [1, 3], inner=["b"]),
        decode(8, "a", retractions=[RetractionEntry("kv", ["b"], 3, 9, 0.5, 0.6)]),
        prefill(9, "b", size=12, admitted=[AdmittedEntry("b", 4, 16, 1)]),
    ]
    stats = journal_stats(records)
    assert stats.given_tokens == 3
    assert stats.recomputed_tokens == 11, "all but its last token had KV, and four are cached"


# --- show ---


def test_last_counts_from_the_start_of_the_file():
    records = [prefill(0, "a", "b"), *(decode(step, "a", "b") for step in range(1, 6))]
    assert [row[:3] for row in cells(records, last=2)] == [
        ["4", "decode a, b", "5/5"],
        ["5", "decode a, b", "6/6"],
    ]
    assert len(cells(records, last=99)) == 6


def test_rid_shows_only_what_names_it():
    waits = [RefusedEntry("c", "slots", 1, 0, 0)]
    records = [
        prefill(0, "a", "b"),
        decode(1, "a", "b", refused=waits),
        decode(2, "a", "b", finished={"b": "stop"}),
        prefill(3, "c"),
        decode(4, "a", "c"),
        decode(5, "a", retractions=[RetractionEntry("kv", ["c"], 5, 5, 0.1, 0.2)]),
        decode(6, "a"),
    ]
    rows = cells(records, rid="c")
    assert [row[0] for row in rows] == ["1", "3", "4", "5"]
    assert [row[2] for row in rows] == ["0", "1", "2", "2"]
    assert step_table(records, rid="c")[0].split("|")[3].strip() == "tokens so far c"


def test_rid_comes_first_among_those_that_wait():
    waits = [RefusedEntry(f"w{i}", "slots", 1, 0, 0) for i in range(9)]
    [row] = cells([decode(0, "a", refused=waits)], rid="w7")
    assert row[4] == "w7 slots, w0 slots, +7"


def test_the_start_of_a_rid_will_do_if_no_other_begins_so():
    records = [prefill(0, "ab1", "ab2", "xyz", "x")]
    assert find_rid(records, "xy") == "xyz"
    assert find_rid(records, "x") == "x"
    with pytest.raises(ValueError, match="--rid ab: 2 requests begin so: ab1, ab2"):
        find_rid(records, "ab")
    with pytest.raises(ValueError, match="--rid q: no record names such a request"):
        find_rid(records, "q")


def test_names_are_as_short_as_they_can_be_and_harmless():
    assert short_names(["a", "b"]) == {"a": "a", "b": "b"}
    assert short_names(["1234567890", "abcdefghij"]) == {
        "1234567890": "123456",
        "abcdefghij": "abcdef",
    }
    assert short_names(["request-10", "request-1"]) == {
        "request-10": "request-10",
        "request-1": "request-1",
    }
    assert short_names(["a|\x1b[1m"]) == {"a|\x1b[1m": "a??[1m"}


def test_with_many_requests_only_those_that_join_or_leave_are_listed():
    rids = [f"r{i:02}" for i in range(12)]
    waits = [RefusedEntry(f"w{i}", "kv", 30, 20, 5) for i in range(5)]
    records = [
        prefill(0, *rids),
        decode(1, *rids, refused=waits, queued=9),
        decode(2, *rids, finished={"r03": "stop"}),
    ]
    header = step_table(records)[0]
    assert "| tokens so far " in header and "r00" not in header
    first, second, third = cells(records)
    assert first[1] == "prefill r00, r01, r02, r03, +8"
    assert first[2] == "r00 1, r01 1, r02 1, r03 1, +8"
    assert second[1:3] == ["decode 12 rows", ""]
    assert second[4] == "w0 kv short by 15, w1 kv short by 15, +7"
    assert third[2] == "r03 3" and third[5] == "end of r03 (stop)"


def test_a_mixed_pass_says_who_does_what():
    records = [
        prefill(0, "a"),
        make(1, "M", ["b", "a"], [3, 1], admitted=[AdmittedEntry("b", 2, 9, 0)], inner=["b"]),
        make(2, "M", ["b", "a"], [4, 1]),
    ]
    assert [row[1:3] for row in cells(records)[1:]] == [
        ["mixed prefill b (3 of 9, 2 cached) with decode a", "2/0"],
        ["mixed prefill b (4 of 9) with decode a", "3/1"],
    ]


# --- stats ---


def test_stats_for_programs_and_for_people_say_the_same(tmp_path, capsys):
    waits = [RefusedEntry("c", "kv", 9, 5, 2)]
    records = [
        prefill(0, "a", "b", ms={"choose": 1.0, "run": 10.0}),
        decode(1, "a", "b", refused=waits, queued=3, used=32, ms={"choose": 3.0, "run": 20.0}),
        decode(2, "a", retractions=[RetractionEntry("kv", ["b"], 5, 5, 0.1, 0.9)], used=16),
        prefill(5, "b", size=6, admitted=[AdmittedEntry("b", 1, 6, 1)]),
    ]
    path = write(tmp_path / "j.jsonl", *records)
    assert main(["stats", str(path), "--json"]) == 0
    stats = msgspec.json.decode(capsys.readouterr().out, type=Stats)
    assert stats == journal_stats(records)
    assert stats.blockers == {"kv": 1, "behind others": 2}
    assert (stats.kv_usage.p50, stats.kv_usage.max) == (0.1875, 0.5)
    assert (stats.ms["choose"].mean, stats.ms["run"].p50) == (2.0, 15.0)
    assert stats.requeue_waits_seconds.max == 3.0
    assert stats.recomputed_tokens == 4
    gap = stats.longest_retraction_gap
    assert gap is not None and (gap.passes, gap.rid, gap.step) == (2, "b", 5)
    assert main(["stats", str(path)]) == 0
    text = capsys.readouterr().out
    assert "4 passes, steps 0 to 5, 5.0 s" in text
    assert "retractions (kv): 1 requests in 1 events, 5 tokens lost, 5 slots gained" in text
    assert "computed again: 4 tokens, 28.6% of what was prefilled" in text
    assert "2 behind others, 1 kv" in text


def test_stats_of_the_last_passes_know_what_came_before():
    records = [prefill(0, "a"), *(decode(step, "a") for step in (1, 2)), prefill(3, "b")]
    records.append(decode(4, "a", "b"))
    stats = journal_stats(records, last=1)
    assert (stats.passes, stats.first_step, stats.given_tokens) == (1, 4, 2)
    assert stats.longest_gap is not None and stats.longest_gap.passes == 2


def test_a_gap_does_not_reach_over_a_restart():
    records = [prefill(0, "a"), decode(1, "a"), prefill(0, "x"), prefill(1, "a", size=6)]
    gap = journal_stats(records).longest_gap
    assert gap is not None and gap.passes == 1


# --- timeline ---


def named_spans(timeline, row) -> list[tuple[str, int, int]]:
    spans = row.spans
    return [(timeline.kinds[spans[i]], *spans[i + 1 : i + 3]) for i in range(0, len(spans), 4)]


def some_records() -> list[StepRecord]:
    return [
        prefill(0, "a", refused=[RefusedEntry("b", "slots", 1, 0, 0)]),
        decode(1, "a"),
        prefill(2, "c"),
        decode(3, "a", "c", refused=[RefusedEntry("b", "kv", 9, 5, 2)]),
        prefill(4, "b", admitted=[AdmittedEntry("b", 0, 8, 0)], inner=["b"]),
        decode(5, "a", "c", finished={"a": "stop"}),
        make(6, "P", ["b"], [4]),
        decode(7, "b", retractions=[RetractionEntry("kv", ["c"], 5, 5, 0.1, 0.9)]),
        decode(8, "b", refused=[RefusedEntry("c", "kv", 9, 5, 2)]),
        prefill(9, "c", admitted=[AdmittedEntry("c", 0, 7, 1)]),
    ]


def test_a_timeline_says_what_each_request_did_in_each_pass():
    timeline = build_timeline(some_records(), "t")
    spans = {row.rid: named_spans(timeline, row) for row in timeline.rows}
    assert spans["a"] == [
        (PREFILL, 0, 1), (DECODE, 1, 1), (HELD, 2, 1), (DECODE, 3, 1), (HELD, 4, 1), (DECODE, 5, 1),
    ]  # fmt: skip
    assert spans["b"] == [
        (WAIT + "slots", 0, 1), (WAIT + "behind others", 1, 2), (WAIT + "kv", 3, 1),
        (PREFILL, 4, 1), (HELD, 5, 1), (PREFILL, 6, 1), (DECODE, 7, 2),
    ]  # fmt: skip
    assert spans["c"] == [
        (PREFILL, 2, 1), (DECODE, 3, 1), (HELD, 4, 1), (DECODE, 5, 1), (HELD, 6, 1),
        (WAIT + "behind others", 7, 1), (WAIT + "kv", 8, 1), (AGAIN, 9, 1),
    ]  # fmt: skip
    rows = {row.rid: (row.marks, row.end, row.outcome, row.tokens) for row in timeline.rows}
    assert rows == {"a": ([], 5, "stop", 4), "b": ([], -1, "", 3), "c": ([7], -1, "", 4)}


def test_a_timeline_of_the_last_passes_is_the_end_of_the_whole_one():
    whole, part = (build_timeline(some_records(), "t", last) for last in (None, 4))
    assert part.passes.step == whole.passes.step[-4:]
    spans = {row.rid: named_spans(part, row) for row in part.rows}
    assert spans == {
        "b": [(PREFILL, 0, 1), (DECODE, 1, 2)],
        "c": [(HELD, 0, 1), (WAIT + "behind others", 1, 1), (WAIT + "kv", 2, 1), (AGAIN, 3, 1)],
    }
    assert [row.marks for row in part.rows] == [[], [1]]


def test_a_blocker_that_the_page_does_not_know_is_drawn_all_the_same():
    records = [decode(0, "a", refused=[RefusedEntry("b", "grammar", 1, 0, 0)])]
    timeline = build_timeline(records, "t")
    [row] = [row for row in timeline.rows if row.rid == "b"]
    assert named_spans(timeline, row) == [(WAIT + "grammar", 0, 1)]


def test_the_page_holds_its_data_and_needs_nothing_else(tmp_path, capsys):
    rid = "</script><img src=x onerror=alert(1)>"
    path = write(tmp_path / "a&b.jsonl", prefill(0, rid), decode(1, rid, finished={rid: "stop"}))
    out = tmp_path / "out.html"
    assert main(["timeline", str(path), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    page = out.read_text(encoding="utf-8")
    assert "{{" not in page and "<title>a&amp;b.jsonl - timeline</title>" in page
    assert page.count("</script>") == PAGE.count("</script>") and "<img" not in page
    assert not re.search(r"https?://|\bsrc=[\"']|@import|url\(", page)
    [data] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page)
    assert [row["rid"] for row in json.loads(data)["rows"]] == [rid]
