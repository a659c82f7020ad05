"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer`.

GGUF stores a vocabulary and the *names* of the algorithms around it. llama.cpp's llama-vocab.cpp
says what the names mean, and tokenizer.json files of the models say how `tokenizers` spells that.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from srt.gguf_metadata import CONTROL_TOKEN, GGUFHeader

logger = logging.getLogger(__name__)

_UNKNOWN_TOKEN, _USER_DEFINED_TOKEN = 2, 4  # values in tokenizer.ggml.token_type

_WORDS_3_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_1_DIGIT = _WORDS_3_DIGITS.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre, by what it means. Files from before the key existed have none of them.
_GPT2 = ("gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo", "jina-en")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen", "megrez")
_TEKKENS = ("tekken",)


def build_tokenizer(header: GGUFHeader) -> Tokenizer:
    """ValueError names what is missing or which kind of vocabulary is not known. The beginning and
    end tokens that the file asks for are added by the caller."""
    tokens = header.require("tokenizer.ggml.tokens")
    kind = header.require("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(header, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(header, tokens)
    else:
        raise ValueError(
            f"{header.path}: tokenizer.ggml.model {kind!r} is not supported; known: gpt2, llama"
        )
    _add_special_tokens(tokenizer, header, tokens)
    return tokenizer


def adds_token(header: GGUFHeader, which: str) -> bool:
    """Whether the text of a prompt gets a `bos` or `eos` token. If the file does not say so it
    depends on the vocabulary, as in llama.cpp."""
    value = header.metadata.get(f"tokenizer.ggml.add_{which}_token")
    if value is not None:
        return bool(value)
    sentencepiece = header.metadata.get("tokenizer.ggml.model") == "llama"
    return which == "bos" and (sentencepiece or _pre(header) in _LLAMA3)


def _pre(header: GGUFHeader) -> str:
    return str(header.metadata.get("tokenizer.ggml.pre", "default"))


def _byte_level_bpe(header: GGUFHeader, tokens: list[str]) -> Tokenizer:
    pre = _pre(header)
    merges = [_split_merge(header, merge) for merge in header.require("tokenizer.ggml.merges")]
    # Whole words that are in the vocabulary win over what the merges would make of them.
    whole_words = pre in _LLAMA3 + _TEKKENS
    tokenizer = _bpe(header, tokens, merges, ignore_merges=whole_words)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _SINGLE_DIGITS:
        steps: list[Any] = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    elif pre in _LLAMA3:
        steps = _split_bytes(_WORDS_3_DIGITS)
    elif pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
        steps = _split_bytes(_WORDS_1_DIGIT)
    elif pre in _TEKKENS:
        steps = _split_bytes(_TEKKEN)
    else:
        if pre not in _GPT2:
            logger.warning(
                f"{header.path}: tokenizer.ggml.pre {pre!r} is unknown; text is split as GPT-2 "
                "does, which may give other tokens than the model was trained on"
            )
        steps = [ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else Sequence(steps)
    return tokenizer


def _split_bytes(pattern: str) -> list[Any]:
    return [
        Split(Regex(pattern), behavior="isolated", invert=False),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _split_merge(header: GGUFHeader, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or " " in right:
        raise ValueError(f"{header.path}: tokenizer.ggml.merges has {merge!r}, not two tokens")
    return left, right


def _sentencepiece_bpe(header: GGUFHeader, tokens: list[str]) -> Tokenizer:
    scores = header.require("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ValueError(
            f"{header.path}: tokenizer.ggml.scores has {len(scores)} entries for "
            f"{len(tokens)} tokens"
        )
    merges = sentencepiece_merges(tokens, scores)
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = _bpe(
        header, tokens, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    prefix_space = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    mark_spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), mark_spaces])
        if prefix_space
        else mark_spaces
    )
    unmark = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        unmark.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(unmark)
    return tokenizer


def sentencepiece_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Merges that make `tokenizers` do what sentencepiece does without them: at each step join the
    two neighbours whose joint piece scores highest."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    found: list[tuple[float, int, int, int, str, str]] = []
    for token_id, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if (left_id := ids.get(left)) is not None and (right_id := ids.get(right)) is not None:
                found.append((-scores[token_id], token_id, left_id, right_id, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _bpe(
    header: GGUFHeader, tokens: list[str], merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if vocab.setdefault(token, token_id) != token_id:
            raise ValueError(
                f"{header.path}: tokenizer.ggml.tokens has {token!r} at {vocab[token]} and at "
                f"{token_id}"
            )
    try:
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # what `tokenizers` raises for a merge of unknown tokens
        raise ValueError(f"{header.path}: tokenizer.ggml.merges: {error}") from error


def _add_special_tokens(tokenizer: Tokenizer, header: GGUFHeader, tokens: list[str]) -> None:
    types = header.metadata.get("tokenizer.ggml.token_type", [])
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (CONTROL_TOKEN, _UNKNOWN_TOKEN) and token
    ]
    user_defined = [
        AddedToken(token, special=False, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind == _USER_DEFINED_TOKEN and token
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(user_defined)
