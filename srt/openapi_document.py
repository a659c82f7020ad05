"""GET /openapi.json: what the server's routes take and give, as OpenAPI 3.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from srt import __version__
from srt.admin_api import MAX_JOURNAL_RECORDS
from srt.http_auth import Access, access_of
from srt.http_json import TENANT_HEADER
from srt.managers.request_preparer import MAX_TENANT_CHARS
from srt.openapi_schemas import SCHEMAS, STRING, Schema, ref
from srt.scheduler_metrics import LOAD_SECTIONS

PATH = "/openapi.json"
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"


@dataclass(frozen=True)
class Operation:
    """One method of one path. `body` and `answer` name schemas; an `answer` of None is no JSON, but
    `kind`, or nothing at all."""

    method: str
    path: str
    summary: str
    body: str | None = None
    answer: str | None = None
    kind: str | None = JSON
    parameters: tuple[Schema, ...] = ()
    needs_body: bool = True  # where there is a `body`
    streams: bool = False  # with `stream` in the body, events of JSON


def _query(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _in_path(name: str) -> Schema:
    # Of any characters, slashes too.
    return {"name": name, "in": "path", "required": True, "schema": {**STRING, "minLength": 1}}


_TENANT: Schema = {
    "name": TENANT_HEADER,
    "in": "header",
    "schema": {"type": "string", "maxLength": MAX_TENANT_CHARS, "pattern": "^[ -~]*$"},
    "description": "Whose share the request uses under the fair policy, unless its body says it.",
}
_FLUSH_TIMEOUT = _query(
    "timeout", {"type": "number", "minimum": 0}, "Seconds to wait for an idle server."
)
_LOADS = (
    _query("include", STRING, f"Of {', '.join(LOAD_SECTIONS)}, all; with commas."),
    _query("format", {"enum": ["json", "prometheus"]}, "Of the answer."),
)
_LAST = _query(
    "last",
    {"type": "integer", "minimum": 1, "maximum": MAX_JOURNAL_RECORDS},
    "So many of the newest records.",
)
_GENERATION = {"parameters": (_TENANT,), "streams": True}


def _get(path: str, summary: str, answer: str | None = "Object", **more: Any) -> Operation:
    return Operation("GET", path, summary, answer=answer, **more)


def _post(path: str, summary: str, body: str | None, answer: str | None, **more: Any) -> Operation:
    return Operation("POST", path, summary, body, answer, **more)


def _generate(method: str) -> Operation:
    summary = "Generate, in SGLang's form."
    body, answer = "GenerateRequest", "GenerateResponse"
    return Operation(method, "/generate", summary, body, answer, **_GENERATION)  # type: ignore[arg-type]


OPERATIONS: tuple[Operation, ...] = (
    _generate("POST"),
    _generate("PUT"),
    _post("/v1/completions", "Complete.", "CompletionRequest", "CompletionResponse", **_GENERATION),
    _post("/v1/chat/completions", "Answer.", "ChatRequest", "ChatResponse", **_GENERATION),
    _post("/v1/embeddings", "Refused: the model generates text.", None, None, kind=None),
    *(
        _post(f"{prefix}/{name}", summary, f"{name.title()}Request", f"{name.title()}Response")
        for prefix in ("", "/v1")
        for name, summary in (("tokenize", "Text to ids."), ("detokenize", "Ids to text."))
    ),
    _get("/", "A greeting.", None),
    _get("/health", "200 if it serves, else 503.", None, kind=None),
    _get("/ready", "The same.", None, kind=None),
    _get("/ping", "200 if the process answers.", None, kind=None),
    _get("/health_generate", "200 if the model gave a token in time.", None, kind=None),
    _get("/metrics", "Prometheus' text format.", None, kind=TEXT),
    _get(PATH, "This."),
    *(
        _get(path, summary)
        for name, summary in (("model_info", "The model."), ("server_info", "The options."))
        for path in (f"/{name}", f"/get_{name}")
    ),
    _get("/v1/models", "The model that is served.", "ModelList"),
    _get(
        "/v1/models/{model_id}",
        "The same, if it has this id.",
        "ModelCard",
        parameters=(_in_path("model_id"),),
    ),
    _get("/v1/loads", "The load.", parameters=_LOADS),
    _get("/v1/requests", "Where every live request stands.", "RequestList"),
    _get("/v1/requests/{rid}", "Where those stand.", "RequestList", parameters=(_in_path("rid"),)),
    _get("/v1/journal", "The last scheduling decisions.", "Journal", parameters=(_LAST,)),
    _get("/v1/scheduler", "The settings that may change while serving."),
    Operation("PATCH", "/v1/scheduler", "Change some of them.", "Settings", "Settings"),
    _post("/set_internal_state", "The same, as SGLang has it.", "InternalStateRequest", "Object"),
    _get("/get_internal_state", "The scheduler's own figures."),
    *(
        Operation(
            method,
            "/flush_cache",
            "Empty the prefix cache, if nothing is live.",
            kind=TEXT,
            parameters=(_FLUSH_TIMEOUT,),
        )
        for method in ("GET", "POST")
    ),
    *(
        operation
        for name, body in (("start", "ProfileRequest"), ("stop", None))
        for operation in (
            _get(f"/{name}_profile", "Trace the scheduler's passes.", None, kind=TEXT),
            _post(
                f"/{name}_profile",
                "Trace the scheduler's passes.",
                body,
                None,
                kind=TEXT,
                needs_body=False,
            ),
        )
    ),
    _post("/abort_request", "End one request or all.", "AbortRequest", None, kind=None),
    _post("/pause_generation", "Pause.", "PauseRequest", "Object", needs_body=False),
    _post("/continue_generation", "Go on.", None, "Object"),
)


def openapi_document() -> dict[str, Any]:
    """The same for every server of this version: it tells nothing about this one."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        item = _operation_object(operation)
        paths.setdefault(operation.path, {})[operation.method.lower()] = item
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "regather",
            "version": __version__,
            "summary": "An LLM serving engine with the HTTP interfaces of SGLang and OpenAI.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [
            {"name": "open", "description": "Take no key."},
            {"name": "normal", "description": "Take a key if the server has any."},
            {"name": "admin", "description": "Take only the admin key if the server has one."},
        ],
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "key": {**bearer, "description": "With --api-key or --api-key-file."},
                "adminKey": {
                    **bearer,
                    "description": "With --admin-api-key, which then takes no other; it opens "
                    "every route.",
                },
            },
        },
    }


def _operation_object(operation: Operation) -> dict[str, Any]:
    access = access_of(operation.method, operation.path)
    keys: list[Any] = [{}, {"key": []}, {"adminKey": []}]  # whichever the server was started with
    result: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [access.value],
        "security": [] if access is Access.OPEN else keys,
        "responses": {
            "200": {"description": "Done.", **_content(operation)},
            "default": {
                "description": "Refused or failed. A 503 says in Retry-After when to try again.",
                "content": {JSON: {"schema": ref("Error")}},
            },
        },
    }
    if operation.kind != JSON:  # these say why in plain text or by their status alone
        result["responses"]["default"] = {"description": "Refused or failed."}
    if operation.parameters:
        result["parameters"] = list(operation.parameters)
    if operation.body is not None:
        result["requestBody"] = {
            "required": operation.needs_body,
            "content": {JSON: {"schema": ref(operation.body)}},
        }
    return result


def _content(operation: Operation) -> dict[str, Any]:
    if operation.kind is None:
        return {}
    schema: Schema = {} if operation.answer is None else {"schema": ref(operation.answer)}
    kinds: dict[str, Any] = {operation.kind: schema}
    if operation.streams:
        kinds[EVENTS] = {"schema": STRING}
    if operation.path == "/v1/loads":
        kinds[TEXT] = {"schema": STRING}
    return {"content": kinds}


class OpenApiRoute:
    """Built when it is first asked for."""

    def __init__(self) -> None:
        self._body: bytes | None = None

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get(PATH, self.serve, allow_head=False)

    async def serve(self, request: web.Request) -> web.Response:
        if self._body is None:
            self._body = orjson.dumps(openapi_document())
        return web.Response(body=self._body, content_type=JSON)
