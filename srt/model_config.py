"""The few numbers we need from a model's config.json and generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srt.config_reader import ConfigReader
from srt.rope_config import RopeConfig, parse_ropes

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Gemma 3's published text configs hold only what differs from the family's first member, so for
# this family, and no other, a missing key has a value.
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class ModelConfig:
    """What the engine knows about a model. Sizes are in elements; a logit cap of 0 means no cap.
    `eos_token_ids` keeps the order in which the files name them."""

    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    attention_scale: float  # what q.k is multiplied with
    attn_logit_cap: float
    final_logit_cap: float
    rope: RopeConfig
    rope_local: RopeConfig  # of the layers with a sliding window; differs from `rope` in Gemma 3
    sliding_window: int | None  # keys a token sees, itself included
    sliding_layers: tuple[bool, ...]  # [num_layers], which layers have the window
    context_len: int
    dtype: str | None  # of the checkpoint, as its config says
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, float] = field(default_factory=dict)

    def window_of(self, layer_id: int) -> int | None:
        return self.sliding_window if self.sliding_layers[layer_id] else None


def load_model_config(
    path: Path, context_length: int | None = None, overrides: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read the config of a folder (config.json, and generation_config.json if there) or of a .gguf
    file. `overrides` replace keys of config.json; `context_length` may only shorten the context.
    ValueError names what is missing, malformed, too large or unknown."""
    generation: dict[str, Any] = {}
    if path.suffix == ".gguf":
        # Late, because only here is a GGUF reader needed.
        from srt.gguf_checkpoint import read_hf_config

        raw = read_hf_config(path)
    else:
        if not (path / "config.json").is_file():
            raise ValueError(f"model path {path} has no config.json and is not a .gguf file")
        raw = read_json_object(path / "config.json")
        if (path / "generation_config.json").is_file():
            generation = read_json_object(path / "generation_config.json")
    return parse_model_config(raw, generation, context_length, overrides or {})


def parse_model_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    context_length: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """ModelConfig from a config.json dict (its `text_config` for multimodal models) and a
    generation_config.json dict. Errors as in `load_model_config`."""
    generation, overrides = generation or {}, overrides or {}
    raw = _with_overrides(_text_part(raw), overrides)
    model_type = str(raw.get("model_type") or "")
    reader = ConfigReader(raw, GEMMA3_DEFAULTS if model_type.startswith("gemma3") else {})
    reader.seen |= {"text_config", "model_type"}
    if not model_type:
        raise ValueError("model config: required key 'model_type' is missing")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise ValueError(f"model config: quantization_config ({method}) is not supported")
    if reader.get("use_bidirectional_attention"):
        raise ValueError("model config: use_bidirectional_attention is for encoders, not served")

    num_layers = reader.size("num_hidden_layers")
    num_heads = reader.size("num_attention_heads")
    num_kv_heads = reader.size("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"model config: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    hidden_size = reader.size("hidden_size")
    if reader.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            f"model config: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads}, and there is no head_dim"
        )
    head_dim = reader.size("head_dim", default=max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise ValueError(
            f"model config: head_dim must be even for rotary embedding, got {head_dim}"
        )
    sliding_window, sliding_layers = _sliding(reader, model_type, num_layers)
    rope, rope_local = parse_ropes(reader)
    attention_bias = reader.optional("attention_bias", bool, False)
    query_scale = reader.optional("query_pre_attn_scalar", float, float(head_dim))
    config = ModelConfig(
        model_type=model_type,
        architectures=tuple(reader.need("architectures", list)),
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.need("rms_norm_eps", float),
        activation=_activation(reader),
        tie_word_embeddings=reader.optional("tie_word_embeddings", bool, False),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias and model_type != "qwen2",
        mlp_bias=reader.optional("mlp_bias", bool, False),
        attention_scale=query_scale**-0.5,
        attn_logit_cap=reader.optional("attn_logit_softcapping", float, 0.0),
        final_logit_cap=reader.optional("final_logit_softcapping", float, 0.0),
        rope=rope,
        rope_local=rope_local,
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        context_len=_context_len(reader, model_type, rope, context_length),
        dtype=_dtype_name(reader),
        eos_token_ids=_eos_token_ids(generation, reader.get("eos_token_id")),
        generation_defaults=_generation_defaults(generation),
    )
    if ignored := sorted(set(overrides) - reader.seen):
        raise ValueError(
            f"json_model_override_args: {', '.join(ignored)} would have no effect on a "
            f"{model_type} model; keys that have: {', '.join(sorted(reader.seen))}"
        )
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's config. What a multimodal config says once for all parts is inherited."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return raw
    inherited = {
        key: raw[key]
        for key in ("eos_token_id", "tie_word_embeddings", "torch_dtype", "dtype")
        if raw.get(key) is not None
    }
    # The class to build is named by the outer config; the text part's own name is optional.
    return {**inherited, **text, "architectures": raw.get("architectures")}


def _with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**raw, **overrides, **(overrides.get("text_config") or {})}
    if "rope_theta" in overrides and isinstance(merged.get("rope_parameters"), Mapping):
        # transformers 5 keeps theta inside, where it would win over the override.
        merged["rope_parameters"] = _without_theta(merged["rope_parameters"])
    return merged


def _without_theta(parameters: Mapping[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in parameters.items() if key != "rope_theta"}
    if isinstance(result.get("full_attention"), Mapping):
        result["full_attention"] = _without_theta(result["full_attention"])
    return result


def _activation(reader: ConfigReader) -> str:
    hidden_act = reader.get("hidden_act")
    name = reader.get("hidden_activation", hidden_act)
    if name is None:
        raise ValueError("model config: required key 'hidden_act' is missing")
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"model config: hidden_act {name!r} is not one of {known}")
    return str(name)


def _sliding(
    reader: ConfigReader, model_type: str, num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """Window and the layers that have it. Qwen has it only if switched on, and then from layer
    `max_window_layers` on; Mistral in every layer; Gemma 3 in all but every sixth; Llama never."""
    none = (None, (False,) * num_layers)
    if model_type == "llama":
        return none
    if model_type in ("qwen2", "qwen3") and not reader.optional("use_sliding_window", bool, False):
        return none
    if reader.get("sliding_window") is None:
        return none
    window = reader.size("sliding_window")
    layer_types = None if model_type == "mistral" else reader.get("layer_types")
    if layer_types is not None:
        unknown = set(layer_types) - {"sliding_attention", "full_attention"}
        if unknown or len(layer_types) != num_layers:
            raise ValueError(
                f"model config: layer_types must name sliding_attention or full_attention for each "
                f"of {num_layers} layers, got {layer_types}"
            )
        return window, tuple(kind == "sliding_attention" for kind in layer_types)
    if model_type in ("qwen2", "qwen3"):
        first = reader.need("max_window_layers", int)
        return window, tuple(layer_id >= first for layer_id in range(num_layers))
    if model_type.startswith("gemma3"):
        pattern = reader.size("sliding_window_pattern")
        return window, tuple(bool((layer_id + 1) % pattern) for layer_id in range(num_layers))
    return window, (True,) * num_layers


def _context_len(
    reader: ConfigReader, model_type: str, rope: RopeConfig, context_length: int | None
) -> int:
    """Tokens of one sequence. `max_position_embeddings` already counts the scaling of llama3 and of
    Gemma 3, not that of linear; yarn's documents state the length as original times factor."""
    limit = reader.size("max_position_embeddings")
    if rope.kind == "yarn":
        limit = int(rope.original_max_position_embeddings * rope.factor)
    elif rope.kind == "linear" and not model_type.startswith("gemma3"):
        limit = int(limit * rope.factor)
    if context_length is None:
        return limit
    if not 1 <= context_length <= limit:
        raise ValueError(
            f"context_length {context_length} must be between 1 and the model's {limit} tokens; a "
            "longer one needs max_position_embeddings or rope_scaling in json_model_override_args"
        )
    return context_length


def _dtype_name(reader: ConfigReader) -> str | None:
    torch_dtype = reader.get("torch_dtype")
    name = reader.get("dtype", torch_dtype)
    return None if name is None else str(name).removeprefix("torch.")


def _eos_token_ids(generation: Mapping[str, Any], from_config: Any) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for value in (generation.get("eos_token_id"), from_config):
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ValueError(f"model config: eos_token_id must be a token id, got {token_id!r}")
            ids[token_id] = None
    return tuple(ids)


def _generation_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Sampling knobs the model's authors recommend; none if they recommend greedy decoding."""
    if generation.get("do_sample") is False:
        return {}
    return {
        key: generation[key]
        for key in SAMPLING_KEYS
        if isinstance(generation.get(key), (int, float)) and not isinstance(generation[key], bool)
    }
