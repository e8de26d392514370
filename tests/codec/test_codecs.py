"""What every codec must do: each in the list, and one that only tests have."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import even_bytes
import numpy as np
import pytest
from compression import bf16, check_bytes, cycle, encodings, fill, write
from support import PAGE

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.codec import codecs
from cumem_sleep.codec.codec import CHUNK_BYTES, PARAMETER_BYTES, Bytes, Code, Codec, Layout, parameters_of, rows
from cumem_sleep.codec.codecs import CODECS
from cumem_sleep.codec.kernels import SimulatedKernels

BOTH: tuple[Codec, ...] = (*CODECS, even_bytes)
EVERY_LAYOUT = [pytest.param(codec, layout, id=layout.name) for codec in BOTH for layout in codec.LAYOUTS]
every_layout = pytest.mark.parametrize(("codec", "layout"), EVERY_LAYOUT)


def small_numbers(nbytes: int, random: np.random.Generator) -> bytes:
    """In 16 bits: the high byte of each is 3."""
    return bytes((random.integers(0, 256, nbytes // 2) + 0x300).astype("<u2"))


@functools.cache
def content_of(*kinds: str) -> Bytes:
    """A chunk of each kind."""
    random = np.random.default_rng(11)
    make = {
        "zeros": lambda: bytes(CHUNK_BYTES),
        "ones": lambda: b"\xff" * CHUNK_BYTES,
        "noise": lambda: random.bytes(CHUNK_BYTES),
        "weights": lambda: bf16(CHUNK_BYTES, random),
        "numbers": lambda: small_numbers(CHUNK_BYTES, random),
    }
    return np.frombuffer(b"".join(make[kind]() for kind in kinds), np.uint8)


def code_for(codec: Codec, layout: Layout, chunk: Bytes) -> Code:
    (parameters,), _ = codec.rank(layout, chunk[None, :8192])
    return Code(layout, parameters.astype(np.uint8).tobytes())


ALL_KINDS = ("zeros", "ones", "noise", "weights", "numbers")


class TestReference:
    @every_layout
    @pytest.mark.parametrize(
        "of", ["weights", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ALL_KINDS if kind != "weights")]
    )
    def test_any_content_comes_back_with_any_code(self, codec: Codec, layout: Layout, of: str) -> None:
        kinds = ALL_KINDS if of != "weights" else ("zeros", "noise", "weights")
        content = content_of(*kinds)
        code = code_for(codec, layout, content_of(of))
        sizes, stored = codec.chunk_bytes(code, content), codec.encode(code, content)
        assert len(sizes) == len(kinds)
        assert stored.size == sizes.sum()
        assert np.array_equal(codec.decode(code, stored, sizes), content)

    @pytest.mark.slow
    @every_layout
    def test_chunks_are_independent(self, codec: Codec, layout: Layout) -> None:
        content = content_of("weights", "noise", "weights")
        code = code_for(codec, layout, content[:CHUNK_BYTES])
        sizes, stored = codec.chunk_bytes(code, content), codec.encode(code, content)
        for chunk, end, size in zip(content.reshape(3, -1), np.cumsum(sizes), sizes, strict=True):
            assert np.array_equal(codec.decode(code, stored[end - size : end], [size]), chunk)

    @every_layout
    def test_no_chunk_becomes_smaller_than_it_says(self, codec: Codec, layout: Layout) -> None:
        for kind in ALL_KINDS:
            chunk = content_of(kind)
            sizes = codec.chunk_bytes(code_for(codec, layout, chunk), chunk)
            assert layout.header_bytes < layout.smallest_chunk_bytes <= sizes.min()

    @every_layout
    def test_zeros_after_its_parameters_change_no_code(self, codec: Codec, layout: Layout) -> None:
        """As a kernel finds them in a row."""
        chunk = content_of("weights")
        code = code_for(codec, layout, chunk)
        assert len(code.parameters) <= PARAMETER_BYTES
        same = Code(layout, code.parameters.ljust(PARAMETER_BYTES, b"\0"))
        stored = codec.encode(same, chunk)
        assert np.array_equal(stored, codec.encode(code, chunk))
        assert np.array_equal(codec.decode(same, stored, [stored.size]), chunk)

    @every_layout
    def test_damaged_bytes_harm_nobody(self, codec: Codec, layout: Layout) -> None:
        chunk = content_of("weights")
        code = code_for(codec, layout, chunk)
        stored = codec.encode(code, chunk)
        random = np.random.default_rng(3)
        for damaged in (stored[: stored.size // 2], stored[:1], random.integers(0, 256, stored.size, np.uint8)):
            assert codec.decode(code, damaged, [damaged.size]).size == CHUNK_BYTES

    @every_layout
    def test_of_nothing(self, codec: Codec, layout: Layout) -> None:
        nothing = np.zeros(0, np.uint8)
        code = code_for(codec, layout, content_of("weights"))
        assert codec.encode(code, nothing).size == codec.chunk_bytes(code, nothing).size == 0
        assert codec.decode(code, nothing, []).size == 0


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "CODECS", BOTH)
    assert codecs.least_bytes(PAGE) == min(layout.smallest_chunk_bytes for codec in BOTH for layout in codec.LAYOUTS)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.__name__)
def test_a_codec_has_kernels_under_its_name(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="kernels need Triton, which comes with PyTorch for CUDA")
    monkeypatch.setattr(_core, "driver_is_simulated", lambda: False)
    for layout in codec.LAYOUTS:
        kernels = codecs.kernels_of(layout)
        assert all(callable(getattr(kernels, name)) for name in ("count", "encode", "decode"))


@pytest.mark.sim  # the second codec has no kernels, and content is written by the CPU
@pytest.mark.usefixtures("both")
class TestTogether:
    """In everything but the codecs themselves, which chunks they are is the only question."""

    @every_layout
    def test_the_simulated_driver_runs_them(self, codec: Codec, layout: Layout, allocator: CuMemAllocator) -> None:
        allocator.free(allocator.malloc(PAGE))  # the driver is open
        content = content_of("weights", "numbers", "noise")
        code = code_for(codec, layout, content[:CHUNK_BYTES])
        sizes = codec.chunk_bytes(code, content)
        totals, counters = np.zeros(3, np.uint32), np.zeros(3, np.uint32)
        stored, decoded = np.zeros(int(sizes.sum()), np.uint8), np.zeros(content.size, np.uint8)
        chunks = content.ctypes.data + CHUNK_BYTES * np.arange(3)
        places = stored.ctypes.data + np.cumsum(sizes) - sizes

        parameters, kernels = parameters_of([code] * 3), codecs.kernels_of(layout)
        assert isinstance(kernels, SimulatedKernels)
        to_count = rows(parameters, chunks, totals.ctypes.data + 4 * np.arange(3))
        kernels.count(layout, to_count.ctypes.data, 3)
        assert totals.tolist() == sizes.tolist()
        to_encode = rows(parameters, chunks, places, sizes)
        kernels.encode(layout, to_encode.ctypes.data, counters.ctypes.data, 3)
        assert (counters + layout.header_bytes).tolist() == sizes.tolist()
        to_decode = rows(parameters, places, decoded.ctypes.data + CHUNK_BYTES * np.arange(3), sizes)
        kernels.decode(layout, to_decode.ctypes.data, 3)
        assert np.array_equal(decoded, content)

    def test_a_segment_changes_from_one_to_the_other(self, allocator: CuMemAllocator) -> None:
        contents = fill(allocator, bf16, small_numbers)
        cycle(allocator, contents)
        for address, kind in zip(contents, (small_numbers, bf16), strict=True):
            contents[address] = kind(2 * PAGE, np.random.default_rng(address))
            write(address, contents[address])
        cycle(allocator, contents)
        assert encodings(allocator, contents) == ["even_bytes", "bf16"]

    def test_a_backup_is_read_without_a_wake(self, allocator: CuMemAllocator) -> None:
        contents = fill(allocator, bf16, small_numbers)
        allocator.sleep()
        for address, content in contents.items():
            found = allocator.read_backup(address + 5, PAGE)
            assert found is not None
            assert found.tobytes() == content[5 : 5 + PAGE]

    def test_what_changes_while_it_is_encoded_is_noticed(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, small_numbers)
        (address,) = contents
        encode = SimulatedKernels.encode

        def change_and_encode(*arguments: Any) -> None:
            ctypes.memset(address + 1, 7, 1)  # one odd byte, so the whole chunk needs twice the room
            encode(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(SimulatedKernels, "encode", change_and_encode)
            with pytest.raises(Exception, match="was written to while it was backed up"):
                allocator.sleep()
        contents[address] = contents[address][:1] + b"\7" + contents[address][2:]
        check_bytes(contents)
        cycle(allocator, contents)
