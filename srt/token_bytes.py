"""Which bytes each token id stands for, for tokenizers whose decoder works byte by byte.

Text made from a table of bytes costs the same for every token, and a character is known to be
complete from its bytes alone. Decoding a growing list of ids again and again knows neither.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are their own byte; the other bytes follow
    from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


@dataclass(frozen=True)
class DecoderPlan:
    """What a tokenizer's decoder does to a token, as far as a table of bytes can say it."""

    byte_level: bool = False  # the token is spelled in GPT-2's alphabet
    replacements: tuple[tuple[str, str], ...] = ()  # done in order, inside one token
    byte_fallback: bool = False  # `<0xE4>` is the byte E4
    first_drops: str = ""  # a character removed wherever it is in the text's first token
    strip: str = ""  # a character removed from the start of the text ...
    strip_count: int = 0  # ... this many times at most


def plan_decoder(decoder: dict[str, Any] | None) -> DecoderPlan | None:
    """The plan of a decoder in tokenizer.json's form, or None if a table of bytes cannot do it."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return DecoderPlan(byte_level=True)
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    first_drops, strip, strip_count = "", "", 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not (
                byte_fallback or fused
            ):
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": mark} if not fused:
                replacements.append((mark, " "))
                if step.get("prepend_scheme", "always") != "never":
                    first_drops = mark
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": strip, "start": strip_count, "stop": 0} if fused:
                pass  # the pattern has taken what there is
            case _:
                return None
    return DecoderPlan(
        replacements=tuple(replacements),
        byte_fallback=byte_fallback,
        first_drops=first_drops,
        strip=strip,
        strip_count=strip_count,
    )


class TokenBytes:
    """Token id -> bytes, filled as ids come up: a vocabulary of 262 144 is rarely met whole.

    One deliberate difference from the `tokenizers` library: where byte tokens do not add up to
    UTF-8, only the invalid bytes become U+FFFD, as the byte-level decoders do it. The library turns
    every byte of such a run into U+FFFD, the valid characters too, which cannot be streamed.
    """

    def __init__(self, backend: tokenizers.Tokenizer, plan: DecoderPlan) -> None:
        self.plan = plan
        self._backend = backend
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that the vocabulary does not have."""
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._spell(self._backend.id_to_token(token_id) or "")
        return data

    def first(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text."""
        if not self.plan.first_drops:
            return self[token_id]
        token = self._backend.id_to_token(token_id) or ""
        return self._spell(token.replace(self.plan.first_drops, ""))

    def strip(self, text: str, count: int) -> tuple[str, int]:
        """Remove up to `count` stripped characters from the start of `text`. Also returns how many
        more the rest of the text may lose."""
        while count and text:
            if not text.startswith(self.plan.strip):
                return text, 0
            text = text[len(self.plan.strip) :]
            count -= 1
        return text, count

    def _spell(self, token: str) -> bytes:
        if self.plan.byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token, in plain text
                return token.encode()
        for old, new in self.plan.replacements:
            token = token.replace(old, new)
        if self.plan.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


def make_token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes | None:
    """The table for `backend`, or None if its decoder is not one that a table of bytes can do."""
    decoder = backend.decoder
    # The object's pickled state is its JSON; serializing the whole tokenizer would take a second.
    plan = plan_decoder(json.loads(decoder.__getstate__()) if decoder is not None else None)
    return None if plan is None else TokenBytes(backend, plan)
