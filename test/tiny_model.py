"""A model folder small enough to write in a test; its weights are dummies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_scheduler import (
    CHAT_TEMPLATE,
    CONTEXT_LEN,
    EOS,
    VOCAB_SIZE,
    FakeScheduler,
    alphabet,
    byte_tokenizer,
)

from srt.managers.black_box import BlackBox, black_box_path, create_black_box
from srt.managers.ipc import make_ipc_dir


def write_tiny_model(folder: Path) -> Path:
    """Start the engine with load_format="dummy" on it."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT_LEN,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


class FakeHandle:
    """Stands where SchedulerHandle does, with a FakeScheduler for a process."""

    made: list[FakeHandle]
    hanging: frozenset[int] = frozenset()  # which of them never finish loading
    poison: str | None = None  # the id of the request that kills each of them

    def __init__(self, args: Any, model_path: Path) -> None:
        self._args, self._model_path = args, model_path
        self.ipc_dir = make_ipc_dir()
        self.black_box = black_box_path(self.ipc_dir)
        create_black_box(self.black_box)
        self.fake = FakeScheduler(self.ipc_dir, alphabet, black_box=BlackBox(self.black_box))
        self.fake.poison = self.poison
        self.made.append(self)

    def another(self) -> FakeHandle:
        return type(self)(self._args, self._model_path)

    def watch(self, on_exit: Callable[[str], None]) -> None:
        if self.made.index(self) not in self.hanging:
            self.fake.start()  # not before: it would wait to say "ready" to nobody

    def clear_folder(self) -> None:
        for file in self.ipc_dir.glob("*"):
            file.unlink()
        self.ipc_dir.rmdir()

    def stop(self, timeout: float = 5.0) -> None:
        if self.fake.is_alive():
            self.fake.stop()
        for file in self.ipc_dir.glob("*"):
            file.unlink()
        if self.ipc_dir.exists():
            self.ipc_dir.rmdir()


def fake_handle_class() -> type[FakeHandle]:
    """A class of its own for each test, so that `made` starts empty."""
    return type("FakeHandle", (FakeHandle,), {"made": []})
