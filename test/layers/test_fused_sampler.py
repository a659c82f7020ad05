"""Fused sampling against the sampler in torch: the same tokens, not only the same distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from srt.layers import fused_sampler
from srt.layers.fused_sampler import CHUNK, choose_tokens
from srt.layers.fused_top_sampler import BINS, TILE, find_candidates, find_key
from srt.layers.sampler import sample, uniform
from srt.layers.sampling_math import keys_of, logit_of, uniform_of
from srt.sampling_batch import DrawPath, SamplingBatch
from srt.sampling_params import SamplingParams

Knobs = dict[str, Any]
WHOLE: list[Knobs] = [{}, {"temperature": 0.3}, {"temperature": 5.0}, {"min_p": 0.05}, {"min_p": 1}]
TOP_K: list[Knobs] = [
    {"top_k": 2},
    {"top_k": 40},
    {"top_k": 128},
    {"top_k": 128, "temperature": 0.01},
    {"top_k": 200},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 200, "top_p": 0.6},
    {"top_k": 30, "min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.2, "temperature": 1.5},
]
TOP_P: list[Knobs] = [
    {"top_p": 1e-9},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"top_p": 1 - 1e-16},
    {"top_p": 0.9, "temperature": 4.0},
    {"top_p": 0.9, "temperature": 0.2},
    {"top_p": 0.95, "min_p": 0.1},
    {"top_p": 0.3, "min_p": 0.01},
]
GREEDY: Knobs = {"temperature": 0.0}
ALL = [GREEDY, *WHOLE, *TOP_K, *TOP_P]
# One of each kind: a searched row takes the interpreter a tenth of a second.
SOME = [GREEDY, WHOLE[0], WHOLE[3], TOP_K[1], TOP_K[6], TOP_P[3], TOP_P[8]]


def first_and_slow(first: list[Any], slow: list[Any]) -> list[Any]:
    return [*first, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]


def build(
    knobs: list[Knobs], vocab_size: int, device: str, seed: int = 0
) -> tuple[SamplingBatch, torch.Tensor]:
    """Every row with a seed and a length of its own."""
    n = len(knobs)
    rng = np.random.default_rng(seed)
    seeds, lens = rng.integers(-(2**63), 2**63, n), rng.integers(1, 100000, n)
    params = [SamplingParams(sampling_seed=int(s), **k) for s, k in zip(seeds, knobs, strict=True)]
    batch = SamplingBatch.build(params, [[1]] * n, [[]] * n, [[]] * n, vocab_size, device)
    return batch, torch.from_numpy(lens).to(device)


def random_logits(
    num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def check(logits: torch.Tensor, knobs: list[Knobs], device: str, seed: int = 0) -> list[int]:
    expected = sample(logits, *build(knobs, logits.shape[1], "cpu", seed)).tolist()
    on_device = logits.to(device)
    tokens = choose_tokens(on_device, *build(knobs, logits.shape[1], device, seed)).tolist()
    wrong = [(k, e, t) for k, e, t in zip(knobs, expected, tokens, strict=True) if e != t]
    assert not wrong
    assert torch.equal(on_device.cpu().isnan(), logits.isnan())
    return tokens


# --- numbers -----------------------------------------------------------------------------------


@triton.jit
def uniform_kernel(seed_ptr, position_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr + i, mask=i < n, other=0)
    position = tl.load(position_ptr + i, mask=i < n, other=0)
    tl.store(out_ptr + i, uniform_of(seed, position), mask=i < n)


@triton.jit
def key_kernel(x_ptr, key_ptr, back_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    key = keys_of(tl.load(x_ptr + i, mask=i < n, other=0.0), i)
    tl.store(key_ptr + i, key, mask=i < n)
    tl.store(back_ptr + i, logit_of(key), mask=i < n)


def test_uniform_numbers_have_the_bits_of_the_sampler(kernel_device):
    rng = np.random.default_rng(0)
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63, 500))
    seeds[:5] = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    positions = torch.from_numpy(rng.integers(0, 2**40, 500))
    positions[:20] = torch.arange(20)
    out = torch.empty(500, dtype=torch.float64, device=kernel_device)
    uniform_kernel[(1,)](seeds.to(kernel_device), positions.to(kernel_device), out, 500, BLOCK=512)
    assert torch.equal(out.cpu(), uniform(seeds, positions))


def test_keys_order_tokens_by_falling_logit_and_rising_id(kernel_device):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, torch.inf, -torch.inf, 1.0, 3e38, -3e38])
    keys = torch.empty(len(x), dtype=torch.int64, device=kernel_device)
    back = torch.empty(len(x), device=kernel_device)
    key_kernel[(1,)](x.to(kernel_device), keys, back, len(x), BLOCK=16)
    assert keys.argsort().tolist() == [6, 9, 2, 8, 4, 0, 1, 5, 3, 10, 7]
    assert (keys & 0xFFFFFFFF).tolist() == list(range(len(x)))
    assert torch.equal(back.cpu().view(torch.int32), x.view(torch.int32))


@triton.jit
def find_kernel(keys_ptr, weights_ptr, needs_ptr, out_ptr, length, before, BY_COUNT: tl.constexpr):
    need = tl.load(needs_ptr + tl.program_id(0))
    key, reached = find_key(keys_ptr, weights_ptr, length, need, before, BY_COUNT, 16)
    tl.store(out_ptr + 2 * tl.program_id(0), key)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, reached)


@pytest.mark.parametrize("by_count", [True, False])
@pytest.mark.parametrize("keys", [[5], [-(2**62), 2**62, 3, 4, 2**63 - 2], list(range(-9, 28, 2))])
def test_a_search_finds_the_key_at_which_every_number_is_reached(kernel_device, keys, by_count):
    weights = [1 if by_count else (7 * i + 1) % 4 for i in range(len(keys))]
    order = sorted(range(len(keys)), key=lambda i: keys[i])
    needs = torch.arange(1, sum(weights) + 1, device=kernel_device)
    reached = np.cumsum([weights[i] for i in order])
    expected = [
        (keys[order[place]], int(reached[place]))
        for place in np.searchsorted(reached, needs.tolist())
    ]
    out = torch.empty(len(needs), 2, dtype=torch.int64, device=kernel_device)
    on_device = [torch.tensor(values, device=kernel_device) for values in (keys, weights)]
    find_kernel[(len(needs),)](*on_device, needs, out, len(keys), min(keys) - 1, BY_COUNT=by_count)
    assert [tuple(pair) for pair in out.tolist()] == expected


# --- tokens ------------------------------------------------------------------------------------


def seed_that_draws(number: int, position: int) -> int:
    """The seed for which sampler.uniform gives number / 2**53: SplitMix64, backwards."""
    mask = (1 << 64) - 1

    def unmix(x: int) -> int:
        for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            x ^= (x >> shift) ^ (x >> 2 * shift)
            x = x * pow(factor, -1, 1 << 64) & mask
        return x

    gamma = 0x9E3779B97F4A7C15
    seed = (unmix((unmix(number << 11) - position * gamma) & mask) - gamma) & mask
    return seed - (1 << 64) if seed >= 1 << 63 else seed


@pytest.mark.parametrize("knobs", [{}, {"top_k": 8}, {"top_p": 0.9999999}])
@pytest.mark.parametrize("start", [0, CHUNK - 6])
def test_a_number_on_the_boundary_of_two_tokens_draws_the_upper(kernel_device, start, knobs):
    # Eight equal tokens, four on each side of a gap, which may be at the boundary of two chunks:
    # eight times number / 2**53 is where a draw falls.
    allowed = [start + i for i in (0, 1, 2, 3, 9, 10, 11, 12)]
    eighth = 1 << 50
    draws = {0: 0, eighth - 1: 0, eighth: 1, 4 * eighth - 1: 3, 4 * eighth: 4, 8 * eighth - 1: 7}
    seeds = [seed_that_draws(number, 77) for number in draws]
    assert (uniform(torch.tensor(seeds), torch.tensor(77)) * 2.0**53).tolist() == list(draws)
    params = [SamplingParams(sampling_seed=seed, **knobs) for seed in seeds]
    n, vocab_size = len(seeds), start + 13
    batch = SamplingBatch.build(params, [[1]] * n, [[]] * n, [[]] * n, vocab_size, kernel_device)
    logits = torch.full((n, vocab_size), -torch.inf, device=kernel_device)
    logits[:, allowed] = 1.0
    tokens = choose_tokens(logits, batch, torch.full((n,), 77, device=kernel_device))
    assert tokens.tolist() == [allowed[i] for i in draws.values()]


@pytest.mark.parametrize("seed", first_and_slow([0], [1, 2, 3]))
def test_all_knobs_in_one_batch_draw_the_tokens_of_the_sampler(kernel_device, seed):
    logits = random_logits(len(ALL), 300, seed)
    # Logits of bfloat16 have many equals.
    check(logits.bfloat16().float() if seed % 2 else logits, ALL, kernel_device, seed)


@pytest.mark.parametrize(
    "vocab_size", first_and_slow([1, CHUNK + 1, 5 * CHUNK + 3], [2, 127, 129, CHUNK - 1, CHUNK])
)
def test_vocabularies_of_any_size_are_drawn_from(kernel_device, vocab_size):
    check(random_logits(len(SOME), vocab_size, vocab_size), SOME, kernel_device, vocab_size)


def test_a_vocabulary_in_use_is_drawn_from(kernel_device):
    knobs = [WHOLE[0], TOP_K[1], {"top_p": 0.9, "temperature": 0.7}]
    check(random_logits(3, 49152, 1, scale=2.5), knobs, kernel_device)


@pytest.mark.parametrize("knobs", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_p": 0.7, "min_p": 0.2}])
def test_many_draws_from_few_tokens_meet_every_boundary(kernel_device, knobs):
    draws = 16
    logits = torch.tensor([[1.0, 2.0, 0.5, 2.0, -1.0, 1.5]]).expand(draws, -1).contiguous()
    tokens = check(logits, [knobs] * draws, kernel_device)
    assert len(set(tokens)) >= 3


@pytest.mark.parametrize("value", first_and_slow([-1e30], [0.0, -0.0, 7.5]))
def test_equal_logits_are_told_apart_by_their_ids(kernel_device, value):
    knobs = [{}, {"top_k": 3}, {"top_k": 150}, {"top_p": 0.25}, {"top_p": 0.999}, GREEDY]
    tokens = check(torch.full((6, 3000), value), knobs, kernel_device)
    assert tokens[1] < 3 and tokens[2] < 150 and tokens[3] < 750 and tokens[5] == 0


@pytest.mark.parametrize("seed", first_and_slow([0], [1, 2]))
def test_two_levels_of_logits_are_cut_inside_a_level(kernel_device, seed):
    logits = torch.zeros(8, 3 * CHUNK)
    logits[:, ::7] = 2.0
    logits[:, 5] = 2.5
    knobs = [
        {"top_k": 100},
        {"top_k": 1000},
        {"top_p": 0.3},
        {"top_p": 0.5},
        {"top_p": 0.8},
        {"top_k": 900, "top_p": 0.9},
        {"top_k": 300, "top_p": 0.5},
        {"top_p": 0.7, "min_p": 0.5},
    ]
    check(logits, knobs, kernel_device, seed)


@pytest.mark.parametrize("seed", first_and_slow([0], [1, 2]))
def test_a_list_longer_than_a_tile_is_searched_whole(kernel_device, seed):
    vocab_size = 2 * TILE + 100
    knobs = [{"top_k": TILE + 5}, {"top_p": 0.99}, {"top_k": 4000, "top_p": 0.999}, {"top_k": TILE}]
    knobs = [{"temperature": 8.0, **k} for k in knobs]
    check(random_logits(4, vocab_size, seed, scale=1.0), knobs, kernel_device, seed)


@pytest.mark.parametrize("seed", first_and_slow([0], [1, 2, 3]))
def test_zeros_of_both_signs_are_ordered_as_by_the_sampler(kernel_device, seed):
    logits = torch.full((7, 40), -3.0)
    logits[:, 8:12] = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    knobs = [GREEDY, {}, {"top_k": 2}, {"top_k": 3}, {"top_p": 0.3}, {"top_p": 0.5}, {"top_p": 0.9}]
    assert check(logits, knobs, kernel_device, seed)[0] == 8


def test_logits_of_every_size_are_ordered(kernel_device):
    # Keys of both signs, too far apart for their difference to be an int64.
    logits = random_logits(6, 500, 3) * torch.logspace(-30, 30, 500)
    logits[1] -= 1e25
    logits[3:] *= 1e-30
    check(logits, [{"top_k": 9}, {"top_k": 150}, {"top_p": 0.9}] * 2, kernel_device)


@pytest.mark.parametrize("temperature", first_and_slow([1e-5, 1e9], [0.01, 100.0]))
def test_extreme_temperatures_draw_the_tokens_of_the_sampler(kernel_device, temperature):
    knobs = [{**k, "temperature": temperature} for k in SOME[1:]]
    check(random_logits(len(knobs), 300, 5), knobs, kernel_device)


def test_forbidden_tokens_are_never_drawn(kernel_device):
    logits = random_logits(len(SOME), 300)
    logits[:, ::2] = -torch.inf
    knobs = [GREEDY, *({**k, "temperature": 9.0} for k in SOME[1:])]
    assert all(token % 2 for token in check(logits, knobs, kernel_device))


def test_a_single_allowed_token_is_drawn(kernel_device):
    logits = torch.full((len(SOME), CHUNK + 50), -torch.inf)
    logits[:, CHUNK + 49] = -5.0
    assert set(check(logits, SOME, kernel_device)) == {CHUNK + 49}


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of infinity minus infinity
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, torch.inf])
def test_a_row_without_meaning_gives_a_token_and_spares_its_neighbours(kernel_device, bad):
    good, vocab_size = random_logits(1, 300), 300
    broken = torch.full((1, vocab_size), bad)
    partly = good.clone()
    partly[0, 5] = bad
    for knobs in (GREEDY, WHOLE[3], TOP_K[1], TOP_P[3]):
        batch, lens = build([knobs] * 3, vocab_size, kernel_device)
        tokens = choose_tokens(torch.cat([broken, good, partly]).to(kernel_device), batch, lens)
        assert all(0 <= token < vocab_size for token in tokens.tolist())
        batch, lens = build([knobs] * 3, vocab_size, "cpu")
        assert tokens[1] == sample(good.expand(3, -1).contiguous(), batch, lens)[1]
        if bad == torch.inf:
            assert tokens[2] == 5


def test_nan_logits_count_as_forbidden(kernel_device):
    logits = random_logits(len(SOME), 300)
    forbidden = logits.clone()
    logits[:, 3:200:2] = torch.nan
    forbidden[:, 3:200:2] = -torch.inf
    batch, lens = build(SOME, 300, kernel_device)
    tokens = choose_tokens(logits.to(kernel_device), batch, lens).tolist()
    assert tokens == sample(forbidden, *build(SOME, 300, "cpu")).tolist()


@pytest.mark.parametrize("place", [0, 7, CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK + 4])
def test_greedy_takes_the_lowest_of_equal_tokens(kernel_device, place):
    logits = random_logits(2, 2 * CHUNK + 5)
    logits[:, place] = 100.0
    logits[1, place:] = 100.0
    assert check(logits, [GREEDY, GREEDY], kernel_device) == [place, place]


def test_rows_of_a_wider_matrix_are_taken(kernel_device):
    logits = random_logits(len(SOME), 400)[:, 50:350]
    check(logits, SOME, kernel_device)


def test_rows_drawn_in_blocks_are_drawn_as_in_one(kernel_device, monkeypatch):
    knobs = [TOP_P[3], TOP_P[4], TOP_K[1], TOP_P[8], TOP_K[3], TOP_P[2]]
    logits = random_logits(len(knobs), 300)
    for rows in (0, 3):
        monkeypatch.setattr(fused_sampler, "MAX_LIST_ELEMENTS", rows * 300 + 299)
        check(logits, knobs, kernel_device)


def test_a_row_draws_alone_what_it_draws_among_others(kernel_device):
    logits = random_logits(len(SOME), 2500).to(kernel_device)
    batch, lens = build(SOME, 2500, kernel_device)
    together = choose_tokens(logits, batch, lens).tolist()
    for row in (0, 2, 4, 6):
        alone = batch.snapshot()
        alone.filter_batch([row])
        assert choose_tokens(logits[[row]], alone, lens[[row]]).tolist() == [together[row]]


# --- candidates --------------------------------------------------------------------------------


def candidates(logits: torch.Tensor, knobs: Knobs, device: str) -> tuple[list[int], list[int]]:
    """The tokens that are searched, and their weights, for one row."""
    batch, _ = build([knobs], logits.shape[1], device)
    ((path, group),) = batch.draws.items()
    best = torch.empty(1, triton.cdiv(logits.shape[1], CHUNK), dtype=torch.int64, device=device)
    on_device = logits.to(device)
    fused_sampler.best_kernel[(1, best.shape[1])](
        on_device, best, logits.shape[1], on_device.stride(0), CHUNK=CHUNK
    )
    found = find_candidates(
        on_device, best.amin(1), group.row_index, group.columns, path is DrawPath.SORTED
    )
    length = int(found.counters[0, BINS])
    tokens = found.keys[0, :length] & 0xFFFFFFFF
    return tokens.tolist(), found.weights[0, :length].tolist()


@pytest.mark.parametrize(
    "knobs",
    [
        {"top_k": 2},
        {"top_k": 40},
        {"top_k": 200, "top_p": 0.9},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.9, "temperature": 0.6},
        {"top_p": 0.999},
    ],
)
def test_the_list_holds_the_best_tokens_and_few_more_than_the_filters_keep(kernel_device, knobs):
    logits = random_logits(1, 2 * CHUNK + 77, 2)
    tokens, weights = candidates(logits, knobs, kernel_device)
    params = SamplingParams(**knobs)
    probs = (logits[0].double() / params.temperature).softmax(0).sort(descending=True).values
    needed = int((probs.cumsum(0) < params.top_p).sum()) + 1
    if params.top_k > 0:
        needed = params.top_k
    assert len(set(tokens)) == len(tokens)
    assert needed <= len(tokens) <= needed * 1.1 + 5
    best = logits[0].sort(descending=True).indices[: len(tokens)]
    assert sorted(tokens) == sorted(best.tolist())
    # Exponentials may differ in their last bit, which is seldom more than the fraction cut off.
    exact = (logits[0].double() - logits.max().double()) / params.temperature
    exact = (exact.exp() * 2**40).long()[tokens]
    assert max(abs(w - e) for w, e in zip(weights, exact.tolist(), strict=True)) <= 1


def test_tokens_without_weight_are_not_listed(kernel_device):
    logits = torch.full((1, 3000), -30.0)
    logits[0, 100:110] = 0.0
    for knobs in ({"top_k": 50}, {"top_k": 2500}, {"top_p": 1 - 1e-16}):
        assert sorted(candidates(logits, knobs, kernel_device)[0]) == list(range(100, 110))


# --- the full sweep ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab_size", "scale"), [(49152, 0.5), (49152, 3.0), (151936, 3.0), (262144, 4.0)]
)
def test_vocabularies_in_use_are_drawn_from(kernel_device, vocab_size, scale):
    logits = random_logits(len(SOME), vocab_size, 2, scale)
    check(logits.bfloat16().float(), SOME, kernel_device, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 16))
def test_many_batches_draw_the_tokens_of_the_sampler(kernel_device, seed):
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.integers(1, 4000))
    logits = random_logits(len(ALL), vocab_size, seed, scale=float(rng.uniform(0.1, 6)))
    if seed % 3 == 0:
        logits = (logits * 4).round() / 4
    check(logits, ALL, kernel_device, seed)
