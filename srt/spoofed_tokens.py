"""Keeps special tokens that a user writes in a chat what they are for the user: text.

Otherwise `<|im_end|>` in a message would end the user's turn and let the rest of the message speak
as somebody else. What an application itself puts in, as system or assistant, is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})
# Never characters of a text, by Unicode's own rule.
_NO_CHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class _Trie(dict[str, "_Trie"]):
    """By character; empty where a text ends."""


class SpoofedTokens:
    """Finds special tokens by their texts, and breaks them with a mark behind their first
    character. The prompt is cut at the marks before it is encoded, so that no token is made of
    characters on both sides."""

    def __init__(self, special_texts: Iterable[str]) -> None:
        trie = _Trie()
        for text in special_texts:
            if len(text) > 1:
                _add(trie, text)
        # Looks ahead, so that tokens that overlap are all found.
        self._begin = re.compile(f"(?={_pattern(trie)})(.)", re.DOTALL) if trie else None

    def broken(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], str | None]:
        """The messages with their special tokens broken, and the mark that does it; None if there
        is nothing to break. ValueError if every possible mark is in use."""
        if self._begin is None or not any(self._is_spoofed(message) for message in messages):
            return messages, None
        texts = [value for message in messages for value in message.values()]
        used = "".join(value for value in texts if isinstance(value, str))
        mark = next((char for char in _NO_CHARACTERS if char not in used), None)
        if mark is None:
            raise ValueError("the messages use every one of the characters U+FDD0 to U+FDEF")
        return [self._break(message, mark) for message in messages], mark

    def _is_spoofed(self, message: Mapping[str, Any]) -> bool:
        assert self._begin is not None
        if message.get("role") in TRUSTED_ROLES:
            return False
        return any(isinstance(v, str) and self._begin.search(v) for v in message.values())

    def _break(self, message: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
        assert self._begin is not None
        if message.get("role") in TRUSTED_ROLES:
            return message
        return {
            name: self._begin.sub(rf"\1{mark}", value) if isinstance(value, str) else value
            for name, value in message.items()
        }


def _add(trie: _Trie, text: str) -> None:
    for char in text[:-1]:
        if char in trie and not trie[char]:
            return  # a shorter text ends here, and where it begins, this one need not be found
        trie = trie.setdefault(char, _Trie())
    trie[text[-1]] = _Trie()


def _pattern(trie: _Trie) -> str:
    """A regular expression that looks at each character of a text once. A plain list of a model's
    thousands of special tokens would be tried one by one, at each character."""
    if all(not rest for rest in trie.values()):
        return f"[{''.join(map(re.escape, trie))}]"
    branches = [re.escape(char) + (_pattern(rest) if rest else "") for char, rest in trie.items()]
    if len(branches) == 1:
        return branches[0]
    # The set in front ends most of the searches.
    return f"(?=[{''.join(map(re.escape, trie))}])(?:{'|'.join(branches)})"
