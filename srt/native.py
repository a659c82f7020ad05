"""Builds the C++ kernels of srt/csrc on first use and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from srt.default_model import default_cache_dir

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "clang++", "c++")
# Floats must not be reassociated nor fused at the compiler's whim: which instructions a row gets
# would depend on the tile it is computed in.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wno-psabi",
)
BUILD_TIMEOUT_S = 120.0

# The element types that kernels know; the numbers are those of csrc/vec.h. int8, which is blocks
# with scales, only as a KV cache.
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


class NativeBuildError(RuntimeError):
    """There is no usable compiler, or it failed; the message says which and how."""


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The kernels for this CPU, or None if they cannot be built: everything then runs in torch, and
    the log says why. Built once for a source, compiler and CPU, and kept in the cache folder."""
    try:
        return load_library(default_cache_dir() / "native")
    except NativeBuildError as error:
        logger.warning("CPU kernels: none, falling back to plain torch (slower). %s", error)
        return None


def load_library(folder: Path, extra_flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Load the kernels from `folder`, building them first if they are not there."""
    path = _library_path(folder, extra_flags)
    if path.is_file():
        try:
            return open_library(path)
        except (OSError, AttributeError) as error:
            logger.warning("CPU kernels: %s does not load (%s); building it again", path, error)
    try:
        return open_library(build_library(folder, extra_flags))
    except OSError as error:
        raise NativeBuildError(f"{path} does not load: {error}") from error


def open_library(path: Path) -> ctypes.CDLL:
    """The kernels at `path`, their functions declared. Raises OSError or AttributeError if it is
    something else."""
    # PyDLL keeps the interpreter's lock: releasing it costs as much as a small kernel, and a pass
    # is computed by one thread anyway.
    return _declare(ctypes.PyDLL(str(path)))


def build_library(folder: Path, extra_flags: Sequence[str] = ()) -> Path:
    """Build the kernels in `folder`, whatever is there; later flags override our own."""
    path = _library_path(folder, extra_flags)
    start = time.monotonic()
    _build(_find_compiler(), (*FLAGS, *extra_flags), path)
    logger.info("CPU kernels: built %s in %.1f s", path, time.monotonic() - start)
    return path


def _library_path(folder: Path, extra_flags: Sequence[str]) -> Path:
    fingerprint = _fingerprint(_find_compiler(), (*FLAGS, *extra_flags), sorted(SOURCES.glob("*")))
    return folder / f"kernels-{fingerprint}.so"


def _find_compiler() -> str:
    for name in COMPILERS:
        if (path := shutil.which(name)) is not None:
            return path
    raise NativeBuildError(f"No C++ compiler found ({', '.join(COMPILERS)}); installing one helps.")


def _fingerprint(compiler: str, flags: Sequence[str], sources: Sequence[Path]) -> str:
    """A name that changes with anything the machine code depends on. A cache folder may be shared
    by machines with different CPUs."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    stat = os.stat(compiler)
    parts = (compiler, str(stat.st_size), str(stat.st_mtime_ns), *flags, _cpu_identity())
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:16]


def _cpu_identity() -> str:
    """Instruction sets and model of this CPU."""
    keys = ("model name", "flags", "features")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = text.split("\n\n")[0].splitlines()
    return "\n".join(line for line in first if line.lower().startswith(keys))


def _build(compiler: str, flags: Sequence[str], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as staging:
            # Built aside and moved in one step: of two processes that build at once the last wins,
            # and neither sees half a file.
            output = Path(staging) / path.name
            command = [compiler, *flags, str(SOURCES / "kernels.cpp"), "-o", str(output)]
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
            )
            if result.returncode != 0:
                errors = "\n".join(result.stderr.splitlines()[:20])
                raise NativeBuildError(f"{' '.join(command)} failed:\n{errors}")
            os.replace(output, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"building {path} with {compiler} failed: {error}") from error


_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64
_INT = ctypes.c_int32
_FLOAT = ctypes.c_float
# Argument types of each function in csrc/kernels.cpp.
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "rg_set_threads": (_INT,),
    "rg_attention": (_POINTER, _POINTER, _POINTER, *((_LONG, _POINTER) * 3)),
    "rg_packed_bytes": (_INT, _LONG, _LONG),
    "rg_pack": (_POINTER, _INT, _POINTER, _INT, _LONG, _LONG, _LONG),
    "rg_unpack_rows": (_POINTER, _POINTER, _LONG, _POINTER),
    "rg_linear": (_POINTER, _POINTER, _LONG, _LONG, _INT, _POINTER),
    "rg_rms_norm": (*(_POINTER,) * 3, _FLOAT, _INT, _LONG, _LONG, _POINTER, _POINTER),
    "rg_gated": (_POINTER, _INT, _LONG, _LONG, _POINTER),
    "rg_rotate": (_POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER),
    "rg_decoder": (_POINTER, _LONG, _POINTER, _POINTER, _LONG, *(_POINTER,) * 3),
    "rg_argmax": (_POINTER, _LONG, _LONG, _POINTER),
}


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _LONG if name == "rg_packed_bytes" else None
    return library
