"""Fail unless the wheel named on the command line holds every module of the tree, the sources of
the CPU kernels, and nothing else."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(wheel: str) -> int:
    modules = [ROOT / "launch_server.py", ROOT / "bench_serving.py"]
    for package in ("srt", "launch", "bench"):
        modules.extend((ROOT / package).rglob("*.py"))
    kernels = (ROOT / "srt" / "csrc").iterdir()
    expected = {path.relative_to(ROOT).as_posix() for path in (*modules, *kernels)}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    for name in sorted(expected - names):
        print(f"not in the wheel: {name}", file=sys.stderr)
    for name in sorted(names - expected):
        print(f"only in the wheel: {name}", file=sys.stderr)
    print(f"{len(expected)} sources in the tree, {len(names)} files in the wheel")
    return int(expected != names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
