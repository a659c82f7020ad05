"""The routes that describe the server: its model, its options, its load."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from srt import __version__
from srt.http_json import json_response
from srt.http_metrics import exposition
from srt.managers.tokenizer_manager import TokenizerManager
from srt.request_error import RequestError
from srt.scheduler_metrics import LOAD_SECTIONS, load_report, scheduler_families
from srt.server_args import ServerArgs

# What clients call the default model: its name on the hub, where they find its tokenizer.
DEFAULT_MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
# /server_info is read inside benchmarks' timed sections, so it does not wait for a long pass.
INTERNAL_STATE_SECONDS = 1.0


def served_model_name(args: ServerArgs) -> str:
    return args.served_model_name or args.model_path or DEFAULT_MODEL_NAME


class InfoRoutes:
    def __init__(
        self, args: ServerArgs, get_manager: Callable[[], TokenizerManager], labels: dict[str, str]
    ) -> None:
        """`labels`: those of the metrics."""
        self._args = args
        self._model_name = served_model_name(args)
        self._get_manager = get_manager
        self._labels = labels
        self._started_time = time.time()

    def add_to(self, router: web.UrlDispatcher) -> None:
        for path in ("/model_info", "/get_model_info"):
            router.add_get(path, self.model_info, allow_head=False)
        for path in ("/server_info", "/get_server_info"):
            router.add_get(path, self.server_info, allow_head=False)
        router.add_get("/v1/models", self.list_models, allow_head=False)
        router.add_get("/v1/models/{model_id:.+}", self.one_model, allow_head=False)
        router.add_get("/v1/loads", self.loads, allow_head=False)

    async def model_info(self, request: web.Request) -> web.Response:
        manager = self._get_manager()
        config = manager.model_config
        path = self._args.model_path or DEFAULT_MODEL_NAME
        return json_response(
            {
                "model_path": path,
                "served_model_name": self._model_name,
                "tokenizer_path": self._args.tokenizer_path or path,
                "is_generation": True,
                "preferred_sampling_params": self._args.preferred_sampling_params,
                "weight_version": "default",
                "load_format": self._args.load_format,
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": config.model_type,
                "architectures": list(config.architectures),
                "context_length": manager.context_len,
                "vocab_size": config.vocab_size,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        manager = self._get_manager()
        limits = manager.limits
        arguments = self._public_arguments()
        state = {
            **arguments,
            "effective_max_running_requests_per_dp": limits.max_running_requests,
            "memory_usage": {**limits.memory, "token_capacity": limits.max_total_num_tokens},
            "dp_size": 1,
            **await manager.control.internal_state(INTERNAL_STATE_SECONDS),
        }
        return json_response(
            {
                **arguments,
                "launch_command": _launch_command(self._args),
                "scheduler_info": {
                    "max_total_num_tokens": limits.max_total_num_tokens,
                    "max_req_input_len": limits.max_req_input_len,
                    "max_running_requests": limits.max_running_requests,
                    "chunked_prefill_size": limits.chunked_prefill_size,
                    "max_prefill_tokens": limits.max_prefill_tokens,
                    "context_len": limits.context_len,
                },
                "startup_time": self._started_time,
                "kv_events": None,
                "version": __version__,
                "frontend": "aiohttp",
                "internal_states": [state],
            }
        )

    def _public_arguments(self) -> dict[str, Any]:
        """All server arguments, with what must not leave the server masked and paths filled in."""
        path = self._args.model_path or DEFAULT_MODEL_NAME
        arguments = {
            f.name: value if f.repr or value is None else "****"
            for f in dataclasses.fields(self._args)
            for value in [getattr(self._args, f.name)]
        }
        arguments.update(
            model_path=path,
            tokenizer_path=self._args.tokenizer_path or path,
            served_model_name=self._model_name,
        )
        return arguments

    async def list_models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: web.Request) -> web.Response:
        model_id = request.match_info["model_id"]
        if model_id == self._model_name:
            return json_response(self._model_card())
        message = f"The model '{model_id[:200]}' does not exist"
        error = {
            "message": message,
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return json_response({"object": "error", **error, "error": error}, status=404)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": int(self._started_time),
            "owned_by": "sglang",  # clients that talk to SGLang recognise the dialect by this
            "root": self._model_name,
            "parent": None,
            "max_model_len": self._get_manager().context_len,
        }

    async def loads(self, request: web.Request) -> web.Response:
        """The load of this one rank: `include` selects sections, `format=prometheus` the format."""
        asked = request.query.get("include", "all").split(",")
        unknown = next((name for name in asked if name not in (*LOAD_SECTIONS, "all")), None)
        if unknown is not None:
            raise RequestError(
                f"include must be of {', '.join(LOAD_SECTIONS)}, all; got {unknown[:50]!r}.",
                param="include",
            )
        form = request.query.get("format", "json")
        if form not in ("json", "prometheus"):
            raise RequestError(
                f"format must be json or prometheus, got {form[:50]!r}.", param="format"
            )
        manager = self._get_manager()
        state = await manager.control.internal_state(None)
        if form == "prometheus":
            text = exposition(scheduler_families(state, manager.limits, self._labels))
            return web.Response(body=text, content_type="text/plain", charset="utf-8")
        sections = LOAD_SECTIONS if "all" in asked else asked
        load = load_report(state, sections)
        for name, value in (
            ("gen_throughput", manager.metrics.gen_throughput()),
            ("cache_hit_rate", manager.metrics.cache_hit_rate()),
        ):
            if "core" in sections:
                load[name] = value
        return json_response(
            {
                "timestamp": time.time(),
                "version": __version__,
                "dp_rank_count": 1,
                **load,
                "loads": [{"dp_rank": 0, **load}],
            }
        )


def _launch_command(args: ServerArgs) -> str:
    masked = dataclasses.replace(args, api_key=None, admin_api_key=None)
    return shlex.join([sys.executable, "-m", "launch_server", *masked.to_cli()])
