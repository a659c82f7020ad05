"""What a call may hold so that it can cross to the scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_scheduler import byte_tokenizer, tiny_model_config

from srt.managers.io_struct import ReadyMsg
from srt.managers.request_preparer import GenerateReqInput, RequestPreparer
from srt.request_error import RequestError
from srt.server_args import ServerArgs

LIMITS = ReadyMsg(150, 149, 8, 512, 16384, 200)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rid", "a\ud800"),
        ("rids", ["\udcff"]),
        ("tenant", "\udcff"),
        ("extra_key", "\udfff"),
        ("priority", 2**64),
        ("sampling_params", [{"stop": ["ok", "\ud800"]}]),
        ("sampling_params", [{"stop_regex": "\ud800"}]),
    ],
)
def test_what_no_message_can_hold_is_refused_before_anything_is_sent(
    field: str, value: Any
) -> None:
    preparer = RequestPreparer(ServerArgs(), tiny_model_config(), byte_tokenizer())
    values: dict[str, Any] = {"prompts": ["hi"], "sampling_params": [{}], field: value}
    name = {"rids": "rid", "tenant": "X-Tenant"}.get(field, field)
    with pytest.raises(RequestError, match=name):
        asyncio.run(preparer.prepare(GenerateReqInput(**values), LIMITS))


@pytest.mark.parametrize(("num_prompts", "n", "asked"), [(11, 1, 11), (4, 3, 12)])
def test_a_call_of_too_many_requests_is_refused_with_both_numbers(
    num_prompts: int, n: int, asked: int
) -> None:
    preparer = RequestPreparer(
        ServerArgs(max_call_requests=10), tiny_model_config(), byte_tokenizer()
    )
    for prompts, params, message in (
        (num_prompts, {"n": n}, f"at most 10 requests .--max-call-requests.*got {asked}"),
        (10, {"n": 1}, None),
    ):
        call = GenerateReqInput(["hi"] * prompts, [params] * prompts)
        if message is None:
            assert len(asyncio.run(preparer.prepare(call, LIMITS))) == 10
        else:
            with pytest.raises(RequestError, match=message):
                asyncio.run(preparer.prepare(call, LIMITS))
