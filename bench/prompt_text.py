"""Text of a wanted length in tokens, from seeds or from recorded conversations."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.sessions import DatasetError
from bench.sharegpt_file import whole_conversations
from bench.tokenizer import TextTokenizer

# Text worth tiling; more only costs tokenising.
MAX_TILED_CONVERSATIONS = 400
WORDS = """
    water light river mountain city engine letter garden window music bridge winter summer paper
    market island forest signal harbor planet mirror candle shadow silver copper marble velvet
    story answer question reason method number letter table circle corner border center measure
    walks carries follows returns opens holds breaks turns reaches leaves finds builds changes
    small early quiet bright heavy narrow distant common certain simple second hidden broken open
    under over between behind beyond before after during without against because while until
""".split()  # noqa: SIM905, as a list it would be one word a line


def length_between(longest: int, ratio: float, rng: random.Random) -> int:
    """Uniform in [longest * ratio, longest], at least 1."""
    return rng.randint(max(1, int(longest * ratio)), longest)


def exact_text(
    take: Callable[[int], list[int]], length: int, tokenizer: TextTokenizer
) -> tuple[str, int]:
    """Text that encodes to `length` tokens as nearly as re-encoding allows, and how many it really
    has. `take(n)` gives n ids. Decoding joins tokens that encode differently again, so what is too
    long is cut and what is too short gets more, a few times."""
    ids = take(length)
    best = ("", 0)
    for _ in range(4):
        text = tokenizer.decode(ids)
        encoded = tokenizer.encode(text)
        if abs(len(encoded) - length) < abs(best[1] - length):
            best = (text, len(encoded))
        if len(encoded) == length:
            break
        ids = encoded[:length] if len(encoded) > length else encoded + take(length - len(encoded))
    return best


class TextSource:
    """Token ids of natural text without end: ShareGPT if it is here, else synthetic words."""

    def __init__(
        self, tokenizer: TextTokenizer, rng: random.Random, sharegpt: Path | None, least: int
    ) -> None:
        """Prepares about `least` ids, after which the text begins again."""
        self.ids: list[int] = []
        self.position = 0
        if sharegpt is not None:
            rows = load_sharegpt_rows(sharegpt)
            for row in rng.sample(rows, min(len(rows), MAX_TILED_CONVERSATIONS)):
                for text in turns_of(row):
                    self.ids += tokenizer.encode(text)
                if len(self.ids) >= least:
                    break
        self.note = f"text of {sharegpt.name}" if self.ids and sharegpt else "synthetic words"
        if not self.ids:
            # A word is at least one token, so this many are enough.
            words = rng.choices(WORDS, k=max(256, min(least, 65536)))
            self.ids = tokenizer.encode(" ".join(words))

    def take(self, num: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < num:
            part = self.ids[self.position : self.position + num - len(taken)]
            taken += part
            self.position = (self.position + len(part)) % len(self.ids)
        return taken


def load_sharegpt_rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows, was_cut = whole_conversations(path.read_bytes())
    except ValueError as error:
        raise DatasetError(f"{path}: {error}") from error
    if was_cut:
        print(f"{path}: the last conversation is cut off and left out", file=sys.stderr)
    return rows


def turns_of(row: dict[str, Any]) -> list[str]:
    """The texts of a conversation in any of the spellings in use: conversations or conversation,
    content or value."""
    turns = row.get("conversations") or row.get("conversation") or []
    return [
        text
        for turn in turns
        if isinstance(turn, dict)
        and isinstance(text := turn.get("content", turn.get("value")), str)
    ]
