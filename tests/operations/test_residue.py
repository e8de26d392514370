"""What a sleep reports of the memory that is left on its devices: items that add up, or none."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import MIB, PAGE, Cuda, in_thread
from two_processes import other_process

from cumem_sleep import CuMemAllocator, SleepReport, _core, sim
from cumem_sleep.core.driver import open_driver

pytestmark = pytest.mark.sim

Take = Callable[[int], Callable[[], None]]


@pytest.fixture
def take(allocator: CuMemAllocator) -> Iterator[Take]:
    """Takes device memory that is not the layer's; the result gives it back."""
    open_driver("sim")
    cuda = Cuda()
    cuda.enter()
    taken: list[ctypes.c_uint64] = []

    def free(address: ctypes.c_uint64) -> None:
        taken.remove(address)
        cuda.call("cuMemFree_v2", address)

    def take(nbytes: int) -> Callable[[], None]:
        address = ctypes.c_uint64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        taken.append(address)
        return lambda: free(address)

    yield take
    for address in [*taken]:
        free(address)
    cuda.leave()


def test_memory_that_stays_awake_is_an_item(allocator: CuMemAllocator, take: Take) -> None:
    take(8 * MIB)
    allocator.malloc(3 * PAGE, "weights")
    allocator.malloc(PAGE, "kv_cache")
    report = allocator.discard("kv_cache")
    assert report.left_bytes == 8 * MIB + 3 * PAGE
    assert report.left == {"awake": 3 * PAGE, "rest": 8 * MIB}


def test_what_is_all_of_others_has_no_items(allocator: CuMemAllocator, take: Take) -> None:
    allocator.malloc(PAGE, "weights")
    take(4 * MIB)
    report = allocator.sleep()
    assert (report.left_bytes, report.left) == (4 * MIB, {})
    assert "4.00 MiB left on the GPU; " in str(report)


class TestHeldElsewhere:
    """What a sleep released, and what did not become free."""

    HOLDER = """
        open_driver()
        nbytes, descriptor = link.receive()
        imported = _core.ImportedMemory(descriptor, 0, nbytes)
        os.close(descriptor)
        link.send()
        link.receive()
        imported.close()
        link.send()
    """

    @pytest.fixture
    def during_the_release(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
        """Something is called between the two looks of a sleep."""

        def call(happen: Callable[[], object]) -> None:
            put_to_sleep = _core.put_to_sleep

            def put_all_to_sleep(*arguments: Any) -> int:
                freed_bytes = put_to_sleep(*arguments)
                happen()
                return freed_bytes

            monkeypatch.setattr(_core, "put_to_sleep", put_all_to_sleep)

        return call

    @pytest.mark.parametrize("operation", ["sleep", "discard", "regions"])
    def test_what_another_process_maps_is_an_item(self, allocator: CuMemAllocator, take: Take, operation: str) -> None:
        take(8 * MIB)
        if operation == "regions":
            with allocator.regions.use("x", backup=True):
                exported = allocator.malloc(3 * PAGE)
                allocator.malloc(PAGE)
        else:
            exported = allocator.malloc(3 * PAGE, "kv_cache")
            allocator.malloc(PAGE, "kv_cache")
        sleep = {
            "sleep": allocator.sleep,
            "discard": lambda: allocator.discard("kv_cache"),
            "regions": allocator.regions.sleep,
        }[operation]
        wake = allocator.regions.wake if operation == "regions" else allocator.wake_up
        before = _core.memory_info(0)[0]
        with other_process(self.HOLDER) as (link, _):
            descriptor, _, nbytes = _core.export_memory(exported)
            link.send(nbytes, descriptor)
            os.close(descriptor)
            link.receive()
            report = sleep()
            assert report.freed_bytes == 4 * PAGE
            assert _core.memory_info(0)[0] == before + PAGE
            assert (report.left_bytes, report.left) == (
                8 * MIB + 3 * PAGE,
                {"held_elsewhere": 3 * PAGE, "rest": 8 * MIB},
            )
            assert "(about up to 6.00 MiB freed here and still held elsewhere, 8.00 MiB the rest)" in str(report)
            wake()
            link.send()
            link.receive()
        report = sleep()
        assert (report.left_bytes, report.left) == (8 * MIB, {})

    def test_level_3_has_no_items(
        self,
        allocator: CuMemAllocator,
        take: Take,
        during_the_release: Callable[[Callable[[], object]], None],
    ) -> None:
        """Theirs are of level 1."""
        allocator.malloc(PAGE, "weights")
        during_the_release(lambda: take(8 * MIB))
        report = allocator.sleep(level=3)
        assert (report.left_bytes, report.left) == (4 * MIB, {})
        allocator.wake_up()

    def test_what_others_free_meanwhile_is_no_item(
        self,
        allocator: CuMemAllocator,
        take: Take,
        during_the_release: Callable[[Callable[[], object]], None],
    ) -> None:
        give_back = take(8 * MIB)
        allocator.malloc(PAGE, "weights")
        during_the_release(give_back)
        report = allocator.sleep()
        assert (report.left_bytes, report.left) == (0, {})

    def test_what_became_free_on_one_device_does_not_hide_another(
        self,
        allocator: CuMemAllocator,
        take: Take,
        during_the_release: Callable[[Callable[[], object]], None],
    ) -> None:
        sim.configure(devices=2)
        give_back = take(8 * MIB)
        for device in (0, 1):
            allocator.malloc(PAGE, "weights", device=device)
        elsewhere: list[_core.Scratch] = []

        def happen() -> None:
            give_back()
            elsewhere.append(_core.Scratch(1, 2 * PAGE))

        during_the_release(happen)
        assert allocator.sleep().left["held_elsewhere"] == 2 * PAGE
        elsewhere[0].close()

    def test_memory_of_this_layer_is_none_of_it(
        self, allocator: CuMemAllocator, during_the_release: Callable[[Callable[[], object]], None]
    ) -> None:
        allocator.malloc(PAGE, "weights")
        during_the_release(lambda: in_thread(lambda: allocator.malloc(PAGE, "weights")))
        assert allocator.sleep().left == {"awake": PAGE, "rest": 0}

    def test_nothing_fails_for_it(self, allocator: CuMemAllocator, take: Take) -> None:
        """Without the look before the release there is no item; without the one after it there is none at all."""
        take(2 * MIB)
        allocator.malloc(PAGE, "weights")
        reports: list[SleepReport] = []
        for after in (0, 1):
            sim.fail("cuMemGetInfo", after=after)
            reports.append(allocator.sleep())
            allocator.wake_up()
        assert [(report.left_bytes, report.left) for report in reports] == [(2 * MIB, {}), (0, {})]
        assert [report.freed_bytes for report in reports] == [PAGE, PAGE]
