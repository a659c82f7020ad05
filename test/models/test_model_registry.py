"""Which architectures are known."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from srt.model_config import ModelConfig, parse_model_config
from srt.models.causal_lm import CausalLM
from srt.models.registry import ARCHITECTURES, check_architecture, create_model


@pytest.fixture
def config() -> ModelConfig:
    return parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 16,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32,
        }
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_named_can_be_made(name: str, config: ModelConfig) -> None:
    with torch.device("meta"):
        model = create_model(dataclasses.replace(config, architectures=(name,)))
    assert isinstance(model, CausalLM)


def test_an_unknown_architecture_is_an_error_that_lists_the_known(config: ModelConfig) -> None:
    unknown = dataclasses.replace(config, architectures=("MambaForCausalLM",))
    with pytest.raises(ValueError, match=r"MambaForCausalLM.*LlamaForCausalLM, Mistral"):
        check_architecture(unknown)
    known_too = dataclasses.replace(config, architectures=("Other", "Qwen3ForCausalLM"))
    assert check_architecture(known_too) == "Qwen3ForCausalLM"
