"""Both ways of copying are timed before the first wake."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
from support import DRIVER, PAGE, SIMULATED

import cumem_sleep.transfer
from cumem_sleep import CuMemAllocator, DriverError, OutOfDeviceMemory, OutOfHostMemory, _core, sim
from cumem_sleep.driver import open_driver
from cumem_sleep.extents import Piece
from cumem_sleep.transfer import routes
from cumem_sleep.transfer.restorer import Restorer


class FakeCopies:
    """Stands in for the kernel's copies, where no kernel runs."""

    def __init__(self, nbytes: int, pieces: int) -> None:
        self.bytes = nbytes
        self.pieces = pieces

    def start(self, stream: _core.CopyStream, pieces: list[Piece]) -> None:
        assert sum(piece.bytes for piece in pieces) <= self.bytes
        assert len(pieces) <= self.pieces
        stream.poison(pieces[0].address, pieces[0].bytes)


def fake_copies(device: int, nbytes: int, pieces: int) -> AbstractContextManager[list[FakeCopies]]:
    return nullcontext([FakeCopies(nbytes, pieces)])


class TestWarmUp:
    def warm_up(self, monkeypatch: pytest.MonkeyPatch, work: Callable[[int], None]) -> Restorer:
        module = types.ModuleType("cumem_sleep.transfer.copy_kernel")
        module.warm_up = work  # type: ignore[attr-defined]
        module.gpu_copies = fake_copies  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(vars(cumem_sleep.transfer), "copy_kernel", module)
        open_driver(DRIVER)
        restorer = Restorer(CuMemAllocator.tuning)
        restorer.warm_up(0)
        return restorer

    def test_makes_the_kernel_a_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.warm_up(monkeypatch, lambda device: None)._routes._kernel_devices == {0}

    def test_times_both_ways_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that wakes right after its first sleep has no other way to know what the link can do."""
        monkeypatch.setattr(CuMemAllocator.tuning, "batch_bytes", PAGE)
        log: list[str] = []
        to_device, synchronize = _core.CopyStream.to_device, _core.CopyStream.synchronize
        poison = _core.CopyStream.poison

        def copied(stream: _core.CopyStream, address: int, block: _core.HostBlock, offset: int, nbytes: int) -> None:
            log.append(f"engine, {nbytes >> 20} MiB")
            to_device(stream, address, block, offset, nbytes)

        def by_kernel(stream: _core.CopyStream, address: int, nbytes: int) -> None:
            log.append(f"kernel, {nbytes >> 20} MiB")
            poison(stream, address, nbytes)

        def waited(stream: _core.CopyStream) -> None:
            synchronize(stream)
            log.append("wait")

        monkeypatch.setattr(_core.CopyStream, "to_device", copied)
        monkeypatch.setattr(_core.CopyStream, "poison", by_kernel)
        monkeypatch.setattr(_core.CopyStream, "synchronize", waited)
        before = sim.stats() if SIMULATED else None
        best = self.warm_up(monkeypatch, lambda device: None)._routes.best_rate(0)
        assert log == ["engine, 2 MiB", "wait", "kernel, 2 MiB", "wait"] * 3
        assert 0 < best.value < 1e15
        if before is not None:
            assert sim.stats().live_handles == before.live_handles
            assert sim.stats().registered_bytes == before.registered_bytes

    @pytest.mark.parametrize("what", ["Scratch", "pinned_block", "CopyStream"])
    def test_what_cannot_be_timed_the_wakes_find_out(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        def refuse(*_: object) -> None:
            if what == "pinned_block":
                raise OutOfHostMemory(1, 0, "budget")
            raise OutOfDeviceMemory(1, 0, 0) if what == "Scratch" else DriverError("cuStreamCreate", "", "", "")

        monkeypatch.setattr(routes if what == "pinned_block" else _core, what, refuse)
        restorer = self.warm_up(monkeypatch, lambda device: None)
        assert restorer._routes._kernel_devices == {0}
        assert restorer._routes.best_rate(0).value == 0

    def test_not_where_kernels_do_not_reach_pinned_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_core, "device_info", lambda device: types.SimpleNamespace(host_pointers=False))
        warmed: list[int] = []
        assert self.warm_up(monkeypatch, warmed.append)._routes._kernel_devices == set()
        assert warmed == []

    def test_a_kernel_that_does_not_compile(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: int) -> None:
            raise AssertionError("PTX")

        assert self.warm_up(monkeypatch, fail)._routes._kernel_devices == set()
        assert "copy engine alone" in caplog.text

    def test_an_error_of_the_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: int) -> None:
            raise DriverError("cuStreamCreate", "CUDA_ERROR_UNKNOWN", "", "")

        with pytest.raises(DriverError):
            self.warm_up(monkeypatch, fail)
