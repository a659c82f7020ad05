"""Breaks code on purpose and asks whether the tests notice.

    python test/tools/mutate.py test/layers/attention_mutants.py [TEXT] [--every N]

The file holds MUTANTS, a list; with TEXT, only those whose names contain it are made, with --every
only each N-th of them. For each the tree is copied and changed, and its tests are run: they must
fail, and not because the code no longer loads. Exit status 1 if a mutant survives.

Mutants are forked from a process that has imported torch and Triton and computed nothing, which
spares each of them those seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS_PASSED, TESTS_FAILED = 0, 1  # pytest's exit status; 2 and above: it could not run them
DEADLINE = 300  # seconds; a mutant that hangs is noticed, too


@dataclass(frozen=True)
class Mutant:
    """`old` must occur in `path` exactly once and becomes `new`. `tests` are arguments for pytest,
    the likeliest to notice first."""

    name: str
    path: str
    old: str
    new: str
    tests: Sequence[str]


@dataclass(frozen=True)
class Verdict:
    name: str
    killed: bool
    said: str  # what pytest printed


def source_of(mutant: Mutant) -> str:
    """The mutated file. ValueError if the place is not there, or not the only one."""
    source = (ROOT / mutant.path).read_text()
    found = source.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.path}: {mutant.old!r} occurs {found} times, not once")
    return source.replace(mutant.old, mutant.new)


def judge(mutant: Mutant) -> Verdict:
    """Run the mutant's tests in a copy of the tree. ValueError if they cannot run at all."""
    source = source_of(mutant)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        skip = shutil.ignore_patterns("__pycache__", ".*_cache")
        for name in ("srt", "test"):
            shutil.copytree(ROOT / name, copy / name, ignore=skip)
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / mutant.path).write_text(source)
        log = copy / "log"
        child = multiprocessing.get_context("fork").Process(
            target=_run_tests, args=(copy, mutant.tests, log)
        )
        child.start()
        child.join(DEADLINE)
        if child.is_alive():
            child.kill()
            child.join()
            return Verdict(mutant.name, killed=True, said=f"no end within {DEADLINE} s")
        said = log.read_text(errors="replace")
    if child.exitcode not in (TESTS_PASSED, TESTS_FAILED):
        raise ValueError(f"{mutant.name}: status {child.exitcode}\n{said[-2000:]}")
    return Verdict(mutant.name, child.exitcode == TESTS_FAILED, said)


def _run_tests(copy: Path, tests: Sequence[str], log: Path) -> None:
    import pytest

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer than most tests
    os.chdir(copy)
    sys.path[:] = [entry for entry in sys.path if not entry or not Path(entry).is_relative_to(ROOT)]
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def load(path: Path) -> list[Mutant]:
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = sys.modules[__name__]
    spec.loader.exec_module(module)
    mutants: list[Mutant] = module.MUTANTS
    return mutants


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--every", type=int, default=1, metavar="N")
    args = parser.parse_args(argv)
    mutants = [mutant for mutant in load(args.file) if args.text in mutant.name][:: args.every]
    # Before any fork, and nothing is computed: a fork of a process with busy threads may hang.
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import triton.language
    import triton.runtime.interpreter  # noqa: F401

    survivors = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for verdict in pool.map(judge, mutants):
            print("killed  " if verdict.killed else "SURVIVED", verdict.name, flush=True)
            survivors += not verdict.killed
    print(f"{len(mutants)} mutants, {survivors} survived")
    return 1 if survivors or not mutants else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
