"""The server's options: one frozen dataclass, from whose fields the command line is made."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from srt.option_fields import (
    FieldSpec,
    describe_values,
    field_specs,
    flag_of,
    is_valid,
    option,
)
from srt.sampling_params import SamplingParams, SamplingParamsError
from srt.sglang_flags import FlagValueError, foreign_of, without_foreign

logger = logging.getLogger(__name__)


class ServerArgsError(ValueError):
    """An option has a value it cannot have; the message names the flag, the value and the limit."""


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Options of one server, valid from construction on. None means "decided at start", as the help
    says. Names and defaults are those of SGLang where it has the option. Nothing writes back here:
    what is derived from options lives elsewhere."""

    # Model and tokenizer
    model_path: str | None = option(
        None,
        "folder, .gguf file or hub name of the model; without it a small default model is fetched",
        aliases=("--model",),
    )
    tokenizer_path: str | None = option(None, "folder or hub name of the tokenizer, if elsewhere")
    served_model_name: str | None = option(None, "model id in the API; else the model path")
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    cache_dir: str | None = option(None, "folder that keeps downloaded models")
    load_format: str = option(
        "auto",
        "format of the weights; dummy makes random ones",
        choices=("auto", "safetensors", "gguf", "pt", "dummy"),
    )
    dtype: str = option(
        "auto",
        "type of weights and activations; auto follows the model, float32 on CPU",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of the KV cache; auto is int8 on CPU where products are int8, float16 for weights of "
        "int8 alone, else the type of the activations",
        choices=("auto", "float32", "float16", "bfloat16", "fp8_e4m3", "int8"),
    )
    quantization: str = option(
        "auto",
        "bits of the weights on CPU: auto keeps a GGUF file's own blocks, as gguf does, and leaves "
        "others as they are; int8 rounds weights, w8a8_int8 and int4 activations too; none is "
        "exact",
        choices=("auto", "none", "gguf", "int4", "int8", "w8a8_int8"),
    )
    batch_invariant: bool = option(
        False,
        "a request's tokens do not depend on who else is in the batch: slower on CUDA, and always "
        "so on CPUs with quantized or float32 weights",
        aliases=("--enable-deterministic-inference",),
    )
    context_length: int | None = option(
        None, "tokens of prompt and output together; else the model's limit", low=1
    )
    json_model_override_args: str = option(
        "{}", "JSON object whose keys replace those of the model's config.json"
    )
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))

    # HTTP
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(30000, "port to listen on; 0 picks a free one", low=0, high=65535)
    api_key: str | None = option(None, "key that clients must send as a bearer token", secret=True)
    api_key_file: str | None = option(
        None, "file of further keys, one a line, each maybe with a space and its owner's name"
    )
    admin_api_key: str | None = option(
        None, "key for flush, abort, pause and settings, which then take no other", secret=True
    )
    ssl_certfile: str | None = option(None, "PEM file with the certificate chain for HTTPS")
    ssl_keyfile: str | None = option(None, "PEM file with the key of --ssl-certfile")
    ssl_ca_certs: str | None = option(
        None, "PEM file of authorities; clients must then have a certificate of one of them"
    )
    cors_allow_origins: str = option(
        "*", "web pages that may call the server: * for all, none, or origins with commas"
    )
    max_connections: int | None = option(
        None, "connections at a time; else as many as the process may have descriptors", low=1
    )
    max_body_bytes: int = option(64 * 2**20, "largest body of a request; more is a 413", low=1024)
    header_timeout: float = option(
        30.0, "seconds that a request's head may take to arrive; then the server hangs up", low=0.1
    )
    body_timeout: float = option(
        60.0, "seconds that a request's body may take to arrive; longer is a 408", low=0.1
    )
    slow_client_timeout: float = option(
        60.0,
        "seconds in which a client must read 16 KiB of an answer that waits for it; then the "
        "server hangs up and aborts its request",
        low=0.1,
    )
    max_restarts: int = option(
        5, "replacements of a scheduler process that died, in 5 minutes, before giving up", low=0
    )
    watchdog_timeout: float = option(
        300.0, "seconds without a turn of the scheduler loop after which it is replaced", low=0.5
    )
    load_timeout: float | None = option(
        None,
        "seconds after which a replacement that still loads is taken to hang; else ten times what "
        "the first one took, at least 60",
        low=0.1,
    )
    crash_dump_folder: str | None = option(
        None, "where to leave a crash dump on giving up; else the folder for temporary files"
    )
    drain_timeout: float = option(
        30.0, "seconds that running requests get to finish after SIGTERM", low=0.0
    )
    skip_server_warmup: bool = option(False, "report ready without a first generation")
    log_level: str = option(
        "info", "least severe messages to log", choices=("debug", "info", "warning", "error")
    )
    log_requests: bool = option(False, "log a line when a request arrives and one when it ends")
    log_requests_level: int = option(
        0,
        "what --log-requests shows: 0 numbers, 1 sampling parameters too, 2 the start of prompt "
        "and answer, 3 all of them",
        low=0,
        high=3,
    )
    log_requests_format: str = option(
        "text", "form of the lines of --log-requests", choices=("text", "json")
    )

    # Memory
    mem_fraction_static: float | None = option(
        None, "share of memory for weights and KV cache; else by device", low=0.0001, high=0.99
    )
    max_running_requests: int | None = option(
        None, "requests that may hold KV cache at once; else by memory", low=1
    )
    max_total_tokens: int | None = option(None, "tokens the KV cache holds; else by memory", low=1)
    page_size: int = option(1, "tokens in one page of the KV cache", low=1)
    disable_cuda_graph: bool = option(False, "launch every decode pass kernel by kernel, on CUDA")
    cuda_graph_max_bs: int | None = option(
        None,
        "rows of the largest decode pass that is captured as a CUDA graph; else 256 or "
        "--max-running-requests",
        low=1,
    )
    disable_radix_cache: bool = option(False, "do not reuse the KV cache of common prefixes")

    # Scheduling
    max_queued_requests: int | None = option(
        None, "requests that may wait for a first token; one more is answered with 503", low=1
    )
    max_call_requests: int = option(
        4096, "requests of one call, prompts times n; more is a 400", low=1
    )
    max_queue_age: float | None = option(
        None, "seconds of waiting after which a request goes first in any policy", low=0
    )
    chunked_prefill_size: int | None = option(
        None, "new tokens of one request in one prefill; else by memory; -1 never splits", low=-1
    )
    max_prefill_tokens: int = option(16384, "new tokens of all requests in one prefill", low=1)
    prefill_max_requests: int | None = option(None, "requests in one prefill", low=1)
    schedule_policy: str = option(
        "fcfs",
        "order of the waiting requests: arrival, longest cached prefix, longest output, random, "
        "priority, or fair among tenants",
        choices=("fcfs", "lpm", "lof", "random", "priority", "fair"),
    )
    schedule_conservativeness: float = option(
        1.0, "larger admits later and retracts less", low=0.0, high=100.0
    )
    admission: str = option(
        "estimated",
        "how much KV running requests are believed to need: a share of their limits, or the "
        "simulated peak of what requests here have used",
        choices=("ratio", "estimated"),
    )
    enable_priority_scheduling: bool = option(
        False, "the same as --schedule-policy priority; large values go first"
    )
    schedule_low_priority_values_first: bool = option(False, "small priorities go first instead")
    default_priority_value: int = option(0, "priority of requests that bring none")
    abort_on_priority_when_disabled: bool = option(
        False, "refuse requests with a priority unless the policy is priority"
    )
    disable_priority_preemption: bool = option(
        False, "never retract a running request for a more important one"
    )
    priority_scheduling_preemption_threshold: int = option(
        10, "a request may push aside running ones whose priority differs by more than this", low=0
    )
    retraction_policy: str = option(
        "length",
        "who is retracted first: fewest outputs, or the least important class before that",
        choices=("length", "priority"),
    )
    tenant_weights: str = option(
        "{}", "JSON object of tenants' shares under the fair policy; else 1"
    )
    fair_output_weight: float = option(
        2.0, "what an output token counts under the fair policy, an input token being 1", low=0.0
    )
    phase_policy: str = option(
        "interleave",
        "prefill or decode next: prefills first, decodes first, decode passes between prefills, "
        "or by the targets for TTFT and ITL",
        choices=("prefill-first", "decode-first", "interleave", "slo"),
    )
    prefill_decode_interval: int = option(
        1, "decode passes after a prefill under the interleave policy", low=1
    )
    prefill_decode_interval_min_bs: int = option(
        0, "running requests below which prefills need not wait for them", low=0
    )
    target_ttft_ms: float = option(2000.0, "TTFT that the slo policy aims at", low=1.0)
    target_itl_ms: float = option(200.0, "ITL that the slo policy aims at", low=1.0)
    enable_mixed_chunk: bool = option(
        False, "running requests decode in the same pass as a prefill"
    )
    batching: str = option(
        "continuous",
        "when requests join: at any pass or, for comparison, only after all before them have ended "
        "(static waits for a full batch of --max-running-requests, dynamic only a moment)",
        choices=("continuous", "static", "dynamic"),
    )
    batching_timeout_ms: float | None = option(
        None,
        "a batch that is not full starts after this; else 100 if dynamic, 2000 if static",
        low=0,
    )
    overlap_schedule: str = option(
        "auto",
        "choose the next pass while the device computes; auto is on for CUDA",
        choices=("auto", "on", "off"),
    )
    disable_overlap_schedule: bool = option(False, "the same as --overlap-schedule off")
    journal: str | None = option(
        None, "file that gets one JSON line a pass; see python -m srt.journal"
    )
    profile_dir: str | None = option(
        None, "folder for the traces of /start_profile; else one in the system's temporary folder"
    )
    random_seed: int | None = option(
        None, "seed of requests that bring none; else random", low=0, high=2**63 - 1
    )
    retract_every: int = option(
        0, "for tests: retract a request every so many decode passes; 0 is off", low=0
    )
    decode_log_interval: int = option(40, "decode passes between two log lines", low=1)

    # Requests
    queue_timeout: float | None = option(
        None, "seconds a request may wait for its first token; then it ends with a 503", low=0.001
    )
    request_timeout: float | None = option(
        None, "seconds a request may take in all; then it ends with a 503", low=0.001
    )
    stream_interval: int = option(1, "tokens between two chunks of a stream", low=1)
    stream_response_default_include_usage: bool = option(
        False, "streams of the OpenAI routes end with their usage unless they say otherwise"
    )
    incremental_streaming_output: bool = option(
        False, "chunks of /generate carry only what is new, not the whole text so far"
    )
    chat_template: str | None = option(None, "file with a Jinja chat template; else the model's")
    sampling_defaults: str = option(
        "model",
        "where defaults of sampling come from: the model's generation_config.json or OpenAI's",
        choices=("model", "openai"),
    )
    preferred_sampling_params: str | None = option(
        None, "JSON object with this server's defaults of sampling_params"
    )
    allow_auto_truncate: bool = option(
        False, "cut prompts and max_new_tokens that do not fit, instead of refusing them"
    )

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ServerArgsError at the first option with a wrong type or value."""
        for spec in _FIELDS.values():
            value = getattr(self, spec.name)
            if not is_valid(spec, value):
                raise ServerArgsError(
                    f"{flag_of(spec.name)} must be {describe_values(spec)}, got {value!r}"
                )
        if self.chunked_prefill_size == 0:
            raise ServerArgsError("--chunked-prefill-size must be -1 (off) or at least 1, got 0")
        _json_object("--json-model-override-args", self.json_model_override_args)
        _tenant_weights(self.tenant_weights)
        if self.preferred_sampling_params is not None:
            flag = "--preferred-sampling-params"
            preferred = _json_object(flag, self.preferred_sampling_params)
            try:
                SamplingParams.parse(preferred, {})
            except SamplingParamsError as error:
                raise ServerArgsError(f"{flag}: {error}") from error

    @classmethod
    def from_cli(cls, argv: Sequence[str]) -> ServerArgs:
        """Parse `argv` (without the program's name). A mistake is reported on stderr and exits with
        status 2, as argparse does."""
        try:
            values = _parse_flags(argv)
            config = values.pop("config", None)
            if config is not None:
                values = {**_parse_config_file(config), **values}
            return cls(**values)
        except ServerArgsError as error:
            print(f"launch_server: error: {error}\nSee --help.", file=sys.stderr)
            raise SystemExit(2) from error

    def to_cli(self) -> list[str]:
        """The shortest argument list that `from_cli` turns into an equal object."""
        argv = []
        for spec in _FIELDS.values():
            value = getattr(self, spec.name)
            if value == spec.default:
                continue
            # One string, so that a value that begins with a dash stays a value.
            argv.append(flag_of(spec.name) if value is True else f"{flag_of(spec.name)}={value}")
        return argv


_FIELDS = field_specs(ServerArgs)


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ServerArgsError(f"{flag} must be a JSON object, got {text!r} ({error})") from error
    if not isinstance(value, dict):
        raise ServerArgsError(f"{flag} must be a JSON object, got {text!r}")
    return value


def _tenant_weights(text: str) -> None:
    for tenant, weight in _json_object("--tenant-weights", text).items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not (0 < weight < math.inf):
            raise ServerArgsError(
                f"--tenant-weights must hold numbers above 0, got {weight!r} for {tenant!r}"
            )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ServerArgsError(message)


def _build_parser() -> _Parser:
    """A parser that only collects what was given; types and limits are `check`'s work, so that they
    are the same for the command line, the config file and Python."""
    parser = _Parser(
        prog="launch_server",
        description="Serve a language model over HTTP.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options (name: value); flags given here win"
    )
    for spec in _FIELDS.values():
        default = "" if spec.default is None else f" (default: {spec.default})"
        text = (spec.help + default).replace("%", "%%")
        flags = (flag_of(spec.name), *spec.aliases)
        if spec.type is bool:
            parser.add_argument(
                *flags, dest=spec.name, help=text, action=argparse.BooleanOptionalAction
            )
        else:
            kind = spec.type.__name__.upper()
            metavar = "{" + ",".join(spec.choices) + "}" if spec.choices else kind
            parser.add_argument(*flags, dest=spec.name, help=text, metavar=metavar)
    return parser


def _parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """The options given in `argv`, by field name, plus `config` if it was given."""
    try:
        kept, idle = without_foreign(argv, _own_flags())
    except FlagValueError as error:
        raise ServerArgsError(str(error)) from error
    _warn_of_idle(idle)
    given, unknown = _build_parser().parse_known_args(kept)
    if unknown:
        raise ServerArgsError(_unknown_message(unknown[0].split("=")[0]))
    values: dict[str, Any] = vars(given)
    return {
        name: value if name == "config" else _convert(_FIELDS[name], value)
        for name, value in values.items()
    }


def _convert(spec: FieldSpec, value: Any) -> Any:
    """`value` in the field's type, or as it is if that is impossible: `check` names the mistake."""
    if spec.type in (int, float) and isinstance(value, str):
        try:
            return spec.type(value)
        except ValueError:
            return value
    return value


def _warn_of_idle(flags: Sequence[str]) -> None:
    if flags:
        logger.warning("These options have no effect in this server: %s", ", ".join(flags))


def _own_flags() -> list[str]:
    return [name for spec in _FIELDS.values() for name in (flag_of(spec.name), *spec.aliases)]


def _unknown_message(flag: str) -> str:
    if not flag.startswith("-"):
        return f"unexpected argument {flag!r}"
    known = _own_flags()
    longer = [name for name in known if name.startswith(flag)]
    nearest = longer or difflib.get_close_matches(flag, known, n=1, cutoff=0.0)
    return f"unknown option {flag}; the nearest is {nearest[0]}"


def _parse_config_file(path: str) -> dict[str, Any]:
    """Options of a YAML mapping, whose keys are field names with dashes or underscores."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ServerArgsError(f"--config cannot read {path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ServerArgsError(f"--config {path} must hold a mapping of options, not {content!r}")
    try:
        options = {flag_of(str(key)): value for key, value in content.items()}
        foreign, idle = foreign_of(options, _own_flags())
    except FlagValueError as error:
        raise ServerArgsError(f"--config {path}: {error}") from error
    _warn_of_idle(idle)
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if flag_of(name) in foreign:
            continue
        if name == "model":
            name = "model_path"
        if name not in _FIELDS:
            raise ServerArgsError(f"--config {path}: {_unknown_message(flag_of(name))}")
        # A JSON option may be written as a YAML mapping.
        values[name] = json.dumps(value) if isinstance(value, dict) else value
    return values
