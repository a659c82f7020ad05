"""Servers that the acceptance tests share; each is found idle, whole and answering afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from greedy_reference import GreedyReference
from real_server import RealServer, serve, start, whole_again
from safetensors.torch import save_file
from tiny_model import write_tiny_model

from srt.model_config import load_model_config
from srt.models.registry import create_model
from srt.weights import fill_with_random_weights, weight_targets

CONTEXT_LEN = 2048
SECOND_EOS = 123


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one token a byte, two end tokens and weights that a reference can read."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT_LEN
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"eos_token_id": [config["eos_token_id"], SECOND_EOS]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = create_model(load_model_config(folder)).float()
    fill_with_random_weights(model, 1)
    weights = {name: target.contiguous() for name, target in weight_targets(model).items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def reference(tiny_folder: Path) -> GreedyReference:
    return GreedyReference(tiny_folder, max_tokens=CONTEXT_LEN)


@pytest.fixture(scope="session")
def roomy_process(tiny_folder: Path) -> Iterator[RealServer]:
    yield from serve(
        start(
            tiny_folder,
            *("--max-total-tokens", "8192", "--max-running-requests", "32"),
            *("--page-size", "16", "--chunked-prefill-size", "128"),
        )
    )


@pytest.fixture(scope="session")
def tight_process(tiny_folder: Path) -> Iterator[RealServer]:
    """320 tokens for 8 rows, admitted in the belief that nobody produces anything."""
    yield from serve(
        start(
            tiny_folder,
            *("--max-total-tokens", "320", "--max-running-requests", "8"),
            *("--page-size", "16", "--chunked-prefill-size", "128"),
            *("--schedule-conservativeness", "0", "--admission", "ratio"),
            *("--overlap-schedule", "on", "--schedule-policy", "priority"),
        )
    )


@pytest.fixture(scope="session")
def default_process(default_model: Path) -> Iterator[RealServer]:
    """The default model with no option at all."""
    yield from serve(RealServer())


@pytest.fixture
def roomy(roomy_process: RealServer) -> Iterator[RealServer]:
    """Context 2048 inside a pool of 8192, pages of 16, chunks of 128."""
    yield from whole_again(roomy_process)


@pytest.fixture
def tight(tight_process: RealServer) -> Iterator[RealServer]:
    yield from whole_again(tight_process)


@pytest.fixture
def default_server(default_process: RealServer) -> Iterator[RealServer]:
    yield from whole_again(default_process)
