"""Backups that are damaged, and a codec that fails: no byte is lost."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from compression import (
    BENCH_BYTES,
    MakeAllocator,
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
from preparing import finished
from support import BACKED_UP, DROPPED, PAGE

from cumem_sleep import BackupMismatch, CodecError, CuMemAllocator, sim
from cumem_sleep.codec.codec import Codec, Kernels, Layout

pytestmark = pytest.mark.sim


class TestDamage:
    @pytest.mark.slow
    @pytest.mark.parametrize("verify", ["wake", "off"])
    @pytest.mark.parametrize("part", ["header", "plane", "level 0", "symbols", "second chunk"])
    def test_of_a_backup(self, make_allocator: MakeAllocator, part: str, verify: str) -> None:
        allocator = make_allocator(compress="auto", verify=verify)
        contents = fill(allocator, bf16, some_noise) | fill(allocator, noise, tag="lora")
        allocator.sleep()
        address = list(contents)[1]
        backup = allocator._store.catalogue.get(at(address))
        assert backup is not None
        assert backup.encoding is not None
        layout, sizes = backup.encoding.code.layout, backup.encoding.sizes
        first = layout.header_bytes
        content = np.frombuffer(memoryview(backup.extents[0]), np.uint8)
        place = {
            "header": 0,
            "plane": first + 7,
            "level 0": first + layout.fixed_bytes - 1,
            # The last block of the second chunk is noise, so it has many; at most 15 bytes of nothing follow.
            "symbols": int(sizes[:2].sum()) - 100,
            "second chunk": int(sizes[0]) + first,
        }[part]
        content[place] ^= 0x10
        if verify == "off":
            allocator.wake_up()
            assert ctypes.string_at(address, 2 * PAGE) != contents[address]
            return
        for _ in range(2):
            with pytest.raises(BackupMismatch) as raised:
                allocator.wake_up()
            assert f"0x{address:x}" in raised.value.segment
            assert raised.value.expected == str(backup.digest)
            assert states() == {BACKED_UP}
            assert sim.stats().live_handles == 0
        content[place] ^= 0x10
        allocator.wake_up()
        check_bytes(contents)


class TestCodecFails:
    @pytest.mark.parametrize("prepare", [False, True])
    def test_on_trial(
        self,
        allocator: CuMemAllocator,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        prepare: bool,
    ) -> None:
        """Kernels of any layout are tried before anything is stored that only they can read."""
        tried = []

        def refuse(codec: Codec, kernels: Kernels, layout: Layout, device: int) -> None:
            tried.append(layout.name)
            if layout.name == "fp16":
                raise RuntimeError("no such kernel")

        monkeypatch.setattr("cumem_sleep.codec.codecs.try_kernels", refuse)
        contents = fill(allocator, bf16)
        cycle(allocator, contents)
        assert (tried, encodings(allocator, contents)) == (["bf16"], ["bf16"])
        contents |= fill(allocator, fp16)
        if prepare:
            assert finished(allocator.prepare()).error is None
        cycle(allocator, contents)
        assert tried == ["bf16", "fp16"]
        assert encodings(allocator, contents) == ["bf16", None]
        assert "no such kernel" in caplog.text

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "after"), [("count", 0), ("encode", 0), ("encode", 1)])
    def test_at_sleep(
        self,
        allocator: CuMemAllocator,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        name: str,
        after: int,
    ) -> None:
        contents = fill(allocator, bf16, noise, bf16)
        fill(allocator, noise, nbytes=BENCH_BYTES[1], tag="kv_cache")
        failing(name, monkeypatch, after)
        for _ in range(2):
            cycle(allocator, contents)
            assert encodings(allocator, contents) == [None] * 3
            check_host_bytes(allocator)
            assert sim.stats().live_handles == 4
        assert len(caplog.records) == 1
        assert "stored uncompressed" in caplog.text
        assert "no such kernel" in caplog.text

    @pytest.mark.parametrize("prepare", [False, True])
    def test_after_a_good_sleep(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, prepare: bool
    ) -> None:
        """What is clean stays compressed, and can still be restored; what changed is stored as it is."""
        contents = fill(allocator, bf16, bf16)
        cycle(allocator, contents)
        first, second = contents
        contents[second] = bytes([contents[second][0] ^ 1]) + contents[second][1:]
        write(second, contents[second])
        failing("encode", monkeypatch)
        cycle(allocator, contents)
        assert encodings(allocator, contents) == ["bf16", None]
        contents[first] = bytes([contents[first][0] ^ 1]) + contents[first][1:]
        write(first, contents[first])
        if prepare:
            assert finished(allocator.prepare()).error is None
            assert encodings(allocator, contents) == [None, None]
        assert allocator.sleep().copied_bytes == (0 if prepare else 2 * PAGE)
        assert encodings(allocator, contents) == [None, None]
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("after", [0, 1])
    def test_at_wake(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        contents = fill(allocator, bf16, noise, bf16)
        fill(allocator, zeros, nbytes=BENCH_BYTES[1], tag="kv_cache")
        allocator.sleep()
        for _ in range(2):
            with monkeypatch.context() as patch:
                failing("decode", patch, after)
                with pytest.raises(CodecError, match="no such kernel"):
                    allocator.wake_up()
            assert states() == {BACKED_UP, DROPPED}
            assert sim.stats().live_handles == 0
            assert encodings(allocator, contents) == ["bf16", None, "bf16"]
        allocator.wake_up()
        check_bytes(contents)

    def test_kernels_cannot_be_had(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse() -> None:
            raise CodecError("no Triton here")

        monkeypatch.setattr("cumem_sleep.codec.compressor.require_kernels", refuse)
        contents = fill(allocator, bf16)
        for _ in range(2):
            assert finished(allocator.prepare()).error is None
            cycle(allocator, contents)
            write(next(iter(contents)), contents[next(iter(contents))])
        assert encodings(allocator, contents) == [None]
        assert len(caplog.records) == 1
        assert "no Triton here" in caplog.text

    def test_kernels_do_not_reach_host_memory(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        info = SimpleNamespace(host_pointers=False, numa_node=-1)
        monkeypatch.setattr("cumem_sleep.codec.workspace._core.device_info", lambda device: info)
        contents = fill(allocator, bf16)
        cycle(allocator, contents)
        assert encodings(allocator, contents) == [None]
        assert "cannot access pinned host memory" in caplog.text
