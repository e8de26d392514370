"""A wake that restores no bytes of some tags, because new ones are about to be loaded."""

from __future__ import annotations

import pytest
from support import AWAKE, BACKED_UP, PAGE, SIMULATED, Memory
from waking import OldWeights, check_bytes, fill, states

from cumem_sleep import CuMemAllocator, InvalidArgument, OutOfDeviceMemory, sim


@pytest.mark.parametrize("tags", [None, "weights", ["weights", "kv_cache"]])
def test_what_is_not_restored_has_no_backup_any_more(old_weights: OldWeights, tags: str | list[str] | None) -> None:
    allocator = old_weights.allocator
    report = allocator.wake_up(tags, restore=False)
    assert (report.restored_bytes, report.verified_bytes) == (PAGE, PAGE)
    assert report.mapped_bytes == (4 if tags == "weights" else 5) * PAGE
    assert allocator.usage()["weights"].host_bytes == 0
    old_weights.check_that_they_are_gone()
    check_bytes(old_weights.memory, old_weights.others)
    allocator.wake_up()
    old_weights.check_that_new_ones_survive()


def test_the_cache_alone_leaves_the_weights_asleep(allocator: CuMemAllocator, memory: Memory) -> None:
    weights = fill(allocator, memory, [PAGE])
    cache = fill(allocator, memory, [PAGE], "kv_cache")
    allocator.sleep(offload_tags=["weights", "kv_cache"])
    allocator.wake_up("kv_cache", restore=False)
    assert states() == {"weights": BACKED_UP, "kv_cache": AWAKE}
    (address,) = cache
    assert allocator.usage()["kv_cache"].host_bytes == 0
    allocator.wake_up()
    check_bytes(memory, weights)
    assert memory.read(address, PAGE) is not None


@pytest.mark.sim
def test_what_fails_restores_when_it_is_asked_to(allocator: CuMemAllocator, memory: Memory) -> None:
    weights = fill(allocator, memory, [PAGE] * 2)
    allocator.sleep()
    sim.configure(device_bytes=PAGE)
    with pytest.raises(OutOfDeviceMemory):
        allocator.wake_up(restore=False)
    sim.configure(device_bytes=64 * PAGE)
    sim.fail("cuMemSetAccess", after=1)
    with pytest.raises(Exception, match="cuMemSetAccess"):
        allocator.wake_up(restore=False)
    sim.reset()
    assert states() == {"weights": BACKED_UP}
    assert allocator.wake_up().restored_bytes == 2 * PAGE
    check_bytes(memory, weights)


def test_after_level_3(allocator: CuMemAllocator, memory: Memory) -> None:
    if not SIMULATED:
        pytest.skip("a process of its own tries level 3 on a GPU")
    fill(allocator, memory, [PAGE])
    memory.close()
    allocator.sleep(3)
    assert allocator.wake_up("weights", restore=False).restored_bytes == 0
    assert states() == {"weights": AWAKE}


def test_without_backups_there_is_nothing_to_read(allocator: CuMemAllocator, memory: Memory) -> None:
    (address,) = fill(allocator, memory, [PAGE])
    allocator.sleep()
    allocator.wake_up("weights", restore=False)
    assert allocator.read_backup(address, PAGE) is None


def test_what_was_kept_of_dropped_memory_is_given_up(allocator: CuMemAllocator, memory: Memory) -> None:
    """A cache that was computed with the old weights."""
    fill(allocator, memory, [PAGE])
    (cache,) = fill(allocator, memory, [PAGE], "kv_cache")
    memory.close()
    allocator.sleep(keep={cache: [(0, 4096)]})
    assert allocator.wake_up("weights", restore=False).not_kept == ""
    woken = allocator.wake_up()
    assert (woken.kept_bytes, woken.not_kept) == (0, "the wake was not to restore")


@pytest.mark.parametrize("restore", [0, None, "no", 1.0])
def test_only_true_and_false(allocator: CuMemAllocator, restore: object) -> None:
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    with pytest.raises(InvalidArgument, match="restore"):
        allocator.wake_up(restore=restore)  # type: ignore[arg-type]
    assert states() == {"weights": BACKED_UP}
