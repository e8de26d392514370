"""Ranges that are kept of dropped memory: their bytes come back, or somebody is told why none of them did."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from support import MIB, PAGE, Memory

from cumem_sleep import CuMemAllocator

Ranges = npt.NDArray[np.int64]


class Cache:
    """Segments of `kv_cache` with random bytes, and random ranges of each that are to be kept."""

    def __init__(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        pages: tuple[int, ...] = (2, 3, 1),
        devices: int = 1,
        seed: int = 1,
    ) -> None:
        self.allocator, self.memory = allocator, memory
        self.devices = [number % devices for number in range(len(pages))]
        self.addresses = [
            allocator.malloc(count * PAGE, "kv_cache", device)
            for count, device in zip(pages, self.devices, strict=True)
        ]
        self.contents = [
            memory.fill_random(address, count * PAGE, device)
            for address, count, device in zip(self.addresses, pages, self.devices, strict=True)
        ]
        self.keep = self.chosen(np.random.default_rng(seed))

    def chosen(self, random: np.random.Generator) -> dict[int, Ranges]:
        """Blocks of one size, in any order, some of them next to each other; every second address is inside."""
        keep = {}
        for number, (address, content) in enumerate(zip(self.addresses, self.contents, strict=True)):
            block = int(random.choice([16, 4096, 65536, 3 * 65536 + 16]))
            blocks = random.permutation(len(content) // block)[: random.integers(1, 40)]
            inside = (number % 2) * 4096
            keep[address + inside] = np.column_stack((blocks * block - inside, np.full(len(blocks), block)))
        return keep

    @property
    def bytes(self) -> int:
        return sum(int(rows[:, 1].sum()) for rows in self.keep.values())

    def is_back(self) -> bool:
        """Whether all of it is on the devices."""
        for address, rows in self.keep.items():
            number = max(n for n, start in enumerate(self.addresses) if start <= address)
            start, content = self.addresses[number], self.contents[number]
            now = self.memory.read(start, len(content), self.devices[number])
            for offset, nbytes in (rows + np.array((address - start, 0))).tolist():
                if now[offset : offset + nbytes] != content[offset : offset + nbytes]:
                    return False
        return True

    def write_elsewhere(self) -> None:
        """As the next user of the device's memory would."""
        for address, content, device in zip(self.addresses, self.contents, self.devices, strict=True):
            self.memory.write(address, bytes(len(content)), device)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", MIB)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("seed", range(8))
def test_the_bytes_come_back(allocator: CuMemAllocator, memory: Memory, seed: int) -> None:
    weights = allocator.malloc(PAGE, "weights")
    content = memory.fill_random(weights, PAGE)
    cache = Cache(allocator, memory, seed=seed)
    for _ in range(2):
        report = allocator.sleep(keep=cache.keep)
        assert (report.kept_bytes, report.not_kept) == (cache.bytes, "")
        assert allocator.usage()["kv_cache"].kept_bytes == cache.bytes
        report = allocator.wake_up()
        assert (report.kept_bytes, report.not_kept) == (cache.bytes, "")
        assert cache.is_back()
        assert memory.read(weights, PAGE) == content
        assert allocator.usage()["kv_cache"].kept_bytes == 0
    allocator.sleep()
    assert allocator.wake_up().not_kept == ""
