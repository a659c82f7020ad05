"""The mutants of the fused kernels are killed: a sample here, all of them by hand."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import fused_mutants
import pytest
import sampler_mutants
from mutate import ROOT, source_of

MODULES = [fused_mutants, sampler_mutants]
MUTANTS = [mutant for module in MODULES for mutant in module.MUTANTS]


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_sample_of_the_mutants_of_the_fused_kernels_is_killed(module: ModuleType) -> None:
    command = [sys.executable, "test/tools/mutate.py", f"test/layers/{module.__name__}.py"]
    command += ["--every", "5"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_mutant_of_the_fused_kernels_can_still_be_made() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert source_of(mutant)
