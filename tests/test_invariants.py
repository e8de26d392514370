"""Invalid states of a segment end a process that was built to check them: one with sanitizers."""

from __future__ import annotations

import signal

import pytest
from support import run_script

from cumem_sleep import _core

BREAKS = {
    "backed up without a backup": (
        """
        with _core.HeldSegments([segment]):
            _core.put_to_sleep([segment], [], lambda: None)
        """,
        "backed up, its mapping detached",
    ),
    "memory that nobody will release": (
        """
        with _core.HeldSegments([segment]):
            _core.put_to_sleep([], [segment], lambda: None)
            segment.map()
        """,
        "dropped, its mapping mapped, holds: 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_state_that_must_not_be_ends_the_process(name: str) -> None:
    broken, found = BREAKS[name]
    process = run_script(
        """
        allocator = CuMemAllocator(Settings(driver="sim"))
        allocator.malloc(2 * MIB)
        segment, = _core.segments()
        """,
        broken,
        "print('went on')",
    )
    if _core.CHECKS_INVARIANTS:
        assert process.returncode == -signal.SIGABRT, process.stdout + process.stderr
        assert "cumem-sleep: invalid state: " in process.stderr
        assert found in process.stderr
    else:
        assert (process.returncode, process.stdout) == (0, "went on\n"), process.stderr
