"""Settings of the scheduler that may change while it serves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from srt.managers.phase_policy import PHASES, make_phase_policy
from srt.managers.schedule_policy import POLICIES, make_policy

if TYPE_CHECKING:
    from srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_CONSERVATIVENESS = 100.0


def current_settings(scheduler: Scheduler) -> dict[str, Any]:
    limits = scheduler.admission.limits
    return {
        "max_running_requests": limits.max_running_requests,
        "max_prefill_tokens": limits.max_prefill_tokens,
        "chunked_prefill_size": -1 if limits.chunk is None else limits.chunk,
        "prefill_max_requests": limits.max_requests,
        "schedule_conservativeness": scheduler.admission.ratio.conservativeness,
        "schedule_policy": scheduler.waiting_queue.policy.name,
        "max_queue_age": scheduler.waiting_queue.max_age,
        "phase_policy": scheduler.phase.name,
        "admission": scheduler.admission.rule,
    }


def change_settings(scheduler: Scheduler, values: dict[str, Any]) -> str | None:
    """Apply all of `values` (see current_settings) or, if one of them is wrong, none: then the
    error names the field, the value and the limit. Requests that run are left alone."""
    error = next(
        (e for name, value in values.items() if (e := _error(scheduler, name, value))), None
    )
    if error is not None:
        return error
    before = current_settings(scheduler)
    for name, value in values.items():
        _apply(scheduler, name, value)
    after = current_settings(scheduler)
    changes = [f"{k}: {before[k]} -> {after[k]}" for k in after if before[k] != after[k]]
    if changes:
        logger.info("Scheduler settings changed. %s", ", ".join(changes))
    return None


def _error(scheduler: Scheduler, name: str, value: Any) -> str | None:
    rows = scheduler.memory.rows.num_rows
    page_size = scheduler.memory.slots.page_size
    match name:
        case "max_running_requests":
            return _int_error(name, value, 1, rows)
        case "max_prefill_tokens":
            return _int_error(name, value, 1, None)
        case "chunked_prefill_size":
            return None if value == -1 else _int_error(name, value, page_size, None)
        case "prefill_max_requests":
            return None if value is None else _int_error(name, value, 1, None)
        case "schedule_conservativeness":
            return _number_error(name, value, 0.0, MAX_CONSERVATIVENESS)
        case "max_queue_age":
            return None if value is None else _number_error(name, value, 0.0, None)
        case "schedule_policy":
            return _choice_error(name, value, POLICIES)
        case "phase_policy":
            return _choice_error(name, value, PHASES)
        case "admission":
            return _choice_error(name, value, ("ratio", "estimated"))
    return f"unknown field {name!r}, expected one of {', '.join(current_settings(scheduler))}"


def _int_error(name: str, value: Any, low: int, high: int | None) -> str | None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and value >= low and (high is None or value <= high):
        return None
    limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
    return f"{name} must be an integer {limit}, got {value!r}"


def _number_error(name: str, value: Any, low: float, high: float | None) -> str | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and value >= low and (high is None or value <= high):
        return None
    limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
    return f"{name} must be a number {limit}, got {value!r}"


def _choice_error(name: str, value: Any, choices: tuple[str, ...]) -> str | None:
    if value in choices:
        return None
    return f"{name} must be one of {', '.join(choices)}, got {value!r}"


def _apply(scheduler: Scheduler, name: str, value: Any) -> None:
    admission, queue = scheduler.admission, scheduler.waiting_queue
    match name:
        case "max_running_requests" | "max_prefill_tokens":
            admission.change_limits(**{name: value})
        case "chunked_prefill_size":
            admission.change_limits(chunk=None if value == -1 else value)
        case "prefill_max_requests":
            admission.change_limits(max_requests=value)
        case "schedule_conservativeness":
            admission.ratio.change_conservativeness(float(value))
        case "max_queue_age":
            queue.max_age = value
        case "schedule_policy":
            queue.change_policy(make_policy(value, scheduler.memory.tree))
            admission.change_limits(wait_for_prefix=value == "lpm")
        case "phase_policy":
            scheduler.phase = make_phase_policy(value, page_size=scheduler.memory.slots.page_size)
        case "admission":
            admission.rule = value
        case _:
            raise AssertionError(f"{name} was validated but has no setter")
