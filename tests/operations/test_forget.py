"""What sleeps gives up its backups, because new bytes are about to be loaded."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from support import AWAKE, BACKED_UP, DROPPED, PAGE, Memory
from waking import OldWeights, check_bytes, fill, states

from cumem_sleep import CuMemAllocator, DriverError, InvalidArgument, InvalidState, OutOfDeviceMemory, _core, sim
from cumem_sleep.core import preload
from cumem_sleep.core.levels import DEFERRABLE_TAGS


@pytest.mark.parametrize("tags", ["weights", ["weights", "kv_cache"]])
def test_what_is_forgotten_comes_back_without_its_bytes(old_weights: OldWeights, tags: str | list[str]) -> None:
    allocator, weights = old_weights.allocator, old_weights.weights
    held_bytes = allocator.usage()["default"].host_bytes
    assert allocator.release_backups(tags) == 3 * PAGE
    assert states() == {"weights": DROPPED, "kv_cache": DROPPED, "default": BACKED_UP}
    usage = allocator.usage()
    assert (usage["weights"].host_bytes, usage["weights"].backed_up_bytes) == (0, 0)
    assert usage["default"].host_bytes == held_bytes
    with pytest.raises(InvalidState, match="dropped"):
        allocator.read_backup(next(iter(weights)), PAGE)
    assert allocator.release_backups(tags) == 0
    assert allocator.wake_up().restored_bytes == PAGE
    check_bytes(old_weights.memory, old_weights.others)
    old_weights.check_that_they_are_gone()
    old_weights.check_that_new_ones_survive()


def test_what_is_awake_keeps_its_backup(allocator: CuMemAllocator, memory: Memory) -> None:
    weights = fill(allocator, memory, [PAGE])
    fill(allocator, memory, [PAGE], "kv_cache")
    assert allocator.release_backups(DEFERRABLE_TAGS) == 0
    allocator.sleep()
    allocator.wake_up("weights")
    assert allocator.release_backups(DEFERRABLE_TAGS) == 0
    assert states() == {"weights": AWAKE, "kv_cache": DROPPED}
    assert allocator.sleep().clean_bytes == PAGE
    allocator.wake_up()
    check_bytes(memory, weights)


def test_regions_forget_nothing(allocator: CuMemAllocator, memory: Memory) -> None:
    with allocator.regions.use_without_pool("weights", backup=True):
        address = allocator.malloc(PAGE)
    content = memory.fill_random(address, PAGE)
    allocator.regions.sleep()
    allocator.release_backups(DEFERRABLE_TAGS)
    allocator.regions.wake()
    check_bytes(memory, {address: content})


def test_what_was_kept_of_dropped_memory_is_given_up(allocator: CuMemAllocator, memory: Memory) -> None:
    """A cache that was computed with the old weights."""
    fill(allocator, memory, [PAGE])
    (cache,) = fill(allocator, memory, [PAGE], "kv_cache")
    memory.close()
    allocator.sleep(keep={cache: [(0, 4096)]})
    allocator.release_backups("weights")
    assert allocator.usage()["kv_cache"].kept_bytes == 0
    woken = allocator.wake_up()
    assert (woken.kept_bytes, woken.not_kept) == (0, "release_backups() was called")


@pytest.mark.sim
def test_memory_that_the_driver_did_not_take_is_given_back_all_the_same(
    allocator: CuMemAllocator, memory: Memory
) -> None:
    fill(allocator, memory, [PAGE])
    sim.fail("cuMemRelease", times=100, error="CUDA_ERROR_UNKNOWN")
    allocator.sleep()
    assert allocator.release_backups(DEFERRABLE_TAGS) == PAGE
    sim.reset()
    assert _core.reclaim() == 0
    assert sim.stats().live_handles == 0
    allocator.wake_up()


@pytest.mark.sim
def test_a_wake_that_fails_leaves_them_lost(allocator: CuMemAllocator, memory: Memory) -> None:
    fill(allocator, memory, [PAGE] * 2)
    allocator.sleep()
    allocator.release_backups(DEFERRABLE_TAGS)
    sim.fail("cuMemSetAccess", after=1, error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(DriverError, match="cuMemSetAccess"):
        allocator.wake_up()
    sim.reset()
    assert states() == {"weights": DROPPED}
    assert allocator.wake_up().restored_bytes == 0


@pytest.mark.parametrize("tags", ["weight", ["weights", 1], 7, b"weights"])
def test_other_tags_are_refused(allocator: CuMemAllocator, tags: object) -> None:
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    with pytest.raises(InvalidArgument):
        allocator.release_backups(tags)  # type: ignore[arg-type]
    assert states() == {"weights": BACKED_UP}


@pytest.mark.parametrize("tags", [None, "weights"])
def test_a_wake_that_does_not_restore_gives_them_up(old_weights: OldWeights, tags: str | None) -> None:
    allocator = old_weights.allocator
    with pytest.raises(InvalidArgument, match="restore=0"):
        allocator.wake_up(restore=0)  # type: ignore[arg-type]
    report = allocator.wake_up(tags, restore=False)
    assert (report.restored_bytes, report.verified_bytes) == (PAGE, PAGE)
    assert report.mapped_bytes == (4 if tags == "weights" else 5) * PAGE
    old_weights.check_that_they_are_gone()
    check_bytes(old_weights.memory, old_weights.others)
    allocator.wake_up()
    old_weights.check_that_new_ones_survive()


@pytest.mark.sim
def test_a_wake_that_fails_gives_nothing_up(allocator: CuMemAllocator, memory: Memory) -> None:
    weights = fill(allocator, memory, [PAGE] * 2)
    with allocator.regions.use("reference", backup=True):
        reference = allocator.malloc(PAGE)
    content = memory.fill_random(reference, PAGE)
    allocator.sleep()
    allocator.regions.sleep()
    wakes = (lambda: allocator.wake_up(restore=False)), (lambda: allocator.regions.wake(restore=False))
    for wake in wakes:
        sim.configure(device_bytes=1)
        with pytest.raises(OutOfDeviceMemory):
            wake()
        sim.configure(device_bytes=64 * PAGE)
        sim.fail("cuMemSetAccess")
        with pytest.raises(DriverError, match="cuMemSetAccess"):
            wake()
        sim.reset()
    assert allocator.wake_up().restored_bytes == 2 * PAGE
    assert allocator.regions.wake().restored_bytes == PAGE
    check_bytes(memory, weights)
    assert memory.read(reference, PAGE) == content


def test_what_was_kept_is_given_up_by_a_wake_that_does_not_restore(allocator: CuMemAllocator, memory: Memory) -> None:
    """A cache that was computed with the old weights."""
    fill(allocator, memory, [PAGE])
    (cache,) = fill(allocator, memory, [PAGE], "kv_cache")
    memory.close()
    allocator.sleep(keep={cache: [(0, 4096)]})
    assert allocator.wake_up("weights", restore=False).not_kept == ""
    woken = allocator.wake_up()
    assert (woken.kept_bytes, woken.not_kept) == (0, "the wake was not to restore")


def test_tags_of_a_wake_that_does_not_restore_may_be_given_once_only(old_weights: OldWeights) -> None:
    report = old_weights.allocator.wake_up(iter(["weights", "kv_cache"]), restore=False)
    assert report.restored_bytes == PAGE
    old_weights.check_that_they_are_gone()


def test_old_names_say_the_same(old_weights: OldWeights) -> None:
    """Of `CuMemAllocator`, for one release more."""
    allocator: Any = old_weights.allocator
    assert allocator.asleep_tags == {"weights", "kv_cache", "default"}
    assert (allocator.agreement, allocator.may_be_asleep, allocator.may_deepen) == (None, True, False)
    assert allocator.drop_kept() == 0
    assert allocator.forget() == 3 * PAGE
    with allocator.filling(lambda _: None):
        allocator.wake_up()


def test_an_old_place_has_the_same() -> None:
    """Of the library for LD_PRELOAD, for one release more."""
    assert importlib.import_module("cumem_sleep.integrations.preload").library_path is preload.library_path
