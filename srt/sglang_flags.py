"""SGLang's flags that are taken without being ours, so that a copied command line starts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

# Features that do not exist here, and choices between ways to the same result. Each pattern matches
# a whole flag name.
_NO_EFFECT = re.compile(
    r"--(?:(?:enable-|max-|disable-)?loras?(?:-.+)?|speculative-.+|disaggregation-.+"
    r"|enable-hierarchical-cache|(?:enable-|disable-)?hicache-.+"
    r"|ep|ep-size|expert-parallel-size|ep-.+|(?:enable-)?(?:ep-moe|deepep-moe|eplb)|deepep-.+|eplb-.+"
    r"|moe-(?:a2a-backend|runner-backend|dense-tp-size)|init-expert-location"
    r"|(?:enable-|disable-)?(?:multimodal|mm)|(?:enable-|disable-)?mm-.+|limit-mm-.+"
    r"|(?:prefill-|decode-)?attention-backend|(?:sampling|grammar)-backend|triton-attention-.+"
    r"|enable-cuda-graph|disable-cuda-graph-padding|cuda-graph-bs"
    r"|enable-torch-compile|torch-compile-max-bs"
    r"|(?:reasoning|tool-call)-parser|trust-remote-code"
    r"|bucket-.+|log-level-http|dist-init-addr|nccl-init-addr)"
)
# What this server always does.
_ALWAYS_ON = frozenset({"--enable-metrics", "--enable-cache-report"})


class _Fixed(NamedTuple):
    """The one value of an option that is true here."""

    value: str
    reason: str


_ONE_DEVICE = "it computes on one device"
_FIXED = {
    **dict.fromkeys(
        (
            *("--tp", "--tp-size", "--tensor-parallel-size", "--dp", "--dp-size"),
            *("--data-parallel-size", "--pp-size", "--pipeline-parallel-size", "--nnodes"),
        ),
        _Fixed("1", _ONE_DEVICE),
    ),
    **dict.fromkeys(("--node-rank", "--base-gpu-id"), _Fixed("0", _ONE_DEVICE)),
    "--num-continuous-decode-steps": _Fixed("1", "it chooses before every pass"),
    "--radix-eviction-policy": _Fixed("lru", "it has no other"),
    "--tokenizer-mode": _Fixed("auto", "it has no other tokenizers than fast ones"),
}


class FlagValueError(ValueError):
    """A flag asks for what this server cannot do; the message names both."""


def without_foreign(argv: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """`argv` less the flags of this module and their values, and those of them that have no effect,
    which are worth a warning. Flags in `own` are never dropped. FlagValueError for a value other
    than the one that is true here."""
    kept: list[str] = []
    idle: list[str] = []
    skipping = False
    for arg, following in pairwise([*argv, "--"]):
        if arg.startswith("--"):
            name, has_value, value = arg.partition("=")
            if not has_value:
                value = "" if following.startswith("--") else following
            skipping = name not in own and _is_foreign(name, value)
            if skipping and _NO_EFFECT.fullmatch(name):
                idle.append(name)
        if not skipping:
            kept.append(arg)
    return kept, idle


def foreign_of(options: Mapping[str, object], own: Collection[str]) -> tuple[set[str], list[str]]:
    """The same of `options`, flags with values of a file: those to drop, and those of them that
    have no effect."""
    foreign = {flag for flag, v in options.items() if flag not in own and _is_foreign(flag, str(v))}
    return foreign, [flag for flag in options if flag in foreign and _NO_EFFECT.fullmatch(flag)]


def _is_foreign(flag: str, value: str) -> bool:
    fixed = _FIXED.get(flag)
    if fixed is None:
        return flag in _ALWAYS_ON or _NO_EFFECT.fullmatch(flag) is not None
    if value != fixed.value:
        raise FlagValueError(
            f"{flag} must be {fixed.value} for this server, got {value!r}: {fixed.reason}"
        )
    return True
