"""Writes GGUF files in the test: any metadata, any tensors, by the format's own package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

_TYPES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}

LLAMA_METADATA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | None = None,
    quantized: GGMLQuantizationType | None = None,
    arch: str = "llama",
) -> Path:
    """`metadata` values may be bool, int, float, str or lists of them. `quantized` applies to
    tensors of two dimensions."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, _TYPES[type(value)])
    for name, values in (tensors or {}).items():
        if quantized is not None and values.ndim == 2:
            packed = gguf.quants.quantize(values, quantized)
            writer.add_tensor(name, packed, raw_dtype=quantized)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def embedding(rows: int = 8, columns: int = 32) -> dict[str, np.ndarray]:
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    return {"token_embd.weight": values}
