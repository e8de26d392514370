"""A restore says when half of its bytes are on their way."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable

import pytest
from stand_ins import FakeStream, Log, Part, Store, parts_of

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.transfer.restorer import Restorer, ToRestore


class TestHalfDone:
    """`Restorer.restore` says when half of the bytes are on their way."""

    def restore(
        self, monkeypatch: pytest.MonkeyPatch, parts: list[Part], batch_bytes: int, half_done: Callable[[int], None]
    ) -> Log:
        """`half_done` is given the bytes on their way."""
        log = Log()

        class Stream(FakeStream):
            def __init__(self, device: int) -> None:
                super().__init__(len(log.in_flight), log)

            def read(self, address: int, extent: object, offset: int, nbytes: int, *, by_kernel: bool = False) -> None:
                super().read(address, extent, offset, nbytes, by_kernel=by_kernel)
                log.events.append(("bytes", nbytes))

            def __enter__(self) -> Stream:
                return self

            def __exit__(self, *_: object) -> None:
                self.synchronize()

        def begun_bytes() -> int:
            return sum(nbytes for event, nbytes in log.events if event == "bytes")  # type: ignore[misc]

        def half() -> None:
            log.events.append(("half", begun_bytes()))
            half_done(begun_bytes())

        monkeypatch.setattr(_core, "CopyStream", Stream)
        monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", batch_bytes)
        done: list[int] = []

        def done_with(addresses: Iterable[int]) -> None:
            some = [*addresses]
            ended = [part.id for part in parts if part.address in some]
            assert not set(ended) & set(log.flying), "the others may be in flight"
            done.extend(some)

        transfers = types.SimpleNamespace(lane=lambda stream: stream, done_with=done_with)
        backups = ToRestore(Store(parts, 8).backed_up(parts), [])
        restorer = Restorer(CuMemAllocator.tuning)
        restorer.restore(backups, transfers, lambda _: None, half, None, {})  # type: ignore[arg-type]
        assert begun_bytes() == sum(part.bytes for part in parts)
        assert log.flying == []
        assert sorted(done) == [part.address for part in parts], "once each"
        return log

    @pytest.mark.parametrize("batch_bytes", [1, 3, 8, 20, 1000])
    @pytest.mark.parametrize("sizes", [(8,), (8, 8), (20, 1, 1), (1, 1, 20), (7,) * 9, (100, 5, 100)], ids=str)
    @pytest.mark.parametrize("devices", [1, 2, 3])
    def test_once_and_as_soon_as_it_is(
        self, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], batch_bytes: int, devices: int
    ) -> None:
        parts = parts_of(*sizes)
        for number, part in enumerate(parts):
            part.device = number % devices
        calls: list[int] = []
        self.restore(monkeypatch, parts, batch_bytes, calls.append)
        (begun,) = calls
        half = sum(sizes) // 2
        assert begun >= half
        assert begun - min(devices, len(sizes)) * batch_bytes < half, "a batch of each device before, it was so already"

    def test_what_it_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.restore(monkeypatch, parts_of(8, 8, 8), 4, fail)
