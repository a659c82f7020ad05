"""The mutation tool tells a killed mutant from one that lives and from one that does not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutate import ROOT, Mutant, source_of

PATH = "srt/layers/extend_attention.py"
TESTS = ("test/layers/test_extend_attention.py", "-k", "exactly_one_tile")
MUTANTS_FILE = """
from mutate import Mutant
MUTANTS = [Mutant({name!r}, {path!r}, {old!r}, {new!r}, {tests!r})]
"""


def run_tool(folder: Path, old: str, new: str) -> subprocess.CompletedProcess[str]:
    file = folder / "some_mutants.py"
    file.write_text(MUTANTS_FILE.format(name="x", path=PATH, old=old, new=new, tests=TESTS))
    command = [sys.executable, str(ROOT / "test/tools/mutate.py"), str(file)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_a_mutant_that_the_tests_notice_is_killed(tmp_path):
    result = run_tool(tmp_path, "counts = -(-lens // tokens)", "counts = lens // tokens")
    assert (result.returncode, result.stdout.split("\n")[0]) == (0, "killed   x")


@pytest.mark.slow
def test_a_mutant_that_the_tests_do_not_see_survives(tmp_path):
    result = run_tool(tmp_path, 'kind="stable"', 'kind="mergesort"')
    assert (result.returncode, result.stdout.split("\n")[0]) == (1, "SURVIVED x")


@pytest.mark.slow
def test_a_mutant_that_does_not_load_is_an_error(tmp_path):
    result = run_tool(tmp_path, "counts = -(-lens // tokens)", "counts = = lens")
    assert result.returncode == 1
    assert "ValueError: x: status 2" in result.stderr


def test_code_that_is_not_there_cannot_be_mutated():
    with pytest.raises(ValueError, match="occurs 0 times, not once"):
        source_of(Mutant("x", PATH, "no such line", "", TESTS))
