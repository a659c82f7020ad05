"""Config files as people publish them, and as they break them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from srt.model_config import ModelConfig, load_model_config, parse_model_config
from srt.rope_config import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
GEMMA3_TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def parse(**changes: Any) -> ModelConfig:
    return parse_model_config({**LLAMA, **changes})


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in LLAMA.items() if name != key}


def test_a_llama_config_is_read() -> None:
    config = parse()
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert (config.head_dim, config.attention_scale, config.context_len) == (16, 0.25, 2048)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (2,))
    assert not config.tie_word_embeddings and not config.qkv_bias
    assert config.rope == config.rope_local == RopeConfig(theta=10_000.0)
    assert config.sliding_window is None and config.window_of(0) is None


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        parse_model_config(without(key))
    with pytest.raises(ValueError, match=key):
        parse(**{key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", "three"),
        ("num_hidden_layers", 0),
        ("hidden_size", 64.5),
        ("num_key_value_heads", 3),
        ("num_attention_heads", 5),
        ("head_dim", 15),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", "yes"),
        ("hidden_act", "relu7"),
        ("eos_token_id", "</s>"),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "gptq"}),
        ("rope_scaling", [1, 2]),
    ],
)
def test_a_bad_value_is_named_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        parse(**{key: value})


def test_heads_default_to_one_kv_head_each() -> None:
    assert parse_model_config(without("num_key_value_heads")).num_kv_heads == 4


def test_the_generation_config_names_its_end_tokens_first_and_loses_none() -> None:
    raw = {**LLAMA, "eos_token_id": [2, 7]}
    assert parse_model_config(raw, {"eos_token_id": 9}).eos_token_ids == (9, 2, 7)
    assert parse_model_config(raw, {"eos_token_id": [7, 9]}).eos_token_ids == (7, 9, 2)
    assert parse_model_config(without("eos_token_id"), {}).eos_token_ids == ()


def test_recommended_sampling_is_kept_unless_it_is_greedy() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": None, "transformers_version": "5"}
    config = parse_model_config(LLAMA, generation)
    assert config.generation_defaults == {"temperature": 0.6, "top_k": 20}
    config = parse_model_config(LLAMA, {**generation, "do_sample": False})
    assert config.generation_defaults == {}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("kind", "numbers", "context_len"),
    [
        ("default", {}, 2048),
        ("linear", {"factor": 3.0}, 6144),
        ("llama3", LLAMA3, 2048),
        ("yarn", YARN, 2048),
        ("yarn", {"factor": 4.0}, 8192),
    ],
)
def test_h53_every_spelling_of_rope_scaling_means_the_same(
    kind: str, numbers: dict[str, Any], context_len: int
) -> None:
    """H53: `type` and `rope_type`, with the same context length."""
    expected = parse(rope_theta=7.0, rope_scaling={"rope_type": kind, **numbers})
    assert expected.rope.kind == kind and expected.rope.theta == 7.0
    assert expected.context_len == context_len
    for other in (
        parse(rope_theta=7.0, rope_scaling={"type": kind, **numbers}),
        parse(rope_theta=7.0, rope_scaling={"type": kind, "rope_type": kind, **numbers}),
        parse(rope_theta=7.0, rope_scaling={"rope_type": kind, "unheard_of": 1, **numbers}),
        parse(rope_parameters={"rope_type": kind, "rope_theta": 7.0, **numbers}),
        parse(rope_theta=7.0, rope_parameters={"rope_type": kind, **numbers}),
    ):
        assert other == expected


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_h53_an_unknown_kind_of_rope_scaling_is_an_error_that_lists_the_known(
    spelling: str,
) -> None:
    """H53: an error at load."""
    with pytest.raises(ValueError, match=r"'longrope'.*default, linear, llama3, yarn"):
        parse(rope_scaling={spelling: "longrope", "factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
    ],
)
def test_scaling_without_its_numbers_is_an_error(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(rope_scaling=scaling)


def test_the_context_may_be_shortened_but_not_stretched() -> None:
    assert parse_model_config(LLAMA, context_length=100).context_len == 100
    with pytest.raises(ValueError, match=r"context_length 4096.*2048"):
        parse_model_config(LLAMA, context_length=4096)
    longer = parse_model_config(LLAMA, None, 4096, {"max_position_embeddings": 4096})
    assert longer.context_len == 4096


def test_overrides_replace_keys_and_unread_ones_are_refused() -> None:
    config = parse_model_config(
        {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        overrides={"rope_theta": 9.0, "num_hidden_layers": 1},
    )
    assert config.num_layers == 1 and config.rope == RopeConfig(theta=9.0)
    with pytest.raises(ValueError, match=r"num_hidden_layer .*num_hidden_layers"):
        parse_model_config(LLAMA, overrides={"num_hidden_layer": 1})


def test_a_scaling_override_wins_over_the_newer_spelling() -> None:
    raw = {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5.0, **LLAMA3}}
    config = parse_model_config(raw, overrides={"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.rope == RopeConfig(5.0, "linear", 2.0) and config.context_len == 4096


def test_llama_never_slides_and_mistral_always_does_if_it_has_a_window() -> None:
    assert parse(sliding_window=16).sliding_window is None
    mistral = parse(model_type="mistral", sliding_window=16)
    assert [mistral.window_of(i) for i in range(3)] == [16, 16, 16]
    assert parse(model_type="mistral", sliding_window=None).window_of(0) is None


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_slides_only_if_switched_on_and_only_above_a_layer(model_type: str) -> None:
    settings = {"model_type": model_type, "sliding_window": 16, "max_window_layers": 2}
    assert parse(**settings).sliding_window is None
    assert parse(**settings, use_sliding_window=False).sliding_window is None
    config = parse(**settings, use_sliding_window=True)
    assert [config.window_of(i) for i in range(3)] == [None, None, 16]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = parse(**settings, use_sliding_window=True, layer_types=kinds)
    assert [config.window_of(i) for i in range(3)] == [16, None, 16]
    with pytest.raises(ValueError, match="layer_types"):
        parse(**settings, use_sliding_window=True, layer_types=kinds[:2])


def test_biases_are_where_each_family_has_them() -> None:
    def biases(**changes: Any) -> tuple[bool, bool, bool]:
        config = parse(**changes)
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases(model_type="qwen2") == (True, False, False)
    assert biases(model_type="qwen3", attention_bias=True) == (True, True, False)


def test_a_sparse_multimodal_gemma_config_is_completed_by_the_family() -> None:
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": GEMMA3_TEXT,
        "vision_config": {"hidden_size": 1152},
    }
    config = parse_model_config(raw, {"eos_token_id": [1, 106], "top_k": 64})
    assert config.architectures == ("Gemma3ForConditionalGeneration",)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.hidden_size, config.context_len) == (262208, 2560, 131072)
    assert config.tie_word_embeddings and config.activation == "gelu_pytorch_tanh"
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (1, 106))
    assert config.rope == RopeConfig(1e6, "linear", 8.0)
    assert config.rope_local == RopeConfig(1e4)
    assert [config.window_of(i) for i in range(7)] == [1024] * 5 + [None, 1024]
    assert config.attention_scale == 256**-0.5
    shorter = parse_model_config(raw, overrides={"text_config": {"num_hidden_layers": 2}})
    assert shorter.num_layers == 2


def test_gemma_rope_per_layer_type_means_the_same_as_the_older_spelling() -> None:
    gemma = {**GEMMA3_TEXT, "architectures": ["Gemma3ForCausalLM"]}
    new = {name: value for name, value in gemma.items() if name != "rope_scaling"}
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert parse_model_config(new) == parse_model_config(gemma)
    overridden = parse_model_config(new, overrides={"rope_theta": 5.0})
    assert (overridden.rope.theta, overridden.rope_local.theta) == (5.0, 1e4)


def test_a_folder_is_read_with_its_generation_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load_model_config(tmp_path, 64, {}).eos_token_ids == (5, 2)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"generation_config\.json must hold a JSON object"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_model_config(tmp_path)


def test_reading_a_config_does_not_load_torch() -> None:
    code = (
        "import sys, srt.model_config, srt.models.registry, srt.memory_plan, srt.host_limits; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
