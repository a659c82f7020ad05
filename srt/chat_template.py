"""Renders chat templates as transformers does, without importing it (and, with it, torch).

A template comes with a model, so it is untrusted code: it runs in jinja2's immutable sandbox.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Ends in a space, so that a template which trims the message can be told from one which does not.
_CONTINUE_MARK = "<<the final message goes on here>> "


class ChatTemplateError(ValueError):
    """The messages do not fit the template, in the template's own words where it has some."""


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The prompt for `messages`. With `continue_final_message` it ends where the last message's
    text ends, so that the model goes on with it; it excludes `add_generation_prompt`. `variables`
    are what else the template may read: special tokens, documents, its own switches.
    """
    if continue_final_message:
        if add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt cannot both be true"
            )
        messages = _with_mark(messages)
    try:
        text = _compile(template).render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{"documents": None, **variables},
        )
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(error.message or type(error).__name__) from error
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        # The template's code met a message of a shape that it does not expect.
        raise ChatTemplateError(
            f"the chat template cannot render these messages: {type(error).__name__}: {error}"
        ) from error
    return _cut_at_mark(text) if continue_final_message else text


def _with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A copy of `messages` with the mark behind the last one's last text."""
    if not messages:
        raise ChatTemplateError("continue_final_message needs a message, and there is none")
    result: list[Any] = [*messages[:-1], copy.deepcopy(dict(messages[-1]))]
    content = result[-1].get("content")
    if isinstance(content, str):
        result[-1]["content"] = content + _CONTINUE_MARK
        return result
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] += _CONTINUE_MARK
                return result
    raise ChatTemplateError("continue_final_message needs text in the final message's content")


def _cut_at_mark(text: str) -> str:
    begin = text.rfind(_CONTINUE_MARK.rstrip())
    if begin < 0:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not show the final message's text"
        )
    trimmed = not text.startswith(_CONTINUE_MARK, begin)
    return text[:begin].rstrip() if trimmed else text[:begin]


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment.from_string(template)


class _GenerationTag(Extension):
    """`{% generation %}` marks, for training, what the assistant wrote; here, mere content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it a plain attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        # Its body is a scope of its own, as it is where the tag means something.
        scope = nodes.Scope(lineno=parser.stream.current.lineno)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [scope]


class _TemplateDict:
    """`dict(...)` for templates, without a class to climb out through."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """jinja2's `namespace` lets a template set any attribute; this one, no underscored ones."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with '_'")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
