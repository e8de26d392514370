"""An operation that is asked to stop stops at its next look."""

from __future__ import annotations

import signal
import sys
import threading
import time

import pytest
from interrupts import name_of_code
from support import HANGS_S, assert_no_threads
from world import Phase, World, phases

from cumem_sleep import _core

pytestmark = pytest.mark.sim

# Where an operation looks whether it is to stop, by phase; at the last one everything is detached.
LOOKS = {
    "first sleep": {
        "operations/layer.py:quiesce",
        "operations/sleep.py:_changed_of",
        "digest/device.py:finish",
        "digest/device.py:_through_host",
        "transfer/transfer.py:step",
        "transfer/link.py:begin",
        "transfer/link.py:_wait_until",
        "operations/sleep.py:_agree",
    },
    "wake of all": {
        "transfer/transfer.py:step",
        "transfer/link.py:_wait_until",
        "digest/device.py:finish",
        "digest/device.py:_through_host",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", phases(*LOOKS), ids=str)
def test_stops_at_every_look(world: World, phase: Phase) -> None:
    check_looks(world, phase, LOOKS[phase.name])


def check_looks(world: World, phase: Phase, expected: set[str]) -> None:
    """It stops there, and all is as it was before."""
    phase.prepare(world)
    looks = Looks()
    with looks:
        phase.operate(world)
    assert set(looks.places) == expected
    for index, place in enumerate(looks.places):
        phase.prepare(world)
        before = world.state()
        looks = Looks(index)
        with looks, pytest.raises(TimeoutError):
            phase.operate(world)
        assert looks.stopped, f"it went on after {place}"
        assert world.state() == before, place
        world.check_bytes()
        assert_no_threads()


class Looks:
    """Counts the looks of an operation, and asks it to stop just before one."""

    def __init__(self, at: int | None = None) -> None:
        self.places: list[str] = []
        self.stopped = False
        self._at = at
        self._main = threading.get_ident()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Looks:
        self._look = _core.stop_if_asked

        def look() -> None:
            self._note(name_of_code(sys._getframe(1).f_code))
            self._look()

        self._patch.setattr(_core, "stop_if_asked", look)
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        signal.signal(signal.SIGUSR1, self._before)
        self.stopped = len(self.places) - 1 == self._at

    def _handle(self, *_: object) -> None:
        raise TimeoutError

    def _note(self, place: str) -> None:
        self.places.append(place)
        if len(self.places) - 1 != self._at:
            return
        signal.pthread_kill(self._main, signal.SIGUSR1)
        ends_at = time.monotonic() + HANGS_S
        while True:
            assert time.monotonic() < ends_at, "nobody asks it to stop"
            try:
                self._look()
            except _core.OperationStopped:
                return
