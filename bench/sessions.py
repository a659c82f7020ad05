"""What is sent: requests as turns of sessions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, chat messages


class DatasetError(ValueError):
    """The data cannot be used as asked; the message names the file, the line and the reason."""


@dataclass(frozen=True)
class Turn:
    """One request. With `follows_reply`, `prompt` is only what is new: it is sent after the turn
    before it has been answered, behind that turn's whole prompt and the reply."""

    prompt: Prompt
    prompt_len: int  # tokens by the client's count, of `prompt` alone
    output_len: int
    follows_reply: bool = False
    extra: dict[str, Any] = field(default_factory=dict)  # body keys of this request alone


@dataclass(frozen=True)
class Session:
    """Turns sent one after another, each when the one before has ended; mostly just one."""

    turns: tuple[Turn, ...]
    timestamp_ms: float | None = None
    routing_key: str | None = None


@dataclass(frozen=True)
class Dataset:
    sessions: list[Session]
    note: str  # where the prompts came from, for the report

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)
