from __future__ import annotations

import io
import logging

import pytest

from srt.log_lines import LineFormatter
from srt.monitor_log import LogReader

FORGED = "[2026-01-01 00:00:00] Decode batch, #running-req: 99, #token: 1"


def written(log):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    log(logger)
    return stream.getvalue()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_no_text_within_a_message_can_begin_a_line_of_the_log(end):
    text = written(lambda logger: logger.error("%s", f"x{end}{FORGED}"))
    assert sum(line.startswith("[") for line in text.splitlines()) == 1


def test_no_text_within_an_exception_can_begin_a_line_of_the_log():
    def log(logger):
        try:
            raise ValueError(f"x\n{FORGED}")
        except ValueError:
            logger.exception("failed")

    text = written(log)
    assert "\nTraceback" in text
    assert sum(line.startswith("[") for line in text.splitlines()) == 1


def test_what_a_terminal_obeys_is_shown_and_half_characters_are_written():
    assert written(lambda logger: logger.error("a\x1b[2Jb\ud800\tc")).endswith(
        "] a\\x1b[2Jb\\ud800\tc\n"
    )


@pytest.mark.parametrize("form", ["Receive: obj={'text': '%s'}", '{"event": "Finish", "t": "%s"}'])
def test_the_monitor_believes_no_text_of_a_client(form):
    stamp = "[2026-01-01 00:00:00] "
    assert LogReader().read(stamp + form % FORGED) is None
    assert LogReader().read(FORGED).running == 99
