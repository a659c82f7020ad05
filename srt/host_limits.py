"""How much memory and how many cores this process may use, containers included."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import ModuleType

import psutil

# There is none on Windows.
resource: ModuleType | None
try:
    import resource
except ImportError:
    resource = None

MAX_DESCRIPTORS = 65_536
CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_memory(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Bytes that can be allocated without swapping: what the machine has left, or what the control
    group has left where that is less."""
    available = int(psutil.virtual_memory().available)
    for folder in _cgroup_folders(cgroup_root):
        # Version 2, then version 1, whose "no limit" is a number beyond any machine.
        for limit_file, usage_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _read_int(folder / limit_file)
            usage = _read_int(folder / usage_file)
            if limit is not None and usage is not None:
                # The page cache counts as used but is given up on demand.
                stat = (folder / limit_file).parent / "memory.stat"
                available = min(available, limit - usage + _read_stat(stat, cache_key))
    return max(available, 0)


def descriptor_limit() -> int:
    """Files and sockets that this process may have open."""
    if resource is None:
        return MAX_DESCRIPTORS
    soft: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)


def raise_descriptor_limit() -> None:
    """As far as a user may; shells allow 1024 by default, and each stream takes one, at either
    end."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid it; then it stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def usable_cores(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Physical cores this process may run on, at least 1: matrix products gain nothing from a
    core's second hardware thread, and threads beyond a container's quota wait for each other."""
    logical = psutil.cpu_count(logical=True) or 1
    physical = psutil.cpu_count(logical=False) or logical
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    # An affinity mask counts hardware threads; assume it has both of a core or one of each.
    cores = max(1, min(physical, allowed))
    for folder in _cgroup_folders(cgroup_root):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            cores = min(cores, max(1, round(quota / period)))
    return cores


def _cgroup_folders(root: Path) -> list[Path]:
    """Our control group and those it is nested in: each may set a limit. In a container the root is
    our own group."""
    folders = [root]
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return folders
    for line in lines:
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            parts = [part for part in path.split("/") if part not in ("", "..")]
            folders += [root.joinpath(*parts[: i + 1]) for i in range(len(parts))]
    return folders


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """Microseconds of CPU time per period, and the period; 0 if there is no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        version1 = folder / "cpu"
        return (
            _read_int(version1 / "cpu.cfs_quota_us") or 0,
            _read_int(version1 / "cpu.cfs_period_us") or 0,
        )
    return (int(quota), int(period)) if quota != "max" else (0, 0)


def _read_int(file: Path) -> int | None:
    """None if the file is absent or says there is no limit."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _read_stat(file: Path, key: str) -> int:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
