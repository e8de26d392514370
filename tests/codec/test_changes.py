"""Compressed backups of bytes that change: what is encoded anew, and what is noticed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from compression import (
    Contents,
    Kind,
    MakeAllocator,
    at,
    bf16,
    check_bytes,
    check_host_bytes,
    cycle,
    encodings,
    fill,
    fp16,
    noise,
    small_slots,  # noqa: F401  (autouse)
    some_noise,
    states,
    write,
    zeros,
)
from support import AWAKE, PAGE

from cumem_sleep import CuMemAllocator, InvalidState, OutOfHostMemory, _core
from cumem_sleep.backups.writer import BackupWriter
from cumem_sleep.codec.kernels import SimulatedKernels
from cumem_sleep.codec.plan import Planner
from cumem_sleep.codec.workspace import Workspace
from cumem_sleep.digest.digester import DigestRun

pytestmark = pytest.mark.sim


class TestChanges:
    def test_clean_segments_are_not_encoded(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        contents = fill(allocator, bf16, bf16)
        cycle(allocator, contents)
        second = list(contents)[1]
        content = contents[second]
        contents[second] = content[:-1] + bytes([content[-1] ^ 0x80])
        write(second, contents[second])
        encoded = []
        encode = SimulatedKernels.encode

        def counted(*arguments: Any) -> None:
            encoded.append(arguments[-1])
            encode(*arguments)

        monkeypatch.setattr(SimulatedKernels, "encode", counted)
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (2 * PAGE, 2 * PAGE)
        assert sum(encoded) == 2
        allocator.wake_up()
        check_bytes(contents)
        assert allocator.sleep().copied_bytes == 0
        assert sum(encoded) == 2
        allocator.wake_up()

    def test_similar_values_need_no_new_memory_and_no_samples(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, bf16, bf16)
        cycle(allocator, contents)
        before = [allocator._store.catalogue.of(at(address)) for address in contents]
        sizes = [backup.encoding.sizes for backup in before if backup.encoding]
        random = np.random.default_rng(7)
        for address in contents:
            contents[address] = bf16(2 * PAGE, random)
            write(address, contents[address])
        with monkeypatch.context() as patch:
            patch.setattr(Planner, "sample", None)
            report = allocator.sleep()
        assert report.copied_bytes == 2 * 2 * PAGE
        after = [allocator._store.catalogue.of(at(address)) for address in contents]
        for old, new, old_sizes in zip(before, after, sizes, strict=True):
            assert new is old
            assert new.encoding is not None
            assert (new.encoding.sizes != old_sizes).all()
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    def test_old_backups_make_way_for_a_digest(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That finds no memory before they do."""
        contents = fill(allocator, *[bf16] * 5)
        cycle(allocator, contents)
        self.change_all(contents)
        start, calls = DigestRun.start, list[int]()
        forget, forgotten = allocator._store.catalogue.forget, list[int]()

        def refuse_at_first(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            calls.append(len(segments))
            if len(calls) > 1 and not forgotten:
                raise OutOfHostMemory(4096, 0, "MemAvailable")
            start(run, segments)

        def noted_forget(ids: Iterable[int]) -> None:
            forgotten.extend(ids := list(ids))
            forget(ids)

        with monkeypatch.context() as patch:
            patch.setattr(allocator._store.catalogue, "forget", noted_forget)
            patch.setattr(DigestRun, "start", refuse_at_first)
            assert allocator.sleep().copied_bytes == 10 * PAGE
        allocator.wake_up()
        check_bytes(contents)

    @staticmethod
    def change_all(contents: Contents) -> None:
        for address in contents:
            contents[address] = bf16(2 * PAGE, np.random.default_rng(address))
            write(address, contents[address])

    @pytest.mark.slow
    @pytest.mark.parametrize("first", [bf16, noise, zeros, some_noise, fp16])
    @pytest.mark.parametrize("second", [bf16, noise, zeros, some_noise])
    def test_of_kind(self, allocator: CuMemAllocator, first: Kind, second: Kind) -> None:
        """Host memory is as much as the bytes need that are there now."""
        contents = fill(allocator, first)
        cycle(allocator, contents)
        (address,) = contents
        contents[address] = second(2 * PAGE, np.random.default_rng(9))
        write(address, contents[address])
        allocator.sleep()
        assert encodings(allocator, contents) == [None if second is noise else "bf16"]
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    def test_during_sleep_are_noticed(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the sizes of chunks tell, and where only the digest does."""
        contents = fill(allocator, bf16, bf16)
        address = list(contents)[1]
        encode = Workspace.encode
        flipped = contents[address][:-2] + bytes([contents[address][-2] ^ 1]) + contents[address][-1:]
        for changed in (
            flipped,
            noise(2 * PAGE, np.random.default_rng(1)),
        ):

            def write_and_encode(*arguments: Any, changed: bytes = changed) -> None:
                write(address, changed)
                encode(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(Workspace, "encode", write_and_encode)
                with pytest.raises(InvalidState, match=f"0x{address:x}.* written to"):
                    allocator.sleep()
            assert states() == {AWAKE}
            contents[address] = changed
            check_bytes(contents)
            cycle(allocator, contents)
            allocator.release_backups()

    def test_memory_that_was_to_be_reused_is_not_trusted(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A sleep that fails before it writes to it; and then the bytes are again those that it held."""
        contents = fill(allocator, bf16)
        cycle(allocator, contents)
        (address,) = contents
        write(address, bf16(2 * PAGE, np.random.default_rng(8)))

        def refuse(*_: object, **__: object) -> None:
            raise InvalidState("not now")

        with monkeypatch.context() as patch:
            patch.setattr(BackupWriter, "add", refuse)
            with pytest.raises(InvalidState, match="not now"):
                allocator.sleep()
        write(address, contents[address])
        cycle(allocator, contents)

    def test_sizes_alone_tell_without_digests(
        self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocator = make_allocator(compress="auto", verify="off", retain_backups=False)
        contents = fill(allocator, bf16)
        (address,) = contents
        encode = Workspace.encode

        def write_and_encode(*arguments: Any) -> None:
            write(address, noise(2 * PAGE, np.random.default_rng(1)))
            encode(*arguments)

        monkeypatch.setattr(Workspace, "encode", write_and_encode)
        with pytest.raises(InvalidState, match=f"0x{address:x}.* written to"):
            allocator.sleep()
        assert states() == {AWAKE}
        assert allocator._store.memory.bytes == 0
