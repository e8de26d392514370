"""A KV cache of which a sleep keeps ranges."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from support import DEVICE_BYTES, PAGE, holds, random_bytes

from cumem_sleep import CuMemAllocator, SleepReport, WakeReport, sim


class Cache:
    """Segments of `kv_cache` with random bytes, some weights, and ranges of the first that are to be kept.

    Bytes are read and written at their addresses, which the simulated driver allows, so that no call is made for it.
    """

    def __init__(
        self, allocator: CuMemAllocator, pages: tuple[int, ...] = (2, 3, 1), devices: int = 1, seed: int = 1
    ) -> None:
        self.allocator = allocator
        sim.configure(devices=devices, device_bytes=DEVICE_BYTES)
        self.weights = allocator.malloc(PAGE, "weights")
        self.addresses = [
            allocator.malloc(count * PAGE, "kv_cache", number % devices) for number, count in enumerate(pages)
        ]
        self.contents: dict[int, bytes] = {}
        random = np.random.default_rng(seed)
        for address, count in zip((self.weights, *self.addresses), (1, *pages), strict=True):
            self.contents[address] = random_bytes(count * PAGE, random)
        self.fill()
        self.keep = {}
        for number, address in enumerate(self.addresses):
            block = int(random.choice([16, 4096, 65536, 3 * 65536 + 16]))
            blocks = random.permutation(len(self.contents[address]) // block)[: random.integers(1, 40)]
            inside = (number % 2) * 4096  # an address in the middle serves as well
            self.keep[address + inside] = np.column_stack((blocks * block - inside, np.full(len(blocks), block)))

    @property
    def bytes(self) -> int:
        return sum(int(rows[:, 1].sum()) for rows in self.keep.values())

    @property
    def host_bytes(self) -> int:
        return self.allocator.usage()["kv_cache"].host_bytes

    @property
    def kept_bytes(self) -> int:
        return self.allocator.usage()["kv_cache"].kept_bytes

    def fill(self) -> None:
        """All is as it was at first."""
        for address, content in self.contents.items():
            ctypes.memmove(address, content, len(content))

    def is_back(self) -> bool:
        """Whether the ranges have their bytes."""
        for address, rows in self.keep.items():
            start = max(each for each in self.addresses if each <= address)
            for offset, nbytes in (rows + np.array((address - start, 0))).tolist():
                if not holds(start + offset, self.contents[start][offset : offset + nbytes]):
                    return False
        return True

    def is_all_there(self) -> bool:
        """Whether nothing at all was lost."""
        return all(holds(at, content) for at, content in self.contents.items())

    def sleep(self, **arguments: Any) -> SleepReport:
        return self.allocator.sleep(keep=self.keep, **arguments)

    def check_kept(self, report: SleepReport) -> None:
        """After a sleep: all of it is kept."""
        assert (report.kept_bytes, report.not_kept) == (self.bytes, "")
        assert self.kept_bytes == self.bytes

    def wake(self) -> WakeReport:
        """Weights are right, and what is reported to be back is. What is not is computed anew."""
        report = self.allocator.wake_up()
        assert holds(self.weights, self.contents[self.weights])
        assert report.kept_bytes in (0, self.bytes)
        assert not (report.kept_bytes and report.not_kept)
        assert not report.kept_bytes or self.is_back(), "a wrong byte, said to be kept"
        assert self.kept_bytes == 0
        if not report.kept_bytes:
            self.fill()
        return report

    def check_back(self) -> None:
        """Wake, and all of it is back."""
        report = self.wake()
        assert (report.kept_bytes, report.not_kept) == (self.bytes, "")

    def check_lost(self, why: str) -> None:
        """Wake, and none of it is back, because of that."""
        report = self.wake()
        assert report.kept_bytes == 0
        assert why in report.not_kept
