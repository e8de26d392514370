"""From a public call to its first work on memory: how many functions of the package a reader passes.

A function is a frame on the caller's thread or on the operation's, or one of the extension's that is named here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support import PAGE

import cumem_sleep
from cumem_sleep import CuMemAllocator, _core

_PACKAGE = Path(cumem_sleep.__file__).parent
MOST_TO_MAPPING, MOST_TO_A_COPY = 9, 10  # from the public call to the first unmap or map, and to the first copy
_TO_THE_THREAD = ("OperationLock::run", "start_thread")


def _functions(frame: FrameType | None) -> Iterator[str]:
    """Those of the package that are at work."""
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
            yield f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}"
        frame = frame.f_back


def way_to(patch: pytest.MonkeyPatch, owner: Any, name: str, call: Callable[[], object]) -> list[str]:
    """The functions on the way from `call`, made on this thread, to the first call of a function of the extension."""
    caller, called = threading.get_ident(), getattr(owner, name)
    passed: list[str] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        if not passed:
            passed.extend(_functions(sys._getframe(1)))
            if threading.get_ident() != caller:
                passed.extend(_functions(sys._current_frames()[caller]))
        return called(*arguments, **options)

    with patch.context() as patched:
        patched.setattr(owner, name, watched)
        call()
    return passed


@pytest.mark.sim
@pytest.mark.parametrize(
    ("operation", "owner", "name", "in_extension", "most"),
    [
        ("sleep", _core, "put_to_sleep", ("SegmentTable::put_to_sleep", "Mapping::detach"), MOST_TO_MAPPING),
        ("sleep", _core.CopyStream, "to_host", ("CopyStream::to_host",), MOST_TO_A_COPY),
        ("wake", _core.Segment, "map", ("Segment::map", "Mapping::map", "Mapping::enter_range"), MOST_TO_MAPPING),
        ("wake", _core.CopyStream, "to_device", ("CopyStream::to_device",), MOST_TO_A_COPY),
    ],
)
def test_the_way_is_short(
    operation: str,
    owner: Any,
    name: str,
    in_extension: tuple[str, ...],
    most: int,
    make_allocator: Callable[..., CuMemAllocator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without digests, which copy to the host as well on the simulated driver.
    allocator = make_allocator(verify="off", retain_backups=False)
    for tag in ("weights", "kv_cache"):
        allocator.malloc(PAGE, tag)
    if operation == "wake":
        allocator.sleep()
    passed = way_to(monkeypatch, owner, name, allocator.sleep if operation == "sleep" else allocator.wake_up)
    sources = "".join(path.read_text() for path in (Path(__file__).parents[1] / "csrc").glob("*.cpp"))
    assert all(f"{each}(" in sources for each in (*_TO_THE_THREAD, *in_extension))
    assert len(passed) >= 3
    assert len(passed) + len(_TO_THE_THREAD) + len(in_extension) <= most, passed
