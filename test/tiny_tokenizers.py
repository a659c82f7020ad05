"""Tokenizers of each decoder family, small enough to build in a test."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from srt.tokenizer import Tokenizer

TEXTS = (
    "Hello world, it's a test.",
    "你好,世界。今天天气很好!",
    "Привет, мир — как дела?",
    "नमस्ते दुनिया, यह एक परीक्षा है।",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦 family 🇩🇪 flag 🤷🏽‍♀️",
    "e\u0301 combining, \u200d joiner, tab\tand\r\nlines",
    "  leading and   inner spaces  ",
)


def byte_level() -> Tokenizer:
    """All 256 bytes, some merges from TEXTS, and two special tokens, 0 and 1."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 0)]
    )
    return Tokenizer(backend, {"bos_token": "<|start|>", "eos_token": "<|end|>"})


def sentencepiece(prefix_space: bool = True) -> Tokenizer:
    """Byte fallback as in Llama 2 (a space put before the text) or Gemma (none)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "H", "e", "l", "o", "▁w", "r", "d", "▁▁", "好", "▁He", "llo"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("▁", "w")]
    merges = [(left, right) for left, right in merges if right in vocab]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    mark = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = mark
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def metaspace() -> Tokenizer:
    """Unigram models of the T5 kind: the first token's space marks vanish."""
    pieces = ["<unk>", "</s>", "▁Hello", "▁", "▁▁", "wor", "ld", "▁du", "é"]
    backend = tokenizers.Tokenizer(
        models.WordLevel(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "</s>")])
    return Tokenizer(backend)


def word_piece() -> Tokenizer:
    """BERT's kind: the decoder puts spaces between tokens and takes some away again."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "hello", "##ing", "world", ",", ".", "n't", "'", "do"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(t, special=True) for t in pieces[:3]])
    return Tokenizer(backend)


def word_level() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    pieces = ["<unk>", "<a>", "<b>", "one", "two", "three"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(t, special=True) for t in pieces[:3]])
    return Tokenizer(backend)
