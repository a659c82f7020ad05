"""Where a model's files are: the default model, a folder, a GGUF file, or a name on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from srt.default_model import ModelUnavailable, fetch_default_model

# What serving reads. Pickled weights are left out: `--load-format pt` is for local folders.
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve_model(
    model_path: str | None, revision: str | None = None, cache_dir: Path | None = None
) -> Path:
    """A folder with a config.json, or a `.gguf` file, for what the user named (None: the default).

    Only a hub name or the default model may download, and only what is not cached; `revision` is of
    a hub name. ValueError or ModelUnavailable says what is wrong with the name and what to pass.
    """
    if model_path is None:
        if revision is not None:
            raise ValueError(f"revision {revision!r} needs a model_path on the hub")
        return fetch_default_model(cache_dir)
    path = Path(model_path).expanduser()
    if path.exists():
        if revision is not None:
            raise ValueError(f"revision {revision!r} needs a model_path on the hub, not {path}")
        return _local(path)
    if path.suffix == ".gguf" or not _HUB_NAME.fullmatch(model_path):
        raise ValueError(f"model_path {model_path!r} does not exist, and is no name on the hub")
    return _local(_snapshot(model_path, revision, cache_dir))


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model_path {str(path)!r} must be a folder or a .gguf file")
        return path
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(file.name for file in ggufs[:8])
        raise ValueError(f"model_path {str(path)!r} has several models; pass one of: {names}")
    raise ValueError(f"model_path {str(path)!r} has neither a config.json nor a .gguf file")


def _snapshot(name: str, revision: str | None, cache_dir: Path | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=None if cache_dir is None else cache_dir / "hub",
            allow_patterns=list(_HUB_PATTERNS),
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        summary = (str(error).strip().splitlines() or [type(error).__name__])[0]
        at = "" if revision is None else f" at revision {revision!r}"
        raise ModelUnavailable(
            f"model_path {name!r}{at} is no local folder or file and could not be fetched from the "
            f"hub: {summary} Pass a model that is on this machine: --model-path FOLDER or "
            "--model-path FILE.gguf"
        ) from error
    return Path(folder)
