"""The values of --quantization, and how a model's linears get them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from srt.layers.embedding import Embedding
from srt.layers.linear import Linear
from srt.layers.quantization.packed_weight import PackedFormat, PackedWeight, PanelArena


@dataclass(frozen=True)
class QuantizationScheme:
    """How linears and the language model head are stored and computed by the CPU kernels."""

    linear: PackedFormat | None  # None: as the checkpoint's own blocks
    head: PackedFormat | None
    exact: bool  # activations stay float32


# The head decides between close tokens and is not where the time goes: it never gets 4 bits, unless
# the checkpoint has it so.
_SCHEMES = {
    "none": QuantizationScheme(PackedFormat.DENSE, PackedFormat.DENSE, exact=True),
    "gguf": QuantizationScheme(None, None, exact=False),
    "int4": QuantizationScheme(PackedFormat.Q4, PackedFormat.Q8, exact=False),
    "int8": QuantizationScheme(PackedFormat.Q8, PackedFormat.Q8, exact=True),
    "w8a8_int8": QuantizationScheme(PackedFormat.Q8, PackedFormat.Q8, exact=False),
}


def choose_quantization(
    asked: str, model_path: Path, load_format: str, device: str, has_kernels: bool
) -> str:
    """What `--quantization asked` means for this model and machine: a scheme's name or "none".
    ValueError if it was asked for and cannot be had."""
    is_gguf = load_format in ("auto", "gguf") and model_path.suffix == ".gguf"
    if asked == "auto":
        # Weights that somebody has quantised are computed with as they are; others are not touched.
        return "gguf" if is_gguf and device == "cpu" and has_kernels else "none"
    if asked == "none":
        return asked
    if device != "cpu":
        raise ValueError(f"--quantization {asked} has kernels for cpu only, not for {device}")
    if not has_kernels:
        raise ValueError(
            f"--quantization {asked} needs the CPU kernels, which could not be built (see above); "
            "install a C++ compiler or use --quantization none"
        )
    if asked == "gguf" and not is_gguf:
        raise ValueError(f"--quantization gguf needs a .gguf file, not {model_path}")
    return asked


def pack_modules(model: nn.Module, name: str, library: ctypes.CDLL) -> None:
    """Make the linears and the head of a model without weights hold packed ones. A checkpoint fills
    them later. An embedding that is not the head as well stays as it is."""
    scheme = _SCHEMES[name]
    head = getattr(model, "lm_head", None)
    arena = PanelArena()
    for module in model.modules():
        if isinstance(module, Linear):
            bias = None if module.bias is None else module.bias.data.float()
            if bias is not None:
                module.bias = nn.Parameter(bias, requires_grad=False)
            outputs, inputs = module.weight.shape
            module.packed = PackedWeight(
                library, arena, outputs, inputs, scheme.linear, scheme.exact, bias
            )
            del module.weight
        elif isinstance(module, Embedding) and module is head:
            outputs, inputs = module.weight.shape
            module.packed = PackedWeight(library, arena, outputs, inputs, scheme.head, scheme.exact)
            del module.weight


def packed_bytes(model: nn.Module) -> int:
    """Bytes of all packed weights."""
    return sum(
        module.packed.nbytes
        for module in model.modules()
        if isinstance(module, (Linear, Embedding)) and module.packed is not None
    )
