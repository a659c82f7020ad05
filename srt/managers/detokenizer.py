"""Incremental text of one request: tokens in, text that will never change out."""

from __future__ import annotations

import codecs
from collections.abc import Collection

import tokenizers

from srt.tokenizer import Tokenizer

_MAX_PENDING = 8  # tokens; twice what the longest UTF-8 character needs


class Detokenizer:
    """Text of one request, token by token, at a cost a token that does not grow.

    What `push` returned is final: an incomplete character is held back until its bytes are there,
    or until they can no longer become one. The pieces joined are `Tokenizer.decode` of all ids.

    `continues_text`: the ids continue a text that is shown before them, so the space that a
    sentencepiece token begins with stays. By default they are a text of their own.
    """

    __slots__ = ("_first", "_skip", "_special_ids", "_strip_count", "_table", "_utf8", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        continues_text: bool = False,
    ) -> None:
        self._skip = skip_special_tokens
        self._special_ids = tokenizer.special_ids
        self._table = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not continues_text
        self._strip_count = 0
        self._window: _WindowDecoder | None = None
        if self._table is None:
            separated = () if spaces_between_special_tokens else tokenizer.special_ids
            self._window = _WindowDecoder(tokenizer.backend, separated)
        elif not continues_text:
            self._strip_count = self._table.plan.strip_count

    def push(self, token_id: int) -> str:
        """The text this token adds; empty while a character is incomplete."""
        if self._skip and token_id in self._special_ids:
            return ""
        if self._table is None:
            assert self._window is not None
            return self._window.push(token_id)
        data = self._table.first(token_id) if self._first else self._table[token_id]
        self._first = False
        return self._stripped(self._utf8.decode(data))

    def finish(self) -> str:
        """What was held back. The bytes of an incomplete character become one U+FFFD."""
        if self._window is not None:
            return self._window.finish()
        return self._stripped(self._utf8.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if self._strip_count and text:
            assert self._table is not None
            text, self._strip_count = self._table.strip(text, self._strip_count)
        return text


class _WindowDecoder:
    """Text from decoders that are not a table of bytes (WordPiece, BPE suffixes, none at all).

    Each token is decoded behind the tokens shown last, and only what it adds is returned. Text that
    ends in U+FFFD waits for more, but never for more than a few tokens.
    """

    __slots__ = ("_backend", "_last_separated", "_pending", "_separated", "_shown", "_shown_len")

    def __init__(self, backend: tokenizers.Tokenizer, separated: Collection[int]) -> None:
        self._backend = backend
        # Two neighbours of these ids get no space between them: a new text begins at the second.
        self._separated = separated
        self._last_separated = False
        self._shown: list[int] = []  # the last tokens whose text is out
        self._shown_len = 0  # characters of their text
        self._pending: list[int] = []  # tokens whose text is not

    def push(self, token_id: int) -> str:
        before = ""
        separated = token_id in self._separated
        if separated and self._last_separated:
            before = self.finish()
            self._shown, self._shown_len = [], 0
        self._last_separated = separated
        self._pending.append(token_id)
        text = self._decode(self._shown + self._pending)
        if text.endswith("\ufffd") and len(self._pending) < _MAX_PENDING:
            return before
        return before + self._show(text)

    def finish(self) -> str:
        return self._show(self._decode(self._shown + self._pending)) if self._pending else ""

    def _show(self, text: str) -> str:
        added = text[self._shown_len :]
        # Tokens without text cannot stand for "the text has begun", so keep the older ones then.
        shown = self._decode(self._pending)
        if shown:
            self._shown, self._shown_len = self._pending, len(shown)
            self._pending = []
        elif added or len(self._pending) >= _MAX_PENDING:
            self._pending = []
        return added

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)
