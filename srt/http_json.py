"""JSON in and out of an HTTP request, with a clear refusal of what is not JSON."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import hdrs, web

from srt.request_error import RequestError

# Whose share a request uses under the fair policy, unless its body has a `user`.
TENANT_HEADER = "X-Tenant"


async def read_json(request: web.Request) -> Any:
    """The body's JSON value. A missing Content-Type is taken for JSON, any other one is refused."""
    content_type = request.headers.get(hdrs.CONTENT_TYPE)
    if content_type is not None:
        kind = request.content_type
        if kind != "application/json" and not kind.endswith("+json"):
            raise RequestError(
                f"Content-Type must be application/json, got {content_type[:100]!r}."
            )
    data = await request.read()
    if not data:
        raise RequestError("The body is empty; a JSON object is expected.")
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON in UTF-8: {error}") from error


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_response(error: RequestError, path: str) -> web.Response:
    """The documented error shape of the route at `path`. A 503 says when to try again."""
    response = json_response(error.body(schema_as_text=path == "/generate"), error.status)
    if error.status == 503:
        response.headers[hdrs.RETRY_AFTER] = "1"
    return response
