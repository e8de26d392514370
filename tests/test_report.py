"""What reports and errors say."""

from __future__ import annotations

import dataclasses
import pickle
import time

import pytest

from cumem_sleep import (
    BackupMismatch,
    BackupPlace,
    CumemSleepError,
    DriverError,
    InvalidArgument,
    InvalidArgumentType,
    InvalidState,
    OutOfDeviceMemory,
    OutOfHostMemory,
    SleepReport,
    WakeReport,
)
from cumem_sleep.errors import format_bytes
from cumem_sleep.report import PhaseTimer

GIB = 1 << 30

SLEEP = SleepReport(
    freed_bytes=61 * GIB,
    copied_bytes=50 * 10**9,
    clean_bytes=GIB,
    dropped_bytes=2 * GIB,
    left_bytes=GIB,
    seconds=1.25,
    phases={"quiesce": 0.001, "copy": 1.0, "release": 0.2},
)
WAKE = WakeReport(
    mapped_bytes=61 * GIB,
    restored_bytes=55 * 10**9,
    verified_bytes=GIB,
    seconds=1.2,
    phases={"copy": 1.0, "map": 0.1, "verify": 0.015},
)


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (
            SLEEP,
            "sleep: freed 61.00 GiB in 1.250 s (copied 46.57 GiB at 50.0 GB/s, unchanged 1.00 GiB, dropped 2.00 GiB),"
            " 1.00 GiB left on the GPU; quiesce 0.001 s, copy 1.000 s, release 0.200 s",
        ),
        (
            SleepReport(
                left_bytes=GIB,
                left={"held_elsewhere": 512 << 20, "awake": 256 << 20, "rest": 256 << 20},
            ),
            "sleep: freed 0 B in 0.000 s (copied 0 B, unchanged 0 B, dropped 0 B), 1.00 GiB left on the GPU (about"
            " 256.00 MiB awake, up to 512.00 MiB freed here and still held elsewhere, 256.00 MiB the rest)",
        ),
        (
            WAKE,
            "wake: mapped 61.00 GiB in 1.200 s (restored 51.22 GiB at 55.0 GB/s, verified 1.00 GiB);"
            " copy 1.000 s, map 0.100 s, verify 0.015 s",
        ),
        (
            dataclasses.replace(SLEEP, stored_bytes=33 * 10**9),
            "sleep: freed 61.00 GiB in 1.250 s (copied 46.57 GiB at 50.0 GB/s as 30.73 GiB, 0.660 of it,"
            " unchanged 1.00 GiB, dropped 2.00 GiB), 1.00 GiB left on the GPU;"
            " quiesce 0.001 s, copy 1.000 s, release 0.200 s",
        ),
        (
            dataclasses.replace(WAKE, stored_bytes=33 * 10**9),
            "wake: mapped 61.00 GiB in 1.200 s (restored 51.22 GiB at 55.0 GB/s from 30.73 GiB, 0.600 of it,"
            " verified 1.00 GiB); copy 1.000 s, map 0.100 s, verify 0.015 s",
        ),
        (
            dataclasses.replace(SLEEP, found_bytes=GIB, place=BackupPlace("/run/v.sock")),
            "sleep: freed 61.00 GiB in 1.250 s (copied 46.57 GiB at 50.0 GB/s, unchanged 1.00 GiB, of which 1.00 GiB"
            " found in the vault, dropped 2.00 GiB), backups in the vault at /run/v.sock, 1.00 GiB left on the GPU;"
            " quiesce 0.001 s, copy 1.000 s, release 0.200 s",
        ),
        (SleepReport(note="nothing to do"), "sleep: nothing to do"),
        (WakeReport(note="nothing to do"), "wake: nothing to do"),
    ],
)
def test_log_line(report: SleepReport | WakeReport, text: str) -> None:
    assert str(report) == text
    assert str(dataclasses.replace(report, simulated=True)) == f"[simulated] {text}"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2 << 20, "2.00 MiB"),
        (3 << 29, "1.50 GiB"),
        (141 * GIB, "141.00 GiB"),
        (5 << 40, "5.00 TiB"),
        (5 << 60, "5242880.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


class TestPhaseTimer:
    def test_adds_up_in_the_order_of_first_runs(self) -> None:
        timer = PhaseTimer()
        for phase in ("map", "copy", "map"):
            with timer(phase):
                time.sleep(0.002)
        assert list(timer.phases) == ["map", "copy"]
        assert timer.phases["map"] >= 0.004
        assert timer.seconds >= timer.phases["map"] + timer.phases["copy"]

    def test_counts_a_phase_that_fails(self) -> None:
        timer = PhaseTimer()
        with pytest.raises(KeyError), timer("copy"):
            raise KeyError
        assert "copy" in timer.phases


ERRORS = [
    DriverError("cuMemMap", "CUDA_ERROR_INVALID_VALUE", "invalid argument", "segment at 0x1000"),
    OutOfDeviceMemory(2 * GIB, GIB, 1, segment="3 sleeping segments"),
    OutOfHostMemory(2 * GIB, GIB, "budget"),
    BackupMismatch("segment weights", "ab" * 16, "cd" * 16),
    InvalidState("not now"),
    InvalidArgument("level=3"),
    InvalidArgumentType("level='x'"),
]


class TestErrors:
    @pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
    def test_survive_another_process(self, error: CumemSleepError) -> None:
        """A worker's error is pickled on its way to the engine, as vLLM does with everything."""
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)

    def test_driver_error(self) -> None:
        error = ERRORS[0]
        assert str(error) == ("cuMemMap failed with CUDA_ERROR_INVALID_VALUE: for segment at 0x1000: invalid argument")

    def test_out_of_device_memory(self) -> None:
        text = str(ERRORS[1])
        for words in ("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "device 1", "2.00 GiB", "1.00 GiB", "3 sleeping"):
            assert words in text

    @pytest.mark.parametrize("limit", ["budget", "cgroup", "MemAvailable", "cuMemHostRegister", "mmap"])
    def test_out_of_host_memory(self, limit: str) -> None:
        error = OutOfHostMemory(2 * GIB, GIB, limit, "why")
        assert (error.needed_bytes, error.available_bytes, error.limit) == (2 * GIB, GIB, limit)
        for words in ("2.00 GiB", "1.00 GiB", f"limit: {limit}", "why", OutOfHostMemory.ADVICE.get(limit, "")):
            assert words in str(error)

    def test_backup_mismatch(self) -> None:
        text = str(ERRORS[3])
        for words in ("segment weights", "ab" * 16, "cd" * 16, "asleep"):
            assert words in text
