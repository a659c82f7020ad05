"""What the journal's readers say about schedules that the real loop has run."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
import pytest
from scheduler_harness import Harness
from test_golden_schedules import run

from srt.journal import Journal, StepRecord, read_journal
from srt.journal_history import History, follow
from srt.journal_report import main
from srt.journal_stats import BEHIND, Gap, journal_stats
from srt.journal_table import step_table
from srt.journal_timeline import KINDS, build_timeline


def shown(path: Path, capsys, *options: str) -> list[list[str]]:
    """The cells of the rows that `show` prints, without the padding."""
    assert main(["show", str(path), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert set(lines[1]) == {"|", "-"}
    return [rows[0], *rows[2:]]


def test_show_prints_the_worked_schedule_of_three_requests(tmp_path, capsys):
    path = tmp_path / "j.jsonl"
    run(Harness(max_running=2, journal=str(path)), [(0, "A", 3, 2), (0, "B", 3, 5), (1, "C", 3, 2)])
    table = [row[:3] for row in shown(path, capsys)]
    assert table == [
        ["step", "pass", "tokens so far A/B/C"],
        ["0", "prefill A, B", "1/1/0"],
        ["1", "decode A, B", "2/2/0"],
        ["2", "prefill C", "2/2/1"],
        ["3", "decode B, C", "2/3/2"],
        ["4", "decode B", "2/4/2"],
        ["5", "decode B", "2/5/2"],
    ]
    waiting, notes = zip(*(row[4:] for row in shown(path, capsys)[1:]), strict=True)
    assert waiting == ("", "C slots", "", "", "", "")
    assert notes == ("", "end of A (length)", "", "end of C (length)", "", "end of B (length)")


def test_show_prints_the_worked_schedule_of_five_requests(tmp_path, capsys):
    path = tmp_path / "j.jsonl"
    run(
        Harness(max_running=2, max_prefill_tokens=6, journal=str(path)),
        [(0, "A", 3, 4), (1, "B", 2, 2), (2, "C", 3, 3), (4, "D", 4, 2), (6, "E", 2, 4)],
    )
    assert [row[1] for row in shown(path, capsys)[1:]] == [
        "prefill A", "prefill B", "decode A, B", "prefill C", "decode A, C", "decode A, C",
        "prefill D, E", "decode D, E", "decode E", "decode E",
    ]  # fmt: skip


def test_show_prints_the_chunks_of_a_long_prompt(tmp_path, capsys):
    path = tmp_path / "j.jsonl"
    harness = Harness(pool_size=8192, context_len=4096, chunk=1024, journal=str(path))
    run(harness, [(0, "B", 2, 3), (1, "C", 2500, 2)])
    assert [row[1:3] for row in shown(path, capsys)[1:]] == [
        ["prefill B", "1/0"],
        ["prefill C (1024 of 2500)", "1/0"],
        ["prefill C (1024 of 2500)", "1/0"],
        ["prefill C (452 of 2500)", "1/1"],
        ["decode B, C", "2/2"],
        ["decode B", "3/2"],
    ]


def test_show_prints_decode_turns_between_chunks(tmp_path, capsys):
    path = tmp_path / "j.jsonl"
    harness = Harness(
        pool_size=8192, context_len=4096, chunk=1024, phase="interleave", journal=str(path)
    )
    run(harness, [(0, "B", 2, 5), (1, "C", 2500, 1)])
    table = shown(path, capsys)[1:]
    assert [row[1].split(" (")[0] for row in table] == [
        "prefill B", "decode B", "prefill C", "decode B", "prefill C", "decode B", "prefill C",
        "decode B",
    ]  # fmt: skip
    assert table[1][4] == "C decode_turn"


def test_show_says_by_how_much_kv_is_short(tmp_path, capsys):
    path = tmp_path / "j.jsonl"
    harness = Harness(pool_size=40, journal=str(path))
    run(harness, [(0, "A", 10, 20), (1, "B", 10, 20)])
    first = shown(path, capsys)[2]
    refused = read_journal(path)[1].refused[0]
    missing = refused.needed + refused.reserved - refused.available
    assert missing > 0 and first[4] == f"B kv short by {missing}"


def crowd(harness: Harness, seed: int, count: int = 25) -> None:
    """Random requests, some of which stop by themselves, until all have ended."""
    rng = random.Random(seed)
    for i in range(count):
        prompt = [rng.randrange(harness.vocab_size) for _ in range(rng.randint(1, 30))]
        harness.send(f"r{i}", prompt, rng.randint(1, 30))
        for _ in range(rng.randint(0, 4)):
            harness.step()
    harness.run()


def small(seed: int, **options: object) -> Harness:
    rng = random.Random(seed)
    return Harness(
        pool_size=rng.choice([60, 90, 150]),
        max_running=rng.choice([2, 5, 12]),
        chunk=rng.choice([8, 16, None]),
        phase=rng.choice(["interleave", "prefill-first", "decode-first"]),
        disable_radix=rng.random() < 0.5,
        conservativeness=0.1,
        retract_every=7,
        eos=tuple(range(40)),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_history_counts_what_the_clients_got(seed, mixed, overlap):
    harness = small(seed, mixed=mixed, overlap=overlap)
    harness.scheduler.recorder.journal = Journal(ring_size=10_000)
    crowd(harness, seed)
    records = msgspec.convert(harness.scheduler.recorder.journal.last(10_000), list[StepRecord])
    history, recomputed, retracted = History(), 0, 0
    for view in follow(records, history):
        recomputed += view.recomputed
        retracted += len(view.retracted)
        lost = sum(event.lost for event in view.record.retractions)
        assert sum(track.kv_len for track in view.retracted) == lost
        assert not view.left
    got = {rid: len(ids) for rid, ids in harness.outputs.items()}
    assert {track.rid: track.tokens for track in history.tracks} == got
    ends = {rid: reason.type.value for rid, reason in harness.finished.items()}
    assert {track.rid: track.outcome for track in history.tracks} == ends
    assert recomputed == harness.scheduler.counters.recomputed_tokens
    assert retracted == sum(harness.scheduler.counters.retracted_requests.values()) > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_timeline_draws_every_pass_of_a_request_once(seed, tmp_path):
    path = tmp_path / "j.jsonl"
    crowd(small(seed, mixed=seed % 2 == 1, journal=str(path)), seed)
    records = read_journal(path)
    timeline = build_timeline(records, "t")
    assert len(timeline.rows) == 25
    drawn: dict[int, set[str]] = {}
    for row in timeline.rows:
        spans = [row.spans[i : i + 4] for i in range(0, len(row.spans), 4)]
        for (_, first, length, _), (_, after, _, _) in itertools.pairwise(spans):
            assert first + length == after, "a hole, or two things in one pass"
        for kind, first, length, _ in spans:
            if timeline.kinds[kind] in KINDS[:3]:
                for index in range(first, first + length):
                    drawn.setdefault(index, set()).add(row.rid)
        assert row.end == spans[-1][1] + spans[-1][2] - 1 and row.outcome
    assert drawn == {index: set(record.rids) for index, record in enumerate(records)}
    marks = sorted((index, row.rid) for row in timeline.rows for index in row.marks)
    events = [
        (index, rid)
        for index, record in enumerate(records)
        for event in record.retractions
        for rid in event.victims
    ]
    assert marks == sorted(events) and events


def test_stats_of_the_worked_schedule(tmp_path):
    path = tmp_path / "j.jsonl"
    run(Harness(max_running=2, journal=str(path)), [(0, "A", 3, 2), (0, "B", 3, 5), (1, "C", 3, 2)])
    stats = journal_stats(read_journal(path))
    assert (stats.passes, stats.seconds, stats.given_tokens) == (6, 5.0, 9)
    phases = {
        name: (phase.passes, phase.rows, phase.row_limit, phase.tokens)
        for name, phase in stats.phases.items()
    }
    assert phases == {"prefill": (2, 3, 4, 9), "all": (6, 9, 12, 15), "decode": (4, 6, 8, 6)}
    assert stats.phases["all"].utilisation == 0.75
    assert stats.outcomes == {"length": 3}
    assert stats.blockers == {"slots": 1}
    assert stats.longest_gap == Gap(passes=2, ms=2000.0, rid="B", step=3)
    assert (stats.waits_passes.count, stats.waits_passes.max) == (3, 1.0)
    assert set(stats.ms) == {"receive", "choose", "run", "process"}


def test_stats_of_a_crowd_agree_with_the_schedulers_counters(tmp_path):
    path = tmp_path / "j.jsonl"
    harness = small(1, journal=str(path))
    crowd(harness, 1)
    records = read_journal(path)
    stats, counters = journal_stats(records), harness.scheduler.counters
    assert stats.given_tokens == counters.generated_tokens
    assert stats.prefill_tokens == counters.prompt_tokens
    assert stats.recomputed_tokens == counters.recomputed_tokens > 0
    assert stats.recomputed_share == stats.recomputed_tokens / stats.prefill_tokens
    requests = {cause: sums.requests for cause, sums in stats.retractions.items()}
    assert requests == dict(counters.retracted_requests)
    assert stats.outcomes == dict(counters.ended)
    assert sum(stats.blockers.values()) == sum(record.queued for record in records)
    assert stats.blockers[BEHIND] > 0
    assert stats.longest_retraction_gap is not None and stats.longest_retraction_gap.passes > 1


def test_show_marks_retractions_and_who_comes_back(tmp_path, capsys):
    path = tmp_path / "j.jsonl"
    harness = Harness(max_running=4, retract_every=4, journal=str(path), disable_radix=True)
    run(harness, [(0, "A", 3, 7), (0, "B", 4, 7)])
    table = shown(path, capsys)[1:]
    [at] = [i for i, row in enumerate(table) if "RETRACTED" in row[5]]
    assert table[at][5].startswith("RETRACTED B (forced: 7 lost, 7 gained, ratio ")
    # Its four tokens stay; all eight are computed again.
    assert [row[1:3] for row in table[at : at + 2]] == [
        ["decode A", "5/4"],
        ["prefill B (again)", "5/5"],
    ]


def test_a_request_waits_from_its_arrival_on(tmp_path):
    """C comes while one pass runs, is named by no record before it is admitted, and still waits."""
    path = tmp_path / "j.jsonl"
    harness = Harness(max_running=2, journal=str(path))
    run(harness, [(0, "A", 3, 2), (0, "B", 3, 5), (1, "C", 3, 2)])
    records = read_journal(path)
    arrivals = {
        entry.rid: (record.step, entry.prompt_len) for record in records for entry in record.arrived
    }
    assert arrivals == {"A": (0, 3), "B": (0, 3), "C": (1, 3)}
    timeline = build_timeline(records, "t")
    [row] = [row for row in timeline.rows if row.rid == "C"]
    assert row.spans[1] == 1, "the wait begins with the pass after the arrival"


def test_what_happened_before_a_pass_is_recorded_even_if_a_choice_came_to_nothing(tmp_path):
    """Whoever is aborted in the queue while nothing can run ends in the next record."""
    path = tmp_path / "j.jsonl"
    harness = Harness(max_running=2, journal=str(path))
    harness.scheduler.paused = True
    harness.send("A", [1, 2, 3], 2)
    harness.step()
    harness.abort("A")
    harness.step()
    harness.scheduler.paused = False
    harness.send("B", [1, 2, 3], 2)
    harness.run()
    first = read_journal(path)[0]
    assert [entry.rid for entry in first.arrived] == ["A", "B"]
    assert first.finished == {"A": "abort"} and first.rids == ["B"]


def test_a_request_aborted_in_the_queue_is_shown_with_its_end(tmp_path):
    """No pass and no blocker names B; its arrival and its end do."""
    path = tmp_path / "j.jsonl"
    harness = Harness(max_running=1, journal=str(path))
    harness.send("A", [1, 2, 3], 6)
    harness.step()
    harness.send("B", [4, 5, 6], 6)
    harness.abort("B")
    harness.run()
    table = step_table(read_journal(path))
    assert any("end of B (abort)" in line for line in table)
    assert journal_stats(read_journal(path)).outcomes == {"length": 1, "abort": 1}


def test_an_end_by_a_stop_string_is_a_stop_and_told_once(tmp_path, capsys):
    path = tmp_path / "j.jsonl"
    harness = Harness(journal=str(path))
    harness.send("A", [1, 2], 9)
    harness.send("B", [3, 4], 4)
    harness.step()
    harness.abort("A", finished=True, stopped=True)
    harness.run()
    table = shown(path, capsys)
    assert [row[5] for row in table if "A" in row[5]] == ["end of A (stop)"]


def test_what_is_used_in_a_mixed_pass_counts_those_that_ride_along():
    harness = Harness(mixed=True)
    harness.send("A", [1, 2, 3], 9)
    harness.step()
    harness.send("B", [4, 5], 9)
    mixed = harness.step()
    assert mixed is not None and mixed.phase == "M"
    assert mixed.record.used == harness.memory.used
