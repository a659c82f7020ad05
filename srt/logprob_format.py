"""Log-probabilities in the form of /generate: lists of [logprob, token id, text or null]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from srt.managers.io_struct import TokenLogprobs
from srt.managers.req_state import ReqState

Triple = list[Any]  # [float | None, int, str | None]


class LogprobFormat:
    """`text_of` gives a token's text; None leaves texts out."""

    def __init__(self, text_of: Callable[[int], str] | None = None) -> None:
        self._text_of = text_of

    def fields(
        self, state: ReqState, first_input: int = 0, first_output: int = 0
    ) -> dict[str, list[Any]]:
        """The lists of a state from these positions on; none if its request did not ask."""
        request = state.request
        if not request.return_logprob:
            return {}
        parts = {
            "input": state.input_logprobs[first_input:],
            "output": state.output_logprobs[first_output:],
        }
        found: dict[str, list[Any]] = {}
        for name, positions in parts.items():
            found[f"{name}_token_logprobs"] = [
                self._triple(position.logprob, position.token_id) for position in positions
            ]
            if request.top_logprobs_num:
                found[f"{name}_top_logprobs"] = [self._triples(p, p.top) for p in positions]
            if request.token_ids_logprob is not None:
                found[f"{name}_token_ids_logprobs"] = [self._triples(p, p.ids) for p in positions]
        return found

    def _triples(
        self, position: TokenLogprobs, pairs: Sequence[tuple[float, int]] | None
    ) -> list[Triple] | None:
        """None for the first prompt token, of which nothing is known."""
        if position.logprob is None or pairs is None:
            return None
        return [self._triple(logprob, token_id) for logprob, token_id in pairs]

    def _triple(self, logprob: float | None, token_id: int) -> Triple:
        return [logprob, token_id, None if self._text_of is None else self._text_of(token_id)]


class GrowingLists:
    """Lists that only grow, in JSON: what a chunk adds is rendered once, however many chunks repeat
    it, so that a chunk late in a long stream costs about what an early one does."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytearray] = {}

    def extend(self, fields: dict[str, list[Any]]) -> dict[str, orjson.Fragment]:
        """Add `fields` and give all that is there."""
        for name, new in fields.items():
            body = self._bodies.setdefault(name, bytearray())
            if new:
                body += (b"," if body else b"") + orjson.dumps(new)[1:-1]
        return {
            name: orjson.Fragment(b"[" + bytes(body) + b"]") for name, body in self._bodies.items()
        }
