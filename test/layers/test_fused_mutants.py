"""The mutants of the fused kernels are killed: a sample here, all of them by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fused_mutants import MUTANTS
from mutate import ROOT, source_of


@pytest.mark.slow
def test_a_sample_of_the_mutants_of_the_fused_kernels_is_killed() -> None:
    command = [sys.executable, "test/tools/mutate.py", "test/layers/fused_mutants.py"]
    command += ["--every", "5"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_mutant_of_the_fused_kernels_can_still_be_made() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert source_of(mutant)
