"""The digests of memory as it is, awake or asleep."""

from __future__ import annotations

import numpy as np
import pytest
from support import PAGE, SIMULATED, Memory, digest_of, fresh_allocator
from waking import fill

from cumem_sleep import CuMemAllocator, DriverError, InvalidArgument, sim


def _expected(contents: dict[int, bytes]) -> dict[int, str]:
    return {address: str(digest_of(np.frombuffer(content, np.uint8))) for address, content in contents.items()}


def test_the_same_bytes_have_the_same_digests_awake_and_asleep(allocator: CuMemAllocator, memory: Memory) -> None:
    fill(allocator, memory, [PAGE], "kv_cache")
    weights = fill(allocator, memory, [PAGE, 2 * PAGE])
    assert allocator.digests("weights") == _expected(weights)
    allocator.sleep()
    assert allocator.digests(["weights", "kv_cache"]) == _expected(weights), "what was dropped has no digest"
    allocator.wake_up("weights")
    assert allocator.digests("weights") == _expected(weights)


def test_a_changed_byte_changes_the_digest_of_its_segment_alone(allocator: CuMemAllocator, memory: Memory) -> None:
    contents = fill(allocator, memory, [PAGE, PAGE])
    first = min(contents)
    allocator.sleep()
    allocator.wake_up()
    contents[first] = bytes([contents[first][0] ^ 1]) + contents[first][1:]
    memory.write(first, contents[first])
    assert allocator.digests("weights") == _expected(contents)


def test_without_digests_at_the_sleep_what_sleeps_is_left_out(memory: Memory) -> None:
    allocator = fresh_allocator(verify="off", retain_backups=False)
    weights = fill(allocator, memory, [PAGE])
    allocator.sleep()
    assert allocator.digests("weights") == {}
    allocator.wake_up()
    assert allocator.digests("weights") == _expected(weights)


def test_a_misspelt_tag_is_refused(allocator: CuMemAllocator) -> None:
    with pytest.raises(InvalidArgument, match="wieghts"):
        allocator.digests("wieghts")


@pytest.mark.skipif(not SIMULATED, reason="breaks driver calls")
def test_memory_that_cannot_be_read_is_an_error_and_stays(allocator: CuMemAllocator, memory: Memory) -> None:
    weights = fill(allocator, memory, [PAGE])
    sim.fail("cuMemcpyDtoHAsync_v2", 0, "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        allocator.digests("weights")
    assert allocator.digests("weights") == _expected(weights)
