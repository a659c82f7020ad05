"""Who may call which route: the clients' keys and the operator's."""

from __future__ import annotations

import hmac
from enum import Enum
from pathlib import Path

from aiohttp import hdrs, web

from srt.server_args import ServerArgs

# Open to everyone: probes and scrapers need no key, and the description of the API is the same for
# all servers of a version and tells nothing about this one.
_ALWAYS_OPEN = frozenset({"/health", "/health_generate", "/ready", "/metrics", "/openapi.json"})
# They change what the server does for everybody.
_ADMIN_ROUTES = frozenset(
    {
        ("GET", "/flush_cache"),
        ("POST", "/flush_cache"),
        ("POST", "/abort_request"),
        ("POST", "/pause_generation"),
        ("POST", "/continue_generation"),
        ("PATCH", "/v1/scheduler"),
        ("POST", "/set_internal_state"),
        ("GET", "/get_internal_state"),
        ("GET", "/start_profile"),
        ("POST", "/start_profile"),
        ("GET", "/stop_profile"),
        ("POST", "/stop_profile"),
    }
)


class Access(Enum):
    """`ADMIN` routes want the admin key if there is one, else any key."""

    OPEN = "open"
    NORMAL = "normal"
    ADMIN = "admin"


class Keys:
    """The keys of a server. Compared in constant time, each with each, so that the time of a
    refusal tells nothing."""

    def __init__(self, args: ServerArgs) -> None:
        """ValueError if --api-key-file cannot be read or holds no key."""
        self._names: dict[str, str | None] = {}  # key -> whose it is
        if args.api_key is not None:
            self._names[args.api_key] = None
        if args.api_key_file is not None:
            self._names |= _read_key_file(args.api_key_file)
        self._admin = args.admin_api_key

    def allows(self, request: web.Request) -> bool:
        given = _bearer_token(request)
        is_admin = self._admin is not None and _equal(given, self._admin)
        access = access_of(request.method, _route_path(request))
        if access is Access.OPEN or is_admin:
            return True
        if access is Access.ADMIN and self._admin is not None:
            return False
        if not self._names:
            return True
        return self._find(given) is not None

    def owner(self, request: web.Request) -> str | None:
        """The name beside the request's key in the key file."""
        key = self._find(_bearer_token(request)) if self._names else None
        return None if key is None else self._names[key]

    def _find(self, given: str) -> str | None:
        found = None
        for key in self._names:
            if _equal(given, key):
                found = key
        return found


def access_of(method: str, path: str) -> Access:
    """`path`: that of the route."""
    if method == hdrs.METH_OPTIONS or path in _ALWAYS_OPEN:
        return Access.OPEN
    return Access.ADMIN if (method, path) in _ADMIN_ROUTES else Access.NORMAL


def _route_path(request: web.Request) -> str:
    """The path of the route that will serve the request, so that no other spelling of a path
    (`/health/../generate`, `%2F`) can be taken for another route. Empty: there is none."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def _bearer_token(request: web.Request) -> str:
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return token if scheme == "Bearer" else ""


def _equal(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), key.encode())


def _read_key_file(path: str) -> dict[str, str | None]:
    """One key a line, then, after a space, whose it is; `#` begins a comment."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {path} cannot be read: {error}") from error
    names: dict[str, str | None] = {}
    for line in text.splitlines():
        key, _, name = line.partition("#")[0].strip().partition(" ")
        if key:
            names[key] = name.strip() or None
    if not names:
        raise ValueError(f"--api-key-file {path} holds no key")
    return names
