"""Fused penalties and biases against those in torch, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from srt.layers.fused_penalties import BIAS_BLOCK, CHUNK, GROUP_BLOCK, adjust_logits
from srt.layers.sampler import adjust_logits as adjust_in_torch
from srt.sampling_batch import SamplingBatch
from srt.sampling_params import SamplingParams

Knobs = dict[str, Any]
PENALTIES: list[Knobs] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -1.25},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
]


def build(knobs: list[Knobs], vocab_size: int, device: str, prompt_len: int = 6) -> SamplingBatch:
    rng = np.random.default_rng(len(knobs))
    # The ends of the vocabulary and of a chunk among them, and tokens that are in both.
    prompts = [[0, *rng.integers(0, vocab_size, prompt_len - 2).tolist(), 7] for _ in knobs]
    outputs = [[7, 7, vocab_size - 1, min(CHUNK, vocab_size - 1), 3] for _ in knobs]
    params = [SamplingParams(**k) for k in knobs]
    stops = [[5, 2]] * len(knobs)
    return SamplingBatch.build(params, prompts, outputs, stops, vocab_size, device)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


def check(
    logits: torch.Tensor, knobs: list[Knobs], device: str, seq_lens: list[int] | None = None
) -> None:
    vocab_size = logits.shape[1]
    lens = torch.tensor(seq_lens or [11] * len(knobs))
    expected = adjust_in_torch(logits, build(knobs, vocab_size, "cpu"), lens)
    before, on_device = logits.clone(), logits.to(device)
    got = adjust_logits(on_device, build(knobs, vocab_size, device), lens.to(device)).cpu()
    if device == "cuda":  # which multiplies and adds in one step
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(got, expected)
    assert not torch.equal(got, before)
    assert torch.equal(on_device.cpu(), before)


@pytest.mark.parametrize("vocab_size", [8, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_penalties_are_those_of_torch(kernel_device, vocab_size):
    check(random_logits(len(PENALTIES), vocab_size), PENALTIES, kernel_device)


def test_rows_without_penalty_between_those_with_one_are_copied(kernel_device):
    knobs: list[Knobs] = [{}, PENALTIES[4], {}, {}, PENALTIES[0], PENALTIES[2], {}]
    check(random_logits(7, 300), knobs, kernel_device)


def test_more_rows_than_are_searched_at_once_are_penalised(kernel_device):
    count = GROUP_BLOCK + 2
    knobs: list[Knobs] = [PENALTIES[i % len(PENALTIES)] for i in range(count)]
    check(random_logits(count, 12), knobs, kernel_device)


def test_logits_of_both_signs_and_none_are_penalised_towards_less(kernel_device):
    logits = torch.zeros(1, 10)
    logits[0, 0], logits[0, 7], logits[0, 9] = 3.0, -3.0, -torch.inf
    check(logits, [{"repetition_penalty": 1.7, "presence_penalty": 0.5}], kernel_device)


def test_biases_are_those_of_torch(kernel_device):
    knobs: list[Knobs] = [
        {"logit_bias": {0: 4.0, 7: -100.0, 299: 0.25}},
        {},
        {"logit_bias": {1: 1e30}, "min_new_tokens": 40},
    ]
    check(random_logits(3, 300), knobs, kernel_device)


def test_stop_tokens_are_forbidden_until_min_new_tokens(kernel_device):
    knobs: list[Knobs] = [{"min_new_tokens": 3}] * 4
    logits = random_logits(4, 20)
    # Prompts of six tokens: forbidden up to a length of eight.
    check(logits, knobs, kernel_device, [6, 8, 9, 10])
    batch = build(knobs, 20, kernel_device)
    lens = torch.tensor([6, 8, 9, 10], device=kernel_device)
    adjusted = adjust_logits(logits.to(kernel_device), batch, lens).cpu()
    assert adjusted[:, [5, 2]].isinf().all(dim=1).tolist() == [True, True, False, False]


def test_a_token_that_is_both_biased_and_forbidden_is_forbidden(kernel_device):
    knobs: list[Knobs] = [{"min_new_tokens": 50, "logit_bias": {5: 100.0, 6: 1.0}}]
    check(random_logits(1, 20), knobs, kernel_device)


def test_any_number_of_biases_is_added(kernel_device):
    for count in (1, BIAS_BLOCK - 1, BIAS_BLOCK, BIAS_BLOCK + 1):
        bias = {token: 0.5 + token for token in range(count)}
        knobs: list[Knobs] = [{}, {"logit_bias": bias}]
        check(random_logits(2, 300), knobs, kernel_device)


def test_penalties_come_before_biases(kernel_device):
    knobs: list[Knobs] = [{"repetition_penalty": 1.5, "logit_bias": {7: 1.0, 0: -1.0}}]
    check(random_logits(1, 300), knobs, kernel_device)


def test_rows_of_a_wider_matrix_are_taken(kernel_device):
    wide = random_logits(3, 400)
    check(wide[:, 50:350], PENALTIES[:3], kernel_device)
    check(wide[:, 50:350], [{"logit_bias": {4: 3.0}}] * 3, kernel_device)


def test_plain_rows_keep_their_object(kernel_device):
    logits = random_logits(2, 50).to(kernel_device)
    lens = torch.tensor([3, 4], device=kernel_device)
    assert adjust_logits(logits, build([{}, {"top_k": 3}], 50, kernel_device), lens) is logits


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [49152, 151936, 262144])
def test_vocabularies_in_use_are_penalised(kernel_device, vocab_size):
    knobs = [*PENALTIES, {"logit_bias": {9: 1.0, vocab_size - 1: 2.0}}]
    check(random_logits(len(knobs), vocab_size), knobs, kernel_device)
