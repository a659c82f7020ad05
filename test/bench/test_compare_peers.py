"""The comparison against stub servers."""

from __future__ import annotations

import json

import pytest
from stub_server import StubServer

from bench.compare_peers import main, order_of_round, parse_peer

LOAD = [
    "--dataset-name", "random-ids", "--random-input-len", "6", "--random-output-len", "3",
    "--random-range-ratio", "1", "--num-prompts", "2", "--warmup-requests", "0",
]  # fmt: skip


def test_every_server_gets_every_rounds_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer() as first, StubServer() as second:
        peers = [f"a=sglang@{first.url}", f"b=sglang@{second.url}"]
        assert main([*peers, "--rounds", "2", "--json", "--", *LOAD]) == 0
        sent = [server.sent("/generate") for server in (first, second)]
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"a", "b"}
    assert all(len(values) == 2 for values in found["a"].values())
    assert len(sent[0]) == 4 and sent[0] == sent[1], "the same requests in the same order"
    assert sent[0][:2] != sent[0][2:], "new requests in each round"


def test_the_table_has_values_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer() as server:
        peers = [f"a=sglang@{server.url}", f"b=sglang@{server.url}"]
        assert main([*peers, "--rounds", "1", "--", *LOAD]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert "a / b" in header
    assert rows[0].startswith("output tok/s") and "to" in rows[0]


def test_each_round_begins_with_another_server() -> None:
    peers = [parse_peer(f"{name}=vllm@http://h") for name in "abc"]
    orders = ["".join(peer.name for peer in order_of_round(peers, i)) for i in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a"], "NAME=BACKEND@URL"),
        (["a=nobody@http://h"], "backend must be one of"),
        (["a=vllm@http://h", "a=vllm@http://i"], "same name"),
        (["a=vllm@http://h", "--rounds", "0"], "--rounds must be at least 1, got 0"),
    ],
)
def test_a_bad_command_line_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
