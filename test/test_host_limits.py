"""Limits of control groups count where they are lower than the machine's."""

from __future__ import annotations

from pathlib import Path

import psutil

from srt.host_limits import available_memory, usable_cores


def write(folder: Path, **contents: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert 0 < available_memory(tmp_path) <= total
    assert 1 <= usable_cores(tmp_path) <= (psutil.cpu_count() or 1)


def test_a_group_of_version_2_limits_memory_and_gives_its_page_cache_back(tmp_path: Path) -> None:
    write(tmp_path, memory__max="1000", memory__current="700")
    assert available_memory(tmp_path) == 300
    write(tmp_path, memory__stat="anon 500\ninactive_file 200\n")
    assert available_memory(tmp_path) == 500
    write(tmp_path, memory__max="600")
    assert available_memory(tmp_path) == 100
    write(tmp_path, memory__max="10")
    assert available_memory(tmp_path) == 0


def test_no_limit_in_a_group_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path, memory__max="max", memory__current="700", cpu__max="max 100000")
    assert available_memory(tmp_path) > 10**6
    assert usable_cores(tmp_path) == usable_cores(tmp_path / "nothing")


def test_a_group_of_version_1_limits_memory_and_cores(tmp_path: Path) -> None:
    write(
        tmp_path / "memory",
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="900",
        memory__stat="total_inactive_file 50",
    )
    assert available_memory(tmp_path) == 150
    write(tmp_path / "cpu", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    assert usable_cores(tmp_path) == 1
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert usable_cores(tmp_path) == usable_cores(tmp_path / "nothing")


def test_a_quota_below_one_core_still_is_one_core(tmp_path: Path) -> None:
    write(tmp_path, cpu__max="20000 100000")
    assert usable_cores(tmp_path) == 1
