"""Config and weights of a GGUF file in the shape the rest of the engine knows: Hugging Face's.

The names and layouts undone here are those of llama.cpp's converter, convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srt.gguf_metadata import GGUFHeader, GGUFTensor, read_header, shard_paths

if TYPE_CHECKING:
    import numpy as np
    import torch

    from srt.layers.quantization.blocks import QuantizedBlocks

# GGUF's architecture -> (architectures[0], model_type).
_FAMILIES = {
    "llama": ("LlamaForCausalLM", "llama"),  # Llama, SmolLM, and Mistral without a window
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
# general.file_type -> the dtype the weights are in. Quantized ones mostly come from bfloat16.
_FILE_DTYPES = {0: "float32", 1: "float16"}
_ROPE_FREQS = "rope_freqs.weight"
_F32, _NO_SCALING = 0, ("none", None)
_GEMMA3_27B_LAYERS = 62

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# Gemma norms on both sides of each block, so the one before the MLP has another name.
_GEMMA3_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Values dequantized at a time: enough for numpy to be fast, few enough to stay in the cache.
_CHUNK_VALUES = 1 << 18


def read_hf_config(path: Path) -> dict[str, Any]:
    """The file's metadata as a config.json dict. What the format leaves out (Gemma 3's local rope
    theta and layer pattern) is filled in. ValueError names a missing key or an unknown value."""
    header = read_header(path)
    tensor_names = {
        tensor.name
        for part in shard_paths(header)
        for tensor in (header if part == path else read_header(part)).tensors
    }
    arch = _architecture(header)
    architecture, model_type = _FAMILIES[arch]

    def need(key: str) -> Any:
        return header.require(f"{arch}.{key}")

    def get(key: str, default: Any = None) -> Any:
        return header.metadata.get(f"{arch}.{key}", default)

    num_heads = _same_in_all_layers(header, f"{arch}.attention.head_count", None)
    head_dim = get("attention.key_length", need("embedding_length") // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ValueError(f"{path}: {arch}.{key} is {get(key)}, not the head's size {head_dim}")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(header),
        "hidden_size": need("embedding_length"),
        "intermediate_size": _same_in_all_layers(header, f"{arch}.feed_forward_length", None),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _same_in_all_layers(
            header, f"{arch}.attention.head_count_kv", num_heads
        ),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "rope_theta": _decimal(get("rope.freq_base", 1e6 if arch == "gemma3" else 1e4)),
        "rope_scaling": _rope_scaling(header, arch, head_dim),
        "attention_bias": "blk.0.attn_output.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_down.bias" in tensor_names,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.eos_token_ids(),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": _FILE_DTYPES.get(header.metadata.get("general.file_type", -1), "bfloat16"),
    }
    window = get("attention.sliding_window")
    if arch == "llama" and window:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        config["sliding_window"] = window
    if arch == "gemma3":
        # The 27B model alone scales by the width of a head as if heads filled the hidden size; the
        # file does not say so, and llama.cpp knows that model by its number of layers too.
        whole = need("block_count") == _GEMMA3_27B_LAYERS
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": need("embedding_length") // num_heads if whole else head_dim,
            "sliding_window": need("attention.sliding_window"),
            "sliding_window_pattern": get("attention.sliding_window_pattern", 6),
            "rope_local_base_freq": _decimal(get("rope.freq_base_swa", 1e4)),
            "attn_logit_softcapping": get("attn_logit_softcapping"),
            "final_logit_softcapping": get("final_logit_softcapping"),
        }
        del config["hidden_act"]
    return config


def iterate_tensors(
    path: Path, keep_blocks: bool = False
) -> Iterator[tuple[str, torch.Tensor | QuantizedBlocks]]:
    """(Hugging Face name, float32 tensor) of each tensor, one in memory at a time; with
    `keep_blocks`, matrices in the layouts of BLOCK_BYTES stay in their blocks. A tensor without a
    place in the architecture keeps its GGUF name, so that the loader's error can list it."""
    import torch

    from srt.layers.quantization.blocks import BLOCK_BYTES, QuantizedBlocks

    header = read_header(path)
    arch = _architecture(header)
    for part in shard_paths(header):
        part_header = header if part == path else read_header(part)
        for tensor in part_header.tensors:
            if tensor.name == _ROPE_FREQS:
                continue  # it is part of the config: rope_scaling
            name = hf_name(arch, tensor.name)
            raw, kind = _read_blocks(part_header, tensor, _rows_in_hf_order(header, arch, tensor))
            if keep_blocks and kind in BLOCK_BYTES and len(tensor.shape) == 2:
                rows, columns = tensor.shape
                data = torch.from_numpy(raw).view(rows, -1)
                yield name, QuantizedBlocks(kind, (rows, columns), data)
                continue
            values = _dequantize(part_header, tensor, raw)
            if arch == "gemma3" and name.endswith("norm.weight"):
                values -= 1  # stored as the factor itself, not as the model's 1 + weight
            yield name, torch.from_numpy(values)


def hf_name(arch: str, name: str) -> str:
    """The Hugging Face name of a tensor, or `name` if the architecture has no such tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    layer_names = _GEMMA3_LAYER_NAMES if arch == "gemma3" else _LAYER_NAMES
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in layer_names:
        return name
    return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"


def _architecture(header: GGUFHeader) -> str:
    arch = header.require("general.architecture")
    if arch not in _FAMILIES:
        raise ValueError(
            f"{header.path}: architecture {arch!r} is not supported; known in GGUF: "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    if experts := header.metadata.get(f"{arch}.expert_count"):
        raise ValueError(
            f"{header.path}: a mixture of {experts} experts is not supported as GGUF; "
            "pass the model's safetensors folder"
        )
    return str(arch)


def _same_in_all_layers(header: GGUFHeader, key: str, default: int | None) -> int:
    value = header.require(key) if default is None else header.metadata.get(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ValueError(f"{header.path}: {key} differs between layers, which is not supported")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{header.path}: {key} must be at least 1, got {value!r}")
    return value


def _vocab_size(header: GGUFHeader) -> int:
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight":
            return tensor.shape[0]
    raise ValueError(f"{header.path} lacks the tensor 'token_embd.weight'")


def _decimal(value: float) -> float:
    """The short decimal number a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _rope_scaling(header: GGUFHeader, arch: str, head_dim: int) -> dict[str, Any] | None:
    metadata = header.metadata
    for tensor in header.tensors:
        if tensor.name == _ROPE_FREQS:
            return _llama3_scaling(header, arch, tensor, head_dim)
    kind = metadata.get(f"{arch}.rope.scaling.type")
    factor = metadata.get(f"{arch}.rope.scaling.factor", metadata.get(f"{arch}.rope.scale_linear"))
    if kind is None and factor is not None:
        kind = "linear"  # files from before the type had a key of its own
    if kind in _NO_SCALING or factor in (None, 0.0, 1.0):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _decimal(factor)}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        raise ValueError(f"{header.path}: {arch}.rope.scaling.type {kind!r} is not supported")
    scaling["original_max_position_embeddings"] = header.require(
        f"{arch}.rope.scaling.original_context_length"
    )
    optional = {
        "attention_factor": ("yarn_attn_factor", "attn_factor"),
        "beta_fast": ("yarn_beta_fast",),
        "beta_slow": ("yarn_beta_slow",),
    }
    for key, names in optional.items():
        for name in names:
            if (value := metadata.get(f"{arch}.rope.scaling.{name}")) is not None:
                scaling[key] = _decimal(value)
    return scaling


def _llama3_scaling(
    header: GGUFHeader, arch: str, tensor: GGUFTensor, head_dim: int
) -> dict[str, Any] | None:
    """The parameters behind a table of frequency factors. Llama 3.1 and later store the table and
    not the parameters, of which only `factor` differs between the published models."""
    if tensor.type_id != _F32 or tensor.shape != (head_dim // 2,):
        raise ValueError(f"{header.path}: {_ROPE_FREQS} must be float32 [{head_dim // 2}]")
    end = tensor.offset + 4 * tensor.shape[0]
    if end > header.file_size:
        raise ValueError(f"{header.path}: {_ROPE_FREQS} ends at byte {end}, past the end")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        stored = struct.unpack(f"<{tensor.shape[0]}f", file.read(4 * tensor.shape[0]))
    if all(value == 1.0 for value in stored):
        return None
    scaling = {
        "rope_type": "llama3",
        "factor": _decimal(max(stored)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": header.metadata.get(
            f"{arch}.rope.scaling.original_context_length", 8192
        ),
    }
    theta = _decimal(header.metadata.get(f"{arch}.rope.freq_base", 1e4))
    expected = llama3_factors(theta, head_dim, scaling)
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(stored, expected, strict=True)):
        raise ValueError(
            f"{header.path}: {_ROPE_FREQS} is not llama3 scaling with low_freq_factor 1 and "
            f"high_freq_factor 4 over {scaling['original_max_position_embeddings']} tokens, and "
            "other tables are not supported"
        )
    return scaling


def llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> list[float]:
    """By what llama3 scaling divides each of the head_dim / 2 frequencies: nothing for short waves,
    `factor` for long ones, and a blend between (Llama 3.1's reference implementation)."""
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = scaling["original_max_position_embeddings"]
    factors = []
    for i in range(0, head_dim, 2):
        waves = trained / (2 * math.pi * theta ** (i / head_dim))  # that fit the trained context
        blend = min(1.0, max(0.0, (waves - low) / (high - low)))
        factors.append(1 / ((1 - blend) / factor + blend))
    return factors


def _rows_in_hf_order(header: GGUFHeader, arch: str, tensor: GGUFTensor) -> np.ndarray | None:
    """For llama's q and k, which row of the stored tensor each row is; None for as stored.

    The file interleaves the two halves of a head's rotary dimensions, as llama.cpp rotates
    neighbours; Hugging Face's layout has the halves one after the other."""
    import numpy as np

    match = _LAYER.fullmatch(tensor.name)
    if arch != "llama" or match is None or match[2] not in ("attn_q", "attn_k"):
        return None
    num_heads = _same_in_all_layers(header, f"{arch}.attention.head_count", None)
    if match[2] == "attn_k":
        num_heads = _same_in_all_layers(header, f"{arch}.attention.head_count_kv", num_heads)
    num_rows = tensor.shape[0]
    if num_rows % (2 * num_heads):
        raise ValueError(
            f"{header.path}: {tensor.name} has {num_rows} rows, no multiple of twice its "
            f"{num_heads} heads"
        )
    rows: np.ndarray = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    rows = rows.swapaxes(1, 2).reshape(-1)
    return rows


def _read_blocks(
    header: GGUFHeader, tensor: GGUFTensor, rows: np.ndarray | None
) -> tuple[np.ndarray, str]:
    """The tensor's bytes, with `rows` of the stored rows in that order, and its type's name."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    def error(problem: str) -> ValueError:
        return ValueError(f"{header.path}: tensor {tensor.name!r} {problem}")

    try:
        kind = GGMLQuantizationType(tensor.type_id)
    except ValueError as unknown:
        raise error(f"has the unknown type {tensor.type_id}") from unknown
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    row_values = tensor.shape[-1] if tensor.shape else 1
    if row_values % block_values or 0 in tensor.shape:
        raise error(f"of shape {list(tensor.shape)} has no whole {kind.name} blocks")
    num_bytes = math.prod(tensor.shape) // block_values * block_bytes
    if tensor.offset + num_bytes > header.file_size:
        raise error(
            f"({num_bytes} bytes at {tensor.offset}) goes past the end of the file at "
            f"{header.file_size}: the file is incomplete"
        )
    raw = np.fromfile(header.path, np.uint8, num_bytes, offset=tensor.offset)
    if rows is not None:  # rows are whole blocks, so the small form is what gets shuffled
        raw = np.ascontiguousarray(raw.reshape(len(rows), -1)[rows]).reshape(-1)
    return raw, kind.name


def _dequantize(header: GGUFHeader, tensor: GGUFTensor, raw: np.ndarray) -> np.ndarray:
    """The values of a tensor's bytes, float32 in its shape."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.type_id)
    if kind == GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(tensor.shape)
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    num_values = math.prod(tensor.shape)
    values = np.empty(num_values, np.float32)
    step = max(1, _CHUNK_VALUES // block_values)  # blocks
    try:
        for block in range(0, num_values // block_values, step):
            chunk = raw[block * block_bytes : (block + step) * block_bytes]
            begin = block * block_values
            # One long row: the package works through rows in small groups.
            decoded = dequantize(chunk.reshape(1, -1), kind).reshape(-1)
            values[begin : begin + len(decoded)] = decoded
    except NotImplementedError as unsupported:
        raise ValueError(
            f"{header.path}: tensor {tensor.name!r} has the type {kind.name}, which cannot be "
            "dequantized"
        ) from unsupported
    return values.reshape(tensor.shape)
