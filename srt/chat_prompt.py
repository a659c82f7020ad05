"""The prompt of a chat request: its messages, checked and rendered by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srt.chat_template import ChatTemplateError
from srt.json_fields import optional, type_error
from srt.request_error import RequestError
from srt.tokenizer import Tokenizer

# What a template gets from elsewhere.
_TAKEN = {
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
}


def chat_input_ids(tokenizer: Tokenizer, body: Mapping[str, Any]) -> list[int]:
    """Token ids of `body["messages"]`; RequestError for messages of a wrong shape, for a model
    without a chat template, and for what the template itself refuses."""
    if body.get("chat_template") is not None:
        # A template is a program: even in its sandbox it may loop for hours.
        raise RequestError(
            "chat_template cannot come with a request; the operator chooses it with "
            "--chat-template.",
            param="chat_template",
        )
    messages = chat_messages(body)
    variables = optional(body, "chat_template_kwargs", dict, {})
    if taken := _TAKEN & variables.keys():
        raise RequestError(
            f"chat_template_kwargs cannot hold {min(taken)!r}; that is a field of the request.",
            param="chat_template_kwargs",
        )
    continue_final = optional(body, "continue_final_message", bool, False)
    if not tokenizer.has_chat_template:
        raise RequestError(
            "This model has no chat template. Start the server with --chat-template FILE, or use "
            "/v1/completions.",
            param="messages",
        )
    try:
        return tokenizer.encode_chat(
            messages,
            add_generation_prompt=optional(body, "add_generation_prompt", bool, not continue_final),
            continue_final_message=continue_final,
            **variables,
        )
    except ChatTemplateError as error:
        raise RequestError(f"The chat template refused the messages: {error}") from error


def chat_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a body, with every content a string (text parts are joined by newlines)."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise type_error(messages, "a list of messages", "messages")
    if not messages:
        raise RequestError("Messages cannot be empty.", param="messages")
    return [_message(message, i) for i, message in enumerate(messages)]


def _message(message: Any, i: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise type_error(message, "a map", f"messages[{i}]")
    if not isinstance(message.get("role"), str):
        raise type_error(message.get("role"), "a string", f"messages[{i}].role")
    return {**message, "content": _text(message.get("content"), f"messages[{i}].content")}


def _text(content: Any, name: str) -> str:
    if content is None:  # an assistant's message that only calls tools
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise type_error(content, "a string or a list of parts", name)
    texts = []
    for part in content:
        if not isinstance(part, dict):
            raise type_error(part, "a map", name)
        if part.get("type") != "text":
            raise RequestError(
                f"{name} has a part of type {str(part.get('type'))[:50]!r}; only text works.",
                param="messages",
            )
        if not isinstance(part.get("text"), str):
            raise type_error(part.get("text"), "a string", f"{name}.text")
        texts.append(part["text"])
    return "\n".join(texts)
