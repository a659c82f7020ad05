"""A client's call to requests that are ready to send: parse, tokenize, check what can fit."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import msgspec

from srt.json_fields import check_vocabulary
from srt.logprob_options import LogprobOptions
from srt.managers.io_struct import ReadyMsg, TokenizedGenerateReq
from srt.managers.stop_matcher import StopMatcher
from srt.model_config import ModelConfig
from srt.request_error import RequestError
from srt.sampling_params import SamplingParams, SamplingParamsError, SamplingSchemaError
from srt.server_args import ServerArgs
from srt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Tokenizing more text than this takes long enough (some 10 ms) to hold up every open stream, so it
# is done in a thread.
_THREAD_TOKENIZE_CHARS = 20_000

# A tenant's name is kept for the whole life of the server, in counters and in metrics.
MAX_TENANT_CHARS = 256
MAX_RID_CHARS = 256

# The golden ratio in 63 bits: consecutive multiples are as far apart as they can be.
_SEED_STEP = 0x4F1BBCDCBFA53E0B
_SEED_MASK = 2**63 - 1

# What crosses to the scheduler as the client gave it, and what clients call it.
_CROSSING = {
    "rid": "rid",
    "rids": "rid",
    "priority": "priority",
    "tenant": "user (or the header X-Tenant)",
    "extra_key": "extra_key",
    "sampling_params": "sampling_params",
}


@dataclass
class GenerateReqInput:
    """One client's call: one or several prompts (text or token ids), one dict of raw sampling
    parameters each. `is_batch` says whether the client wrote a list. `rids` None: ids are made up;
    one base id, in `rid`, names all members of the call when it has several."""

    prompts: Sequence[str | list[int]]
    sampling_params: Sequence[dict[str, Any]]
    is_batch: bool = False
    stream: bool = False
    rid: str | None = None
    rids: Sequence[str] | None = None
    priority: int | None = None  # None: the server's default
    tenant: str | None = None  # whose share of the server it uses under the fair policy
    extra_key: str | None = None
    # Of each prompt, None where nothing is asked; none at all: nobody asks.
    logprobs: Sequence[LogprobOptions | None] = ()
    text_in_logprobs: bool = False  # of /generate: beside a token's id its text
    prompt_ids_in_answer: bool = False  # of /generate
    # False when the text already holds what the tokenizer would add (a rendered chat template).
    add_special_tokens: bool = True
    arrival_time: float = field(default_factory=time.time)
    # Seconds until the first token, and in all; None: only the server's own limits.
    queue_timeout: float | None = None
    timeout: float | None = None
    # A request of the server's own (health, warm-up): neither counted nor held up by a full queue.
    is_probe: bool = False


class PreparedReq(NamedTuple):
    """One request of a call, ready to start. `rid` is the client's name for it, `text` its prompt
    (None: it came as ids)."""

    rid: str
    request: TokenizedGenerateReq
    stop_matcher: StopMatcher | None  # None: nothing to look for
    text: str | None


class RequestPreparer:
    """Knows the model's and the server's limits; holds nothing of any request."""

    def __init__(self, args: ServerArgs, model_config: ModelConfig, tokenizer: Tokenizer) -> None:
        self.args = args
        self.model_config = model_config
        self.tokenizer = tokenizer
        self._sampling_defaults = _sampling_defaults(args, model_config)
        self._seeds = random.Random(args.random_seed)
        self._serials = count()

    async def prepare(self, call_input: GenerateReqInput, limits: ReadyMsg) -> list[PreparedReq]:
        """The requests of a call, checked and ready to send, n for each prompt."""
        self._check_size(len(call_input.prompts))
        params = [self._parse_params(raw) for raw in call_input.sampling_params]
        self._check_size(sum(p.n for p in params))
        _check_crossing(call_input)
        prompts = await self._tokenize(call_input)
        has_choices = any(p.n > 1 for p in params)
        members: list[PreparedReq] = []
        for i, (p, prompt) in enumerate(zip(params, prompts, strict=True)):
            asked = call_input.sampling_params[i].get("max_new_tokens")
            input_ids, max_new_tokens = self._fit(prompt, asked, p, limits)
            wish = call_input.logprobs[i] if call_input.logprobs else None
            if wish is not None:
                wish.check(len(input_ids), self.model_config.vocab_size)
            seed = p.sampling_seed if p.sampling_seed is not None else self._seeds.getrandbits(63)
            for choice in range(p.n):
                rid = _given_rid(call_input, i, has_choices)
                request = TokenizedGenerateReq(
                    rid=self._scheduler_rid(rid),
                    input_ids=input_ids,
                    sampling_params=msgspec.structs.replace(
                        p,
                        max_new_tokens=max_new_tokens,
                        min_new_tokens=min(p.min_new_tokens, max_new_tokens),
                        sampling_seed=choice_seed(seed, choice),
                    ),
                    arrival_time=call_input.arrival_time,
                    priority=self._priority(call_input.priority),
                    extra_key=call_input.extra_key,
                    tenant=call_input.tenant,
                )
                if wish is not None:
                    request.return_logprob = True
                    request.logprob_start_len = wish.start
                    request.top_logprobs_num = wish.num_top
                    request.token_ids_logprob = wish.token_ids
                given = call_input.prompts[i]
                text = given if isinstance(given, str) else None
                members.append(PreparedReq(rid or request.rid, request, _stop_matcher(p), text))
        return members

    def _check_size(self, num_requests: int) -> None:
        """Requests of one call are made in one go, and everybody waits for that."""
        limit = self.args.max_call_requests
        if num_requests > limit:
            raise RequestError(
                f"One call may have at most {limit} requests (--max-call-requests), prompts times "
                f"n; got {num_requests}. Please send them in smaller calls."
            )

    def _scheduler_rid(self, rid: str | None) -> str:
        """A fresh id, or the client's with a serial number. A client may use an id again at once
        after it left, while a pass still computes for the old request; its token must not reach
        the new one."""
        return uuid.uuid4().hex if rid is None else f"{rid}#{next(self._serials)}"

    def _priority(self, asked: int | None) -> int:
        if asked is None:
            return self.args.default_priority_value
        is_enabled = self.args.enable_priority_scheduling or self.args.schedule_policy == "priority"
        if self.args.abort_on_priority_when_disabled and not is_enabled:
            raise RequestError(
                "Using priority is disabled for this server. Please send a new request without a "
                "priority.",
                status=503,
                param="priority",
            )
        return asked

    def _parse_params(self, raw: dict[str, Any]) -> SamplingParams:
        try:
            params = SamplingParams.parse(raw, self._sampling_defaults)
            params.check_vocab(self.model_config.vocab_size)
        except SamplingParamsError as error:
            is_schema = isinstance(error, SamplingSchemaError)
            raise RequestError(str(error), param="sampling_params", is_schema=is_schema) from error
        return params

    async def _tokenize(self, call_input: GenerateReqInput) -> list[list[int]]:
        """Token ids of every prompt; text is tokenized, ids are checked against the vocabulary."""
        prompts = call_input.prompts
        texts = [p for p in prompts if isinstance(p, str)]
        for text in texts:
            if not text:
                raise RequestError(
                    "The prompt is empty; it needs at least one token.", param="text"
                )
        encoded: list[list[int]] = []
        if texts:
            add_special_tokens = call_input.add_special_tokens
            if sum(map(len, texts)) > _THREAD_TOKENIZE_CHARS:
                encoded = await asyncio.to_thread(
                    self.tokenizer.encode_batch, texts, add_special_tokens
                )
            else:
                encoded = [self.tokenizer.encode(text, add_special_tokens) for text in texts]
        from_text = iter(encoded)
        ids_of = [next(from_text) if isinstance(p, str) else p for p in prompts]
        for ids, prompt in zip(ids_of, prompts, strict=True):
            if not ids:
                raise RequestError("input_ids cannot be empty.", param="input_ids")
            if not isinstance(prompt, str):
                check_vocabulary(ids, self.model_config.vocab_size, "input_ids")
        return ids_of

    def _fit(
        self,
        input_ids: list[int],
        asked: int | None,
        params: SamplingParams,
        limits: ReadyMsg,
    ) -> tuple[list[int], int]:
        """The prompt and the number of new tokens that fit the context and the KV pool.

        One rule for both limits: prompt + new tokens <= limit. A prompt needs room for one new
        token (even if none is asked for), so in a context of C a prompt of C - 1 fits and one of C
        does not. `asked` is the client's own max_new_tokens: too large is refused with the numbers,
        or cut with --allow-auto-truncate. A default, or null, is cut to what fits.
        """
        context_len = limits.context_len
        truncate = self.args.allow_auto_truncate
        num_input, max_input = len(input_ids), min(limits.max_req_input_len, context_len - 1)
        if num_input > max_input:
            if truncate:
                logger.warning("Cut a prompt of %d tokens to %d", num_input, max_input)
                input_ids, num_input = input_ids[:max_input], max_input
            elif num_input >= context_len:
                raise RequestError(
                    f"The input ({num_input} tokens) is longer than the model's context length "
                    f"({context_len} tokens)."
                    + (
                        " At least one token must be left for the output."
                        if num_input == context_len
                        else ""
                    ),
                )
            else:
                raise RequestError(
                    f"Input length ({num_input} tokens) exceeds the maximum allowed length "
                    f"({max_input} tokens). Use a shorter input or enable --allow-auto-truncate."
                )
        pool_size = limits.max_total_num_tokens
        room = min(context_len, pool_size) - num_input
        if asked is None or truncate:
            wanted = params.max_new_tokens
            return input_ids, room if wanted is None else min(wanted, room)
        if asked > room:
            limit = (
                f"the model's maximum context length of {context_len} tokens"
                if num_input + asked > context_len
                else f"the KV cache, which holds {pool_size} tokens"
            )
            raise RequestError(
                f"Requested token count exceeds {limit}. You requested a total of "
                f"{num_input + asked} tokens: {num_input} tokens from the input messages and "
                f"{asked} tokens for the completion. Please reduce the number of tokens in the "
                "input messages or the completion to fit within the limit.",
                param="max_new_tokens",
            )
        return input_ids, asked


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a request with `seed`: choice 0 keeps it, so that n = 1
    and the first of n agree; the others step away from it by a fixed odd number modulo 2**63."""
    return seed if choice == 0 else (seed + choice * _SEED_STEP) & _SEED_MASK


def _sampling_defaults(args: ServerArgs, model_config: ModelConfig) -> dict[str, Any]:
    """What an absent parameter means: the operator's default, else the model's."""
    defaults: dict[str, Any] = {}
    if args.sampling_defaults == "model":
        defaults.update(model_config.generation_defaults)
    if args.preferred_sampling_params is not None:
        defaults.update(json.loads(args.preferred_sampling_params))
    return defaults


def _check_crossing(call_input: GenerateReqInput) -> None:
    """RequestError for what no message to the scheduler can hold: bytes of a header that are not
    UTF-8, a lone surrogate of a Python string, an integer beyond 64 bits. The sender would only
    find out when it could no longer tell whose it was."""
    if call_input.tenant is not None and len(call_input.tenant) > MAX_TENANT_CHARS:
        field_name = _CROSSING["tenant"]
        raise RequestError(
            f"{field_name} must have at most {MAX_TENANT_CHARS} characters, got "
            f"{len(call_input.tenant)}.",
            param="user",
        )
    rids = [call_input.rid, *(call_input.rids or ())]
    for rid in filter(None, rids):
        # It stands in log lines.
        if len(rid) > MAX_RID_CHARS or not rid.isprintable():
            raise RequestError(
                f"rid must have at most {MAX_RID_CHARS} printable characters, got {len(rid)}: "
                f"{rid[:50]!r}.",
                param="rid",
            )
    for name, field_name in _CROSSING.items():
        try:
            msgspec.msgpack.encode(getattr(call_input, name))
        except UnicodeEncodeError as error:
            problem = f"character {error.object[error.start]!r} at {error.start}"
            raise RequestError(
                f"{field_name} is not valid Unicode: {problem}.", param=field_name
            ) from error
        except OverflowError as error:
            raise RequestError(
                f"{field_name} must be an integer of 64 bits.", param=field_name
            ) from error


def _given_rid(call_input: GenerateReqInput, prompt_index: int, has_choices: bool) -> str | None:
    """A member's id if the client gave one: its own, or `base_0`, `base_1` ... for a batch with one
    base id. None with n > 1, since one id cannot name several choices."""
    if has_choices:
        return None
    if call_input.rids is not None:
        return call_input.rids[prompt_index]
    if call_input.rid is not None and call_input.is_batch:
        return f"{call_input.rid}_{prompt_index}"
    return call_input.rid


def _stop_matcher(params: SamplingParams) -> StopMatcher | None:
    if not params.stop and not params.stop_regex:
        return None
    try:
        return StopMatcher(params.stop, params.stop_regex, params.no_stop_trim)
    except ValueError as error:
        raise RequestError(str(error), param="stop_regex") from error
