"""Checkpoint files to parameters; unknown, missing and misshapen names are one error."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from srt.layers.embedding import Embedding
from srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from srt.layers.linear import Linear, MergedLinear
from srt.layers.quantization.blocks import QuantizedBlocks
from srt.layers.quantization.packed_weight import PackedRows
from srt.model_config import read_json_object
from srt.models.causal_lm import CausalLM

# Buffers that older exports wrote beside the weights; they follow from the config.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
LM_HEAD = "lm_head.weight"
MAX_NAMES_IN_ERROR = 8

# A tensor of a checkpoint, which may come in the blocks it was quantised in.
CheckpointTensor = torch.Tensor | QuantizedBlocks


def load_weights(model: CausalLM, tensors: Iterable[tuple[str, CheckpointTensor]]) -> None:
    """Copy each tensor into the parameter of its name, converting its type; `tensors` is consumed
    one at a time, so that a checkpoint is never held whole beside the model. ValueError lists all
    names that are missing, unexpected or misshapen."""
    targets = weight_targets(model)
    missing = dict.fromkeys(targets)
    unexpected: list[str] = []
    misshapen: list[str] = []
    for checkpoint_name, tensor in tensors:
        name = model.checkpoint_name(checkpoint_name)
        if name is None or name.endswith(IGNORED_SUFFIXES):
            continue
        target = targets.get(name)
        if target is None:
            # A model with tied embeddings has no head of its own; a copy in the file adds nothing.
            if name != LM_HEAD:
                unexpected.append(checkpoint_name)
            continue
        missing.pop(name, None)
        if tuple(tensor.shape) != tuple(target.shape):
            misshapen.append(f"{name} {list(tensor.shape)} instead of {list(target.shape)}")
            continue
        if isinstance(target, PackedRows):
            target.copy_(tensor)
        else:
            target.copy_(tensor if isinstance(tensor, torch.Tensor) else tensor.dequantize())
    problems = [
        f"{len(names)} {kind} ({_some(names)})"
        for kind, names in (
            ("missing", list(missing)),
            ("unexpected", unexpected),
            ("of the wrong shape", misshapen),
        )
        if names
    ]
    if problems:
        raise ValueError(f"weights do not fit the model: {'; '.join(problems)}")


def weight_targets(model: nn.Module) -> dict[str, torch.Tensor | PackedRows]:
    """All tensors a checkpoint must bring, by name there; parts of a MergedLinear are views."""
    targets: dict[str, torch.Tensor | PackedRows] = {}
    for module_name, module in model.named_modules():
        parent = module_name.rpartition(".")[0]
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                for part, rows in module.part_rows():
                    targets[f"{parent}.{part}.{kind}"] = parameter.data[rows]
            else:
                targets[f"{module_name}.{kind}"] = parameter.data
        if not isinstance(module, (Linear, Embedding)) or module.packed is None:
            continue
        inputs = module.packed.shape[1]
        if isinstance(module, MergedLinear):
            for part, rows in module.part_rows():
                shape = (rows.stop - rows.start, inputs)
                targets[f"{parent}.{part}.weight"] = PackedRows(module.packed, rows.start, shape)
        else:
            targets[f"{module_name}.weight"] = PackedRows(module.packed, 0, module.packed.shape)
    return targets


def fill_with_random_weights(model: nn.Module, seed: int) -> None:
    """Random weights that keep activations near unit size: the `dummy` load format, for measuring
    speed and for tests without a checkpoint. The same seed gives the same weights on devices of one
    kind."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.data.fill_(0.0 if isinstance(module, GemmaRMSNorm) else 1.0)
            elif kind == "bias":
                parameter.data.zero_()
            else:
                # Made where they are needed: a host takes minutes over the weights of a GPU.
                scale = parameter.shape[-1] ** -0.5
                values = torch.empty(parameter.shape, dtype=torch.float32, device=device)
                parameter.data.copy_(values.normal_(0.0, scale, generator=generator))
        if isinstance(module, (Linear, Embedding)) and module.packed is not None:
            values = torch.empty(module.packed.shape, dtype=torch.float32)
            values.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)
            module.packed.load_rows(0, values)


def iterate_checkpoint(
    path: Path, load_format: str, keep_blocks: bool = False
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Names and host tensors of the model at `path`, a folder or a .gguf file. `load_format` is
    auto, safetensors, gguf or pt; auto never opens pickled files: those must be asked for with pt,
    and are then read without running code. With `keep_blocks` a GGUF file's quantised matrices come
    as they are, where we know their layout."""
    if load_format == "auto":
        load_format = "gguf" if path.suffix == ".gguf" else "safetensors"
    if load_format == "gguf":
        if path.suffix != ".gguf":
            raise ValueError(f"load_format gguf needs a .gguf file, got {path}")
        # Late, because only here is a GGUF reader needed.
        from srt.gguf_checkpoint import iterate_tensors

        yield from iterate_tensors(path, keep_blocks)
    elif load_format == "safetensors":
        for file in checkpoint_files(path, "model.safetensors.index.json", "*.safetensors"):
            yield from _iterate_safetensors(file)
    elif load_format == "pt":
        for file in checkpoint_files(path, "pytorch_model.bin.index.json", "*.bin", "*.pt"):
            yield from _iterate_pickled(file)
    else:
        raise ValueError(f"load_format {load_format!r} does not read files")


def checkpoint_files(folder: Path, index_name: str, *patterns: str) -> list[Path]:
    """Files that hold the weights: those the index names, all of which must be there; without an
    index, all that match a pattern."""
    if not folder.is_dir():
        raise ValueError(f"weights: {folder} is not a folder")
    index = folder / index_name
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map object")
        names = sorted({str(name) for name in weight_map.values()})
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{index} names files outside its folder: {_some(outside)}")
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(
                f"{len(absent)} of {len(names)} files named in {index} are not there: "
                f"{_some(absent)}"
            )
        return [folder / name for name in names]
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    # Mistral ships the same weights a second time, under the names of its own code.
    files = [file for file in files if not file.name.startswith("consolidated")] or files
    if not files:
        hint = ""
        if any(folder.glob("*.bin")):
            hint = "; there are .bin files, which load_format pt reads"
        raise ValueError(f"no {' or '.join(patterns)} in {folder}{hint}")
    return files


def _iterate_safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        # Leaving the context drops the mapping, and with it the file's pages.
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a dict
                yield name, tensors.get_tensor(name)
    except SafetensorError as error:
        # The library says what is wrong with the bytes, not with which file.
        raise ValueError(f"cannot read {file}: {error}") from error


def _iterate_pickled(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        # Not torch's own text, which suggests to run the code in the file.
        raise ValueError(f"{file} is damaged or holds more than tensors; not loaded") from error
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise ValueError(f"{file} must hold a dict of tensors by name")
    yield from state.items()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    left = len(names) - MAX_NAMES_IN_ERROR
    return f"{shown} and {left} more" if left > 0 else shown
