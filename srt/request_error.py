"""A refusal: why a request gets no answer, with the HTTP status a client sees."""

from __future__ import annotations

from collections.abc import Mapping

# An error reply never grows with the request it refuses.
MAX_MESSAGE_CHARS = 2000

_TYPE_OF_STATUS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    503: "ServiceUnavailableError",
}


class RequestError(ValueError):
    """`status` is an HTTP status, `param` the request field at fault (None: no single one).
    `is_schema` marks a body that breaks the typed schema of /generate (unknown key, wrong type).
    `retry_after`: seconds after which trying again makes sense. `details` are further keys of the
    reply."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        err_type: str | None = None,
        is_schema: bool = False,
        retry_after: int | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[:MAX_MESSAGE_CHARS]}... ({len(message)} characters in all)"
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.err_type = err_type or _TYPE_OF_STATUS.get(status, "InternalServerError")
        self.is_schema = is_schema
        self.retry_after = retry_after
        self.details = dict(details or {})

    def body(self, schema_as_text: bool = False) -> dict[str, object]:
        """The JSON of the reply: flat keys for SGLang's clients and the same keys under `error` for
        OpenAI's and vLLM's. SGLang's /generate has a plain string there for schema errors, hence
        `schema_as_text`."""
        flat: dict[str, object] = {
            "object": "error",
            "message": self.message,
            "type": self.err_type,
            "param": self.param,
            "code": self.status,
            **self.details,
        }
        as_text = schema_as_text and self.is_schema
        return {**flat, "error": self.message if as_text else dict(flat)}
