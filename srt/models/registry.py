"""Which class implements which architecture."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from srt.model_config import ModelConfig

if TYPE_CHECKING:
    from srt.models.causal_lm import CausalLM

# Architecture, as config.json names it -> module below srt.models and class there. Modules are
# imported when asked for, so that the process without torch can look at the names.
ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3ForCausalLM"),
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3ForConditionalGeneration"),
}


def check_architecture(config: ModelConfig) -> str:
    """The first of the config's architectures that we know; ValueError if there is none."""
    for name in config.architectures:
        if name in ARCHITECTURES:
            return name
    raise ValueError(
        f"architecture {', '.join(config.architectures) or '(none)'} is not supported; "
        f"known: {', '.join(ARCHITECTURES)}"
    )


def create_model(config: ModelConfig) -> CausalLM:
    """The model with uninitialised weights, in torch's default type and on its default device."""
    module, class_name = ARCHITECTURES[check_architecture(config)]
    model_class = getattr(importlib.import_module(f"srt.models.{module}"), class_name)
    return cast("CausalLM", model_class(config))
