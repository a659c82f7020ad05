"""A tokenizer.json for models that come without one, made by transformers in another process."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

logger = logging.getLogger(__name__)

# Of these a tokenizer.json can be made.
CONVERTIBLE_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
# Together they identify the one that was made.
_CONVERSION_INPUTS = (
    *CONVERTIBLE_FILES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "config.json",
)
# Runs in a process of its own, because transformers brings torch with it.
_CONVERT = """\
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
tokenizer.backend_tokenizer.save(sys.argv[2])
"""


def convert_tokenizer(folder: Path, cache_dir: Path) -> Path:
    """A tokenizer.json for a folder that has only the older forms, made once and then kept.
    ValueError has transformers' own reason if it cannot."""
    digest = hashlib.sha256(version("transformers").encode())
    for name in _CONVERSION_INPUTS:
        path = folder / name
        if path.is_file():
            digest.update(f"{name} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
    kept = cache_dir.resolve() / "tokenizers" / f"{digest.hexdigest()[:32]}.json"
    if kept.is_file():
        return kept
    logger.info(f"Converting the tokenizer of {folder}; the result is kept in {kept}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="converting-") as staging:
        made = Path(staging) / "tokenizer.json"
        command = [sys.executable, "-c", _CONVERT, str(folder.resolve()), str(made)]
        # In the empty folder, so that nothing in the current one can shadow a module.
        result = subprocess.run(command, cwd=staging, capture_output=True, text=True, check=False)
        if result.returncode != 0 or not made.is_file():
            lines = result.stderr.strip().splitlines()
            raise ValueError(
                f"{folder} has no tokenizer.json, and transformers could not make one: "
                f"{lines[-1] if lines else f'exit code {result.returncode}'}"
            )
        os.replace(made, kept)
    return kept
