"""chaos.py: a short run on a tiny model, and that it can tell right from wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import chaos
from bench.chaos_load import Case, Client, Manner, Tally, make_bodies

ROOT = Path(__file__).resolve().parents[2]


def options(tiny: Path, tmp_path: Path, *argv: str) -> list[str]:
    server = f"--model-path {tiny} --load-format dummy --dtype float32"
    return ["--server", server, "--output", str(tmp_path / "out.json"), *argv]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    from tiny_model import write_tiny_model

    folder = tmp_path / "tiny"
    folder.mkdir()
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_no_request_is_lost_while_schedulers_are_killed(tiny: Path, tmp_path: Path) -> None:
    argv = ("--duration", "12", "--kill-every", "4", "--streams", "8", "--cases", "12")
    code = chaos.main(options(tiny, tmp_path, *argv, "--max-new-tokens", "200"))
    result = json.loads((tmp_path / "out.json").read_text())
    assert code == 0, result
    assert result["faults"] >= 2
    assert result["restarts"] >= 2
    assert result["right"] > 20
    assert result["refused"] > 0
    assert result["left_by_client"] > 0


@pytest.mark.slow
def test_short_requests_leave_no_memory_behind(tiny: Path, tmp_path: Path) -> None:
    code = chaos.main(options(tiny, tmp_path, "--soak", "3000"))
    assert code == 0, (tmp_path / "out.json").read_text()


@pytest.mark.slow
def test_an_overload_is_refused_at_once_and_the_rest_is_served(tiny: Path, tmp_path: Path) -> None:
    """Speed is for quiet machines; that nothing else goes wrong is for all."""
    # In a process of its own: it makes itself less urgent than the server.
    argv = options(tiny, tmp_path, "--overload", "2", "--streams", "4")
    subprocess.run([sys.executable, "-m", "bench.chaos", *argv], cwd=ROOT, timeout=100, check=False)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [text for text in result["problems"] if "under overload" not in text] == []
    assert result["refused"] > 50 and result["refusal_p50_ms"] < 500
    assert min(result["calm_tokens_per_s"] + result["crowded_tokens_per_s"]) > 0


def case() -> Case:
    return Case(make_bodies(1, 8)[0], [1, 2, 3], "abc", "length", 3)


def answer(**changes: Any) -> dict[str, Any]:
    meta = {"finish_reason": {"type": "length"}, "completion_tokens": 3}
    return {"output_ids": [1, 2, 3], "text": "abc", "meta_info": meta, **changes}


class Lines:
    """The body of a stream."""

    def __init__(self, chunks: list[dict[str, Any]], ends: bool) -> None:
        self.content = self
        self._lines = [b"data: " + json.dumps(chunk).encode() + b"\n" for chunk in chunks]
        self._lines += [b"data: [DONE]\n"] if ends else []

    async def readline(self) -> bytes:
        return self._lines.pop(0) if self._lines else b""


def read(chunks: list[dict[str, Any]], ends: bool = True) -> Tally:
    tally = Tally()
    client = Client(None, "", [case()], tally)  # type: ignore[arg-type]
    last = asyncio.run(client._read("x", Lines(chunks, ends), Manner()))  # type: ignore[arg-type]
    if last is not None:
        client._judge("x", case(), last)
    tally.wrong += [str(got) for _, got in client.mismatches]
    return tally


def test_an_answer_as_it_is_alone_is_right() -> None:
    assert read([answer(output_ids=[1]), answer()]).right == 1


@pytest.mark.parametrize(
    ("chunks", "ends", "count"),
    [
        ([answer()], False, "lost"),
        ([], False, "lost"),
        ([answer(meta_info={"finish_reason": {"type": "abort"}})], True, "lost"),
        ([answer(output_ids=[1, 2]), answer(output_ids=[1])], True, "duplicated"),
        ([answer(output_ids=[1, 2]), answer(output_ids=[1, 1, 2, 3])], True, "duplicated"),
        ([answer(output_ids=[1, 2, 2, 3])], True, "wrong"),
        ([answer(output_ids=[1, 3])], True, "wrong"),
        ([answer(text="abbc")], True, "wrong"),
    ],
)
def test_whatever_is_not_the_answer_it_gets_alone_is_counted(chunks, ends, count) -> None:
    tally = read(chunks, ends)
    assert tally.right == 0
    assert len(getattr(tally, count)) == 1
