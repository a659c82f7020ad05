import numpy as np
import pytest

from srt.managers.length_predictor import MIN_SAMPLES, WINDOW, LengthPredictor


def ints(*values):
    return np.array(values, dtype=np.int64)


def predictor(lengths, running=(), quantile=0.5):
    made = LengthPredictor(quantile)
    for length in lengths:
        made.observe(length)
    made.fit(ints(*running))
    return made


def test_it_predicts_the_quantile_of_the_lengths_above_what_was_produced():
    made = predictor(range(1, 101))
    assert made.remaining(ints(0, 50, 90), ints(1000, 1000, 1000)).tolist() == [50, 25, 5]


def test_a_request_longer_than_all_that_were_seen_gets_its_limit():
    assert predictor([10, 20]).remaining(ints(20, 35), ints(7, 400)).tolist() == [7, 400]


def test_no_prediction_is_below_one_or_above_the_limit():
    made = predictor([5] * 20 + [500])
    assert made.remaining(ints(4, 0), ints(100, 3)).tolist() == [1, 3]


def test_running_requests_count_as_longer_than_what_they_have_produced():
    """Of ten requests, five ended at 10 and five run on at 100: half are longer than 100 at
    least."""
    alone = predictor([10] * 5)
    assert alone.remaining(ints(0), ints(1000)).tolist() == [10]
    censored = predictor([10] * 5, running=[100] * 5, quantile=0.6)
    assert censored.remaining(ints(0), ints(1000)).tolist() == [1000]


def test_it_says_when_it_has_seen_enough_and_forgets_the_oldest():
    made = LengthPredictor()
    for _ in range(MIN_SAMPLES - 1):
        made.observe(3)
    assert not made.is_ready
    made.observe(3)
    assert made.is_ready
    for _ in range(WINDOW):
        made.observe(9)
    made.fit(ints())
    assert made.remaining(ints(0), ints(100)).tolist() == [9]


@pytest.mark.parametrize("seed", range(5))
def test_conditional_quantiles_of_a_known_distribution_are_met(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.geometric(1 / 100, 1000)
    made = predictor(lengths)
    # Geometric lengths have no memory: the median of what is left never changes.
    left = made.remaining(ints(0, 50, 100, 150), np.full(4, 10_000))
    assert np.abs(left - 69).max() < 25
