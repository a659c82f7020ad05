"""Checkpoint files to parameters, and the one error that says what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from srt.model_config import ModelConfig, parse_model_config
from srt.models.causal_lm import CausalLM
from srt.models.registry import create_model
from srt.weights import (
    checkpoint_files,
    fill_with_random_weights,
    iterate_checkpoint,
    load_weights,
    weight_targets,
)


def make_config(tied: bool = False, architecture: str = "LlamaForCausalLM") -> ModelConfig:
    return parse_model_config(
        {
            "architectures": [architecture],
            "model_type": "gemma3_text" if architecture.startswith("Gemma") else "llama",
            "vocab_size": 12,
            "hidden_size": 8,
            "intermediate_size": 6,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 2,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32,
            "tie_word_embeddings": tied,
            "attention_bias": True,
        }
    )


def make_model(tied: bool = False, architecture: str = "LlamaForCausalLM") -> CausalLM:
    return create_model(make_config(tied, architecture))


def random_tensors(model: CausalLM, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(target.shape, generator=generator)
        for name, target in weight_targets(model).items()
    }


def assert_loaded(model: CausalLM, tensors: dict[str, torch.Tensor]) -> None:
    for name, target in weight_targets(model).items():
        assert torch.equal(target, tensors[name].to(target.dtype)), name


def test_parts_of_a_merged_linear_land_in_its_rows() -> None:
    model = make_model()
    tensors = random_tensors(model)
    load_weights(model, tensors.items())
    attention = "model.layers.1.self_attn."
    merged = model.get_submodule(attention + "qkv_proj")
    for kind in ("weight", "bias"):
        parts = [tensors[f"{attention}{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(merged.get_parameter(kind), torch.cat(parts))
    assert_loaded(model, tensors)


def test_tensors_are_converted_to_the_type_of_the_model() -> None:
    model = make_model().bfloat16()
    tensors = random_tensors(model)
    load_weights(model, tensors.items())
    assert {target.dtype for target in weight_targets(model).values()} == {torch.bfloat16}
    assert_loaded(model, tensors)


def test_one_error_lists_all_that_does_not_fit() -> None:
    model = make_model()
    tensors = random_tensors(model)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(6, 8)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(6, 9)
    with pytest.raises(ValueError) as error:
        load_weights(model, tensors.items())
    assert str(error.value) == (
        "weights do not fit the model: "
        "2 missing (model.layers.0.self_attn.k_proj.weight, model.norm.weight); "
        "1 unexpected (model.layers.7.mlp.up_proj.weight); "
        "1 of the wrong shape (model.layers.0.mlp.up_proj.weight [6, 9] instead of [6, 8])"
    )


def test_a_long_error_is_cut_but_counts_all() -> None:
    model = make_model()
    extra = {f"adapter.{i}": torch.zeros(1) for i in range(1000)}
    with pytest.raises(ValueError, match=r"1000 unexpected .*and 992 more") as error:
        load_weights(model, {**random_tensors(model), **extra}.items())
    assert len(str(error.value)) < 500


def test_h52_a_tied_model_needs_no_head_and_does_not_mind_one() -> None:
    """H52: the head is the embedding, whatever a file brings under its name."""
    for architecture in ("LlamaForCausalLM", "Gemma3ForCausalLM"):
        model = make_model(tied=True, architecture=architecture)
        tensors = random_tensors(model)
        assert "lm_head.weight" not in tensors
        load_weights(model, tensors.items())
        hidden = torch.randn(1, 8)
        expected = hidden @ tensors["model.embed_tokens.weight"].T
        torch.testing.assert_close(model.logits(hidden), expected)
        with_head = {"lm_head.weight": torch.zeros(12, 8), **tensors}
        load_weights(model, with_head.items())
        torch.testing.assert_close(model.logits(hidden), expected)


def test_h52_an_untied_model_without_its_head_is_an_error() -> None:
    """H52: found at load, by name."""
    model = make_model(tied=False)
    tensors = random_tensors(model)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"1 missing \(lm_head.weight\)"):
        load_weights(model, tensors.items())


def test_rotary_buffers_of_older_exports_are_left_out() -> None:
    model = make_model()
    tensors = random_tensors(model)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}
    load_weights(model, {**tensors, **extra}.items())
    assert_loaded(model, tensors)


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_shards_are_found_through_the_index(load_format: str, tmp_path: Path) -> None:
    model = make_model()
    tensors = random_tensors(model)
    names = list(tensors)
    weight_map = {}
    for i in range(3):
        shard = {name: tensors[name] for name in names[i::3]}
        file = f"model-0000{i}-of-00003.safetensors"
        save_file(shard, tmp_path / file)
        weight_map |= dict.fromkeys(shard, file)
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    load_weights(model, iterate_checkpoint(tmp_path, load_format))
    assert_loaded(model, tensors)

    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"1 of 3 files named in .* model-00001-of-00003"):
        list(iterate_checkpoint(tmp_path, load_format))
    index.write_text(json.dumps({"weight_map": {"a": "../other/model.safetensors"}}))
    with pytest.raises(ValueError, match="outside its folder"):
        list(iterate_checkpoint(tmp_path, load_format))
    index.write_text(json.dumps({"weights": {}}))
    with pytest.raises(ValueError, match="no weight_map"):
        list(iterate_checkpoint(tmp_path, load_format))


def test_the_second_copy_that_mistral_ships_is_not_read(tmp_path: Path) -> None:
    for name in ("consolidated.safetensors", "model.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    files = checkpoint_files(tmp_path, "model.safetensors.index.json", "*.safetensors")
    assert [file.name for file in files] == ["model.safetensors"]


def test_pickled_weights_are_read_only_when_asked_for(tmp_path: Path) -> None:
    model = make_model()
    tensors = random_tensors(model)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="load_format pt"):
        list(iterate_checkpoint(tmp_path, "auto"))
    load_weights(model, iterate_checkpoint(tmp_path, "pt"))
    assert_loaded(model, tensors)


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("pickled-code-ran"),))  # type: ignore[return-value]


def test_code_in_pickled_weights_is_refused_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Exploit()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        list(iterate_checkpoint(tmp_path, "pt"))
    assert not (tmp_path / "pickled-code-ran").exists()
    torch.save({"model": {"x": torch.zeros(1)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="dict of tensors"):
        list(iterate_checkpoint(tmp_path, "pt"))


def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(100)}, file)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        list(iterate_checkpoint(tmp_path, "auto"))


def test_a_folder_without_weights_and_a_wrong_format_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        list(iterate_checkpoint(tmp_path, "auto"))
    with pytest.raises(ValueError, match=r"needs a \.gguf file"):
        list(iterate_checkpoint(tmp_path, "gguf"))
    with pytest.raises(ValueError, match="not a folder"):
        list(iterate_checkpoint(tmp_path / "absent", "safetensors"))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_random_weights_are_the_same_for_a_seed_and_keep_activations_in_range(
    architecture: str,
) -> None:
    models = [make_model(architecture=architecture) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        fill_with_random_weights(model, seed)
    first, again, other = (weight_targets(model) for model in models)
    name = "model.layers.1.mlp.down_proj.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    assert 0.5 < float(torch.randn(500, 6).matmul(first[name].T).std()) < 2.0
