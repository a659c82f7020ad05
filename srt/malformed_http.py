"""Keeps clients that do not speak HTTP from filling the log."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

logger = logging.getLogger(__name__)


class _OneLineEach(logging.Filter):
    """aiohttp reports every head that it cannot parse as an error of ours, with a traceback. It is
    the client's, who got a 400; anybody can send as many as they like."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        logger.debug("Refused what is not HTTP: %s", " ".join(error.message.split())[:200])
        return False


def connection_logger() -> logging.Logger:
    """The logger for aiohttp's connections."""
    found = logging.getLogger(f"{__name__}.connections")
    if not found.filters:
        found.addFilter(_OneLineEach())
    return found
