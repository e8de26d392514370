"""Compressed backups of bytes that change: what is encoded anew, and what is noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from compression import (
    Contents,
    Kind,
    MakeAllocator,
    QuickCodec,
    at,
    bf16,
    check_bytes,
    check_host_bytes,
    cycle,
    encodings,
    failing,
    fill,
    fp16,
    noise,
    small_slots,  # noqa: F401  (autouse)
    some_noise,
    states,
    write,
    zeros,
)
from support import AWAKE, PAGE, digest_by_the_kernel, patch_prefault

from cumem_sleep import CuMemAllocator, InvalidState, OutOfHostMemory, _core, sim
from cumem_sleep.backups.filling import Filling
from cumem_sleep.codec.compressor import Compressor
from cumem_sleep.codec.kernels import SimulatedKernels
from cumem_sleep.codec.plan import PLANNED_AT_ONCE, Planner
from cumem_sleep.codec.workspace import Workspace
from cumem_sleep.digest.device import DigestRun
from cumem_sleep.digest.kernel import GpuSums
from cumem_sleep.digest.reference import Digest

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
    def test_the_next_part_is_counted_while_one_is_encoded(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        contents = fill(allocator, bf16, bf16, fp16, bf16)
        cycle(allocator, contents)
        random = np.random.default_rng(11)
        for address, kind in zip(contents, (bf16, noise, fp16, zeros), strict=True):
            contents[address] = kind(2 * PAGE, random)
            write(address, contents[address])
        calls: list[str] = []

        def noted(name: str, work: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: Any) -> None:
                calls.append(name)
                work(*arguments)

            return call

        for name in ("count", "encode"):
            monkeypatch.setattr(SimulatedKernels, name, noted(name, getattr(SimulatedKernels, name)))
        allocator.sleep()
        # The second is noise by now; the fourth is counted once more, with a code for zeros.
        assert calls == ["count", "count", "encode", "count", "count", "encode", "count", "encode"]
        assert encodings(allocator, contents) == ["bf16", None, "fp16", "bf16"]
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    def test_the_next_part_is_digested_while_one_is_encoded(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of what has a compressed backup; what has none is digested first, because it has to be planned as a whole."""
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        contents = fill(allocator, noise, bf16, bf16, fp16, bf16)
        cycle(allocator, contents)
        for address, kind in zip(contents, (noise, bf16, bf16, fp16, bf16), strict=True):
            contents[address] = kind(2 * PAGE, np.random.default_rng(address))
            write(address, contents[address])
        places = {segment.id: place for place, segment in enumerate(_core.segments())}
        calls: list[object] = []
        start, encode = DigestRun.start, SimulatedKernels.encode

        def noted_start(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            calls.append([places[segment.id] for segment in segments])
            start(run, segments)

        def noted_encode(*arguments: Any) -> None:
            calls.append("encode")
            encode(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(DigestRun, "start", noted_start)
            patch.setattr(SimulatedKernels, "encode", noted_encode)
            report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (10 * PAGE, 0)
        assert calls == [[0], [1], [2, 3], "encode", "encode", [4], "encode", "encode", [1, 2], [0, 3, 4]]
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(4))
    def test_a_digest_that_finds_no_memory_leaves_nothing_out(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """It raises what a backup raises that finds none, which all begins anew after: with that part, too."""
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        contents = fill(allocator, bf16, bf16, fp16, bf16, bf16)
        cycle(allocator, contents)
        self.change_all(contents)
        start, calls = DigestRun.start, list[int]()

        def fail_once(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            if segments:
                calls.append(len(segments))
                if len(calls) == number + 1:
                    raise OutOfHostMemory(4096, 0, "budget")
            start(run, segments)

        with monkeypatch.context() as patch:
            patch.setattr(DigestRun, "start", fail_once)
            if number == 0:  # before anything was found that could make way
                with pytest.raises(OutOfHostMemory):
                    allocator.sleep()
                assert states() == {AWAKE}
            report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (10 * PAGE, 0)
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("after", [0, 1, 3, 5])
    def test_a_codec_that_fails_before_the_last_part_leaves_nothing_out(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, after: int
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        contents = fill(allocator, *[bf16] * 6)
        cycle(allocator, contents)
        self.change_all(contents)
        failing("encode", monkeypatch, after=after)
        report = allocator.sleep()
        assert (report.copied_bytes, report.stored_bytes, report.clean_bytes) == (12 * PAGE, 12 * PAGE, 0)
        assert encodings(allocator, contents) == [None] * 6
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    def test_parts_of_two_devices(self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of the second are found while the first one's are encoded."""
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        allocator = make_allocator(compress="auto")
        sim.configure(devices=2)
        contents: Contents = {}
        for number in range(8):
            contents |= fill(allocator, bf16, device=number % 2)
        cycle(allocator, contents)
        self.change_all(contents)
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (16 * PAGE, 0)
        assert encodings(allocator, contents) == ["bf16"] * 8
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    def test_a_check_that_fails_is_begun_anew(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its tables have room for each segment once."""
        contents = fill(allocator, *[bf16] * 6)
        cycle(allocator, contents)
        self.change_all(contents)
        start, finish, begun, checks = DigestRun.start, DigestRun.finish, list[int](), 0

        def noted_start(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            nonlocal checks
            begun.extend(segment.id for segment in segments)
            assert len(begun) == len(set(begun))
            start(run, segments)
            checks += len(segments) > 2  # more than a part
            if checks == 1:
                checks += 1
                raise OutOfHostMemory(4096, 0, "budget")

        def noted_finish(run: DigestRun) -> dict[int, Digest]:
            begun.clear()
            return finish(run)

        with monkeypatch.context() as patch:
            patch.setattr(DigestRun, "start", noted_start)
            patch.setattr(DigestRun, "finish", noted_finish)
            report = allocator.sleep()
        assert checks == 3
        assert (report.copied_bytes, report.clean_bytes) == (12 * PAGE, 0)
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    def test_a_digest_that_finds_no_memory_on_the_second_device(
        self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where what was begun on the first is kept by a table of its own."""
        allocator = make_allocator(compress="auto")
        sim.configure(devices=2)
        contents = fill(allocator, bf16, bf16, bf16) | fill(allocator, bf16, bf16, device=1)
        digest_by_the_kernel(allocator)
        cycle(allocator, contents)
        self.change_all(contents)
        create, failed = GpuSums.__init__, list[int]()

        def fail_once(sums: GpuSums, device: int, chunks: int) -> None:
            if device == 1 and not failed:
                failed.append(device)
                raise OutOfHostMemory(4096, 0, "mmap")
            create(sums, device, chunks)

        monkeypatch.setattr(GpuSums, "__init__", fail_once)
        report = allocator.sleep()
        assert failed == [1]
        assert (report.copied_bytes, report.clean_bytes) == (10 * PAGE, 0)
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

    @pytest.mark.slow
    @pytest.mark.parametrize(("kind", "devices"), [(bf16, [0, 1]), (noise, [0])])
    def test_a_full_device_where_nothing_changed_is_left_alone(
        self,
        make_allocator: MakeAllocator,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        kind: Kind,
        devices: list[int],
    ) -> None:
        """What has a compressed backup may turn out to have changed later: only then it matters."""
        allocator = make_allocator(compress="auto")
        sim.configure(devices=2)
        contents = fill(allocator, bf16) | fill(allocator, kind, device=1)
        cycle(allocator, contents)
        first = next(iter(contents))
        contents[first] = bf16(2 * PAGE, np.random.default_rng(77))
        write(first, contents[first])
        workspace, seen = Compressor.workspace, list[int]()

        def noted(compressor: Compressor, device: int, *arguments: Any, **named: Any) -> Workspace:
            seen.append(device)
            return workspace(compressor, device, *arguments, **named)

        with closing(_core.Scratch(1, _core.memory_info(1)[0])), monkeypatch.context() as patch:
            patch.setattr(Compressor, "workspace", noted)
            assert allocator.sleep().copied_bytes == 2 * PAGE
        assert seen == devices
        assert "no memory left" not in caplog.text
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

    def test_more_segments_than_are_planned_together(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All of which are found to have changed at once."""
        QuickCodec(monkeypatch)
        monkeypatch.setattr(CuMemAllocator.tuning, "digest_part_bytes", 1 << 30)
        contents = fill(allocator, *[bf16] * (PLANNED_AT_ONCE + 4), nbytes=PAGE)
        cycle(allocator, contents)
        for address, content in contents.items():
            contents[address] = content[2:] + content[:2]
            write(address, contents[address])
        assert allocator.sleep().copied_bytes == len(contents) * PAGE
        assert encodings(allocator, contents) == ["bf16"] * len(contents)
        allocator.wake_up()
        check_bytes(contents)

    def test_pages_of_late_memory_are_touched_ahead(
        self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What does not fit any more takes memory in the middle of a sleep, and not in the thread that copies."""
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        allocator = make_allocator(compress="auto", prefault_threads=2)
        contents = fill(allocator, bf16, bf16, bf16)
        cycle(allocator, contents)
        for address in contents:
            contents[address] = noise(2 * PAGE, np.random.default_rng(address))
            write(address, contents[address])
        touch, touched = _core.HostBlock.prefault, Counter[str]()

        def noted(block: _core.HostBlock, start: int, nbytes: int) -> None:
            touched[_core.thread_name()] += nbytes
            touch(block, start, nbytes)

        patch_prefault(monkeypatch, noted)
        allocator.sleep()
        assert touched["cumem-ahead"] == 3 * 2 * PAGE
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
            patch.setattr(Filling, "add", refuse)
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
        assert allocator._store.room.bytes == 0
