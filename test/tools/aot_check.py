"""Compiles Triton kernels for NVIDIA GPUs on a machine without one, and judges the machine code.

    python test/tools/aot_check.py --arch 80,89,90,100 srt.layers.decode_attention ...

A module declares its kernels in AOT_CASES, a list of dicts or a function that returns one:

    AOT_CASES = [dict(
        kernel=my_kernel,                                            # a @triton.jit function
        name="my_kernel d128",
        signature={"x_ptr": "*bf16", "n": "i32", "stride": "i32:16"},  # every run-time argument
        constexprs={"BLOCK": 128, "stride_d": 1},                    # every other argument
        num_warps=4, num_stages=2, enable_fp_fusion=True,            # optional, as is maxnreg
        arch=(90, 100),                                              # optional: only these
        wgmma=True,                                                  # optional: sm_90 must use it
        max_spill=16,                                                # optional: bytes, not in loops
    )]

Types are Triton's. What the JIT knows about alignment is part of the type: pointers count as
16-byte aligned ("*bf16:1" is not), integers as arbitrary ("i32:16" is divisible by 16, as strides
nearly always are). Integers equal to 1, and None, are constants to the JIT: list them under
constexprs.

Exit status 1 when a case does not compile, does not fit its target, spills (ever in a loop, or more
than it admits to), or lacks a wgmma it claims. A compiler that crashes takes down only its own
case: each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Target:
    """Limits of a compute capability (CUDA programming guide); all have 65536 registers an SM."""

    threads_per_sm: int
    ctas_per_sm: int
    shared_per_sm: int  # bytes
    shared_per_cta: int  # bytes


TARGETS = {
    80: Target(2048, 32, 164 << 10, 163 << 10),
    86: Target(1536, 16, 100 << 10, 99 << 10),
    89: Target(1536, 24, 100 << 10, 99 << 10),
    90: Target(2048, 32, 228 << 10, 227 << 10),
    100: Target(2048, 32, 228 << 10, 227 << 10),
    120: Target(1536, 24, 100 << 10, 99 << 10),
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
REGISTERS_PER_SM = 65536
TENSOR_MEMORY_COLUMNS = 512
DRIVER_SHARED = 1024  # bytes the driver takes of each CTA's share

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
LABEL = re.compile(r"^(\.L_\w+):")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_\w+)\)")
TENSOR_CORE = re.compile(r"\b(?:[HIQ]G?MMA|UTC\w*MMA)\b")
SPILL = re.compile(r"(?:LDL|STL)\b")
PREDICATE = re.compile(r"^@!?U?P\w+\s+")


@dataclass(frozen=True)
class Measured:
    """What a compiled kernel needs and does. Registers and spill are per thread, memory per CTA;
    instructions are those of one warp in one turn of the main loop (0: no loop)."""

    name: str
    arch: int
    warps: int
    regs: int
    spill: int  # bytes
    loop_spill: int  # instructions in innermost loops that spill or reload
    shared: int  # bytes
    ctas: int  # that fit on an SM
    limiter: str  # what limits them
    wgmma: int  # instruction counts of the whole kernel
    tcgen05: int
    mma: int
    tma: int
    cp_async: int
    loop: int


@dataclass(frozen=True)
class Outcome:
    """A case on a target: a measurement if it compiled, a complaint if it is not good enough."""

    name: str
    arch: int
    measured: Measured | None
    complaint: str | None


def cases_of(module: Any) -> list[dict[str, Any]]:
    cases = getattr(module, "AOT_CASES", None)
    if cases is None:
        raise ValueError(f"{module.__name__} has no AOT_CASES")
    return list(cases() if callable(cases) else cases)


def compile_case(case: dict[str, Any], arch: int) -> Any:
    """The compiled kernel, as the JIT would make it for a launch with these types."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = case["kernel"]
    types, constexprs = case["signature"], case.get("constexprs", {})
    names = kernel.arg_names
    unknown = [name for name in (*types, *constexprs) if name not in names]
    missing = [name for name in names if name not in types and name not in constexprs]
    if unknown or missing:
        raise ValueError(f"{kernel.__name__}: missing arguments {missing}, unknown {unknown}")
    signature, attrs = {}, {}
    for i, name in enumerate(names):
        if name in constexprs:
            signature[name] = "constexpr"
            continue
        type_name, _, alignment = types[name].partition(":")
        signature[name] = type_name
        if alignment == "16" or (type_name.startswith("*") and alignment != "1"):
            attrs[(i,)] = [["tt.divisibility", 16]]
    options = {key: case[key] for key in OPTIONS if key in case}
    source = ASTSource(kernel, signature, dict(constexprs), attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def measure(name: str, arch: int, compiled: Any) -> tuple[Measured, str]:
    """The figures of a compiled kernel, and its machine code as text."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _tool(knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name)
        sass = _tool(knobs.nvidia.nvdisasm.path, "-c", cubin.name)
    instructions, loops = innermost_loops(sass)
    ops = Counter(PREDICATE.sub("", text).split()[0] for text in instructions)

    def count(pattern: str) -> int:
        return sum(n for op, n in ops.items() if re.match(pattern, op))

    meta = compiled.metadata
    regs = _usage(usage, "REG")
    ctas, limiter = occupancy(arch, meta.num_warps, regs, meta.shared)
    measured = Measured(
        name=name,
        arch=arch,
        warps=meta.num_warps,
        regs=regs,
        spill=_usage(usage, "STACK") + _usage(usage, "LOCAL"),
        loop_spill=sum(
            bool(SPILL.match(PREDICATE.sub("", text)))
            for loop in loops
            for text in instructions[slice(*loop)]
        ),
        shared=meta.shared,
        ctas=ctas,
        limiter=limiter,
        wgmma=count(r"[HIQ]GMMA"),
        tcgen05=count(r"UTC\w*MMA"),
        mma=count(r"[HIQ]MMA"),
        tma=count(r"UTMALDG"),
        cp_async=count(r"LDGSTS"),
        loop=_main_loop(instructions, loops),
    )
    return measured, sass


def judge(case: dict[str, Any], measured: Measured, tensor_memory: int = 0) -> str | None:
    """What is wrong with a kernel that compiled. Compiling alone does not check the fit."""
    limit = TARGETS[measured.arch].shared_per_cta
    if measured.shared > limit:
        return f"needs {measured.shared} bytes of shared memory, the target has {limit}"
    if tensor_memory > TENSOR_MEMORY_COLUMNS:
        return (
            f"needs {tensor_memory} columns of tensor memory, the target has "
            f"{TENSOR_MEMORY_COLUMNS}"
        )
    if measured.ctas == 0:
        return f"no CTA fits on an SM, by {measured.limiter}"
    if measured.loop_spill:
        return f"spills {measured.spill} bytes a thread, {measured.loop_spill} times in a loop"
    if measured.spill > case.get("max_spill", 0):
        return f"spills {measured.spill} bytes a thread, it may {case.get('max_spill', 0)}"
    if measured.arch == 90 and case.get("wgmma") and not measured.wgmma:
        return "claims wgmma and does not use it"
    return None


def innermost_loops(sass: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The instructions of a listing, and half-open ranges of its loops without inner loops."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := INSTRUCTION.match(line):
            instructions.append(instruction[1])
    loops = []
    for i, text in enumerate(instructions):
        branch = BRANCH.search(text)
        # A branch to itself is the trap behind the end of every kernel.
        if branch and labels.get(branch[1], i) < i:
            loops.append((labels[branch[1]], i + 1))
    inner = [
        loop
        for loop in loops
        if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    ]
    return instructions, inner


def _main_loop(instructions: list[str], loops: list[tuple[int, int]]) -> int:
    """Length of the shortest loop with a tensor-core instruction: tiles at an edge have a loop of
    their own, which tests more. Without tensor cores, of the longest loop."""
    busy = [
        loop for loop in loops if any(TENSOR_CORE.search(i) for i in instructions[slice(*loop)])
    ]
    if busy:
        return min(end - start for start, end in busy)
    return max((end - start for start, end in loops), default=0)


def occupancy(arch: int, warps: int, regs: int, shared: int) -> tuple[int, str]:
    """CTAs that fit on one SM, and what limits them."""
    target = TARGETS[arch]
    registers_per_warp = -(-regs * 32 // 256) * 256  # granted in units of 256
    fits = {
        "threads": target.threads_per_sm // (32 * warps),
        "CTAs": target.ctas_per_sm,
        "regs": REGISTERS_PER_SM // registers_per_warp // warps,
        "smem": target.shared_per_sm // (shared + DRIVER_SHARED),
    }
    limiter = min(fits, key=lambda name: fits[name])
    return fits[limiter], limiter


def check(case: dict[str, Any], arch: int, dump: Path | None = None) -> Outcome:
    """Compile and judge one case in a process of its own."""
    context = multiprocessing.get_context("fork")  # kernels cannot be pickled
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = context.Process(target=_child, args=(case, arch, dump, sender, log.fileno()))
        child.start()
        sender.close()
        try:
            measured, complaint = receiver.recv()
        except EOFError:
            child.join()
            measured, complaint = None, f"the compiler crashed, exit status {child.exitcode}"
        child.join()
        log.seek(0)
        said = re.search(r".*(?:Assertion|\berror\b).*", log.read())
    if measured is None and said:
        complaint += f" [{said[0].strip()[:200]}]"
    return Outcome(case["name"], arch, measured, complaint)


def _child(
    case: dict[str, Any], arch: int, dump: Path | None, sender: Connection, log: int
) -> None:
    # The compiler prints pages of its intermediate code when it fails.
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        compiled = compile_case(case, arch)
        measured, sass = measure(case["name"], arch, compiled)
        if dump is not None:
            stem = re.sub(r"\W+", "_", f"{case['name']} sm{arch}")
            for suffix, text in (("ttgir", compiled.asm["ttgir"]), ("ptx", compiled.asm["ptx"])):
                (dump / f"{stem}.{suffix}").write_text(text)
            (dump / f"{stem}.sass").write_text(sass)
        tensor_memory = getattr(compiled.metadata, "tmem_size", 0) or 0
        sender.send((measured, judge(case, measured, tensor_memory)))
    except Exception as error:  # the top of a process: whatever it is becomes the report
        # Triton wraps the reason in a listing of where it happened.
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        lines = str(reason).strip().splitlines() or [""]
        sender.send((None, f"{type(reason).__name__}: {lines[-1]}"))


def check_modules(
    modules: Sequence[str],
    archs: Sequence[int],
    only: str = "",
    jobs: int = 1,
    dump: Path | None = None,
    once: Sequence[int] = (),
) -> list[Outcome]:
    """All cases whose name contains `only`, in order: for each of `archs`, and of each kernel the
    first one for each of `once`."""
    cases = [
        case
        for name in modules
        for case in cases_of(importlib.import_module(name))
        if only in case["name"]
    ]
    done: set[tuple[Any, int]] = set()
    work = []
    for case in cases:
        for arch in (*archs, *once):
            seen = (case["kernel"], arch)
            if arch not in case.get("arch", (arch,)) or (arch not in archs and seen in done):
                continue
            done.add(seen)
            work.append((case, arch))
    _prepare_forks()
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda item: check(*item, dump), work))


def _prepare_forks() -> None:
    """Do once what each child would do again: import the compiler, and hash all of it."""
    import triton.compiler.code_generator  # noqa: F401
    from triton.runtime.cache import triton_key

    triton_key()


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines of text, one a case that compiled, columns aligned."""
    titles = [field.name for field in fields(Measured)]
    rows = [[str(v) for v in asdict(o.measured).values()] for o in outcomes if o.measured]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        name, *figures = row
        cells = (text.rjust(width) for text, width in zip(figures, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *cells))


def _tool(path: str, *args: str) -> str:
    return subprocess.run([path, *args], check=True, capture_output=True, text=True).stdout


def _usage(text: str, what: str) -> int:
    found = re.search(rf"\b{what}:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump does not say {what}: {text!r}")
    return int(found[1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("modules", nargs="+", metavar="MODULE")
    parser.add_argument("--arch", default="90", help="targets, e.g. 80,89,90,100 (default 90)")
    parser.add_argument("--once", default="", help="targets for only a case of each kernel")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at once")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="keep ttgir, ptx and sass here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    args = parser.parse_args(argv)
    archs, once = (
        [int(arch) for arch in text.split(",") if arch] for text in (args.arch, args.once)
    )
    for option, targets in (("--arch", archs), ("--once", once)):
        if unknown := [arch for arch in targets if arch not in TARGETS]:
            parser.error(f"{option} {unknown}: known are {sorted(TARGETS)}")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set: an interpreted kernel cannot be compiled")
    if args.dump:
        args.dump.mkdir(parents=True, exist_ok=True)

    import triton

    outcomes = check_modules(args.modules, archs, args.only, args.jobs, args.dump, once)
    print(f"triton {triton.__version__}", *table(outcomes), sep="\n")
    complaints = [o for o in outcomes if o.complaint]
    for outcome in complaints:
        print(f"FAIL {outcome.name} sm_{outcome.arch}: {outcome.complaint}")
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print(f"{len(outcomes)} cases, {len(complaints)} failed")
    return 1 if complaints or not outcomes else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
