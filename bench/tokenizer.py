"""Count and make tokens as the server does: with its files if they are here, else by asking it."""

from __future__ import annotations

import http.client
import random
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

# Enough different words and marks that a server-side tokenizer shows a few hundred of its ids.
PROBE_TEXT = (
    "The quick brown fox jumps over the lazy dog, while seven wizards (and 42 jesters) quietly "
    "judge every strange box of quartz. Programs in Python, C++ or Rust return values; people ask "
    "questions! Water, light, music and memory change slowly, from one year to the next: history "
    "shows it. In 1984, 2001 and 2025 the price was $19.99 per unit, plus tax. Write a short story "
    "about a river that forgets its name, then explain why numbers such as 3.14159 never end."
)
REQUEST_TIMEOUT_S = 60.0


class TokenizerError(RuntimeError):
    """No tokenizer could be had; the message says what was tried and what to pass instead."""


class TextTokenizer(Protocol):
    """What data sets and the retokenising check need. Special tokens are neither added nor
    wanted."""

    description: str  # for the report: which tokenizer this is

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def random_ids(self, num: int, rng: random.Random) -> list[int]: ...

    def render_chat(self, messages: list[dict[str, Any]]) -> str: ...


class LocalTokenizer:
    """A tokenizer.json, by the tokenizers library (transformers would import torch)."""

    def __init__(self, file: Path, description: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(file))
        # A file may carry truncation or padding of its training; lengths must be true.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.folder = file.parent
        self.description = description
        special = self.tokenizer.get_added_tokens_decoder()
        self.plain_ids = sorted(set(self.tokenizer.get_vocab().values()) - set(special))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def random_ids(self, num: int, rng: random.Random) -> list[int]:
        return rng.choices(self.plain_ids, k=num)

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        config_file = self.folder / "tokenizer_config.json"
        config = orjson.loads(config_file.read_bytes()) if config_file.is_file() else {}
        template_file = self.folder / "chat_template.jinja"
        if template_file.is_file():
            template: Any = template_file.read_text(encoding="utf-8")
        else:
            template = config.get("chat_template")
        if not isinstance(template, str):
            raise TokenizerError(
                f"--apply-chat-template: {self.folder} holds no chat template; use a chat backend, "
                "where the server applies its own"
            )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        tokens = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, (str, dict))
        }
        return str(
            environment.from_string(template).render(
                messages=messages, add_generation_prompt=True, **tokens
            )
        )


class ServerTokenizer:
    """The server's /tokenize and /detokenize routes, in the field names of SGLang and vLLM (prompt,
    tokens) and of llama.cpp (content, tokens). One connection, kept open; made for preparation and
    for checking after the run, never during it."""

    def __init__(self, base_url: str, model: str, headers: dict[str, str]) -> None:
        self.url = urllib.parse.urlsplit(base_url)
        self.model = model
        self.headers = {**headers, "Content-Type": "application/json"}
        self.connection: http.client.HTTPConnection | None = None
        self.description = f"the server's route {base_url}/tokenize"
        self.known_ids = sorted(set(self.encode(PROBE_TEXT)))

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        path = self.url.path.rstrip("/") + route
        for attempt in (1, 2):
            if self.connection is None:
                https = self.url.scheme == "https"
                make = http.client.HTTPSConnection if https else http.client.HTTPConnection
                self.connection = make(self.url.netloc, timeout=REQUEST_TIMEOUT_S)
            try:
                self.connection.request("POST", path, orjson.dumps(body), self.headers)
                response = self.connection.getresponse()
                data = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                # A kept connection may have been closed meanwhile; a fresh one decides.
                self.close()
                if attempt == 2:
                    raise TokenizerError(
                        f"POST {route}: {error or type(error).__name__}"
                    ) from error
        if response.status != 200:
            raise TokenizerError(f"POST {route}: HTTP {response.status}: {data[:200]!r}")
        try:
            answer = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise TokenizerError(f"POST {route}: the answer is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise TokenizerError(f"POST {route}: the answer is not an object: {data[:200]!r}")
        return answer

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def encode(self, text: str) -> list[int]:
        if not text:
            return []
        body = {"model": self.model, "prompt": text, "content": text, "add_special_tokens": False}
        tokens = self.post("/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(t, int) for t in tokens):
            raise TokenizerError("POST /tokenize: the answer holds no list `tokens` of integers")
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        answer = self.post("/detokenize", {"model": self.model, "tokens": list(ids)})
        for key in ("text", "prompt", "content"):
            if isinstance(answer.get(key), str):
                return str(answer[key])
        raise TokenizerError("POST /detokenize: the answer holds none of text, prompt, content")

    def random_ids(self, num: int, rng: random.Random) -> list[int]:
        # The vocabulary is not known here, and an id of a special token could end a prompt.
        return rng.choices(self.known_ids, k=num)

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        raise TokenizerError(
            "--apply-chat-template needs the tokenizer's files: pass --tokenizer FOLDER, or use a "
            "chat backend, where the server applies its own template"
        )


def local_file(name: str) -> Path | None:
    """The tokenizer.json that a folder or file name means, None if there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    return path if path.is_file() and path.suffix == ".json" else None


def hub_file(name: str, download: bool) -> Path | None:
    """tokenizer.json of a hub name: from the local hub cache, or downloaded if `download`. Raises
    TokenizerError when a download fails."""
    import huggingface_hub

    if Path(name).expanduser().exists() or name.count("/") > 1 or name.startswith((".", "/", "~")):
        return None
    try:
        if download:
            return Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
        cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    except (OSError, ValueError) as error:
        if download:
            raise TokenizerError(f"--tokenizer {name}: {error}") from error
        return None  # not a legal hub name, so nothing is cached under it
    return Path(cached) if isinstance(cached, str) else None


def load_tokenizer(
    asked: str | None,
    server_names: Sequence[str],
    base_url: str,
    model: str,
    headers: dict[str, str],
) -> TextTokenizer:
    """`asked` is --tokenizer and binding. Without it: the first of `server_names` (what the server
    calls its tokenizer or model) that has files here, else the server's /tokenize route. Nothing
    but an explicit hub name is downloaded. Raises TokenizerError."""
    if asked is not None:
        file = local_file(asked) or hub_file(asked, download=True)
        if file is None:
            raise TokenizerError(
                f"--tokenizer {asked}: expected a folder with tokenizer.json, such a file, or a "
                "hub name"
            )
        return LocalTokenizer(file, asked)
    for name in server_names:
        file = local_file(name) or hub_file(name, download=False)
        if file is not None:
            return LocalTokenizer(file, name)
    try:
        return ServerTokenizer(base_url, model, headers)
    except TokenizerError as error:
        raise TokenizerError(
            f"no tokenizer: the server names {', '.join(server_names) or 'none'}, of which no "
            f"tokenizer.json is here, and its own route fails ({error}); pass --tokenizer"
        ) from error
