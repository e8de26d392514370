"""Compressed backups within a budget of host memory."""

from __future__ import annotations

import numpy as np
import pytest
from compression import (
    COMPRESSED_BYTES,
    MakeAllocator,
    bf16,
    check_bytes,
    check_host_bytes,
    cycle,
    fill,
    fp16,
    noise,
    small_slots,  # noqa: F401  (autouse)
    states,
    write,
    zeros,
)
from preparing import finished
from support import AWAKE, PAGE, free_everything

from cumem_sleep import CuMemAllocator, OutOfHostMemory, sim

pytestmark = pytest.mark.sim


class TestHostMemory:
    @pytest.mark.parametrize("prepare", [False, True])
    def test_budget_that_suffices_for_compressed(self, make_allocator: MakeAllocator, prepare: bool) -> None:
        for setting in ("off", "auto"):
            allocator = make_allocator(compress=setting, host_budget_bytes=COMPRESSED_BYTES)
            contents = fill(allocator, bf16)
            if setting == "off":
                with pytest.raises(OutOfHostMemory, match="budget"):
                    allocator.prepare() if prepare else allocator.sleep()
                free_everything()
                continue
            if prepare:
                assert finished(allocator.prepare()).error is None
            report = allocator.sleep()
            assert report.copied_bytes == (0 if prepare else 2 * PAGE)
            assert allocator.usage()["weights"].host_bytes <= COMPRESSED_BYTES
            allocator.wake_up()
            check_bytes(contents)

    def test_budget_that_is_too_small(self, make_allocator: MakeAllocator) -> None:
        allocator = make_allocator(compress="auto", host_budget_bytes=COMPRESSED_BYTES)
        contents = fill(allocator, bf16, bf16) | fill(allocator, bf16, tag="kv_cache")
        for operation in (allocator.sleep, allocator.prepare, allocator.sleep):
            before = sim.stats()
            with pytest.raises(OutOfHostMemory, match="budget") as raised:
                operation()
            assert COMPRESSED_BYTES < raised.value.needed_bytes < 2 * COMPRESSED_BYTES
            assert states() == {AWAKE}
            assert sim.stats().registered_bytes == before.registered_bytes
            assert sim.stats().live_handles == before.live_handles
            check_bytes(contents)
        allocator.free(next(iter(contents)))
        del contents[next(iter(contents))]
        allocator.sleep()
        allocator.wake_up("weights")
        check_bytes(dict(list(contents.items())[:1]))

    @pytest.mark.slow
    @pytest.mark.parametrize("part_bytes", [2 * PAGE, 1 << 30])
    @pytest.mark.parametrize("what", ["one grows", "a new one"])
    def test_old_backups_of_what_changed_make_way(
        self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch, what: str, part_bytes: int
    ) -> None:
        """What comes first wants more memory than there is until the others, which shrink, have their turn."""
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", part_bytes)
        room = int(2 * PAGE * ((0.70 if what == "one grows" else 0.02) + 3 * 0.88))
        allocator = make_allocator(compress="auto", host_budget_bytes=room)
        contents = fill(allocator, *([bf16] if what == "one grows" else []), fp16, fp16, fp16)
        cycle(allocator, contents)
        for number, address in enumerate(contents):
            kind = noise if what == "one grows" and number == 0 else zeros
            contents[address] = kind(2 * PAGE, np.random.default_rng(5))
            write(address, contents[address])
        if what == "a new one":
            contents |= fill(allocator, zeros)
        cycle(allocator, contents)
        check_host_bytes(allocator)
