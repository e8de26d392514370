"""What sleeps forgets its backups, because new bytes are about to be loaded."""

from __future__ import annotations

import pytest
from support import AWAKE, BACKED_UP, DROPPED, PAGE, SIMULATED, Memory
from waking import OldWeights, check_bytes, fill, states

from cumem_sleep import CuMemAllocator, DriverError, InvalidArgument, InvalidState, _core, sim


@pytest.mark.parametrize("tags", [None, "weights", ["weights", "kv_cache"]])
def test_what_is_forgotten_comes_back_without_its_bytes(old_weights: OldWeights, tags: str | list[str] | None) -> None:
    allocator, weights = old_weights.allocator, old_weights.weights
    held_bytes = allocator.usage()["default"].host_bytes
    assert allocator.forget(tags) == 3 * PAGE
    assert states() == {"weights": DROPPED, "kv_cache": DROPPED, "default": BACKED_UP}
    usage = allocator.usage()
    assert (usage["weights"].host_bytes, usage["weights"].backed_up_bytes) == (0, 0)
    assert usage["default"].host_bytes == held_bytes
    with pytest.raises(InvalidState, match="dropped"):
        allocator.read_backup(next(iter(weights)), PAGE)
    assert allocator.forget(tags) == 0
    assert allocator.wake_up().restored_bytes == PAGE
    check_bytes(old_weights.memory, old_weights.others)
    old_weights.check_that_they_are_gone()
    old_weights.check_that_new_ones_survive()


def test_other_tags_are_restored(allocator: CuMemAllocator, memory: Memory) -> None:
    weights = fill(allocator, memory, [PAGE])
    fill(allocator, memory, [PAGE], "kv_cache")
    allocator.sleep(offload_tags=["weights", "kv_cache"])
    assert allocator.forget("kv_cache") == PAGE
    assert states() == {"weights": BACKED_UP, "kv_cache": DROPPED}
    assert allocator.wake_up().restored_bytes == PAGE
    check_bytes(memory, weights)


def test_what_is_awake_keeps_its_backup(allocator: CuMemAllocator, memory: Memory) -> None:
    weights = fill(allocator, memory, [PAGE])
    fill(allocator, memory, [PAGE], "kv_cache")
    assert allocator.forget() == 0
    allocator.sleep()
    allocator.wake_up("weights")
    assert allocator.forget() == 0
    assert states() == {"weights": AWAKE, "kv_cache": DROPPED}
    assert allocator.sleep().clean_bytes == PAGE
    allocator.wake_up()
    check_bytes(memory, weights)


def test_regions_forget_nothing(allocator: CuMemAllocator, memory: Memory) -> None:
    with allocator.regions.use_without_pool("weights", backup=True):
        address = allocator.malloc(PAGE)
    content = memory.fill_random(address, PAGE)
    allocator.regions.sleep()
    allocator.forget()
    allocator.regions.wake()
    check_bytes(memory, {address: content})


def test_what_was_kept_of_dropped_memory_is_given_up(allocator: CuMemAllocator, memory: Memory) -> None:
    """A cache that was computed with the old weights."""
    fill(allocator, memory, [PAGE])
    (cache,) = fill(allocator, memory, [PAGE], "kv_cache")
    memory.close()
    allocator.sleep(keep={cache: [(0, 4096)]})
    allocator.forget("weights")
    assert allocator.usage()["kv_cache"].kept_bytes == 0
    woken = allocator.wake_up()
    assert (woken.kept_bytes, woken.not_kept) == (0, "forget() was called")


def test_the_process_stays_at_level_3(allocator: CuMemAllocator, memory: Memory) -> None:
    if not SIMULATED:
        pytest.skip("a process of its own tries level 3 on a GPU")
    fill(allocator, memory, [PAGE])
    others = fill(allocator, memory, [PAGE], "default")
    memory.close()
    allocator.sleep(3)
    assert allocator.forget("weights") == PAGE
    assert allocator.checkpoint is not None
    assert allocator.usage()["weights"].host_bytes == 0, "only a later call gives it back"
    assert allocator.wake_up().restored_bytes == PAGE
    assert states() == {"weights": AWAKE, "default": AWAKE}
    check_bytes(memory, others)


@pytest.mark.sim
def test_memory_that_the_driver_did_not_take_is_given_back_all_the_same(
    allocator: CuMemAllocator, memory: Memory
) -> None:
    fill(allocator, memory, [PAGE])
    sim.fail("cuMemRelease", times=100, error="CUDA_ERROR_UNKNOWN")
    allocator.sleep()
    assert allocator.forget() == PAGE
    sim.reset()
    assert _core.reclaim() == 0
    assert sim.stats().live_handles == 0
    allocator.wake_up()


@pytest.mark.sim
def test_a_wake_that_fails_leaves_them_lost(allocator: CuMemAllocator, memory: Memory) -> None:
    fill(allocator, memory, [PAGE] * 2)
    allocator.sleep()
    allocator.forget()
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
        allocator.forget(tags)  # type: ignore[arg-type]
    assert states() == {"weights": BACKED_UP}
