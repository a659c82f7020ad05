"""Pure: a server's samples and rates in, alerts with advice out."""

from __future__ import annotations

from dataclasses import dataclass

from srt.monitor_history import Rates, Sample

LEVELS = ("warning", "critical")
# With this much of the pool held by live requests, KV is what there is too little of; below the
# other, the pool has room and something else keeps requests waiting.
FULL_POOL, ROOMY_POOL = 0.9, 0.7
# So long without a token, although somebody is there, is a standstill.
STALL_SECONDS = 10.0
MORE_MEMORY = (
    "raise --schedule-conservativeness (admit later; PATCH /v1/scheduler changes it while "
    "serving), lower --max-running-requests, or give the KV pool more room with "
    "--mem-fraction-static or --max-total-tokens"
)


@dataclass(frozen=True)
class Limits:
    """Beyond these a warning is due."""

    retractions_per_minute: float = 6.0
    recomputed_share: float = 0.05
    wait_seconds: float = 60.0


@dataclass(frozen=True)
class Alert:
    """`name` is for scripts, `text` says what is, `advice` what to do."""

    level: str
    name: str
    text: str
    advice: str


def unreachable(reason: str) -> Alert:
    return Alert(
        "critical", "unreachable", reason, "is the server up, and are URL, port and key right?"
    )


def find_alerts(sample: Sample, rates: Rates, limits: Limits) -> list[Alert]:
    """Critical ones first."""
    found = [
        _out_of_memory(rates),
        _stalled(sample, rates),
        _retractions(rates, limits),
        _recomputed(sample, rates, limits),
        _waiting_for_rows(sample),
        _waiting_for_kv(sample),
        _waiting_long(sample, limits),
    ]
    return [alert for alert in found if alert is not None]


def _out_of_memory(rates: Rates) -> Alert | None:
    if not rates.out_of_memory:
        return None
    text = f"{rates.out_of_memory} requests were ended because they did not fit in the pool alone"
    advice = "give the KV pool more room, or limit --context-length to what it holds"
    return Alert("critical", "out-of-memory", text, advice)


def _stalled(sample: Sample, rates: Rates) -> Alert | None:
    live = (sample.running or 0) + (sample.queued or 0)
    if not live or rates.computed is None or rates.computed or rates.seconds < STALL_SECONDS:
        return None
    text = f"{live} requests are there and no token was computed in {rates.seconds:.0f} s"
    advice = "is it paused? else look at its log, and at GET /v1/requests for what they wait for"
    return Alert("critical", "stalled", text, advice)


def _retractions(rates: Rates, limits: Limits) -> Alert | None:
    rate = rates.retractions_per_minute
    if rate is None or rate <= limits.retractions_per_minute:
        return None
    text = f"{rate:.0f} retractions a minute (limit {limits.retractions_per_minute:g})"
    advice = f"{MORE_MEMORY}; python -m srt.journal stats FILE shows what they cost"
    return Alert("warning", "retractions", text, advice)


def _recomputed(sample: Sample, rates: Rates, limits: Limits) -> Alert | None:
    share = rates.recomputed_share
    if share is None or share <= limits.recomputed_share:
        return None
    about = "about " if sample.recomputed_is_estimate else ""
    text = (
        f"{about}{100 * share:.0f} % of the tokens computed were computed before "
        f"(limit {100 * limits.recomputed_share:g} %)"
    )
    return Alert("warning", "recomputed", text, MORE_MEMORY)


def _main_blocker(sample: Sample) -> str | None:
    """What most waiting requests wait for."""
    if not sample.blockers:
        return None
    return max(sample.blockers, key=lambda kind: sample.blockers[kind])


def _waiting_for_rows(sample: Sample) -> Alert | None:
    if not sample.queued or sample.usage is None or sample.usage >= ROOMY_POOL:
        return None
    full = sample.max_running is not None and (sample.running or 0) >= sample.max_running
    if _main_blocker(sample) != "slots" and not full:
        return None
    text = (
        f"{sample.queued} wait for a row while {100 * (1 - sample.usage):.0f} % of the KV pool is "
        "free"
    )
    return Alert("warning", "rows", text, "raise --max-running-requests")


def _waiting_for_kv(sample: Sample) -> Alert | None:
    if not sample.queued or sample.usage is None or _main_blocker(sample) != "kv":
        return None
    if sample.usage >= FULL_POOL:
        text = f"{sample.queued} wait for KV and the pool is {100 * sample.usage:.0f} % full"
        advice = "the load is more than the pool holds: more KV memory, or fewer clients"
        return Alert("warning", "kv-full", text, advice)
    if sample.usage >= ROOMY_POOL:
        return None
    ratio = "" if sample.ratio is None else f" (ratio {sample.ratio:.2f})"
    text = (
        f"{sample.queued} wait for KV that is reserved for running ones{ratio}, though only "
        f"{100 * sample.usage:.0f} % is in use"
    )
    advice = (
        "lower --schedule-conservativeness, use --admission estimated, or have clients ask for a "
        "smaller max_new_tokens"
    )
    return Alert("warning", "kv-reserved", text, advice)


def _waiting_long(sample: Sample, limits: Limits) -> Alert | None:
    if sample.oldest_wait is None or sample.oldest_wait <= limits.wait_seconds:
        return None
    text = f"a request waits since {sample.oldest_wait:.0f} s (limit {limits.wait_seconds:g} s)"
    advice = "GET /v1/requests says what it waits for; --max-queue-age lets old ones go first"
    return Alert("warning", "queue-age", text, advice)
