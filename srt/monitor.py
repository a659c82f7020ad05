"""`python -m srt.monitor`: watch a server's load and retractions, by its URL or by its log.

A live view in the terminal; with --once one look for scripts. The exit code is 0 if all was well, 1
if there was an alert of --fail-on or worse, 2 for a wrong command line, 3 if nothing could be read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from srt.monitor_alerts import LEVELS, Alert, Limits, find_alerts, unreachable
from srt.monitor_history import History
from srt.monitor_log import LogSource
from srt.monitor_sources import HttpSource, Source, SourceError

DEFAULT_URL = "http://127.0.0.1:30000"
EXIT_ALERT, EXIT_USAGE, EXIT_NO_SOURCE = 1, 2, 3
Show = Callable[[History, list[Alert]], None]


class Monitor:
    """Polls `source`, keeps the last `window` seconds, and remembers the worst alert."""

    def __init__(self, source: Source, window: float, limits: Limits) -> None:
        self.history = History(window)
        self.worst: str | None = None
        self._source = source
        self._limits = limits

    def look(self) -> list[Alert]:
        """Take what is new; the alerts of now."""
        try:
            for sample in self._source.poll():
                self.history.add(sample)
        except SourceError as error:
            alerts = [unreachable(str(error))]
        else:
            last = self.history.last
            alerts = []
            if last is not None:
                alerts = find_alerts(last, self.history.rates(), self._limits)
        for alert in alerts:
            if self.worst is None or LEVELS.index(alert.level) > LEVELS.index(self.worst):
                self.worst = alert.level
        return alerts

    def exit_code(self, fail_on: str) -> int:
        if self.history.last is None:  # no answer ever, or not a word about the load
            return EXIT_NO_SOURCE
        if fail_on == "never" or self.worst is None:
            return 0
        return EXIT_ALERT if LEVELS.index(self.worst) >= LEVELS.index(fail_on) else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    source: Source = HttpSource(args.url or DEFAULT_URL, args.api_key)
    if args.log is not None:
        source = LogSource(Path(args.log))
    limits = Limits(args.max_retractions_per_minute, args.max_recomputed_share, args.max_wait)
    monitor = Monitor(source, args.window, limits)
    if args.once:
        looks = 1 if args.log is not None else 2  # a rate needs two; a log has its past in it
    else:
        looks = -1 if args.duration is None else max(2, round(args.duration / args.interval) + 1)
    try:
        with _display(source.name, args.json, args.once) as show:
            _watch(monitor, looks, args.interval, show, only_last=args.once)
    except KeyboardInterrupt:
        pass  # how a live view is left
    return monitor.exit_code(args.fail_on)


def _watch(monitor: Monitor, looks: int, interval: float, show: Show, only_last: bool) -> None:
    """Look `looks` times, without end if that is negative."""
    while True:
        alerts = monitor.look()
        looks -= 1
        if not only_last or looks == 0:
            show(monitor.history, alerts)
        if looks == 0:
            return
        time.sleep(interval)


@contextmanager
def _display(name: str, as_json: bool, once: bool) -> Iterator[Show]:
    from srt.monitor_view import report, screen

    if as_json:

        def show_json(history: History, alerts: list[Alert]) -> None:
            print(json.dumps(report(name, history.last, history.rates(), alerts)), flush=True)

        yield show_json
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if once:
        yield lambda history, alerts: console.print(
            screen(name, history.samples, history.rates(), alerts)
        )
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda history, alerts: live.update(
            screen(name, history.samples, history.rates(), alerts), refresh=True
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"srt.monitor: error: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="srt.monitor",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help=f"server to ask (default {DEFAULT_URL}): /metrics and /v1/requests")
    add("--log", help="file of its log to follow instead, ours or SGLang's")
    add("--api-key", help="key of the server")
    add("--interval", type=float, default=1.0, help="seconds between two looks (default 1)")
    add("--window", type=float, default=60.0, help="seconds that rates are over (default 60)")
    add("--duration", type=float, help="stop after so many seconds (default: at Ctrl-C)")
    add("--once", action="store_true", help="one look (two for rates, --interval apart), then end")
    add("--json", action="store_true", help="a JSON line a look instead of the view")
    add("--fail-on", choices=(*LEVELS, "never"), default="warning", help="alerts that give exit 1")
    defaults = Limits()
    add("--max-retractions-per-minute", type=float, default=defaults.retractions_per_minute)
    add("--max-recomputed-share", type=float, default=defaults.recomputed_share, help="0 to 1")
    add("--max-wait", type=float, default=defaults.wait_seconds, help="seconds in the queue")
    args = parser.parse_args(argv)
    if args.url is not None and not args.url.startswith(("http://", "https://")):
        parser.error(f"--url {args.url}: expected http://HOST:PORT or https://HOST:PORT")
    if args.url is not None and args.log is not None:
        parser.error("--url and --log exclude each other")
    for name in ("interval", "window", "duration"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name} must be a number above 0, got {value}")
    for name in ("max_retractions_per_minute", "max_recomputed_share", "max_wait"):
        if not getattr(args, name) >= 0:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be a number of at least 0, got {getattr(args, name)}")
    if args.once and args.duration is not None:
        parser.error("--once and --duration exclude each other")
    return args


if __name__ == "__main__":
    sys.exit(main())
