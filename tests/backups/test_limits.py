"""What host memory and how many cores may be used, read from made-up systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cumem_sleep import host_facts
from cumem_sleep.core.commitment import reserved_bytes
from cumem_sleep.host_facts import (
    cgroup_available_bytes,
    cgroup_limit_bytes,
    mem_available_bytes,
    mem_total_bytes,
    usable_cores,
)

GIB = 1 << 30
MIB = 1 << 20


class System:
    """A root directory with just the files that a test needs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def group(self, path: str, **files: object) -> None:
        """A control group; files are named with `_` for the first `.`."""
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{path}/{name.replace('_', '.', 1)}", text)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


class TestMemAvailable:
    def test_is_the_kernels_estimate(self, system: System) -> None:
        system.write("proc/meminfo", "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:    2097152 kB")
        assert mem_available_bytes(system.root) == 2 * GIB

    def test_unknown(self, system: System) -> None:
        assert mem_available_bytes(system.root) is None
        system.write("proc/meminfo", "MemTotal: 8388608 kB\nMemFree: 1 kB")
        assert mem_available_bytes(system.root) is None

    def blocks(self, system: System, states: list[str], block_bytes: int = GIB) -> None:
        system.write("sys/devices/system/memory/block_size_bytes", f"{block_bytes:x}")
        for number, state in enumerate(states):
            system.write(f"sys/devices/system/memory/memory{number}/state", state)

    def test_memory_that_the_kernel_keeps_for_itself_is_not_available(self, system: System) -> None:
        system.write("proc/meminfo", f"MemTotal: {int(98.3 * MIB)} kB\nMemAvailable: 1024 kB")
        self.blocks(system, ["online"] * 100)
        assert mem_available_bytes(system.root) == MIB

    def test_memory_that_is_added_on_use_is_available(self, system: System) -> None:
        """Some virtual machines start with a small MemTotal."""
        system.write("proc/meminfo", f"MemTotal: {4 * MIB} kB\nMemAvailable: {3 * MIB} kB")
        self.blocks(system, ["online"] * 100)
        assert mem_available_bytes(system.root) == 3 * GIB + 95 * GIB - 4 * GIB

    def test_memory_blocks_that_are_offline_do_not_count(self, system: System) -> None:
        system.write("proc/meminfo", f"MemTotal: {4 * MIB} kB\nMemAvailable: {3 * MIB} kB")
        self.blocks(system, ["online"] * 4 + ["offline"] * 96)
        assert mem_available_bytes(system.root) == 3 * GIB

    def test_of_this_machine(self) -> None:
        available = mem_available_bytes()
        assert available is not None
        assert MIB < available < 1 << 50


@pytest.mark.parametrize(
    ("total", "limit", "expected"),
    [
        (2048 * GIB, "max", {"MemAvailable": 128 * GIB}),
        (2048 * GIB, 96 * GIB, {"MemAvailable": 128 * GIB, "cgroup": 6 * GIB}),
        (16 * GIB, 8 * GIB, {"MemAvailable": 2 * GIB, "cgroup": 2 * GIB}),
    ],
)
def test_a_share_is_reserved_of_each_limit(
    system: System, monkeypatch: pytest.MonkeyPatch, total: int, limit: int | str, expected: dict[str, int]
) -> None:
    """Of a container's own, too, whatever the host has."""
    system.write("proc/meminfo", f"MemTotal: {total // 1024} kB\nMemAvailable: 1024 kB")
    system.write("proc/self/cgroup", "0::/pod")
    system.group("pod", memory_max=limit, memory_current=GIB)
    monkeypatch.setattr(host_facts, "cgroup_limit_bytes", lambda: cgroup_limit_bytes(system.root))
    monkeypatch.setattr(host_facts, "mem_total_bytes", lambda: mem_total_bytes(system.root))
    assert reserved_bytes() == expected


class TestCgroupV2:
    @pytest.fixture(autouse=True)
    def version_2(self, system: System) -> None:
        system.write("proc/self/cgroup", "0::/pod/container")

    def test_no_limit(self, system: System) -> None:
        system.group("pod/container", memory_max="max", memory_current=5 * GIB)
        assert cgroup_available_bytes(system.root) is None
        assert cgroup_limit_bytes(system.root) is None

    def test_limit(self, system: System) -> None:
        system.group("pod/container", memory_max=8 * GIB, memory_current=5 * GIB)
        assert cgroup_available_bytes(system.root) == 3 * GIB
        assert cgroup_limit_bytes(system.root) == 8 * GIB

    def test_page_cache_that_can_go_is_available(self, system: System) -> None:
        stat = f"anon 5\nfile {4 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}"
        system.group("pod/container", memory_max=8 * GIB, memory_current=7 * GIB, memory_stat=stat)
        assert cgroup_available_bytes(system.root) == 4 * GIB

    def test_page_cache_in_use_is_available_as_for_the_kernel(self, system: System) -> None:
        """As measured in a container: the kernel dropped all of it for what was allocated."""
        stat = f"anon {7 * GIB // 10}\ninactive_file {511 * GIB // 10}\nactive_file {157 * GIB // 10}"
        system.group("pod/container", memory_max=70 * GIB, memory_current=675 * GIB // 10, memory_stat=stat)
        available = cgroup_available_bytes(system.root)
        assert available is not None
        assert round(available / GIB, 1) == 69.3

    @pytest.mark.parametrize(
        ("stat", "available"),
        [
            (f"file {4 * GIB}\nshmem {4 * GIB}\ninactive_anon {4 * GIB}\ninactive_file 0\nactive_file 0", 1),
            (f"inactive_file {2 * GIB}\nactive_file {2 * GIB}\nfile_dirty {GIB}", 4),
            (f"inactive_file {2 * GIB}\nactive_file {2 * GIB}\nfile_dirty {GIB}\nfile_writeback {2 * GIB}", 2),
            (f"active_file {GIB}\nfile_dirty {2 * GIB}\nslab_reclaimable {GIB}", 2),
        ],
    )
    def test_what_has_to_be_written_first_is_not_available(self, system: System, stat: str, available: int) -> None:
        system.group("pod/container", memory_max=8 * GIB, memory_current=7 * GIB, memory_stat=stat)
        assert cgroup_available_bytes(system.root) == available * GIB

    def test_each_group_has_its_own_cache(self, system: System) -> None:
        system.group("pod/container", memory_max=8 * GIB, memory_current=7 * GIB, memory_stat=f"active_file {6 * GIB}")
        system.group("pod", memory_max=20 * GIB, memory_current=19 * GIB, memory_stat=f"active_file {6 * GIB}")
        assert cgroup_available_bytes(system.root) == 7 * GIB
        system.group("pod", memory_max=9 * GIB, memory_current=9 * GIB, memory_stat=f"active_file {6 * GIB}")
        assert cgroup_available_bytes(system.root) == 6 * GIB

    def test_swap_is_not_available(self, system: System) -> None:
        system.group("pod/container", memory_max=8 * GIB, memory_current=7 * GIB, memory_swap_max=64 * GIB)
        assert cgroup_available_bytes(system.root) == GIB

    def test_the_tightest_counts(self, system: System) -> None:
        system.group("pod/container", memory_max=8 * GIB, memory_current=GIB)
        system.group("pod", memory_max=10 * GIB, memory_current=9 * GIB)
        system.group(".", memory_max="max", memory_current=20 * GIB)
        assert cgroup_available_bytes(system.root) == GIB
        assert cgroup_limit_bytes(system.root) == 8 * GIB

    def test_inside_a_container_the_mount_is_the_group(self, system: System) -> None:
        """There the path names what lies outside of the mount."""
        system.group(".", memory_max=4 * GIB, memory_current=GIB)
        assert cgroup_available_bytes(system.root) == 3 * GIB

    def test_nothing_readable(self, system: System) -> None:
        assert cgroup_available_bytes(system.root) is None
        system.group("pod/container", memory_max="nonsense", memory_current="")
        assert cgroup_available_bytes(system.root) is None


class TestCgroupV1:
    @pytest.fixture(autouse=True)
    def version_1(self, system: System) -> None:
        system.write("proc/self/cgroup", "12:cpu,cpuacct:/job\n9:memory:/job\n1:name=systemd:/job\n0::/unified")

    def test_limit(self, system: System) -> None:
        system.group("memory/job", memory_limit_in_bytes=8 * GIB, memory_usage_in_bytes=5 * GIB)
        assert cgroup_available_bytes(system.root) == 3 * GIB
        assert cgroup_limit_bytes(system.root) == 8 * GIB

    def test_no_limit_is_a_huge_number(self, system: System) -> None:
        system.group("memory/job", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=GIB)
        assert cgroup_available_bytes(system.root) is None
        assert cgroup_limit_bytes(system.root) is None

    def test_page_cache_of_the_whole_group(self, system: System) -> None:
        stat = f"cache 1\ninactive_file {GIB}\ntotal_inactive_file {2 * GIB}"
        system.group("memory/job", memory_limit_in_bytes=8 * GIB, memory_usage_in_bytes=7 * GIB, memory_stat=stat)
        assert cgroup_available_bytes(system.root) == 3 * GIB

    def test_a_limit_on_memory_and_swap_together(self, system: System) -> None:
        group, stat = "memory/job", f"total_active_file {GIB}"
        system.group(group, memory_limit_in_bytes=8 * GIB, memory_usage_in_bytes=3 * GIB, memory_stat=stat)
        system.write(f"sys/fs/cgroup/{group}/memory.memsw.limit_in_bytes", 8 * GIB)
        system.write(f"sys/fs/cgroup/{group}/memory.memsw.usage_in_bytes", 7 * GIB)  # of which 4 are swapped
        assert cgroup_available_bytes(system.root) == 2 * GIB

    def test_limit_of_a_parent(self, system: System) -> None:
        system.group("memory", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=GIB)
        system.group("memory/job", memory_limit_in_bytes=8 * GIB, memory_usage_in_bytes=GIB)
        assert cgroup_available_bytes(system.root) == GIB


class TestCores:
    @pytest.fixture(autouse=True)
    def eight_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def test_affinity(self, system: System) -> None:
        assert usable_cores(system.root) == 8

    @pytest.mark.parametrize(
        ("quota", "cores"),
        [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("9900000 100000", 8)],
    )
    def test_quota_of_version_2(self, system: System, quota: str, cores: int) -> None:
        system.write("proc/self/cgroup", "0::/pod")
        system.group("pod", cpu_max=quota)
        assert usable_cores(system.root) == cores

    @pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3), ("50000", 1)])
    def test_quota_of_version_1(self, system: System, quota: str, cores: int) -> None:
        system.write("proc/self/cgroup", "3:cpu:/job")
        system.group("cpu/job", cpu_cfs_quota_us=quota, cpu_cfs_period_us=100000)
        assert usable_cores(system.root) == cores
