"""Segments that are freed, and sleeps that begin, while a codec works."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from compression import (
    bf16,
    check_bytes,
    check_host_bytes,
    fill,
    noise,
    small_slots,  # noqa: F401  (autouse)
)
from support import in_thread

from cumem_sleep import CuMemAllocator, InvalidState, _core
from cumem_sleep.codec.kernels import SimulatedKernels

pytestmark = pytest.mark.sim


class TestFree:
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_during_encode(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
        contents = fill(allocator, bf16, noise, bf16)
        freed = list(contents)[place]
        del contents[freed]
        encode = SimulatedKernels.encode

        def free_and_encode(*arguments: Any) -> None:
            if any(segment.address == freed for segment in _core.segments()):
                with suppress(InvalidState):
                    in_thread(lambda: allocator.free(freed))
            encode(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(SimulatedKernels, "encode", free_and_encode)
            allocator.sleep()
        assert {segment.address for segment in _core.segments()} == set(contents)
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_during_decode(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
        contents = fill(allocator, bf16, noise, bf16)
        allocator.sleep()
        freed = list(contents)[place]
        del contents[freed]
        decode = SimulatedKernels.decode
        calls: list[int] = []

        def free_and_decode(*arguments: Any) -> None:
            if not calls:
                calls.append(freed)
                in_thread(lambda: allocator.free(freed))
            decode(*arguments)

        monkeypatch.setattr(SimulatedKernels, "decode", free_and_decode)
        allocator.wake_up()
        assert {segment.address for segment in _core.segments()} == set(contents)
        check_bytes(contents)
