"""`python -m srt.journal`: reads the file that `--journal FILE` writes, for people."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from srt.journal import StepRecord, client_rid, read_journal
from srt.journal_stats import journal_stats, stats_text
from srt.journal_table import mentioned, step_table
from srt.journal_timeline import timeline_page


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 after one line about a file that cannot be read or written."""
    args = _parser().parse_args(argv)
    try:
        report(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # `show FILE | head` has seen enough. What is left in the buffer has to go somewhere when
        # the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        print(f"journal: error: {error}", file=sys.stderr)
        return 1
    return 0


def report(args: argparse.Namespace) -> None:
    """Write what was asked for. ValueError or OSError says what is wrong with a file."""
    records = read_rotated(args.file)
    if args.command == "show":
        rid = None if args.rid is None else find_rid(records, args.rid)
        print("\n".join(step_table(records, args.last, rid)))
    elif args.command == "stats":
        stats = journal_stats(records, args.last)
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(stats)).decode())
        else:
            print(stats_text(stats))
    else:
        args.output.write_text(timeline_page(records, args.file.name, args.last), encoding="utf-8")
        print(f"wrote {args.output}")


def read_rotated(path: Path) -> list[StepRecord]:
    """The records of FILE and, before them, of the older files FILE.1, FILE.2, ... that rotation
    left, oldest first. FILE need not exist if FILE.1 does: the server may be between the two.
    ValueError if there is none."""
    older: list[Path] = []
    while (old := path.with_name(f"{path.name}.{len(older) + 1}")).is_file():
        older.append(old)
    paths = [*reversed(older), path]
    if older and not path.exists():
        paths.pop()
    records = [record for each in paths for record in read_journal(each)]
    if not records:
        raise ValueError(f"{path} has no journal record yet")
    return records


def find_rid(records: Sequence[StepRecord], start: str) -> str:
    """The scheduler's rid of the request that is called `start`, or the only one whose rid begins
    with it. ValueError if there is none or more than one."""
    rids = {rid for record in records for rid in mentioned(record) if rid.startswith(start)}
    exact = {rid for rid in rids if start in (rid, client_rid(rid))}
    rids = exact or rids
    if not rids:
        raise ValueError(f"--rid {start}: no record names such a request")
    if len(rids) > 1:
        few = ", ".join(sorted(rids)[:3])
        raise ValueError(f"--rid {start}: {len(rids)} requests begin so: {few}, ...")
    return rids.pop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m srt.journal",
        allow_abbrev=False,
        description="What the scheduler decided in each pass, and why. FILE.1, FILE.2, ... that "
        "rotation left beside FILE are read before it.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("show", "print a Markdown table with one row a pass"),
        ("stats", "print utilisation, KV use, retractions, blockers, waits and milliseconds"),
        ("timeline", "write a page that draws requests over passes"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("file", type=Path, metavar="FILE", help="what --journal wrote")
        command.add_argument(
            "--last", type=_positive, metavar="N", help="only the last N passes (default: all)"
        )
        if name == "show":
            command.add_argument(
                "--rid", help="only passes that name this request; the start of its rid will do"
            )
        elif name == "stats":
            command.add_argument("--json", action="store_true", help="for programs")
        else:
            command.add_argument(
                "-o", "--output", type=Path, required=True, metavar="HTML", help="file to write"
            )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
