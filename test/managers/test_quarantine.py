"""Who is ended after crashes, and who goes on."""

from __future__ import annotations

from srt.managers.quarantine import PROGRESS_TOKENS, Quarantine


def test_one_crash_condemns_nobody():
    assert Quarantine().on_crash(["a", "b"], {"a": 3, "b": 4}) == []


def test_who_was_alone_at_two_crashes_in_a_row_is_condemned():
    quarantine = Quarantine()
    quarantine.on_crash(["a", "poison"], {"a": 3, "poison": 0, "waits": 0})
    assert quarantine.on_crash(["poison"], {"poison": 0, "waits": 0}) == ["poison"]
    assert not quarantine.held


def test_one_suspect_in_company_is_tried_before_it_is_condemned():
    """Something else may kill schedulers, twice just when it had come into the batch."""
    outputs = {"poison": 0, "other": 0}
    for end in (["poison"], []):
        quarantine = Quarantine()
        quarantine.on_crash(["poison"], outputs)
        assert quarantine.on_crash(["poison", "other"], outputs) == []
        assert quarantine.next_trial(outputs) == "poison" and not quarantine.held
        got_on = {"poison": 0 if end else PROGRESS_TOKENS, "other": 5}
        assert quarantine.on_crash(["poison", "other"], got_on) == end
        assert quarantine.on_trial is None and not quarantine.held


def test_who_got_on_between_two_crashes_is_innocent():
    quarantine = Quarantine()
    quarantine.on_crash(["a"], {"a": 3})
    assert quarantine.on_crash(["a"], {"a": 3 + PROGRESS_TOKENS}) == []


def test_several_suspects_are_tried_one_after_the_other():
    quarantine = Quarantine()
    outputs = {"a": 1, "b": 1, "poison": 1, "other": 0}
    suspects = ["a", "b", "poison"]
    quarantine.on_crash(suspects, outputs)
    assert quarantine.on_crash(suspects, outputs) == []
    assert quarantine.held == set(suspects)
    first = quarantine.next_trial(outputs)
    assert first == "a" and quarantine.held == {"b", "poison"}
    assert quarantine.next_trial(outputs) is None, "it has not shown anything yet"
    outputs["a"] += PROGRESS_TOKENS
    assert quarantine.next_trial(outputs) == "b"
    del outputs["b"]  # it has ended
    assert quarantine.next_trial(outputs) == "poison"
    assert quarantine.on_crash(["other", "poison"], outputs) == ["poison"]
    assert not quarantine.held and quarantine.on_trial is None


def test_a_crash_without_the_one_on_trial_says_nothing_of_it():
    quarantine = Quarantine()
    outputs = {"a": 1, "b": 1}
    quarantine.on_crash(["a", "b"], outputs)
    quarantine.on_crash(["a", "b"], outputs)
    assert quarantine.next_trial(outputs) == "a"
    assert quarantine.on_crash([], outputs) == []
    assert quarantine.next_trial(outputs) == "a"
    assert quarantine.on_crash(["a", "b"], outputs) == ["a"]


def test_a_suspect_that_its_client_left_is_not_tried():
    quarantine = Quarantine()
    outputs = {"a": 1, "b": 1}
    quarantine.on_crash(["a", "b"], outputs)
    quarantine.on_crash(["a", "b"], outputs)
    assert quarantine.next_trial({"b": 1}) == "b"
