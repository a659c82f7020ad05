"""What the command line of the load generator is made of: fields, flags, refusals."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

# Options of SGLang's benchmark that need a feature we do not have. They are refused by name, since
# a benchmark that drops an option measures something else than what was asked. A name that ends in
# "-" stands for its whole family.
UNSUPPORTED = {
    "--lora-": "LoRA adapters are not driven by this load generator",
    "--profile-by-stage": "the server traces all passes alike",
    "--profile-prefill-url": "disaggregated prefill and decode is not driven from here",
    "--profile-decode-url": "disaggregated prefill and decode is not driven from here",
    "--plot-throughput": "write the JSON line with --output-details and plot that instead",
    "--pd-separated": "disaggregated prefill and decode is not driven by this load generator",
    "--fake-prefill": "disaggregated prefill and decode is not driven by this load generator",
    "--image-": "image prompts are not generated here",
    "--random-image-": "image prompts are not generated here",
    "--speed-bench-": "the speed-bench set lives on a hub; convert it to --dataset-name openai",
    "--mooncake-workload": "traces are not downloaded; pass the file with --dataset-path",
    "--rust-client": "there is one client, in Python; see the client CPU share in the report",
}


class OptionError(ValueError):
    """A user's mistake on the command line; the message names the option, the value and the
    limit."""


def option(
    default: Any,
    help: str,
    *,
    kind: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    many: bool = False,
) -> Any:
    """A field that becomes `--its-name`. `many` takes one or more values into a tuple."""
    return dataclasses.field(
        default=default,
        metadata={"help": help, "kind": kind, "choices": choices, "many": many},
    )


def rate(text: str) -> float:
    return math.inf if text in ("inf", "Inf", "Infinity", "infinity") else float(text)


def flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one place decides what an error looks like."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


def refuse_unsupported(argv: Sequence[str]) -> None:
    for argument in argv:
        name = argument.partition("=")[0]
        for known, reason in UNSUPPORTED.items():
            if name == known or (known.endswith("-") and name.startswith(known)):
                raise OptionError(f"{name} is not supported: {reason}")
