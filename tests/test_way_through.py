"""From a public call to its first work on memory: how many functions of the package a reader passes.

`docs/how-it-works.md` lists them. A function is a frame on the caller's thread or on the operation's, lambdas, methods
of context managers and comprehensions included. The extension is one call, whatever it does in C++.
"""

from __future__ import annotations

import re
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
_PAGE = Path(__file__).parent.parent / "docs" / "how-it-works.md"
MOST_TO_MAPPING, MOST_TO_A_COPY = 6, 8  # from the public call to the first unmap or map, and to the first copy


def _functions(frame: FrameType | None) -> Iterator[str]:
    """Those of the package that are at work, the innermost first."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            yield f"{path.relative_to(_PACKAGE)}: {name}"
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
    return passed[::-1]


def listed(title: str) -> list[str]:
    """What the page says of a way."""
    (row,) = re.findall(rf"^\| {re.escape(title)} \| (.*) \|$", _PAGE.read_text(), re.MULTILINE)
    return re.findall(r"`([^`]+)`", row)


@pytest.mark.sim
@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified names")
class TestWays:
    """Without digests, which copy to the host as well on the simulated driver."""

    @pytest.fixture
    def allocator(self, make_allocator: Callable[..., CuMemAllocator]) -> CuMemAllocator:
        allocator = make_allocator(verify="off", retain_backups=False)
        for tag in ("weights", "kv_cache"):
            allocator.malloc(PAGE, tag)
        return allocator

    def check(self, title: str, passed: list[str], most: int) -> None:
        assert 3 <= len(passed) <= most, passed
        assert listed(title) == [name.replace(".<locals>", "") for name in passed]

    def test_a_sleep_to_its_first_unmap(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        passed = way_to(monkeypatch, _core, "put_to_sleep", allocator.sleep)
        self.check("a sleep, to the first unmap", passed, MOST_TO_MAPPING)

    def test_a_sleep_to_its_first_copy(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        passed = way_to(monkeypatch, _core.CopyStream, "to_host", allocator.sleep)
        self.check("a sleep, to the first copy", passed, MOST_TO_A_COPY)

    def test_a_wake_to_its_first_map(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is mapped is said here, and done by a thread of the extension."""
        allocator.sleep()
        passed = way_to(monkeypatch, _core, "Ahead", allocator.wake_up)
        self.check("a wake, to the first map", passed, MOST_TO_MAPPING)

    def test_a_wake_to_its_first_copy(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        allocator.sleep()
        passed = way_to(monkeypatch, _core.CopyStream, "to_device", allocator.wake_up)
        self.check("a wake, to the first copy", passed, MOST_TO_A_COPY)
