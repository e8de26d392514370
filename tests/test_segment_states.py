"""The states of a segment: those of the table in docs/how-it-works.md, and no others."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial

import pytest
from support import AWAKE, BACKED_UP, DROPPED, PAGE, is_accessible

from cumem_sleep import CuMemAllocator, CumemSleepError, _core, sim
from cumem_sleep.backups.backup import Backup

pytestmark = pytest.mark.sim

# Sleep, mapping and backup, as rows of the table "The states of a segment" in docs/how-it-works.md: those that may be
# there between two operations, without and with memory that the driver refused to give back.
SETTLED = {
    (AWAKE, "mapped", "none"),
    (AWAKE, "mapped", "complete"),
    (BACKED_UP, "unmapped", "complete"),
    (DROPPED, "unmapped", "none"),
}
REFUSED = {
    (BACKED_UP, "without access", "complete"),
    (DROPPED, "without access", "none"),
    # A wake failed, and could not be undone.
    (BACKED_UP, "mapped", "complete"),
    (DROPPED, "mapped", "none"),
}


def state_of(segment: _core.Segment, backup: Backup | None) -> tuple[_core.Segment.Sleep, str, str]:
    """Sleep, mapping and backup in the words of the table; `without access` is `detached`, too."""
    mapping = "unmapped"
    if segment.has_memory:
        mapping = "mapped" if is_accessible(segment.address) else "without access"
    return segment.sleep, mapping, "none" if backup is None else "complete" if backup.complete else "incomplete"


def check_state(segment: _core.Segment, backup: Backup | None, driver_has_refused: bool) -> None:
    """No operation is under way. Args: driver_has_refused: something, which nobody has tried again since."""
    state = state_of(segment, backup)
    allowed = SETTLED | REFUSED if driver_has_refused or segment.keeps_bytes else SETTLED
    assert state in allowed, f"{segment.tag}: {state}"
    if segment.keeps_bytes:
        assert segment.sleep == DROPPED, f"{segment.tag} keeps its bytes: {state}"
        assert segment.has_memory, f"{segment.tag} keeps its bytes: {state}"
    if backup is not None:
        assert not backup.being_prepared, f"{segment.tag}: a backup that nobody makes"
        assert backup.retained is not False or segment.sleep != AWAKE, f"{segment.tag}: a backup that is not to stay"


@dataclass(frozen=True)
class Refusal:
    """Calls that the driver refuses however often they are tried, and what that leaves."""

    name: str
    operation: str
    calls: dict[str, int]  # and how many of each succeed before
    left: tuple[_core.Segment.Sleep, str, str]
    keeps_bytes: bool = False

    def __str__(self) -> str:
        return self.name


UNMAPPED_ONE = {"cuMemUnmap": 1, "cuMemMap": 0}
REFUSALS = [
    Refusal("release, backed up", "sleep", {"cuMemRelease": 0}, (BACKED_UP, "without access", "complete")),
    Refusal("release, dropped", "sleep 2", {"cuMemRelease": 0}, (DROPPED, "without access", "none")),
    Refusal("undo a sleep, backed up", "sleep", UNMAPPED_ONE, (BACKED_UP, "without access", "complete")),
    Refusal("undo a sleep, dropped", "sleep 2", UNMAPPED_ONE, (DROPPED, "without access", "none"), True),
    Refusal("undo a wake", "wake", {"cuMemcpyHtoDAsync": 0, "cuMemUnmap": 0}, (BACKED_UP, "mapped", "complete")),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_the_driver_refused_is_held_until_it_is_tried_again(allocator: CuMemAllocator, refusal: Refusal) -> None:
    for _ in range(2):
        allocator.malloc(PAGE, "weights")
    operations = {"sleep": allocator.sleep, "sleep 2": partial(allocator.sleep, 2), "wake": allocator.wake_up}
    if refusal.operation == "wake":
        allocator.sleep()
    for call, after in refusal.calls.items():
        sim.fail(call, after=after, times=100)
    with contextlib.suppress(CumemSleepError):
        operations[refusal.operation]()
    sim.reset()
    first = _core.segments()[0]
    backup = allocator._store.catalogue.of(first)
    assert (state_of(first, backup), first.keeps_bytes) == (refusal.left, refusal.keeps_bytes)
    check_state(first, backup, driver_has_refused=True)
    if not refusal.keeps_bytes:
        with pytest.raises(AssertionError, match=first.tag):
            check_state(first, backup, driver_has_refused=False)
    allocator.usage()
    for segment in _core.segments():
        check_state(segment, allocator._store.catalogue.of(segment), driver_has_refused=False)
    allocator.wake_up()


@pytest.mark.skipif(_core.CHECKS_INVARIANTS, reason="such a build ends the process itself")
def test_states_outside_of_the_table_are_found(allocator: CuMemAllocator) -> None:
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    (segment,) = _core.segments()
    backup = allocator._store.catalogue.of(segment)
    check_state(segment, backup, driver_has_refused=False)
    for broken in (None, replace(backup, complete=False), replace(backup, being_prepared=True)):
        with pytest.raises(AssertionError, match="weights: "):
            check_state(segment, broken, driver_has_refused=True)
    with _core.HeldSegments([segment]):
        segment.map()
    with pytest.raises(AssertionError, match="weights: "):  # memory that nobody will release
        check_state(segment, backup, driver_has_refused=False)
    allocator.wake_up()
    with pytest.raises(AssertionError, match="weights: "):
        check_state(segment, replace(backup, retained=False), driver_has_refused=False)
    allocator.discard(["weights"])
    with pytest.raises(AssertionError, match="weights: "):
        check_state(segment, backup, driver_has_refused=True)
