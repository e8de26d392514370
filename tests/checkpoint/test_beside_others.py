"""Level 3 with signals, driver errors, compressed backups and the vault."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support import PAGE, Memory, bf16_weights, in_thread

from cumem_sleep import CuMemAllocator, CumemSleepError, _core, sim
from cumem_sleep.checkpoint.process import _Helper

sys.path.append(str(pathlib.Path(__file__).parents[1] / "vault"))
from running import RunningVault

BYTES = bf16_weights(2 * PAGE, np.random.default_rng(5))


def fill(allocator: CuMemAllocator, memory: Memory) -> int:
    address = allocator.malloc(2 * PAGE, "weights")
    memory.write(address, BYTES)
    allocator.malloc(PAGE, "kv_cache")
    return address


def assert_awake_with_bytes(allocator: CuMemAllocator, memory: Memory, address: int) -> None:
    assert not _core.driver_calls_suspended()
    assert not any(usage.asleep_segments for usage in allocator.usage().values())
    assert memory.read(address, 2 * PAGE) == BYTES
    assert sim.stats().blocked_calls == 0


class Interrupt(BaseException):
    """What the handler raises. Not Ctrl-C: a job in the background, of CI say, has that ignored."""


class TestSignals:
    @pytest.fixture
    def interrupted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """A signal comes while the helper works."""

        def handler(*_: object) -> None:
            raise Interrupt

        before = signal.signal(signal.SIGUSR1, handler)
        ask = _Helper.ask

        def ask_and_interrupt(self: _Helper, request: dict[str, object]) -> dict[str, object]:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            return ask(self, request)

        monkeypatch.setattr(_Helper, "ask", ask_and_interrupt)
        yield
        monkeypatch.setattr(_Helper, "ask", ask)
        signal.signal(signal.SIGUSR1, before)

    @pytest.mark.usefixtures("interrupted")
    def test_what_was_begun_is_finished(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address = fill(allocator, memory)
        with pytest.raises(Interrupt):
            allocator.sleep(level=3)
        assert allocator.checkpoint is not None
        with pytest.raises(Interrupt):
            allocator.wake_up()
        assert allocator.checkpoint is None
        if allocator.usage()["weights"].asleep_segments:  # it came before all was awake
            allocator.wake_up()
        assert_awake_with_bytes(allocator, memory, address)


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["off", "auto"])
def test_every_driver_call_of_a_wake_may_fail(make_allocator: object, memory: Memory, compress: str) -> None:
    """Once this process has come back, it is at level 1, and so is what a failure leaves."""
    assert callable(make_allocator)
    allocator = make_allocator(compress=compress)
    address = fill(allocator, memory)
    allocator.sleep(level=3)
    sim.reset()
    allocator.wake_up()
    calls = {name: count for name, count in sim.stats().calls.items() if count and name != "cuGetErrorName"}
    assert calls["cuMemMap"] >= 2
    for name, count in calls.items():
        for after in sorted({0, count // 2, count - 1}):
            allocator.sleep(level=3)
            assert allocator.checkpoint is not None
            sim.reset()
            sim.fail(name, after=after, error="CUDA_ERROR_UNKNOWN")
            try:
                allocator.wake_up()
            except CumemSleepError:
                assert allocator.checkpoint is None
                assert not _core.driver_calls_suspended()
                sim.reset()
                allocator.wake_up()
            sim.reset()
            assert_awake_with_bytes(allocator, memory, address)


class TestVault:
    @pytest.fixture
    def vault(self, tmp_path: pathlib.Path) -> Iterator[RunningVault]:
        folder = tmp_path / "v"
        folder.mkdir(mode=0o700)
        running = RunningVault(folder, "64MiB", "--slab-size", "16MiB")
        running.wait_until_ready()
        yield running
        running.close()

    @pytest.mark.slow
    @pytest.mark.parametrize("ends", [False, True])
    def test_keeps_the_backups(self, make_allocator: object, memory: Memory, vault: RunningVault, ends: bool) -> None:
        """And if it is killed meanwhile, this process wakes from its memory itself."""
        assert callable(make_allocator)
        allocator = make_allocator(vault=str(vault.socket))
        address = fill(allocator, memory)
        for _ in range(2):
            pinned_bytes = sim.stats().registered_bytes  # by the test
            allocator.sleep(level=3)
            assert sim.stats().registered_bytes == pinned_bytes
            assert allocator.checkpoint is not None
            assert allocator.usage()["weights"].vault_bytes == 2 * PAGE
            if ends:
                os.kill(vault.process.pid, signal.SIGKILL)
                vault.process.wait()
                allocator.backup_place()
                assert allocator.checkpoint is not None
            in_thread(allocator.wake_up)
            assert_awake_with_bytes(allocator, memory, address)
            if ends:
                break
        for segment in _core.segments():
            allocator.free(segment.address)
        allocator.close()
