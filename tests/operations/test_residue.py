"""What a sleep reports of the memory that is left on its devices: items that add up, or none."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import MIB, PAGE, Cuda, in_thread
from two_processes import other_process

from cumem_sleep import CuMemAllocator, DriverError, InvalidArgument, InvalidArgumentType, SleepReport, _core, sim
from cumem_sleep.core.driver import open_driver
from cumem_sleep.for_plugin import note_communicators, warming_up

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


def test_everything_has_its_item(allocator: CuMemAllocator, take: Take) -> None:
    take(8 * MIB)
    allocator.malloc(PAGE, "weights")
    with warming_up(allocator):
        take(6 * MIB)
        allocator.malloc(PAGE, "kv_cache")  # its own is not counted
    take(4 * MIB)
    report = allocator.sleep()
    assert report.left_bytes == 18 * MIB
    assert report.left == {"context": 8 * MIB, "modules_and_graphs": 6 * MIB, "rest": 4 * MIB}
    assert "(about 8.00 MiB CUDA context and other processes, 6.00 MiB modules and graphs, 4.00 MiB the rest)" in str(
        report
    )


def test_communicators_are_a_part_of_what_was_there_before(allocator: CuMemAllocator, take: Take) -> None:
    take(8 * MIB)
    note_communicators(allocator, {0: 6 * MIB, 1: 1 * MIB})  # nothing of this layer is on the other device
    allocator.malloc(PAGE, "weights")
    report = allocator.sleep()
    assert report.left == {"context": 2 * MIB, "nccl": 6 * MIB, "rest": 0}
    assert "(about 2.00 MiB CUDA context and other processes, 6.00 MiB NCCL)" in str(report)


def test_communicators_are_never_more_than_what_was_there(allocator: CuMemAllocator, take: Take) -> None:
    take(8 * MIB)
    note_communicators(allocator, {0: 9 * MIB})
    allocator.malloc(PAGE, "weights")
    assert allocator.sleep().left == {"nccl": 8 * MIB, "rest": 0}


@pytest.mark.parametrize("noted", [{-1: 5}, {0: -5}, {0: 1.5}, {True: 5}, {0: "much"}])
def test_nonsense_about_communicators(allocator: CuMemAllocator, noted: dict[int, int]) -> None:
    """Nothing of it is noted."""
    with pytest.raises(InvalidArgument, match=r"^(device|bytes of device (0|-1))="):
        note_communicators(allocator, {0: 5, **noted})


@pytest.mark.parametrize("noted", [5, None, [(0, 5)], {0: 1.5}, {"0": 5}])
def test_communicators_of_the_wrong_type(allocator: CuMemAllocator, noted: dict[int, int]) -> None:
    with pytest.raises(InvalidArgumentType, match="expected"):
        note_communicators(allocator, noted)


def test_memory_that_stays_awake_is_an_item(allocator: CuMemAllocator, take: Take) -> None:
    take(8 * MIB)
    allocator.malloc(3 * PAGE, "weights")
    allocator.malloc(PAGE, "kv_cache")
    report = allocator.discard("kv_cache")
    assert report.left_bytes == 8 * MIB + 3 * PAGE
    assert report.left == {"awake": 3 * PAGE, "context": 8 * MIB, "rest": 0}


def test_what_others_gave_back_is_not_guessed_at(allocator: CuMemAllocator, take: Take) -> None:
    """Another process had much when this one began; no item may be larger than the sum, or below zero."""
    give_back = take(32 * MIB)
    allocator.malloc(PAGE, "weights")
    with warming_up(allocator):
        take(4 * MIB)
    give_back()
    report = allocator.sleep()
    assert (report.left_bytes, report.left) == (4 * MIB, {})
    assert str(report).count("4.00 MiB left on the GPU; ") == 1


def test_of_a_warm_up_only_what_is_still_there_counts(allocator: CuMemAllocator, take: Take) -> None:
    """PyTorch's unused cache, which a sleep empties before it looks."""
    take(8 * MIB)
    allocator.malloc(PAGE, "weights")
    with warming_up(allocator):
        empty_cache = take(6 * MIB)
        take(4 * MIB)
    empty_cache()
    assert allocator.sleep().left == {"context": 8 * MIB, "modules_and_graphs": 4 * MIB, "rest": 0}


def test_a_warm_up_during_which_others_gave_memory_back_has_no_item(allocator: CuMemAllocator, take: Take) -> None:
    give_back = take(8 * MIB)
    take(2 * MIB)
    allocator.malloc(PAGE, "weights")
    with warming_up(allocator):
        take(4 * MIB)
        give_back()
    take(8 * MIB)
    assert allocator.sleep().left == {"context": 10 * MIB, "rest": 4 * MIB}


def test_warm_ups_add_up(allocator: CuMemAllocator, take: Take) -> None:
    allocator.malloc(PAGE, "weights")
    for _ in range(2):
        with warming_up(allocator):
            take(4 * MIB)
    assert allocator.sleep().left == {"modules_and_graphs": 8 * MIB, "rest": 0}


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_warm_ups_that_overlap_count_once(allocator: CuMemAllocator, take: Take, first_to_end: int) -> None:
    allocator.malloc(PAGE, "weights")
    for _ in range(2):
        blocks = [warming_up(allocator), warming_up(allocator)]
        blocks[0].__enter__()
        take(2 * MIB)
        in_thread(blocks[1].__enter__)
        take(4 * MIB)
        in_thread(lambda: blocks.pop(first_to_end).__exit__(None, None, None))  # noqa: B023
        take(2 * MIB)
        blocks[0].__exit__(None, None, None)
    take(20 * MIB)
    assert allocator.sleep().left == {"modules_and_graphs": 16 * MIB, "rest": 20 * MIB}


def test_notes_are_of_the_first_allocation(allocator: CuMemAllocator, take: Take) -> None:
    take(2 * MIB)
    allocator.malloc(PAGE, "weights")
    take(4 * MIB)
    allocator.malloc(PAGE, "weights")
    assert allocator.sleep().left == {"context": 2 * MIB, "rest": 4 * MIB}


def test_a_device_without_notes_leaves_the_item_out(allocator: CuMemAllocator, take: Take) -> None:
    sim.configure(devices=2)
    take(2 * MIB)
    allocator.malloc(PAGE, "weights", device=0)
    allocator.malloc(PAGE, "weights", device=1)
    del allocator._layer.residue._before[1]  # as after a hook in front of cudaMalloc, which tells nobody
    report = allocator.sleep()
    assert (report.left_bytes, report.left) == (2 * MIB, {})


def test_nothing_fails_for_a_note(allocator: CuMemAllocator, take: Take) -> None:
    take(2 * MIB)
    sim.fail("cuMemGetInfo")
    allocator._layer.residue.note_before(0)
    allocator.malloc(PAGE, "weights")
    sim.fail("cuMemGetInfo", times=2)
    with warming_up(allocator):
        take(2 * MIB)
    assert allocator.sleep().left == {"context": 2 * MIB, "rest": 2 * MIB}


def test_a_warm_up_that_fails_is_not_noted(allocator: CuMemAllocator, take: Take) -> None:
    def fail() -> None:
        take(2 * MIB)
        raise DriverError("cuLaunchKernel", "CUDA_ERROR_UNKNOWN")

    allocator.malloc(PAGE, "weights")
    with pytest.raises(DriverError, match="cuLaunchKernel"), warming_up(allocator):
        fail()
    assert allocator.sleep().left == {}


def test_a_pool_of_pytorch_is_noted_before_it_is_entered(
    allocator: CuMemAllocator, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pools:
        """Stands for `TorchPools`, with CUDA in use on device 0."""

        def device_in_use(self) -> int:
            return 0

        def use(self) -> Callable[[], None]:
            raise KeyError("entered")

    allocator._operations.open()
    take(6 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(allocator._pools, "found", Pools())
        with pytest.raises(KeyError, match="entered"), allocator.use_memory_pool("weights"):
            pass
    take(2 * MIB)
    allocator.malloc(PAGE, "weights")
    assert allocator.sleep().left == {"context": 6 * MIB, "rest": 2 * MIB}


def test_level_3_leaves_no_items(allocator: CuMemAllocator, take: Take) -> None:
    take(8 * MIB)
    allocator.malloc(PAGE, "weights")
    report = allocator.sleep(level=3)
    assert (report.left_bytes, report.left) == (4 * MIB, {})
    allocator.wake_up()
    assert allocator.sleep().left == {"context": 8 * MIB, "rest": 0}


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
                {"context": 8 * MIB, "held_elsewhere": 3 * PAGE, "rest": 0},
            )
            assert "up to 6.00 MiB freed here and still held elsewhere)" in str(report)
            wake()
            link.send()
            link.receive()
        assert sleep().left == {"context": 8 * MIB, "rest": 0}

    def test_a_warm_up_is_apart_from_it(
        self,
        allocator: CuMemAllocator,
        take: Take,
        during_the_release: Callable[[Callable[[], object]], None],
    ) -> None:
        allocator.malloc(PAGE, "weights")
        with warming_up(allocator):
            empty_cache = take(6 * MIB)
        empty_cache()
        during_the_release(lambda: take(4 * MIB))
        assert allocator.sleep().left == {"held_elsewhere": 4 * MIB, "rest": 0}

    def test_is_told_even_if_others_have_less_than_they_had(
        self,
        allocator: CuMemAllocator,
        take: Take,
        during_the_release: Callable[[Callable[[], object]], None],
    ) -> None:
        give_back = take(8 * MIB)
        take(2 * MIB)
        allocator.malloc(PAGE, "weights")
        give_back()
        during_the_release(lambda: take(4 * MIB))
        assert allocator.sleep().left == {"held_elsewhere": 4 * MIB, "rest": 2 * MIB}

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
        assert [report.left for report in reports] == [{"context": 2 * MIB, "rest": 0}, {}]
        assert [report.freed_bytes for report in reports] == [PAGE, PAGE]
