"""JSON in and out of an HTTP request, with a clear refusal of what is not JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import orjson
from aiohttp import hdrs, web

from srt.request_error import RequestError

P = ParamSpec("P")
T = TypeVar("T")

TENANT_HEADER = "X-Tenant"
# Text of this size is tokenized in some 10 ms.
MAX_QUICK_BYTES = 20_000
# Seconds that a body may take to arrive.
BODY_TIMEOUT = web.AppKey("body_timeout", float)
# Whose key a request brought, None if that is not known.
KEY_OWNER: web.AppKey[Callable[[web.Request], str | None]] = web.AppKey("key_owner")


def tenant_of(request: web.Request) -> str | None:
    """Whose share a request uses under the fair policy, unless its body has a `user`."""
    return request.headers.get(TENANT_HEADER) or request.app[KEY_OWNER](request)


async def read_json(request: web.Request) -> Any:
    """The body's JSON value. A missing Content-Type is taken for JSON, any other one is refused."""
    content_type = request.headers.get(hdrs.CONTENT_TYPE)
    if content_type is not None:
        kind = request.content_type
        if kind != "application/json" and not kind.endswith("+json"):
            raise RequestError(
                f"Content-Type must be application/json, got {content_type[:100]!r}."
            )
    timeout = request.app[BODY_TIMEOUT]
    try:
        data = await asyncio.wait_for(request.read(), timeout)
    except asyncio.TimeoutError as error:
        raise RequestError(
            f"The body did not arrive within {timeout:g} s (--body-timeout).", status=408
        ) from error
    except ConnectionResetError as error:
        # Raised again it would be logged as our failure; the answer finds nobody.
        raise RequestError("The client left before its body was complete.") from error
    except web.RequestPayloadError as error:
        raise RequestError(f"The body cannot be read: {error}") from error
    if not data:
        raise RequestError("The body is empty; a JSON object is expected.")
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON in UTF-8: {error}") from error


async def apart_if_large(
    request: web.Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """The result of `work` on a request's text: in a thread if the body is large, since tokenizing
    that much would hold up every open stream."""
    size = request.content_length
    if size is not None and size <= MAX_QUICK_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_response(error: RequestError, path: str) -> web.Response:
    """The documented error shape of the route at `path`. A 503 says when to try again."""
    response = json_response(error.body(schema_as_text=path == "/generate"), error.status)
    if error.status == 503:
        response.headers[hdrs.RETRY_AFTER] = str(error.retry_after or 1)
    return response
