"""The shapes of requests and answers as JSON Schema, for the description at /openapi.json.

Limits come from the tables of those who check them. What is kept here by hand is held to the server
by a fuzz test, which sends what a schema allows and compares the answers with theirs.
"""

from __future__ import annotations

from typing import Any

from srt.admin_api import PAUSE_MODES
from srt.logprob_options import MAX_TOKEN_IDS, MAX_TOP_LOGPROBS
from srt.managers.request_preparer import MAX_RID_CHARS, MAX_TENANT_CHARS
from srt.openai_logprobs import MAX_TOP_LOGPROBS as MAX_OPENAI_TOP_LOGPROBS
from srt.profile_api import ACTIVITIES, MAX_PROFILED_PASSES
from srt.sampling_params import (
    BOOL_NAMES,
    INT32_NAMES,
    LIMITS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NAMES,
    UNSUPPORTED_NAMES,
    Limits,
    SamplingParams,
)
from srt.stop_regex import MAX_STOP_REGEX_BYTES

Schema = dict[str, Any]

BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
MAP: Schema = {"type": "object"}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0}
SECONDS: Schema = {"type": "number", "exclusiveMinimum": 0}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def list_of(member: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": member, **limits}


def one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """Every field of a request takes null for "not given"."""
    return one_of(schema, {"type": "null"})


def struct(fields: dict[str, Schema], required: tuple[str, ...] = (), **more: Any) -> Schema:
    """An object. What is not listed is ignored unless `more` says otherwise."""
    result: Schema = {"type": "object", "properties": fields, **more}
    return {**result, "required": list(required)} if required else result


def _request(fields: dict[str, Schema], required: tuple[str, ...] = (), **more: Any) -> Schema:
    takes_null = {k: v if k in required else nullable(v) for k, v in fields.items()}
    return struct(takes_null, required, **more)


def _range(kind: str, limits: Limits | None) -> Schema:
    schema: Schema = {"type": kind}
    if kind == "integer":
        schema["format"] = "int32"
        schema["maximum"] = 2**31 - 1
    if limits is None:
        return schema
    schema["exclusiveMinimum" if limits.is_low_out else "minimum"] = limits.low
    if limits.high < 2**31:
        schema["maximum"] = limits.high
    return schema if limits.also is None else one_of(schema, {"const": limits.also})


def _strings(max_length: int) -> Schema:
    text = {"type": "string", "maxLength": max_length}
    return one_of(text, list_of(text, maxItems=MAX_STOP_STRINGS))


def _sampling_fields() -> dict[str, Schema]:
    """Of each sampling parameter its schema and default, in the order of the parser's table."""
    special: dict[str, Schema] = {
        "stop": _strings(MAX_STOP_CHARS),
        # Characters may have four bytes, which only the server counts.
        "stop_regex": _strings(MAX_STOP_REGEX_BYTES),
        "stop_token_ids": list_of(TOKEN_ID, maxItems=MAX_STOP_TOKEN_IDS),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,18}$"},
            "additionalProperties": NUMBER,
            "maxProperties": MAX_LOGIT_BIAS,
        },
        "sampling_seed": {
            "type": "integer",
            "format": "int64",
            "minimum": -(2**63),
            "maximum": 2**63 - 1,
        },
    }
    defaults = SamplingParams()
    fields = {}
    for name in NAMES:
        if name in UNSUPPORTED_NAMES:
            fields[name] = {"type": "null", "description": "Not supported yet."}
            continue
        if name in special:
            schema = special[name]
        elif name in BOOL_NAMES:
            schema = BOOLEAN
        else:
            is_int = name in INT32_NAMES or name == "max_new_tokens"
            schema = _range("integer" if is_int else "number", LIMITS.get(name))
        default = getattr(defaults, name)
        has_default = default is not None and default != ()
        fields[name] = {**nullable(schema), **({"default": default} if has_default else {})}
    return fields


_SAMPLING = _sampling_fields()
_PROMPT_IDS = list_of(TOKEN_ID, minItems=1)
_TEXT: Schema = {"type": "string", "minLength": 1}
_RID: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_RID_CHARS,
    "description": "Of printable characters.",
}
_TENANT: Schema = {"type": "string", "maxLength": MAX_TENANT_CHARS}


def _each(schema: Schema) -> Schema:
    """One value for all prompts, or a list with one for each."""
    return one_of(schema, list_of(nullable(schema)))


# On both APIs.
_COMMON: dict[str, Schema] = {
    "stream": BOOLEAN,
    "priority": {"type": "integer", "format": "int64"},
    "user": {**_TENANT, "description": "Whose share it uses under the fair policy."},
    "extra_key": STRING,
    "cache_salt": {**STRING, "description": "Requests of another one share no cached prefix."},
    "queue_timeout": {**SECONDS, "description": "Seconds until the first token."},
    "timeout": {**SECONDS, "description": "Seconds in all."},
}
_OPENAI_COMMON: dict[str, Schema] = {
    **_COMMON,
    **{name: _SAMPLING[name] for name in NAMES if name in _SAMPLING and name != "max_new_tokens"},
    "model": STRING,
    "max_tokens": {"type": "integer", "minimum": 1},
    "max_completion_tokens": {"type": "integer", "minimum": 1},
    "min_tokens": _SAMPLING["min_new_tokens"],
    "seed": _SAMPLING["sampling_seed"],
    "rid": {**_RID, "minLength": 0},
    "stream_options": struct(
        {"include_usage": nullable(BOOLEAN), "continuous_usage_stats": nullable(BOOLEAN)}
    ),
    "response_format": struct({"type": {"const": "text"}}, ("type",)),
}
for _name in ("min_new_tokens", "sampling_seed", "stream_interval", "choice", "beam_width"):
    del _OPENAI_COMMON[_name]  # other names there, or none

_MESSAGE = struct(
    {
        "role": STRING,
        "content": nullable(
            one_of(STRING, list_of(struct({"type": {"const": "text"}, "text": STRING}, ("text",))))
        ),
    },
    ("role",),
)
_FINISH = nullable(
    struct(
        {
            "type": {"enum": ["stop", "length", "abort"]},
            "matched": one_of(INTEGER, STRING),
            "length": INTEGER,
            "message": STRING,
            "status_code": nullable(INTEGER),
            "err_type": nullable(STRING),
        },
        ("type",),
    )
)
_LOGPROB: Schema = {
    "description": "Logarithm or null, token id, text or null.",
    "type": "array",
    "items": nullable(one_of(NUMBER, STRING)),
    "minItems": 3,
    "maxItems": 3,
}
_USAGE = struct(
    {
        "prompt_tokens": INTEGER,
        "completion_tokens": INTEGER,
        "total_tokens": INTEGER,
        "prompt_tokens_details": struct({"cached_tokens": INTEGER}),
    },
    ("prompt_tokens", "completion_tokens", "total_tokens"),
)
_GENERATED = struct(
    {
        "text": STRING,
        "output_ids": list_of(INTEGER),
        "index": INTEGER,
        "meta_info": struct(
            {
                "id": STRING,
                "finish_reason": _FINISH,
                "prompt_tokens": INTEGER,
                "completion_tokens": INTEGER,
                "cached_tokens": INTEGER,
                "num_retractions": INTEGER,
                "recomputed_tokens": INTEGER,
                "queue_time": nullable(NUMBER),
                "first_token_latency": NUMBER,
                "e2e_latency": NUMBER,
                "input_token_logprobs": list_of(_LOGPROB),
                "output_token_logprobs": list_of(_LOGPROB),
            },
            ("id", "finish_reason", "prompt_tokens", "completion_tokens"),
        ),
    },
    ("text", "output_ids", "meta_info"),
)
_ENDED: dict[str, Schema] = {
    "index": INTEGER,
    "finish_reason": nullable({"enum": ["stop", "length", "abort"]}),
    "matched_stop": nullable(one_of(INTEGER, STRING)),
}


def _answer(kind: str, choice: dict[str, Schema]) -> Schema:
    fields = {
        "id": STRING,
        "object": {"const": kind},
        "created": INTEGER,
        "model": STRING,
        "choices": list_of(struct({**_ENDED, **choice}, ("index", "finish_reason"))),
        "usage": nullable(_USAGE),
    }
    return struct(fields, tuple(fields))


_ERROR_FIELDS: dict[str, Schema] = {
    "message": STRING,
    "type": STRING,
    "param": nullable(STRING),
    "code": one_of(INTEGER, STRING),
}

SCHEMAS: dict[str, Schema] = {
    "Error": {
        **struct(
            {
                "object": {"const": "error"},
                **_ERROR_FIELDS,
                "error": one_of(STRING, struct(_ERROR_FIELDS, ("message",))),
            },
            ("error",),
        ),
        "description": "The same keys twice, flat for SGLang's clients and under `error` for "
        "OpenAI's. On /generate `error` is the message where a body breaks the schema; a 401 has "
        "nothing else.",
    },
    "SamplingParams": struct(_SAMPLING, additionalProperties=False),
    "GenerateRequest": {
        **_request(
            {
                "text": one_of(_TEXT, list_of(_TEXT, minItems=1)),
                "input_ids": one_of(_PROMPT_IDS, list_of(_PROMPT_IDS, minItems=1)),
                "sampling_params": one_of(
                    ref("SamplingParams"), list_of(nullable(ref("SamplingParams")))
                ),
                "rid": one_of(_RID, list_of(_RID)),
                "return_logprob": _each(BOOLEAN),
                "logprob_start_len": _each({"type": "integer", "minimum": -1}),
                "top_logprobs_num": _each(
                    {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}
                ),
                "token_ids_logprob": one_of(
                    list_of(TOKEN_ID, maxItems=MAX_TOKEN_IDS),
                    list_of(nullable(list_of(TOKEN_ID, maxItems=MAX_TOKEN_IDS))),
                ),
                "return_text_in_logprobs": BOOLEAN,
                **_COMMON,
            }
        ),
        "description": "One of text and input_ids. Lists are batches.",
    },
    "GenerateResponse": one_of(_GENERATED, list_of(_GENERATED)),
    "CompletionRequest": _request(
        {
            "prompt": one_of(
                _TEXT,
                list_of(_TEXT, minItems=1),
                _PROMPT_IDS,
                list_of(_PROMPT_IDS, minItems=1),
            ),
            "echo": BOOLEAN,
            "logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_OPENAI_TOP_LOGPROBS},
            **_OPENAI_COMMON,
        },
        ("prompt",),
    ),
    "CompletionResponse": _answer("text_completion", {"text": STRING, "logprobs": nullable(MAP)}),
    "ChatRequest": _request(
        {
            "messages": list_of(_MESSAGE, minItems=1),
            "logprobs": BOOLEAN,
            "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_OPENAI_TOP_LOGPROBS},
            "chat_template_kwargs": {**MAP, "description": "Variables for the chat template."},
            "continue_final_message": BOOLEAN,
            "add_generation_prompt": BOOLEAN,
            "tool_choice": {"enum": ["none", "auto"]},
            **_OPENAI_COMMON,
        },
        ("messages",),
    ),
    "ChatResponse": _answer(
        "chat.completion",
        {
            "message": struct({"role": STRING, "content": STRING}, ("role", "content")),
            "logprobs": nullable(MAP),
        },
    ),
    "TokenizeRequest": _request(
        {
            "prompt": one_of(STRING, list_of(STRING)),
            "messages": list_of(_MESSAGE, minItems=1),
            "add_special_tokens": BOOLEAN,
        }
    ),
    "TokenizeResponse": struct(
        {
            "tokens": one_of(list_of(INTEGER), list_of(list_of(INTEGER))),
            "count": one_of(INTEGER, list_of(INTEGER)),
            "max_model_len": INTEGER,
        },
        ("tokens", "count", "max_model_len"),
    ),
    "DetokenizeRequest": _request(
        {
            "tokens": one_of(list_of(TOKEN_ID), list_of(list_of(TOKEN_ID))),
            "skip_special_tokens": BOOLEAN,
        },
        ("tokens",),
    ),
    "DetokenizeResponse": struct({"text": one_of(STRING, list_of(STRING))}, ("text",)),
    "AbortRequest": _request({"rid": STRING, "abort_all": BOOLEAN}),
    "ProfileRequest": _request(
        {
            "output_dir": {**STRING, "description": "Inside --profile-dir."},
            "profile_prefix": {"type": "string", "pattern": "^[A-Za-z0-9._-]{0,100}$"},
            "num_steps": {"type": "integer", "minimum": 1, "maximum": MAX_PROFILED_PASSES},
            "start_step": {"type": "integer", "minimum": 1, "maximum": 2**53},
            "activities": list_of({"enum": list(ACTIVITIES)}),
            "with_stack": BOOLEAN,
            "record_shapes": BOOLEAN,
        }
    ),
    "PauseRequest": _request({"mode": {"enum": list(PAUSE_MODES)}}),
    "Settings": {**MAP, "description": "What GET /v1/scheduler shows, or some of it."},
    "InternalStateRequest": struct({"server_args": ref("Settings")}, ("server_args",)),
    "ModelCard": struct(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": INTEGER,
            "owned_by": STRING,
            "root": STRING,
            "parent": nullable(STRING),
            "max_model_len": INTEGER,
        },
        ("id", "object", "created", "max_model_len"),
    ),
    "ModelList": struct(
        {"object": {"const": "list"}, "data": list_of(ref("ModelCard"))}, ("object", "data")
    ),
    "RequestList": struct({"requests": list_of(MAP)}, ("requests",)),
    "Journal": struct({"records": list_of(MAP)}, ("records",)),
    "Object": MAP,
}
