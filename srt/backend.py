"""A scheduler process with the TokenizerManager in front of it, for the server and Engine."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

from srt.generate_api import error_of
from srt.managers.ipc import FrontendChannel
from srt.managers.request_preparer import GenerateReqInput
from srt.managers.scheduler_handle import SchedulerHandle
from srt.managers.tokenizer_manager import TokenizerManager
from srt.model_config import ModelConfig, load_model_config
from srt.model_files import resolve_model
from srt.server_args import ServerArgs
from srt.supervisor import Supervisor
from srt.tokenizer import Tokenizer, load_tokenizer

WARMUP_TOKENS = 8


class Backend:
    """Ready to generate. Lives on the event loop that started it."""

    def __init__(self, manager: TokenizerManager, supervisor: Supervisor) -> None:
        self.manager = manager
        self._supervisor = supervisor

    @classmethod
    async def start(cls, args: ServerArgs, model_path: Path, scheduler: SchedulerHandle) -> Backend:
        """Load the tokenizer while `scheduler` loads the model; return when both are ready.
        RuntimeError, with the scheduler's words, if it fails. Stops `scheduler` on any error."""
        try:
            config = await asyncio.to_thread(_load_config, args, model_path)
            tokenizer = await asyncio.to_thread(_load_tokenizer, args, model_path)
            manager = TokenizerManager(args, config, tokenizer, FrontendChannel(scheduler.ipc_dir))
        except BaseException:
            scheduler.stop()
            raise
        backend = cls(manager, Supervisor(args, manager, scheduler))
        try:
            await manager.wait_ready()
        except BaseException:
            await backend.close()
            raise
        backend._supervisor.start()
        return backend

    async def warm_up(self) -> None:
        """Generate a few tokens, so that the first client does not pay for what is made lazily.
        RuntimeError if that fails."""
        limits = self.manager.limits
        room = min(limits.context_len, limits.max_total_num_tokens) - 1
        call = GenerateReqInput(
            prompts=[[0]],
            sampling_params=[
                {
                    "max_new_tokens": min(WARMUP_TOKENS, room),
                    "temperature": 0.0,
                    "ignore_eos": True,
                }
            ],
            is_probe=True,
        )
        async with aclosing(self.manager.generate(call)) as states:
            async for state in states:
                if error := error_of(state):
                    raise RuntimeError(f"The warm-up request failed: {error.message}")

    async def close(self) -> None:
        await self._supervisor.close()
        await self.manager.close()


def cache_dir(args: ServerArgs) -> Path | None:
    return None if args.cache_dir is None else Path(args.cache_dir)


def _load_tokenizer(args: ServerArgs, model_path: Path) -> Tokenizer:
    path = model_path
    if args.tokenizer_path is not None:
        path = _tokenizer_location(args, args.tokenizer_path)
    tokenizer = load_tokenizer(path, cache_dir(args))
    if args.chat_template is not None:
        try:
            template = Path(args.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--chat-template {args.chat_template} cannot be read: {error}"
            ) from error
        tokenizer.chat_templates = {"default": template}
    return tokenizer


def _tokenizer_location(args: ServerArgs, name: str) -> Path:
    path = Path(name).expanduser()
    # A folder with only a tokenizer is fine here; resolve_model wants a whole model.
    return path if path.exists() else resolve_model(name, args.revision, cache_dir(args))


def _load_config(args: ServerArgs, model_path: Path) -> ModelConfig:
    overrides = json.loads(args.json_model_override_args)
    return load_model_config(model_path, args.context_length, overrides)
