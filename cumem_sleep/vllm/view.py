"""What others read of vLLM's allocator beside its calls, as vLLM's own has it. It is made at each look."""

from __future__ import annotations

from typing import Any

from .. import _core
from ..allocator import CuMemAllocator

_Sleep = _core.Segment.Sleep


class AllocationData:
    """As vLLM's class of that name, for a segment.

    Attributes:
        handle: device, bytes, address; where vLLM has its handle of the memory, 0.
    """

    def __init__(self, segment: _core.Segment) -> None:
        self.handle = (segment.device, segment.bytes, segment.address, 0)
        self.tag = segment.tag
        self.is_asleep = segment.sleep != _Sleep.AWAKE
        self._is_backed_up = segment.sleep == _Sleep.BACKED_UP

    @property
    def cpu_backup_tensor(self) -> Any:
        """A copy of what its backup holds; None: it is awake, or sleeps without one.

        Raises:
            InvalidState: only parts of it are backed up.
        """
        _, nbytes, address, _ = self.handle
        return CuMemAllocator.get_instance().read_backup(address, nbytes) if self._is_backed_up else None


def pointer_to_data() -> dict[int, AllocationData]:
    """All segments by address."""
    return {segment.address: AllocationData(segment) for segment in _core.segments() if not segment.freed}


def allocator_and_pools() -> dict[str, list[AllocationData]]:
    """By tag. For vLLM's pools of a tag, which this layer does not keep, stand its segments."""
    found: dict[str, list[AllocationData]] = {}
    for data in pointer_to_data().values():
        found.setdefault(data.tag, []).append(data)
    return found


def install() -> None:
    """Let the allocator have these names; calling this again is harmless."""
    allocator: Any = CuMemAllocator
    allocator.pointer_to_data = property(lambda _: pointer_to_data())
    allocator.allocator_and_pools = property(lambda _: allocator_and_pools())
    allocator.current_tag = property(lambda _: _core.thread_tag())
