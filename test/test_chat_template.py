"""Prompts rendered here are those transformers renders; a template's refusal keeps its words."""

from __future__ import annotations

import pytest

from srt.chat_template import ChatTemplateError, render_chat_template

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# One with each thing that depends on how the environment is built.
TEMPLATES = {
    "chatml": CHATML,
    "whitespace": """
{%- set ns = namespace(system='', count=0) %}
{{- bos_token }}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% set ns.system = message.content %}
        {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
[{{ message.role }}] {{ ns.system }}|{{ message.content | trim }}
{% endfor %}
{{ ns.count }}
    {%- if add_generation_prompt %} [assistant]{% endif %}
""",
    "tools": (
        "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n"
        "{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}"
        "{% for m in messages %}{{ m | tojson(sort_keys=true) }};{% endfor %}"
    ),
    "generation_tag": (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}"
        "{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    ),
    "loop_controls": (
        "{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ dict(role=message.role).role }}:{{ message.content }}{{ undefined_thing }}"
        "{% endfor %}"
    ),
}
MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  Grüße, 世界?  "},
    {"role": "assistant", "content": "Hi"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": [1, None]}}}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no_tools", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_prompt_is_the_one_transformers_renders(name, tools, add_generation_prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    (theirs,), _ = render_jinja_template(
        [MESSAGES],
        chat_template=TEMPLATES[name],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        **SPECIAL,
    )
    ours = render_chat_template(
        TEMPLATES[name],
        MESSAGES,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        **SPECIAL,
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chatml", "whitespace", "generation_tag"])
@pytest.mark.parametrize("content", ["Sure, the", "Sure, the ", "  Sure", "a\n\n"])
def test_a_continued_message_ends_where_transformers_ends_it(name, content):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*MESSAGES[:2], {"role": "assistant", "content": content}]
    (theirs,), _ = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], continue_final_message=True, **SPECIAL
    )
    ours = render_chat_template(
        TEMPLATES[name],
        messages,
        add_generation_prompt=False,
        continue_final_message=True,
        **SPECIAL,
    )
    assert ours == theirs


def test_a_continued_message_ends_the_prompt_and_stays_unchanged_for_the_caller():
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "The "}]
    text = render_chat_template(
        CHATML, messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("<|im_start|>assistant\nThe ")
    assert messages[-1] == {"role": "assistant", "content": "The "}


def test_a_continued_message_may_be_a_list_of_parts():
    template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}!{% endfor %}"
    )
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    text = render_chat_template(
        template,
        [{"role": "assistant", "content": parts}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text == "one two"
    assert parts[1]["text"] == "two"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "needs a message"),
        ([{"role": "assistant", "content": None}], "needs text"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "needs text"),
    ],
)
def test_nothing_to_continue_is_an_error_that_says_so(messages, problem):
    with pytest.raises(ChatTemplateError, match=problem):
        render_chat_template(
            CHATML, messages, add_generation_prompt=False, continue_final_message=True
        )


def test_continuing_and_a_new_turn_exclude_each_other():
    with pytest.raises(ChatTemplateError, match="cannot both be true"):
        render_chat_template(CHATML, MESSAGES, continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it():
    with pytest.raises(ChatTemplateError, match="does not show the final message"):
        render_chat_template(
            "x", MESSAGES, add_generation_prompt=False, continue_final_message=True
        )


def test_a_templates_own_refusal_keeps_its_words():
    template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ChatTemplateError) as error:
        render_chat_template(template, MESSAGES)
    assert str(error.value) == "System role not supported"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in %}", "line 1"),
        ("{{ messages[0].content + 1 }}", "cannot render these messages: TypeError"),
        ("{{ messages[9].content.strip() }}", "no element 9"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ range(1000000000) | length }}", "OverflowError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace(__class__=1) %}", "begins with '_'"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "begins with '_'"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_whatever_is_wrong_with_a_template_is_a_template_error(template, problem):
    with pytest.raises(ChatTemplateError, match=problem):
        render_chat_template(template, MESSAGES)


def test_the_templates_own_variables_reach_it():
    template = "{{ enable_thinking }} {{ documents is none }} {{ strftime_now('%Y') | length }}"
    assert render_chat_template(template, MESSAGES, enable_thinking=False) == "False True 4"
    assert "False" in render_chat_template("{{ documents is none }}", MESSAGES, documents=[])
