"""What vLLM's plugin asks of an allocator beyond its public calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import _core
from .allocator import CuMemAllocator
from .core.levels import in_pools
from .core.operation import CudaUse, Operation, Vote
from .errors import InvalidState
from .operations.components import Fill
from .ranks.agreement import Agreement
from .report import SleepReport

# Ranks


def agreement(allocator: CuMemAllocator) -> Agreement | None:
    """The agreement with the other ranks of the joined group; None: this process sleeps and wakes alone."""
    return allocator._agreement


def vote_of_ranks(allocator: CuMemAllocator, operation: str) -> Vote:
    """Through which the ranks agree on one operation. What fails inside, the others are told at once."""
    return allocator._vote_of_ranks(operation)


# Sleeping and waking


def prepare_after_warm_up() -> None:
    """From here on `Settings.prepare` takes no effect when a pool is left."""
    CuMemAllocator._prepares_after_pools = False


def prepare_where_there_is_room(allocator: CuMemAllocator) -> None:
    """Make backups ahead that nobody asked for, if host memory has room for those of all ranks, which all call this.

    They are given back when less is left than is reserved for others.
    """
    allocator._prepare_where_there_is_room()


def may_be_asleep(allocator: CuMemAllocator) -> bool:
    """False: nothing is asleep. It costs nothing to ask."""
    return allocator._operations.may_be_asleep


def asleep_tags(allocator: CuMemAllocator) -> frozenset[str]:
    """The tags of which something is asleep that levels decide about."""
    operations, awake = allocator._operations, _core.Segment.Sleep.AWAKE
    operations.may_be_asleep = False  # an operation that ends meanwhile says so after it has changed them
    asleep = frozenset(segment.tag for segment in in_pools()() if segment.sleep != awake)
    operations.may_be_asleep |= bool(asleep)
    return asleep


@contextmanager
def filling(allocator: CuMemAllocator, fill: Fill) -> Iterator[None]:
    """Wakes inside call `fill` with the segments that come back without some of their bytes, and the (begin, end)
    of these, before anybody else may use them. If it raises, the wake fails.
    """
    fills = allocator._components.fills
    fills.append(fill)
    try:
        yield
    finally:
        fills.remove(fill)


def drop_kept(allocator: CuMemAllocator) -> int:
    """Give up what sleeps have kept of dropped memory (`sleep(keep=...)`), and its host memory, in this process alone;
    returns its bytes, which is 0 while that memory is awake.
    """

    def give_up() -> int:
        kept = allocator._store.catalogue.kept
        nbytes = kept.bytes_of(_core.segments())
        kept.give_up("drop_kept() was called")
        return nbytes

    return Operation(allocator._operations, "drop_kept", give_up, uses_cuda=CudaUse.LEASE_UNLESS_AWAY).run()


def kept_names(allocator: CuMemAllocator) -> frozenset[str]:
    """What its vault keeps for those that come later (`CuMemAllocator.adopt`).

    Raises:
        InvalidState: there is no vault, or it keeps nothing.
        VaultError: it does not answer.
    """

    def names() -> frozenset[str]:
        vault = allocator._store.memory.vault
        if vault is None or not vault.keeps_names():
            raise InvalidState("there is no vault with --keep-weights")
        return vault.kept_names()

    return allocator._operations.look("kept_names", names)


# Level 3


def checkpoint(allocator: CuMemAllocator) -> SleepReport:
    """Go on from level 1 or 2 to level 3, as `sleep(level=3)` does after it has put the memory to sleep.

    Returns:
        What was done. If the process stays where it is, `why_not_deeper` says why.

    Raises:
        InvalidState: memory is awake, or there is none.
        CheckpointFailed: as `CuMemAllocator.sleep`.
    """
    return allocator._checkpoint_asleep()


def may_checkpoint(allocator: CuMemAllocator) -> bool:
    """Whether the process is at level 3, or may go there by itself at any time."""
    return allocator._cuda.may_checkpoint


def stay_at_level_1(allocator: CuMemAllocator, why: str) -> None:
    """From now on this process does not go deeper; it says why."""
    allocator._cuda.why_not = why


def prepare_to_end(allocator: CuMemAllocator) -> None:
    """Come back from level 3 before this process ends, so that libraries can let go of the GPU.

    If that fails the process ends at once: the libraries' calls would wait forever.
    """
    allocator._prepare_to_end()
