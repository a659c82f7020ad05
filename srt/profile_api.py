"""/start_profile and /stop_profile: traces of the scheduler's passes, in the operator's folder."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from srt.http_json import read_json
from srt.json_fields import optional, type_error
from srt.managers.io_struct import ProfileOptions
from srt.managers.tokenizer_manager import TokenizerManager
from srt.request_error import RequestError
from srt.server_args import ServerArgs

# A profile keeps every operation in memory until it is written.
MAX_PROFILED_PASSES = 10_000
ACTIVITIES = ("CPU", "GPU")
_PREFIX = re.compile(r"[A-Za-z0-9._-]{0,100}", re.ASCII)


class ProfileRoutes:
    def __init__(self, get_manager: Callable[[], TokenizerManager]) -> None:
        self._get_manager = get_manager

    def add_to(self, router: web.UrlDispatcher) -> None:
        for method in ("GET", "POST"):
            router.add_route(method, "/start_profile", self.start_profile)
            router.add_route(method, "/stop_profile", self.stop_profile)

    async def start_profile(self, request: web.Request) -> web.Response:
        """Every field may be left out. `num_steps` passes are traced, or those until
        /stop_profile; numbers may be strings, as SGLang's own client sends them."""
        manager = self._get_manager()
        body = await read_json(request) if request.body_exists else {}
        if not isinstance(body, dict):
            raise type_error(body, "a map", None)
        await manager.control.start_profile(_options(body, profile_root(manager.args)))
        return web.Response(text="Start profiling.\n")

    async def stop_profile(self, request: web.Request) -> web.Response:
        await self._get_manager().control.stop_profile()
        return web.Response(text="Stop profiling. This will take some time.\n")


def profile_root(args: ServerArgs) -> Path:
    """Where traces go, and nothing outside it."""
    return Path(args.profile_dir or Path(tempfile.gettempdir(), "regather-profiles"))


def _options(body: Mapping[str, Any], root: Path) -> ProfileOptions:
    if optional(body, "profile_by_stage", bool, False):
        raise RequestError(
            "profile_by_stage is not supported by this server yet.", param="profile_by_stage"
        )
    prefix = optional(body, "profile_prefix", str, "")
    if not _PREFIX.fullmatch(prefix):
        raise RequestError(
            f"profile_prefix must match {_PREFIX.pattern}, got {prefix[:50]!r}.",
            param="profile_prefix",
        )
    return ProfileOptions(
        output_dir=str(_folder(optional(body, "output_dir", str, ""), root)),
        prefix=f"{prefix}-" if prefix else "",
        num_steps=_count(body, "num_steps", MAX_PROFILED_PASSES) or MAX_PROFILED_PASSES,
        start_step=_count(body, "start_step", 2**53),
        activities=_activities(body),
        with_stack=optional(body, "with_stack", bool, False),
        record_shapes=optional(body, "record_shapes", bool, False),
    )


def _folder(asked: str, root: Path) -> Path:
    """`asked`, which a client chose, so it must not lead out of the operator's folder."""
    try:
        root, folder = root.resolve(), (root / asked).resolve()
    except (OSError, ValueError) as error:
        raise RequestError(
            f"output_dir {asked[:100]!r} is no path: {error}.", param="output_dir"
        ) from error
    if not folder.is_relative_to(root):
        raise RequestError(
            f"output_dir must be inside {root} (--profile-dir), got {asked[:100]!r}.",
            param="output_dir",
        )
    return folder


def _count(body: Mapping[str, Any], name: str, high: int) -> int:
    """0 if it is left out."""
    value = body.get(name)
    if value is None:
        return 0
    number = value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        number = int(value[:20])
    if type(number) is not int:
        raise type_error(value, "an integer", name)
    if not 1 <= number <= high:
        raise RequestError(f"{name} must be in [1, {high}], got {number}.", param=name)
    return number


def _activities(body: Mapping[str, Any]) -> list[str]:
    asked = optional(body, "activities", list, [])
    for name in asked:
        if name not in ACTIVITIES:
            raise RequestError(
                f"activities must be of {', '.join(ACTIVITIES)}, got {name!r:.50}.",
                param="activities",
            )
    return list(dict.fromkeys(asked)) or ["CPU"]
