"""Rotary position embedding as a model's config.json describes it, in any spelling in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srt.config_reader import ConfigReader

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer. `kind` is one of ROPE_KINDS; the numbers
    below `factor` belong to llama3 or yarn and keep their defaults otherwise."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # Scales cos and sin; yarn's answer to attention that is too flat over a longer context.
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


def parse_ropes(reader: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of full-attention layers and of those with a sliding window, the same but in Gemma 3.
    Spellings: `rope_scaling` beside `rope_theta`; `rope_parameters` with the theta inside
    (transformers 5); `rope_parameters` with a dict per layer type; each with `type` or `rope_type`.
    """
    theta = reader.optional("rope_theta", float, 10_000.0)
    local_theta = reader.optional("rope_local_base_freq", float, theta)
    parameters = _mapping(reader, "rope_parameters")
    scaling = _mapping(reader, "rope_scaling")
    # Where full and sliding layers differ, scaling belongs to the full ones.
    differ = reader.get("rope_local_base_freq") is not None
    full: Mapping[str, Any] = parameters
    local: Mapping[str, Any] = {}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        differ = True
        full = parameters.get("full_attention") or {}
        local = parameters.get("sliding_attention") or {}
    if scaling:
        # The older spelling wins where both are given, so that it can serve as an override.
        full = {"rope_theta": full.get("rope_theta"), **scaling}
    if not differ:
        local = full
    return _rope(reader, full, theta), _rope(reader, local, local_theta)


def _mapping(reader: ConfigReader, key: str) -> Mapping[str, Any]:
    value = reader.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"model config: {key} must be an object, got {value!r}")
    return value


def _rope(reader: ConfigReader, parameters: Mapping[str, Any], theta: float) -> RopeConfig:
    rope = ConfigReader(parameters, {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"model config: rope scaling type {kind!r} is not one of {', '.join(ROPE_KINDS)}"
        )
    partial = reader.optional(
        "partial_rotary_factor", float, rope.optional("partial_rotary_factor", float, 1.0)
    )
    if partial != 1.0:
        raise ValueError(f"model config: partial_rotary_factor must be 1, got {partial}")
    theta = rope.optional("rope_theta", float, theta)
    if kind == "default":
        return RopeConfig(theta)
    factor = rope.optional("factor", float, 0.0)
    trained = 0
    if kind != "linear":
        trained = rope.size(
            "original_max_position_embeddings", default=reader.size("max_position_embeddings")
        )
    if kind == "yarn" and not factor:
        # DeepSeek's way of writing yarn: the factor is implied by the two lengths.
        factor = reader.size("max_position_embeddings") / trained
    if factor < 1.0:
        raise ValueError(f"model config: rope scaling factor must be at least 1, got {factor}")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    if kind == "llama3":
        low, high = rope.need("low_freq_factor", float), rope.need("high_freq_factor", float)
        if not 0 < low < high:
            raise ValueError(
                f"model config: rope scaling needs 0 < low_freq_factor < high_freq_factor, "
                f"got {low} and {high}"
            )
        return RopeConfig(theta, kind, factor, trained, low, high)
    return RopeConfig(
        theta,
        kind,
        factor,
        trained,
        beta_fast=rope.optional("beta_fast", float, 32.0),
        beta_slow=rope.optional("beta_slow", float, 1.0),
        truncate=rope.optional("truncate", bool, True),
        attention_factor=_maybe_float(rope, "attention_factor"),
        mscale=_maybe_float(rope, "mscale"),
        mscale_all_dim=_maybe_float(rope, "mscale_all_dim"),
    )


def _maybe_float(reader: ConfigReader, key: str) -> float | None:
    return None if reader.get(key) is None else reader.need(key, float)
