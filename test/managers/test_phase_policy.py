import numpy as np
import pytest

from srt.managers.phase_policy import (
    PHASES,
    DecodeFirst,
    Interleave,
    PassStats,
    PhaseState,
    PrefillFirst,
    SloPolicy,
    make_phase_policy,
)
from srt.managers.step_time import MIN_SAMPLES, StepTimeModel


def state(running=8, now=0.0, due=0.0, last=0.0, pending=1000):
    return PhaseState(now, running, 1000 * running, pending, due, last)


def test_prefill_first_always_takes_the_whole_budget():
    policy = PrefillFirst()
    policy.on_launch(is_extend=True)
    assert policy.prefill_tokens(state(), 512) == 512


def test_decode_first_prefills_only_when_nobody_decodes():
    policy = DecodeFirst()
    assert policy.prefill_tokens(state(running=1), 512) == 0
    assert policy.prefill_tokens(state(running=0), 512) == 512


def test_interleave_owes_its_decodes_after_a_prefill():
    policy = Interleave(decodes=2)
    seen = []
    for _ in range(6):
        tokens = policy.prefill_tokens(state(), 512)
        seen.append(tokens)
        policy.on_launch(is_extend=tokens > 0)
    assert seen == [512, 0, 0, 512, 0, 0]


def test_interleave_owes_nothing_to_fewer_than_its_minimum():
    policy = Interleave(decodes=2, min_batch=4)
    policy.on_launch(is_extend=True)
    assert policy.prefill_tokens(state(running=3), 512) == 512
    policy.on_launch(is_extend=True)
    assert policy.prefill_tokens(state(running=4), 512) == 0


def trained(ttft, itl):
    """A policy that has learned 1 ms a token and 10 ms a pass."""
    policy = SloPolicy(ttft, itl, page_size=1)
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = int(rng.integers(1, 600))
        policy.on_pass(PassStats(True, tokens, 1, tokens, 0.01 + 0.001 * tokens))
        rows = int(rng.integers(1, 32))
        policy.on_pass(PassStats(False, rows, rows, 0, 0.01 + 0.001 * rows))
    return policy


def test_slo_sizes_a_prefill_to_the_slack_of_the_streams():
    policy = trained(ttft=60.0, itl=0.3)
    tokens = policy.prefill_tokens(state(running=8, now=0.1, last=0.0), 4096)
    # 300 ms - 100 ms gone - 18 ms for the decode pass leave some 170 ms, 10 of them fixed.
    assert 100 < tokens < 190


def test_slo_decodes_when_the_streams_have_no_slack_and_the_waiting_have():
    policy = trained(ttft=60.0, itl=0.1)
    assert policy.prefill_tokens(state(now=0.095, last=0.0, due=0.0), 4096) == 0


def test_slo_prefills_a_little_when_the_waiting_are_later_than_the_streams():
    policy = trained(ttft=0.5, itl=0.1)
    assert policy.prefill_tokens(state(now=5.0, last=4.95, due=0.0), 4096) == SloPolicy.MIN_TOKENS


def test_slo_never_prefills_more_than_a_few_times_in_a_row_while_somebody_decodes():
    policy = trained(ttft=0.001, itl=60.0)
    turns = 0
    while policy.prefill_tokens(state(now=9.0, last=9.0), 512) and turns < 99:
        policy.on_launch(is_extend=True)
        turns += 1
    assert turns == SloPolicy.MAX_PREFILLS


def test_slo_takes_everything_when_nobody_decodes():
    assert trained(1.0, 0.1).prefill_tokens(state(running=0), 512) == 512


@pytest.mark.parametrize("name", PHASES)
def test_every_name_makes_the_policy_of_that_name(name):
    assert make_phase_policy(name).name == name


def test_an_unknown_name_is_named():
    with pytest.raises(ValueError, match="'best'"):
        make_phase_policy("best")


def test_the_step_time_model_learns_a_linear_machine_and_follows_a_change():
    model, rng = StepTimeModel(), np.random.default_rng(0)

    def feed(per_token, steps):
        for _ in range(steps):
            tokens, rows, kv = (int(rng.integers(1, high)) for high in (2000, 100, 100_000))
            seconds = 0.005 + per_token * tokens + 1e-4 * rows + 1e-7 * kv
            model.observe(tokens, rows, kv, seconds)

    feed(1e-4, MIN_SAMPLES - 1)
    assert not model.is_ready
    feed(1e-4, 100)
    assert model.is_ready
    assert model.seconds(1000, 50, 50_000) == pytest.approx(0.115, rel=0.02)
    assert model.tokens_within(0.1051) == pytest.approx(1000, rel=0.05)
    assert model.tokens_within(0.001) == 0
    feed(3e-4, 1500)
    assert model.seconds(1000, 50, 50_000) == pytest.approx(0.315, rel=0.05)


def test_the_step_time_model_stays_sane_when_all_passes_are_alike():
    model = StepTimeModel()
    for _ in range(20_000):
        model.observe(8, 8, 1000, 0.1)
    assert model.seconds(8, 8, 1000) == pytest.approx(0.1, rel=0.01)
    assert np.isfinite(model.seconds(500, 8, 1000))
