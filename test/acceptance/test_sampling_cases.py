"""Sampling parameters do what they say, on every route, in any company."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from greedy_reference import GreedyReference
from real_server import RealServer, at_once

EOS, SECOND_EOS = 0, 123
ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions"]
OPENAI_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}


def answers(server: RealServer, route: str, text: str, **params: Any) -> list[tuple[str, str, int]]:
    """Text, finish reason and number of tokens of each choice, whatever the route. The names of
    `params` are those of /generate."""
    if route == "/generate":
        result = server.ask(route, text=text, sampling_params=params)
        return [
            (
                one["text"],
                one["meta_info"]["finish_reason"]["type"],
                one["meta_info"]["completion_tokens"],
            )
            for one in (result if isinstance(result, list) else [result])
        ]
    theirs = {OPENAI_NAMES.get(name, name): value for name, value in params.items()}
    if route == "/v1/completions":
        theirs["prompt"] = text
    else:
        theirs["messages"] = [{"role": "user", "content": text}]
    result = server.ask(route, **theirs)
    counted = result["usage"]["completion_tokens"] // len(result["choices"])
    return [
        (
            one["message"]["content"] if "message" in one else one["text"],
            one["finish_reason"],
            counted,
        )
        for one in result["choices"]
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_a_seed_decides_the_text(roomy: RealServer, route: str) -> None:
    """H19: the same seed the same text, another seed another, n choices with one seed differ."""
    ask = partial(answers, roomy, route, "seeded", max_new_tokens=16, temperature=1.0)
    first, again, other = (ask(sampling_seed=seed)[0][0] for seed in (1, 1, 2))
    assert first == again != other
    choices = [text for text, _, _ in ask(sampling_seed=1, n=4)]
    assert len(set(choices)) == 4 and choices[0] == first
    together = at_once(*(partial(ask, sampling_seed=seed) for seed in (1, 2, 3, 1)))
    assert [result[0][0] for result in together][::3] == [first, first]


def test_a_seed_means_the_same_on_both_plain_routes(roomy: RealServer) -> None:
    """H19: /generate and /v1/completions agree, and requests without a seed do not repeat."""
    ask = {"max_new_tokens": 16, "temperature": 1.0}
    one, two = (
        answers(roomy, route, "seeded", **ask, sampling_seed=9)[0][0] for route in ROUTES[:2]
    )
    assert one == two
    assert len({answers(roomy, "/generate", "seeded", **ask)[0][0] for _ in range(4)}) == 4


@pytest.mark.parametrize("route", ROUTES)
def test_a_bias_forbids_and_forces(roomy: RealServer, route: str) -> None:
    """H24: -100 on the best token and it never appears; +100 on another and only that appears."""
    ask = partial(answers, roomy, route, "biased", temperature=0, ignore_eos=True)
    forced = ask(max_new_tokens=8, logit_bias={str(ord("u") + 1): 100})
    assert forced == [("u" * 8, "length", 8)]
    # Letters only, so that tokens can be read off the text.
    letters = {str(byte + 1): 40 for byte in range(ord("a"), ord("z") + 1)}
    [(text, _, _)] = ask(max_new_tokens=24, logit_bias=letters)
    best = text[0]
    without = {**letters, str(ord(best) + 1): -100}
    [(text, _, number)] = ask(max_new_tokens=24, logit_bias=without)
    assert best not in text and text.isalpha() and number == 24


def penalized(
    reference: GreedyReference, prompt: list[int], count: int, repetition: float, frequency: float
) -> list[int]:
    """What greedy decoding gives under penalties, from the logits of one prefix at a time."""
    outputs: list[int] = []
    for _ in range(count):
        logits = reference.logits(prompt + outputs)[-1].clone()
        seen = torch.tensor(sorted({*prompt, *outputs}))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
        for token in outputs:
            logits[token] -= frequency
        outputs.append(int(logits.argmax()))
    return outputs


def test_penalties_give_what_the_logits_say_in_changing_company(
    roomy: RealServer, reference: GreedyReference
) -> None:
    """H25: repetition and frequency penalties, while other requests join and leave the batch."""
    prompt = [7, 8, 9, 7, 8, 9]
    kinds = [(1.0, 0.0), (1.3, 0.0), (1.0, 2.0), (1.3, 2.0)]

    def ask(repetition: float, frequency: float) -> list[int]:
        return roomy.ids(
            prompt,
            max_new_tokens=32,
            ignore_eos=True,
            repetition_penalty=repetition,
            frequency_penalty=frequency,
        )

    passing = [partial(roomy.ids, f"x{i}", max_new_tokens=4 * i, ignore_eos=True) for i in range(6)]
    results = at_once(*(partial(ask, *kind) for kind in kinds), *passing)
    for kind, outputs in zip(kinds, results, strict=False):
        assert outputs == penalized(reference, prompt, 32, *kind), kind
    distinct = [len(set(outputs)) for outputs in results[:4]]
    assert distinct[0] < distinct[1] and distinct[0] < distinct[2]


@pytest.mark.parametrize("route", ROUTES)
def test_ignore_eos_goes_on_to_the_limit(roomy: RealServer, route: str) -> None:
    """H26: exactly max_new_tokens where every single token would be an end token."""
    ask = partial(answers, roomy, route, "end", temperature=0, max_new_tokens=200)
    for eos in (EOS, SECOND_EOS):
        bias = {str(eos): 100}
        assert ask(logit_bias=bias)[0][1:] == ("stop", 1)
        assert ask(logit_bias=bias, ignore_eos=True)[0][1:] == ("length", 200)


@pytest.mark.parametrize("route", ROUTES)
def test_a_minimum_holds_back_every_end_token(roomy: RealServer, route: str) -> None:
    """H27: alone and beside requests without one, in a model with two end tokens."""
    ends = {str(EOS): 100, str(SECOND_EOS): 100}
    ask = partial(answers, roomy, route, "min", temperature=0, max_new_tokens=40, logit_bias=ends)
    assert ask(min_new_tokens=5)[0][1:] == ("stop", 6)
    plain = partial(answers, roomy, "/generate", "beside", temperature=0, max_new_tokens=40)
    alone = plain()
    results = at_once(*(partial(ask, min_new_tokens=5 * i) for i in range(1, 5)), plain, ask, plain)
    assert [result[0][1:] for result in results[:4]] == [("stop", 5 * i + 1) for i in range(1, 5)]
    assert results[4] == results[6] == alone
    assert results[5][0][1:] == ("stop", 1)


def test_a_minimum_holds_back_stop_tokens_too(roomy: RealServer) -> None:
    """H27: the request's own stop tokens."""
    forced = {"logit_bias": {"65": 100}, "stop_token_ids": [65], "max_new_tokens": 20}
    assert roomy.ids("x", **forced) == [65]
    ids = roomy.ids("x", **forced, min_new_tokens=7)
    assert len(ids) == 8 and ids.index(65) == 7
