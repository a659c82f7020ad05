"""/tokenize and /detokenize: what the server's tokenizer makes of a text, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from srt.chat_prompt import chat_input_ids
from srt.http_json import apart_if_large, json_response, read_json
from srt.json_fields import check_vocabulary, optional, token_ids, type_error
from srt.managers.tokenizer_manager import TokenizerManager
from srt.tokenizer import Tokenizer


class TokenizeRoutes:
    def __init__(self, get_manager: Callable[[], TokenizerManager]) -> None:
        self._get_manager = get_manager

    def add_to(self, router: web.UrlDispatcher) -> None:
        for prefix in ("", "/v1"):
            router.add_post(f"{prefix}/tokenize", self.tokenize)
            router.add_post(f"{prefix}/detokenize", self.detokenize)

    async def tokenize(self, request: web.Request) -> web.Response:
        """`{"prompt": text or list of texts}` or `{"messages": [...]}` -> token ids and their
        count, each a list for a list of prompts."""
        body = await read_json(request)
        if not isinstance(body, dict):
            raise type_error(body, "a map", None)
        manager = self._get_manager()
        max_model_len = manager.context_len
        if body.get("messages") is not None:
            tokens = await apart_if_large(request, chat_input_ids, manager.tokenizer, body)
            return json_response(
                {"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len}
            )
        prompt = body.get("prompt")
        texts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise type_error(prompt, "a string or a list of strings", "prompt")
        add_special_tokens = optional(body, "add_special_tokens", bool, True)
        encoded = await apart_if_large(
            request, manager.tokenizer.encode_batch, texts, add_special_tokens
        )
        counts = [len(ids) for ids in encoded]
        is_one = isinstance(prompt, str)
        return json_response(
            {
                "tokens": encoded[0] if is_one else encoded,
                "count": counts[0] if is_one else counts,
                "max_model_len": max_model_len,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """`{"tokens": ids or list of ids}` -> `{"text": text or list of texts}`."""
        body = await read_json(request)
        if not isinstance(body, dict):
            raise type_error(body, "a map", None)
        tokens = body.get("tokens")
        is_batch = bool(tokens) and isinstance(tokens, list) and isinstance(tokens[0], list)
        members: Any = tokens if is_batch else [tokens]
        lists = [token_ids(ids, "tokens") for ids in members]
        manager = self._get_manager()
        for ids in lists:
            check_vocabulary(ids, manager.model_config.vocab_size, "tokens")
        skip = optional(body, "skip_special_tokens", bool, True)
        texts = await apart_if_large(request, _decode_all, manager.tokenizer, lists, skip)
        return json_response({"text": texts if is_batch else texts[0]})


def _decode_all(tokenizer: Tokenizer, lists: list[list[int]], skip_special: bool) -> list[str]:
    return [tokenizer.decode(ids, skip_special_tokens=skip_special) for ids in lists]
