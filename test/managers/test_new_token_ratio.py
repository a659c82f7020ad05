import pytest

from srt.managers.new_token_ratio import NewTokenRatio


def test_it_falls_to_the_floor_in_600_passes_and_stays():
    ratio = NewTokenRatio()
    assert ratio.value == pytest.approx(0.7)
    for _ in range(300):
        ratio.decay()
    assert ratio.value == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(900):
        ratio.decay()
    assert ratio.value == pytest.approx(0.098)


def test_a_retraction_sets_it_to_what_was_used_plus_twenty_a_row():
    ratio = NewTokenRatio()
    ratio.on_retract(sum_outputs=100, sum_max_new_tokens=999, num_rows=10)
    assert ratio.value == pytest.approx(0.3)
    ratio.on_retract(sum_outputs=990, sum_max_new_tokens=999, num_rows=10)
    assert ratio.value == 1.0


def test_conservativeness_scales_it_up_to_one():
    assert NewTokenRatio(0.5).value == pytest.approx(0.35)
    assert NewTokenRatio(3.0).value == 1.0


def test_idle_time_resets_it():
    ratio = NewTokenRatio()
    ratio.on_retract(1, 1, 1)
    ratio.reset()
    assert ratio.value == ratio.initial
