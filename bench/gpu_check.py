"""Measures what a GPU makes of this engine: `python -m bench.gpu_check`, under 8 minutes.

Device facts, copy bandwidth and matmul rate; kernels against float64; attention against the
measured copy and product and against torch's own; decode steps of a Llama-3-8B-shaped engine with
random weights against the least that memory allows; prefill; host time with and without overlap
and graphs. Prints tables and writes JSON. `--dry-run` does all of it on a CPU, with interpreted
kernels and toy sizes: its figures mean nothing. Exit status 1 if a kernel is wrong or a section
fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

SECTIONS = ("device", "accuracy", "decode", "extend", "engine")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU, interpreted")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="file to write")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="do these only"
    )
    args = parser.parse_args(argv)
    if args.dry_run:
        interpret_kernels()
    elif not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device; --dry-run needs none", file=sys.stderr)
        return 2
    logging.disable(logging.INFO)
    report = run(args.dry_run, args.sections)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{report['seconds']:.0f} s; written to {args.json}")
    for failure in report["failures"]:
        print(f"FAILED: {failure}")
    return 1 if report["failures"] else 0


def interpret_kernels() -> None:
    """From here on kernels run on the CPU. The interpreter is a tool of the tests, so that this
    works in a checkout only."""
    tools = Path(__file__).resolve().parent.parent / "test" / "tools"
    if not (tools / "interpreted_triton.py").is_file():
        raise SystemExit(f"gpu_check: --dry-run needs the checkout's interpreter in {tools}")
    sys.path.insert(0, str(tools))
    import interpreted_triton  # type: ignore[import-not-found]

    interpreted_triton.install()


def run(dry_run: bool, sections: Sequence[str]) -> dict[str, Any]:
    """The report. A section that fails is named under "failures"; the others go on."""
    # Late: what these import fixes how kernels run.
    from bench import gpu_accuracy, gpu_attention, gpu_device

    begin = time.monotonic()
    device = gpu_device.Device.dry() if dry_run else gpu_device.Device.cuda()
    report: dict[str, Any] = {"dry_run": dry_run, "device": device.facts(), "failures": []}
    print(", ".join(f"{name} {value}" for name, value in report["device"].items()))
    # The yardsticks of all others, so that they are measured in any case.
    copy_bytes, product_rate = gpu_device.copy_bandwidth(device), gpu_device.matmul_rate(device)
    report["copy_gb_s"], report["matmul_tflops"] = copy_bytes / 1e9, product_rate / 1e12
    print(f"copy {copy_bytes / 1e9:.1f} GB/s, matmul {product_rate / 1e12:.1f} TFLOP/s")

    if "accuracy" in sections:
        for check in collect(report, "accuracy", lambda: gpu_accuracy.checks(device)):
            if not check.passed:
                report["failures"].append(
                    f"{check.kernel}: error {check.error:.3g} exceeds {check.tolerance:.3g}"
                )
    if "decode" in sections:
        collect(report, "decode", lambda: gpu_attention.decode_rows(device, copy_bytes))
    if "extend" in sections:
        collect(report, "extend", lambda: gpu_attention.extend_rows(device, product_rate))
    if "engine" in sections:
        _measure_engine(report, device, copy_bytes)
    report["seconds"] = time.monotonic() - begin
    return report


def _measure_engine(report: dict[str, Any], device: Any, copy_bytes: float) -> None:
    from bench.gpu_engine import EngineCheck

    made: list[EngineCheck] = []

    def load() -> Iterable[EngineCheck]:
        made.append(EngineCheck(device))
        return []

    collect(report, "engine_load", load)
    if not made:
        return
    check = made[0]
    report["engine_load"] = {
        "seconds": check.load_seconds,
        "kv_tokens": check.plan.max_total_num_tokens,
    }
    collect(report, "steps", lambda: check.step_rows(copy_bytes))
    collect(report, "prefill", check.prefill_rows)
    collect(report, "loop", check.loop_rows)


def collect(report: dict[str, Any], name: str, rows: Callable[[], Iterable[Any]]) -> list[Any]:
    """Print and keep what a section yields, up to where it fails."""
    found: list[Any] = []
    begin = time.monotonic()
    try:
        for row in rows():
            if not found:
                print(f"\n{name}: " + "  ".join(asdict(row)))
            found.append(row)
            print("  " + "  ".join(_cell(value) for value in asdict(row).values()), flush=True)
    except Exception as error:
        # A report of the rest is worth more than none.
        report["failures"].append(f"{name}: {type(error).__name__}: {error}")
        traceback.print_exc()
    report[name] = [asdict(row) for row in found]
    report.setdefault("section_seconds", {})[name] = time.monotonic() - begin
    return found


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
