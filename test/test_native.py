"""Building and finding the C++ kernels, and life without a compiler."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import srt.model_runner
import srt.native
from srt.layers.torch_attention import TorchAttentionBackend
from srt.model_config import load_model_config
from srt.model_runner import ModelRunner
from srt.native import NativeBuildError, load_library, native_library
from srt.server_args import ServerArgs

needs_compiler = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")


def make_folder(folder: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_runner(folder: Path, quantization: str) -> ModelRunner:
    args = ServerArgs(
        load_format="dummy", device="cpu", quantization=quantization, max_total_tokens=64
    )
    return ModelRunner(folder, load_model_config(folder), args)


def test_without_a_compiler_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(srt.native.shutil, "which", lambda name: None)
    with pytest.raises(NativeBuildError, match=r"No C\+\+ compiler found \(g\+\+, clang\+\+"):
        load_library(tmp_path)


def test_without_kernels_the_server_falls_back_to_torch_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(srt.native.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING, "srt.native"):
        assert native_library.__wrapped__() is None
    assert "falling back to plain torch" in caplog.text and "No C++ compiler" in caplog.text
    monkeypatch.setattr(srt.model_runner, "native_library", lambda: None)
    runner = make_runner(make_folder(tmp_path), "auto")
    assert runner.quantization == "none"
    plan = runner.plan_memory()
    runner.init_memory(plan, torch.zeros(2, 128, dtype=torch.int32))
    assert isinstance(runner.attn, TorchAttentionBackend) and runner.decoder is None


@pytest.mark.parametrize("quantization", ["int4", "int8", "w8a8_int8"])
def test_quantization_without_kernels_is_an_error_that_names_the_way_out(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(srt.model_runner, "native_library", lambda: None)
    with pytest.raises(ValueError, match=f"--quantization {quantization} needs the CPU kernels"):
        make_runner(make_folder(tmp_path), quantization)


@needs_compiler
def test_gguf_quantization_of_another_format_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--quantization gguf needs a \.gguf file"):
        make_runner(make_folder(tmp_path), "gguf")


def test_a_failing_compiler_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'out of ink' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(srt.native.shutil, "which", lambda name: str(compiler))
    with pytest.raises(NativeBuildError, match="out of ink"):
        load_library(tmp_path / "cache")


def start_build(folder: Path) -> subprocess.Popen[bytes]:
    """Another process that builds in `folder` and loads; -O0, as what is built does not matter."""
    code = (
        "import sys; from pathlib import Path; from srt.native import load_library; "
        "load_library(Path(sys.argv[1]), ['-O0']).rg_set_threads(1)"
    )
    root = Path(__file__).resolve().parent.parent
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=root)


@needs_compiler
@pytest.mark.slow
def test_a_damaged_library_is_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert start_build(tmp_path).wait(120) == 0
    (path,) = tmp_path.glob("*.so")
    path.write_bytes(b"not a library")
    with caplog.at_level(logging.WARNING, "srt.native"):
        load_library(tmp_path, ["-O0"]).rg_set_threads(1)
    assert "does not load" in caplog.text and path.stat().st_size > 1000


@needs_compiler
@pytest.mark.slow
def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    processes = [start_build(tmp_path) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("*.so"))) == 1 and len(list(tmp_path.iterdir())) == 1


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are x86-64's")
@pytest.mark.parametrize("march", ["x86-64", "skylake-avx512", "cascadelake", "alderlake"])
def test_the_kernels_compile_for_cpus_with_other_instructions(march: str, tmp_path: Path) -> None:
    """Without AVX2, with AVX-512, with VNNI too, and with VNNI for AVX2 alone."""
    command = [
        *(srt.native._find_compiler(), *srt.native.FLAGS, f"-march={march}", "-O1"),
        *(str(srt.native.SOURCES / "kernels.cpp"), "-o", str(tmp_path / "kernels.so")),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
