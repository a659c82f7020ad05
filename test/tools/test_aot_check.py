"""The ahead-of-time check reads machine code rightly and refuses what a GPU would refuse."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path

import aot_check
import pytest
from aot_check import ROOT, TARGETS, Measured, innermost_loops, judge, main, occupancy

GOOD = Measured(
    name="x", arch=90, warps=4, regs=64, spill=0, loop_spill=0, shared=20480, ctas=8,
    limiter="regs", wgmma=4, tcgen05=0, mma=0, tma=0, cp_async=8, loop=200,
)  # fmt: skip

LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/                   LDG.E R2, [R4.64] ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32 R0, R0, R2, R4 ;
        /*0030*/              @!P0 FADD R0, R0, R2 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   IADD3 R3, R3, 0x1, RZ ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3);
"""

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, turns, N: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    acc = tl.zeros([N, N], tl.float32)
    for turn in range(turns):
        acc = tl.dot(tl.load(a_ptr + tile + turn * N * N), tl.load(b_ptr + tile), acc)
    tl.store(out_ptr + tile, acc)

def case(name, N, **options):
    types = dict(a_ptr="*bf16", b_ptr="*bf16", out_ptr="*fp32", turns="i32")
    return dict(kernel=dot_kernel, name=name, signature=types, constexprs=dict(N=N), **options)

AOT_CASES = [case("good", 64, wgmma=True), case("spills", 128, num_warps=1),
             case("no wgmma", 32, wgmma=True), case("wrong", 64)]
AOT_CASES[3]["signature"].pop("turns")
"""


def test_only_the_inner_loop_counts_and_the_final_trap_is_none():
    instructions, loops = innermost_loops(LISTING)
    assert len(instructions) == 8
    assert loops == [(2, 5)]


@pytest.mark.parametrize(
    ("arch", "warps", "regs", "shared", "expected"),
    [
        (90, 4, 80, 39_000, (5, "smem")),
        (90, 8, 255, 1000, (1, "regs")),
        (89, 4, 32, 0, (12, "threads")),
        (90, 1, 16, 0, (32, "CTAs")),
        (89, 4, 32, 101 << 10, (0, "smem")),
    ],
)
def test_occupancy_is_what_the_scarcest_resource_allows(arch, warps, regs, shared, expected):
    assert occupancy(arch, warps, regs, shared) == expected


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(shared=TARGETS[90].shared_per_cta + 1), "shared memory"),
        (dict(ctas=0), "no CTA fits"),
        (dict(spill=8), "spills 8 bytes a thread, it may 0"),
        (dict(spill=8, loop_spill=2), "2 times in a loop"),
        (dict(wgmma=0), "claims wgmma"),
    ],
)
def test_each_defect_has_its_complaint(change, complaint):
    case = {"wgmma": True}
    assert judge(case, GOOD) is None
    assert complaint in judge(case, dataclasses.replace(GOOD, **change))


def test_a_spill_that_is_admitted_passes_outside_of_loops():
    assert judge({"max_spill": 8}, dataclasses.replace(GOOD, spill=8)) is None


def test_too_much_tensor_memory_is_a_complaint():
    assert "513 columns" in judge({}, GOOD, tensor_memory=513)


def test_an_unknown_target_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--arch", "75", "x"])
    assert "--arch [75]: known are [80, 86, 89, 90, 100, 120]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--once", "75", "x"])
    assert "--once [75]" in capsys.readouterr().err


def test_only_the_first_case_of_a_kernel_is_for_the_targets_of_once(monkeypatch):
    kernels = types.ModuleType("kernels_of_a_test")
    kernels.AOT_CASES = [
        dict(kernel="x", name="x1", arch=(80, 100)),
        dict(kernel="x", name="x2"),
        dict(kernel="y", name="y1"),
    ]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(aot_check, "check", lambda case, arch, dump: (case["name"], arch))
    found = aot_check.check_modules([kernels.__name__], [80], once=[89, 100])
    assert found == [
        ("x1", 80),
        ("x1", 100),
        ("x2", 80),
        ("x2", 89),
        *(("y1", a) for a in (80, 89, 100)),
    ]


def run_tool(*arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """In a process of its own: in ours kernels may be interpreted."""
    command = [sys.executable, str(ROOT / "test/tools/aot_check.py"), *arguments]
    return subprocess.run(command, cwd=path, capture_output=True, text=True)


@pytest.mark.slow
def test_good_kernels_pass_and_bad_ones_do_not(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    figures = tmp_path / "figures.json"
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'test/tools')!r}];"
        f"import aot_check; sys.exit(aot_check.main(['kernels', '--json', {str(figures)!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    outcomes = {outcome["name"]: outcome for outcome in json.loads(figures.read_text())}
    assert result.returncode == 1, result.stdout
    assert outcomes["good"]["complaint"] is None
    assert outcomes["good"]["measured"]["wgmma"] > 0
    assert "spills" in outcomes["spills"]["complaint"]
    assert outcomes["no wgmma"]["complaint"] == "claims wgmma and does not use it"
    assert "missing arguments ['turns']" in outcomes["wrong"]["complaint"]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["decode", "extend"])
def test_the_attention_kernels_fit_every_target(kernel):
    result = run_tool("--arch", "80,89,90,100", f"srt.layers.{kernel}_attention")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_what_the_backend_launches_compiles(arch):
    """The cases above are written by hand; this is what the host side really passes."""
    result = subprocess.run(
        [sys.executable, "test/layers/compile_attention.py", str(arch)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
