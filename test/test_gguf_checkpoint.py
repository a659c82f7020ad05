"""A GGUF file says, in Hugging Face's terms, what its model is and what its weights are."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tiny_gguf import LLAMA_METADATA, embedding, write_gguf

from srt.gguf_checkpoint import hf_name, iterate_tensors, llama3_factors, read_hf_config
from srt.gguf_metadata import read_header


def with_arch(arch: str, **changes: object) -> dict[str, object]:
    metadata = {key.replace("llama.", f"{arch}."): v for key, v in LLAMA_METADATA.items()}
    metadata.update({f"{arch}.{key.replace('__', '.')}": v for key, v in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


def config_of(tmp_path, metadata, tensors=None, arch="llama"):
    tensors = embedding() if tensors is None else tensors
    return read_hf_config(write_gguf(tmp_path / "m.gguf", metadata, tensors, arch=arch))


def test_a_llama_file_gives_the_config_its_model_had(tmp_path):
    metadata = {
        **LLAMA_METADATA,
        "general.file_type": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
    }
    config = config_of(tmp_path, metadata)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["hidden_size"], config["intermediate_size"], config["head_dim"]) == (32, 64, 8)
    assert (config["num_hidden_layers"], config["max_position_embeddings"]) == (1, 64)
    assert config["vocab_size"] == 8
    assert config["rms_norm_eps"] == 1e-5  # not the float32 nearest to it
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] is None
    assert config["eos_token_id"] == [2]
    assert config["bos_token_id"] == 1
    assert config["torch_dtype"] == "float16"


def test_the_output_matrix_decides_whether_embeddings_are_tied(tmp_path):
    """H52: as a GGUF says it."""
    assert config_of(tmp_path, LLAMA_METADATA)["tie_word_embeddings"] is True
    tensors = {**embedding(), "output.weight": np.ones((8, 32), np.float32)}
    assert config_of(tmp_path, LLAMA_METADATA, tensors)["tie_word_embeddings"] is False


def test_biases_of_a_llama_are_seen_in_its_tensors(tmp_path):
    bias = np.ones(32, np.float32)
    tensors = {**embedding(), "blk.0.attn_output.bias": bias, "blk.0.ffn_down.bias": bias}
    config = config_of(tmp_path, LLAMA_METADATA, tensors)
    assert config["attention_bias"] is True
    assert config["mlp_bias"] is True
    assert config_of(tmp_path, LLAMA_METADATA)["attention_bias"] is False


def test_a_llama_with_a_window_is_a_mistral(tmp_path):
    metadata = {**LLAMA_METADATA, "llama.attention.sliding_window": 16}
    config = config_of(tmp_path, metadata)
    assert config["architectures"] == ["MistralForCausalLM"]
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_files_name_their_own_architecture_and_head_size(tmp_path, arch):
    metadata = with_arch(arch, attention__key_length=16, attention__value_length=16)
    config = config_of(tmp_path, metadata, arch=arch)
    assert config["architectures"] == [f"{arch.capitalize()}ForCausalLM"]
    assert config["model_type"] == arch
    assert config["head_dim"] == 16


def test_what_a_gemma3_file_leaves_out_is_filled_in(tmp_path):
    metadata = with_arch(
        "gemma3",
        attention__key_length=16,
        attention__value_length=16,
        attention__sliding_window=512,
        rope__freq_base=1e6,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
    )
    config = config_of(tmp_path, metadata, arch="gemma3")
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["model_type"] == "gemma3_text"
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (512, 6)
    assert config["query_pre_attn_scalar"] == 16
    assert config["hidden_activation"] == "gelu_pytorch_tanh"


def test_the_largest_gemma3_scales_its_queries_by_hidden_size_over_heads(tmp_path):
    metadata = with_arch(
        "gemma3", block_count=62, attention__key_length=16, attention__sliding_window=512
    )
    assert config_of(tmp_path, metadata, arch="gemma3")["query_pre_attn_scalar"] == 8


def test_our_model_config_accepts_what_each_architecture_gives(tmp_path):
    from srt.model_config import load_model_config

    for arch in ("llama", "qwen2", "qwen3", "gemma3"):
        metadata = with_arch(arch, attention__sliding_window=16 if arch == "gemma3" else None)
        path = write_gguf(tmp_path / f"{arch}.gguf", metadata, embedding(), arch=arch)
        config = load_model_config(path, None, {})
        assert (config.num_heads, config.vocab_size, config.context_len) == (4, 8, 64)


def test_a_rope_scaling_type_without_a_factor_or_with_factor_one_scales_nothing(tmp_path):
    metadata = {**LLAMA_METADATA, "llama.rope.scaling.type": "linear"}
    assert config_of(tmp_path, metadata)["rope_scaling"] is None
    metadata["llama.rope.scaling.factor"] = 1.0
    assert config_of(tmp_path, metadata)["rope_scaling"] is None


def test_the_old_key_of_linear_scaling_still_counts(tmp_path):
    metadata = {**LLAMA_METADATA, "llama.rope.scale_linear": 4.0}
    scaling = config_of(tmp_path, metadata)["rope_scaling"]
    assert scaling == {"rope_type": "linear", "factor": 4.0}


def test_yarn_keeps_its_parameters(tmp_path):
    metadata = {
        **LLAMA_METADATA,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16,
        "llama.rope.scaling.yarn_beta_fast": 24.0,
    }
    assert config_of(tmp_path, metadata)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 24.0,
    }
    del metadata["llama.rope.scaling.original_context_length"]
    with pytest.raises(ValueError, match="original_context_length"):
        config_of(tmp_path, metadata)


def test_an_unknown_rope_scaling_is_refused(tmp_path):
    """H53: in a GGUF, too."""
    metadata = {
        **LLAMA_METADATA,
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.factor": 2.0,
    }
    with pytest.raises(ValueError, match="'longrope' is not supported"):
        config_of(tmp_path, metadata)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.slow
def test_llama3_factors_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        rope_parameters={**LLAMA3, "rope_theta": 500_000.0},
        max_position_embeddings=131_072,
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = [500_000.0 ** (-i / 128) for i in range(0, 128, 2)]
    factors = llama3_factors(500_000.0, 128, LLAMA3)
    ours = [freq / factor for freq, factor in zip(plain, factors, strict=True)]
    assert torch.allclose(torch.tensor(ours), theirs.float(), rtol=1e-5)


def test_a_table_of_rope_factors_becomes_the_llama3_scaling_that_made_it(tmp_path):
    metadata = with_arch("llama", rope__freq_base=500_000.0, attention__key_length=64)
    factors = np.array(llama3_factors(500_000.0, 64, LLAMA3), np.float32)
    tensors = {**embedding(), "rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    assert read_hf_config(path)["rope_scaling"] == LLAMA3
    assert [name for name, _ in iterate_tensors(path)] == ["model.embed_tokens.weight"]
    factors[3] *= 2
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not llama3 scaling"):
        config_of(tmp_path, metadata, {**embedding(), "rope_freqs.weight": factors})
    ones = np.ones(32, np.float32)
    assert (
        config_of(tmp_path, metadata, {**embedding(), "rope_freqs.weight": ones})["rope_scaling"]
        is None
    )


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({k: v for k, v in LLAMA_METADATA.items() if "block" not in k}, "llama.block_count"),
        ({**LLAMA_METADATA, "llama.expert_count": 8}, "mixture of 8 experts"),
        ({**LLAMA_METADATA, "llama.rope.dimension_count": 4}, "rope.dimension_count is 4"),
        ({**LLAMA_METADATA, "llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({**LLAMA_METADATA, "llama.attention.head_count": 0}, "at least 1, got 0"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path, metadata, problem):
    with pytest.raises(ValueError, match=problem):
        config_of(tmp_path, metadata)


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {}, embedding(), arch="mamba")
    for read in (read_hf_config, lambda path: list(iterate_tensors(path))):
        with pytest.raises(ValueError, match="'mamba' is not supported; known in GGUF: gemma3, ll"):
            read(path)


def converter_permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k (LlamaModel.permute)."""
    shape = (num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape))


@pytest.mark.parametrize("quantized", [None, GGMLQuantizationType.Q8_0])
def test_the_converters_permutation_of_llamas_q_and_k_is_undone(tmp_path, quantized):
    rng = np.random.default_rng(0)
    original = {
        "attn_q.weight": rng.normal(size=(32, 32)).astype(np.float32),
        "attn_k.weight": rng.normal(size=(16, 32)).astype(np.float32),
        "attn_k.bias": rng.normal(size=16).astype(np.float32),
        "attn_v.weight": rng.normal(size=(16, 32)).astype(np.float32),
    }
    heads = {"attn_q.weight": 4, "attn_k.weight": 2, "attn_k.bias": 2}
    stored = {
        f"blk.0.{name}": converter_permute(values, heads[name]) if name in heads else values
        for name, values in original.items()
    }
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, {**embedding(), **stored}, quantized)
    loaded = dict(iterate_tensors(path))
    for name, values in original.items():
        found = loaded[hf_name("llama", f"blk.0.{name}")].numpy()
        assert np.allclose(found, values, atol=0.03 if quantized else 0)


def test_qwens_q_and_k_are_taken_as_stored(tmp_path):
    values = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    tensors = {**embedding(), "blk.0.attn_q.weight": values}
    path = write_gguf(tmp_path / "m.gguf", with_arch("qwen2"), tensors, arch="qwen2")
    loaded = dict(iterate_tensors(path))
    assert np.array_equal(loaded["model.layers.0.self_attn.q_proj.weight"].numpy(), values)


def test_gemmas_norms_lose_the_one_that_was_added_and_keep_their_places(tmp_path):
    names = {
        "output_norm": "model.norm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.post_attention_norm": "model.layers.0.post_attention_layernorm",
        "blk.0.ffn_norm": "model.layers.0.pre_feedforward_layernorm",
        "blk.0.post_ffw_norm": "model.layers.0.post_feedforward_layernorm",
        "blk.0.attn_q_norm": "model.layers.0.self_attn.q_norm",
        "blk.0.attn_k_norm": "model.layers.0.self_attn.k_norm",
    }
    tensors = {f"{name}.weight": np.full(8, 1.5 + i, np.float32) for i, name in enumerate(names)}
    path = write_gguf(
        tmp_path / "m.gguf", with_arch("gemma3"), {**embedding(), **tensors}, arch="gemma3"
    )
    loaded = dict(iterate_tensors(path))
    for i, name in enumerate(names.values()):
        assert loaded[f"{name}.weight"].tolist() == [0.5 + i] * 8
    assert loaded["model.embed_tokens.weight"][0, 1] == 1.0  # no norm, so nothing is taken away


def test_a_tensor_of_no_known_place_keeps_its_name(tmp_path):
    tensors = {**embedding(), "blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, tensors)
    assert [name for name, _ in iterate_tensors(path)] == [
        "model.embed_tokens.weight",
        "blk.0.attn_sinks.weight",
    ]


def dequantizable() -> list[GGMLQuantizationType]:
    found = []
    for kind in GGMLQuantizationType:
        try:
            _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
            gguf.quants.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
        except (KeyError, NotImplementedError):
            continue
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", dequantizable(), ids=lambda kind: kind.name)
def test_every_type_that_the_format_can_dequantize_is_read(tmp_path, kind):
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # 300 blocks in 3 rows; F32 and the like have blocks of one value, so a row is made longer.
    row_blocks = 100
    raw = np.random.default_rng(1).integers(0, 60, (3, row_blocks * block_bytes), dtype=np.uint8)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in LLAMA_METADATA.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ((_, values),) = iterate_tensors(path)
    assert values.dtype == torch.float32
    assert values.shape == (3, row_blocks * block_values)
    expected = gguf.quants.dequantize(raw, kind)
    assert np.array_equal(values.numpy(), expected, equal_nan=True)


def test_a_tensor_longer_than_one_chunk_is_put_together_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("srt.gguf_checkpoint._CHUNK_VALUES", 96)
    values = np.random.default_rng(2).normal(size=(7, 64)).astype(np.float32)
    tensors = {"token_embd.weight": values}
    path = write_gguf(
        tmp_path / "m.gguf", LLAMA_METADATA, tensors, quantized=GGMLQuantizationType.Q8_0
    )
    ((_, loaded),) = iterate_tensors(path)
    expected = gguf.quants.dequantize(
        gguf.quants.quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
    )
    assert np.array_equal(loaded.numpy(), expected)


def test_a_type_that_cannot_be_dequantized_is_refused_by_name(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", LLAMA_METADATA, {"token_embd.weight": np.ones((8, 32), np.int32)}
    )
    with pytest.raises(ValueError, match=r"'token_embd.weight' has the type I32, which cannot"):
        list(iterate_tensors(path))


def test_a_file_without_the_end_of_its_weights_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, embedding())
    data = path.read_bytes()
    path.write_bytes(data[: read_header(path).tensors[0].offset + 100])
    with pytest.raises(ValueError, match=r"'token_embd.weight' \(1024 bytes .* is incomplete"):
        list(iterate_tensors(path))


def test_tensors_of_all_parts_come_in_order(tmp_path):
    metadata = {**LLAMA_METADATA, "split.count": 2}
    norm = {"output_norm.weight": np.ones(32, np.float32)}
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", metadata, embedding())
    write_gguf(
        tmp_path / "m-00002-of-00002.gguf",
        {"split.count": 2},
        norm | {"output.weight": norm["output_norm.weight"]},
    )
    names = [name for name, _ in iterate_tensors(first)]
    assert names == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert read_hf_config(first)["tie_word_embeddings"] is False


def test_loaded_tensors_can_be_written_to(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, embedding())
    before = path.read_bytes()
    for _, tensor in iterate_tensors(path):
        tensor.fill_(math.pi)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_the_default_models_weights_are_those_transformers_reads(default_model):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**read_hf_config(default_model)))
    loaded = load_gguf_checkpoint(str(default_model), return_tensors=True, model_to_load=model)
    theirs = {name: torch.as_tensor(tensor) for name, tensor in loaded["tensors"].items()}
    names = set()
    for name, tensor in iterate_tensors(default_model):
        assert torch.equal(tensor, theirs[name]), name
        names.add(name)
    assert names == set(theirs)
