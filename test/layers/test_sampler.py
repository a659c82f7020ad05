"""The sampler against references in NumPy float64, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.layers import native_ops
from srt.layers.sampler import adjust_logits, mark_broken, sample, uniform
from srt.sampling_batch import BROKEN, SamplingBatch
from srt.sampling_params import SamplingParams

VOCAB_SIZE = 300


@dataclass
class Row:
    params: SamplingParams
    logits: np.ndarray
    prompt_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    output_ids: list[int] = field(default_factory=list)
    stop_ids: tuple[int, ...] = ()

    @property
    def seq_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


def build(rows: list[Row]) -> SamplingBatch:
    return SamplingBatch.build(
        [row.params for row in rows],
        [row.prompt_ids for row in rows],
        [row.output_ids for row in rows],
        [row.stop_ids for row in rows],
        len(rows[0].logits),
        "cpu",
    )


def tensors(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.from_numpy(np.stack([row.logits for row in rows]).astype(np.float32))
    return logits, torch.tensor([row.seq_len for row in rows])


def sampled(rows: list[Row], batch: SamplingBatch | None = None) -> list[int]:
    logits, seq_lens = tensors(rows)
    return sample(logits, batch or build(rows), seq_lens).tolist()


def adjusted(row: Row) -> np.ndarray:
    logits, seq_lens = tensors([row])
    return adjust_logits(logits, build([row]), seq_lens)[0].numpy()


def random_logits(seed: int, scale: float = 3.0, size: int = VOCAB_SIZE) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


# --- references ---


def reference_uniform(seed: int, position: int) -> float:
    """SplitMix64 in Python integers."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    state = (mix((seed + gamma) & mask) + position * gamma) & mask
    return (mix(state) >> 11) / 2**53


def reference_distribution(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Token ids in the order in which they are drawn, and their probabilities."""
    p = row.params
    x = row.logits.astype(np.float64) / p.temperature
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    ids = np.arange(len(probs))
    if p.top_p < 1.0 or 0 < p.top_k < len(probs):
        ids = np.argsort(-row.logits, kind="stable")
        probs = probs[ids]
    if p.top_k > 0:
        probs[p.top_k :] = 0
        probs /= probs.sum()
    if p.top_p < 1.0:
        size = int(np.argmax(np.cumsum(probs) >= p.top_p)) + 1
        probs[size:] = 0
    probs[probs < p.min_p * probs.max()] = 0
    return ids, probs / probs.sum()


def reference_token(row: Row) -> int:
    if row.params.is_greedy:
        return int(row.logits.argmax())
    ids, probs = reference_distribution(row)
    u = reference_uniform(row.params.sampling_seed or 0, row.seq_len)
    return int(ids[np.searchsorted(np.cumsum(probs), u, side="right")])


# --- the random number ---


@pytest.mark.parametrize("seed", [0, 1, 42, -1, 2**63 - 1, -(2**63)])
def test_uniform_numbers_are_those_of_splitmix64(seed):
    positions = [0, 1, 2, 1000, 2**31]
    got = uniform(torch.full((len(positions),), seed), torch.tensor(positions))
    assert got.tolist() == [reference_uniform(seed, position) for position in positions]


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions():
    for seeds, positions in [
        (torch.arange(20000), torch.full((20000,), 7)),
        (torch.full((20000,), 7), torch.arange(20000)),
    ]:
        u = uniform(seeds, positions).numpy()
        assert u.min() >= 0 and u.max() < 1
        counts = np.histogram(u, bins=50, range=(0, 1))[0]
        # Chi-square with 49 degrees of freedom stays below 85 in 99.9 % of the cases.
        assert ((counts - 400) ** 2 / 400).sum() < 85
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


# --- filters ---


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 40},
        {"top_k": 200},
        {"top_k": VOCAB_SIZE},
        {"top_p": 0.01},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 200, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.2, "temperature": 1.5},
    ],
)
def test_tokens_are_those_of_the_reference(knobs, seed):
    rows = []
    for position in range(20):
        params = SamplingParams(sampling_seed=seed * 1000, **knobs)
        logits = random_logits(seed * 100 + position)
        rows.append(Row(params, logits, output_ids=[0] * position))
    assert sampled(rows) == [reference_token(row) for row in rows]


def frequencies(row: Row, draws: int = 4000) -> np.ndarray:
    """How often each token is drawn, over `draws` positions of one seed."""
    batch = build([row] * draws)
    logits = torch.from_numpy(row.logits).expand(draws, -1).contiguous()
    tokens = sample(logits, batch, torch.arange(draws))
    return np.bincount(tokens.numpy(), minlength=len(row.logits))


@pytest.mark.parametrize(
    "knobs", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.5, "top_k": 150}]
)
def test_drawn_tokens_follow_the_distribution(knobs):
    row = Row(SamplingParams(sampling_seed=11, **knobs), random_logits(3, scale=1.5, size=200))
    ids, probs = reference_distribution(row)
    expected = np.zeros(200)
    expected[ids] = probs * 4000
    counts = frequencies(row)
    assert counts[expected == 0].sum() == 0
    # Rare tokens are pooled, as the test needs at least some five of each kind.
    rare = expected < 5
    kinds = np.append(expected[~rare], expected[rare].sum())
    seen = np.append(counts[~rare], counts[rare].sum())
    kinds, seen = kinds[kinds > 0], seen[kinds > 0]
    freedom = len(kinds) - 1
    # Mean plus four standard deviations of a chi-square variable.
    assert ((seen - kinds) ** 2 / kinds).sum() < freedom + 4 * np.sqrt(2 * freedom)


def test_top_k_keeps_exactly_k_and_prefers_low_ids_among_equals():
    row = Row(SamplingParams(top_k=3), np.array([0, 1, 1, 1, 1, 0], np.float32))
    assert np.flatnonzero(frequencies(row, 300)).tolist() == [1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log(np.array([0.125, 0.5, 0.25, 0.125], np.float32))
    for top_p, kept in [(0.1, [1]), (0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.76, [0, 1, 2])]:
        row = Row(SamplingParams(top_p=top_p), logits)
        assert np.flatnonzero(frequencies(row, 300)).tolist() == kept


def test_negative_zero_and_negative_logits_are_ordered_as_numbers():
    row = Row(SamplingParams(top_k=2), np.array([-3, -0.5, -7, -0.25, -0.75], np.float32))
    assert np.flatnonzero(frequencies(row, 300)).tolist() == [1, 3]


def test_greedy_takes_the_lowest_of_equal_tokens():
    row = Row(SamplingParams(temperature=0.0), np.array([0, 2, 1, 2], np.float32))
    assert sampled([row, row]) == [1, 1]


def test_a_low_temperature_tends_to_greedy():
    row = Row(SamplingParams(temperature=1e-6, sampling_seed=5), random_logits(1))
    assert sampled([row]) == [int(row.logits.argmax())]


# --- independence ---

knobs = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.6, 1.0, 3.0]),
        "top_k": st.sampled_from([-1, 1, 4, 60, 200]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "min_new_tokens": st.sampled_from([0, 3]),
        "logit_bias": st.sampled_from([None, {5: 4.0, 6: -100.0}]),
        "sampling_seed": st.integers(0, 1000),
    }
)


def row_of(values: dict[str, Any], seed: int) -> Row:
    rng = np.random.default_rng(seed)
    return Row(
        SamplingParams(**values),
        random_logits(seed),
        prompt_ids=rng.integers(0, VOCAB_SIZE, 5).tolist(),
        output_ids=rng.integers(0, VOCAB_SIZE, int(rng.integers(0, 5))).tolist(),
        stop_ids=tuple(rng.integers(0, VOCAB_SIZE, 2).tolist()),
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(knobs, min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_a_row_draws_alone_what_it_draws_in_any_batch(all_knobs, rng):
    rows = [row_of(values, seed) for seed, values in enumerate(all_knobs)]
    alone = [sampled([row])[0] for row in rows]
    order = list(range(len(rows)))
    rng.shuffle(order)
    assert sampled([rows[i] for i in order]) == [alone[i] for i in order]
    keep = sorted(rng.sample(order, rng.randint(1, len(rows))))
    batch = build(rows)
    batch.filter_batch(keep)
    batch.merge_batch(build(rows))
    assert sampled([*(rows[i] for i in keep), *rows], batch) == [*(alone[i] for i in keep), *alone]


def test_rows_drawn_in_blocks_are_drawn_as_in_one(monkeypatch):
    rows = [row_of({"top_p": 0.9, "sampling_seed": i}, i) for i in range(7)]
    whole = sampled(rows)
    monkeypatch.setattr("srt.layers.sampler.MAX_BLOCK_ELEMENTS", 2 * VOCAB_SIZE)
    assert sampled(rows) == whole


def test_the_same_seed_and_position_give_the_same_token_and_others_differ():
    def stream(seed: int) -> list[int]:
        logits = np.zeros(VOCAB_SIZE, np.float32)
        rows = [Row(SamplingParams(sampling_seed=seed), logits, [1], [0] * i) for i in range(20)]
        return sampled(rows)

    assert stream(1) == stream(1)
    assert stream(1) != stream(2)
    assert len(set(stream(1))) > 10


# --- adjustments ---


def test_repetition_penalty_is_that_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    row = Row(SamplingParams(repetition_penalty=1.3), random_logits(2), [1, 2, 2], [7, 8, 7])
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty=1.3)
    seen = torch.tensor([row.prompt_ids + row.output_ids])
    expected = processor(seen, torch.from_numpy(row.logits)[None].clone())[0]
    np.testing.assert_allclose(adjusted(row), expected.numpy(), rtol=1e-6)


def test_frequency_and_presence_penalties_are_those_of_openai_over_outputs_only():
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=-1.0)
    row = Row(params, random_logits(2), [1, 2, 2], [7, 8, 7])
    expected = row.logits.copy()
    expected[7] -= 2 * 0.5 - 1.0
    expected[8] -= 0.5 - 1.0
    np.testing.assert_allclose(adjusted(row), expected, rtol=1e-6)


def test_penalties_follow_the_tokens_while_rows_join_and_leave():
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=2.0)
    plain = SamplingParams(temperature=0.0)
    rows = [Row(plain, random_logits(0)), Row(params, random_logits(1))]
    batch = build(rows)
    for step in range(12):
        expected = sampled(rows)  # from scratch, with all outputs so far
        assert sampled(rows, batch) == expected
        batch.append_tokens(torch.tensor(expected))
        for row, token in zip(rows, expected, strict=True):
            row.output_ids.append(token)
        if step == 3:
            batch.filter_batch([1])
            rows = rows[1:]
        if step == 6:
            rows = [*rows, Row(params, random_logits(5))]
            batch.merge_batch(build(rows[-1:]))
    assert len(set(rows[0].output_ids)) > 3


def test_a_bias_of_minus_100_forbids_a_token_and_plus_100_forces_it():
    logits = random_logits(4)
    best = int(logits.argmax())
    other = (best + 1) % VOCAB_SIZE
    for temperature in (0.0, 1.0):
        banned = SamplingParams(temperature=temperature, logit_bias={best: -100.0})
        assert best not in sampled([Row(banned, logits, output_ids=[0] * i) for i in range(50)])
        forced = SamplingParams(temperature=temperature, logit_bias={other: 100.0})
        drawn = sampled([Row(forced, logits, output_ids=[0] * i) for i in range(50)])
        assert set(drawn) == {other}


def test_stop_tokens_are_forbidden_exactly_until_min_new_tokens():
    logits = np.zeros(VOCAB_SIZE, np.float32)
    logits[[7, 9]] = [50, 60]  # two ends of sequence, far above the rest
    params = SamplingParams(temperature=0.0, min_new_tokens=3)
    rows = [Row(params, logits, output_ids=[0] * i, stop_ids=(7, 9)) for i in range(5)]
    neighbour = Row(SamplingParams(temperature=0.0), logits, stop_ids=(7, 9))
    assert sampled([neighbour, *rows, neighbour]) == [9, 0, 0, 0, 9, 9, 9]


def test_a_stop_token_that_is_also_biased_stays_forbidden():
    params = SamplingParams(temperature=0.0, min_new_tokens=2, logit_bias={7: 100.0})
    row = Row(params, np.zeros(VOCAB_SIZE, np.float32), stop_ids=(7,))
    assert sampled([row]) == [0]


def test_adjusting_leaves_the_callers_logits_and_the_neighbours_alone():
    rows = [
        Row(SamplingParams(temperature=0.0), random_logits(1)),
        Row(SamplingParams(repetition_penalty=2.0, logit_bias={1: 5.0}), random_logits(2)),
    ]
    logits, seq_lens = tensors(rows)
    before = logits.clone()
    after = adjust_logits(logits, build(rows), seq_lens)
    assert torch.equal(logits, before)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    assert adjust_logits(logits, build(rows[:1]), seq_lens) is logits


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize(
    "knobs", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}]
)
def test_a_row_of_logits_that_mean_nothing_is_marked_and_spares_its_neighbours(knobs, bad):
    params = SamplingParams(sampling_seed=3, **knobs)
    good = Row(params, random_logits(1))
    broken = Row(params, np.full(VOCAB_SIZE, bad, np.float32))
    partly = Row(params, np.where(np.arange(VOCAB_SIZE) == 5, bad, random_logits(1)))
    greedy = Row(SamplingParams(temperature=0.0), broken.logits)
    tokens = sampled([good, broken, partly, good, greedy])
    assert tokens[1] == tokens[4] == BROKEN
    assert [tokens[0], tokens[3]] == sampled([good]) * 2
    # A single forbidden token is no matter.
    assert tokens[2] == (tokens[0] if bad == -np.inf else BROKEN)


@pytest.mark.parametrize("place", [0, 5, 287, 288, 299])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_one_bad_logit_anywhere_marks_a_row(monkeypatch, bad, place, has_kernels):
    if not has_kernels:
        monkeypatch.setattr(native_ops, "kernels_for", lambda logits: None)
    logits = random_logits(1)
    logits[place] = bad
    greedy = SamplingParams(temperature=0.0)
    penalized = SamplingParams(temperature=0.0, logit_bias={place: -1e30}, repetition_penalty=1.5)
    assert sampled([Row(greedy, logits), Row(greedy, random_logits(1))])[0] == BROKEN
    assert sampled([Row(penalized, logits), Row(greedy, random_logits(1))])[0] == BROKEN


def test_only_hidden_rows_that_are_not_finite_are_marked():
    hidden = torch.ones(4, 8)
    hidden[1, 3], hidden[2, 7] = torch.nan, -torch.inf
    assert mark_broken(hidden).tolist() == [0, BROKEN, BROKEN, 0]


def test_forbidden_tokens_are_never_drawn():
    logits = random_logits(6)
    logits[::2] = -np.inf
    for knobs in ({}, {"top_k": 290}, {"top_p": 0.999}, {"top_k": 120}):
        params = SamplingParams(temperature=9.0, sampling_seed=1, **knobs)
        counts = frequencies(Row(params, logits), 500)
        assert counts[::2].sum() == 0


@pytest.mark.gpu
def test_a_gpu_draws_the_same_numbers_and_tokens_as_a_cpu():
    seeds, positions = torch.arange(1000) * 7919 - 5000, torch.arange(1000)
    assert torch.equal(uniform(seeds.cuda(), positions.cuda()).cpu(), uniform(seeds, positions))
    combinations = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1, "repetition_penalty": 1.2}]
    rows = [row_of({"sampling_seed": i, **combinations[i % 4]}, i) for i in range(64)]
    logits, seq_lens = tensors(rows)
    batch = SamplingBatch.build(
        [row.params for row in rows],
        [row.prompt_ids for row in rows],
        [row.output_ids for row in rows],
        [row.stop_ids for row in rows],
        VOCAB_SIZE,
        "cuda",
    )
    assert sample(logits.cuda(), batch, seq_lens.cuda()).tolist() == sampled(rows)
