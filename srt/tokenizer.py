"""Text to token ids and back on the `tokenizers` library, without torch in the process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from srt.chat_template import ChatTemplateError, render_chat_template
from srt.default_model import default_cache_dir
from srt.gguf_metadata import read_header
from srt.gguf_tokenizer import adds_token, build_tokenizer
from srt.spoofed_tokens import SpoofedTokens
from srt.token_bytes import make_token_bytes
from srt.tokenizer_conversion import CONVERTIBLE_FILES, convert_tokenizer

logger = logging.getLogger(__name__)

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# Of a chat: from here on other threads may go on while it is encoded, which costs a little.
_MANY_CHARS = 20_000


class Tokenizer:
    """One model's tokenizer.

    `decode` of some ids is what `srt.managers.detokenizer` gives for them piece by piece: bytes
    that are no UTF-8 become U+FFFD, one for each maximal invalid run as Unicode recommends.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` by role (`bos_token`, `eos_token`, ...), as chat templates name them;
        `chat_templates` by name, the usual one being `default`."""
        # A tokenizer.json may remember how it was used in training.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids: frozenset[int] = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._spoofed_tokens = SpoofedTokens(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        )
        eos_token_id = self._special_id("eos_token")
        ids = [*eos_token_ids, *([] if eos_token_id is None else [eos_token_id])]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
        self.bos_token_id: int | None = self._special_id("bos_token")
        # None: the decoder is not one that works byte by byte.
        self.token_bytes = make_token_bytes(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """ValueError if `text` is not Unicode (half of a surrogate pair, as broken JSON has)."""
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # the library's word for it
            raise _not_unicode([text], error) from error

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """As `encode` for each text, on several cores."""
        try:
            encodings = self.backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise _not_unicode(texts, error) from error
        return [list(encoding.ids) for encoding in encodings]

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of `ids`; ids that the vocabulary does not have add nothing.

        `spaces_between_special_tokens` only matters where the tokenizer's decoder puts spaces
        between tokens (word-level ones do; byte-level and sentencepiece ones never): False leaves
        them out between two special tokens.
        """
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        if not ids:
            return ""
        table = self.token_bytes
        if table is not None:
            data = table.first(ids[0]) + b"".join([table[token_id] for token_id in ids[1:]])
            return table.strip(data.decode("utf-8", "replace"), table.plan.strip_count)[0]
        if spaces_between_special_tokens:
            return str(self.backend.decode(list(ids), skip_special_tokens=False))
        pieces: list[list[int]] = []
        for i, token_id in enumerate(ids):
            if i == 0 or (token_id in self.special_ids and ids[i - 1] in self.special_ids):
                pieces.append([])
            pieces[-1].append(token_id)
        return "".join(self.backend.decode(piece, skip_special_tokens=False) for piece in pieces)

    def token_as_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text it stands within; a special one adds its name. A character
        may need several tokens, so these bytes may be part of one."""
        if self.token_bytes is not None:
            return self.token_bytes[token_id]
        return str(self.backend.decode([token_id], skip_special_tokens=False)).encode()

    def token_text(self, token_id: int) -> str:
        """`token_as_bytes` as text, with U+FFFD for parts of characters."""
        return self.token_as_bytes(token_id).decode("utf-8", "replace")

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text for `messages` by the model's template, or by `chat_template`, which is
        a template itself. ChatTemplateError says what is wrong, in the template's own words."""
        template = chat_template if chat_template is not None else self._chat_template(tools)
        return render_chat_template(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **{**self.special_tokens, **variables},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """The prompt's tokens. Templates write their special tokens themselves, so none is added: a
        second beginning-of-text token is outside of what models were trained on. Those that a user
        writes are no such tokens (see SpoofedTokens)."""
        try:
            messages, mark = self._spoofed_tokens.broken(messages)
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        text = self.render_chat(
            messages,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template,
            **variables,
        )
        parts = [text] if mark is None else text.split(mark)
        if len(text) > _MANY_CHARS:
            encoded = self.encode_batch(parts, add_special_tokens=False)
        else:
            encoded = [self.encode(part, add_special_tokens=False) for part in parts]
        return [token_id for ids in encoded for token_id in ids]

    def _chat_template(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        if "default" in self.chat_templates:
            return self.chat_templates["default"]
        if self.chat_templates:
            names = ", ".join(sorted(self.chat_templates))
            raise ChatTemplateError(f"the model has several chat templates and no default: {names}")
        raise ChatTemplateError(
            "the model has no chat template: pass one with --chat-template, or send a plain prompt"
        )

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def _not_unicode(texts: Sequence[str], error: TypeError) -> Exception:
    """What to raise for the library's complaint: a caller's bug stays the TypeError it is."""
    for i, text in enumerate(texts):
        if isinstance(text, str):
            for at, char in enumerate(text):
                if "\ud800" <= char <= "\udfff":
                    return ValueError(
                        f"text {i} is not valid Unicode: character {at} is the surrogate {char!r}"
                    )
    return error


def load_tokenizer(path: Path, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of a model: a folder, a `.gguf` file, or a tokenizer.json by itself.

    `cache_dir` is where a tokenizer.json made from a sentencepiece model is kept. ValueError or
    FileNotFoundError says which file is missing or unreadable.
    """
    if path.is_dir():
        return _load_folder(path, cache_dir if cache_dir is not None else default_cache_dir())
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer {path} does not exist")
    if path.suffix == ".gguf":
        return _load_gguf(path)
    return Tokenizer(_read_tokenizer_json(path))


def _load_gguf(path: Path) -> Tokenizer:
    header = read_header(path)
    backend = build_tokenizer(header)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    special_tokens = {}
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for gguf_role, role in roles.items():
        token_id = header.metadata.get(f"tokenizer.ggml.{gguf_role}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ValueError(
                f"{path}: tokenizer.ggml.{gguf_role}_token_id is {token_id}, and the vocabulary "
                f"has {len(tokens)} tokens"
            )
        special_tokens[f"{role}_token"] = tokens[token_id]
    if adds_token(header, "bos") and "bos_token" not in special_tokens:
        logger.warning(f"{path} wants a beginning-of-text token, but names none; none is added")
    _set_post_processor(
        backend, special_tokens, adds_token(header, "bos"), adds_token(header, "eos")
    )
    prefix = "tokenizer.chat_template"
    templates = {
        key[len(prefix) + 1 :] or "default": template
        for key, template in header.metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    return Tokenizer(backend, special_tokens, header.eos_token_ids(), templates)


def _load_folder(folder: Path, cache_dir: Path) -> Tokenizer:
    config = _read_json_object(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(folder / "tokenizer.json")
    elif any((folder / name).is_file() for name in CONVERTIBLE_FILES):
        backend = _read_tokenizer_json(convert_tokenizer(folder, cache_dir))
    else:
        raise FileNotFoundError(
            f"{folder} has no tokenizer: neither tokenizer.json nor {', '.join(CONVERTIBLE_FILES)}"
        )
    roles = {**_read_json_object(folder / "special_tokens_map.json"), **config}
    special_tokens = {
        role: text
        for role in SPECIAL_TOKEN_NAMES
        if (text := _token_text(roles.get(role))) is not None
    }
    extra = roles.get("additional_special_tokens") or roles.get("extra_special_tokens") or []
    extra_texts = [_token_text(t) for t in (extra.values() if isinstance(extra, dict) else extra)]
    _make_special(backend, [*special_tokens.values(), *(text for text in extra_texts if text)])
    # tokenizer.json says what a prompt gets around it. These flags win where they disagree:
    # fine-tuned models often change the config alone.
    now = backend.encode("").tokens
    has_bos = bool(now) and now[0] == special_tokens.get("bos_token")
    has_eos = bool(now) and now[-1] == special_tokens.get("eos_token")
    bos, eos = config.get("add_bos_token"), config.get("add_eos_token")
    bos, eos = (has_bos if bos is None else bool(bos)), (has_eos if eos is None else bool(eos))
    if (bos, eos) != (has_bos, has_eos):
        _set_post_processor(backend, special_tokens, bos, eos)
    templates = _read_chat_templates(folder, config)
    return Tokenizer(backend, special_tokens, (), templates)


def _read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Newest form first: files of their own, then a JSON file of a processor, then the config."""
    templates: dict[str, str] = {}
    in_config = config.get("chat_template")
    if isinstance(in_config, str):
        templates["default"] = in_config
    elif isinstance(in_config, list):
        templates.update({entry["name"]: entry["template"] for entry in in_config})
    in_json = _read_json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        templates["default"] = in_json
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error


def _read_json_object(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _token_text(token: Any) -> str | None:
    """A special token is written as its text, or as an object with its text as `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _make_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """The config may name special tokens that tokenizer.json does not know as such."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(texts) if text not in known]
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in missing]
    )


def _set_post_processor(
    backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], bos: bool, eos: bool
) -> None:
    """Every prompt gets a beginning and an end token as told, whatever it got before."""
    before = special_tokens.get("bos_token") if bos else None
    after = special_tokens.get("eos_token") if eos else None
    used = [token for token in (before, after) if token is not None]
    # Pieces as a list: in the one-string form a token with a space or a colon would not parse.
    single = [*([before] if before else []), "$A", *([after] if after else [])]
    backend.post_processor = TemplateProcessing(
        single=single,
        pair=[*single, "$B:1"],
        special_tokens=[(token, backend.token_to_id(token)) for token in used],
    )
