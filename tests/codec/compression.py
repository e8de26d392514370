"""Segments of bytes of every kind, and what their compressed backups have to be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import AWAKE, MIB, PAGE, SIMULATED, ample_host_memory, bf16_weights, holds, quick_sums

from cumem_sleep import CuMemAllocator, _core, sim
from cumem_sleep.codec import exponent
from cumem_sleep.codec.codec import Bytes, Code
from cumem_sleep.codec.kernels import SimulatedKernels
from cumem_sleep.codec.workspace import workspace_bytes

MakeAllocator = Callable[..., CuMemAllocator]
Contents = dict[int, bytes]  # by address

# Of one slot of a workspace, which is then a page.
ONE_PAGE_BENCH = PAGE - (64 << 10)
BENCH_BYTES = 5 * PAGE, 3 * PAGE  # with `small_slots`; the second is the least
EXACT = 1.01
COMPRESSED_BYTES = int(0.70 * 2 * PAGE)  # of two pages of weights, with some to spare
USUAL_BENCH_BYTES = workspace_bytes(
    CuMemAllocator.tuning, CuMemAllocator.tuning.most_slots, CuMemAllocator.tuning.slot_bytes[0]
)  # before the tests make it small


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two encoded chunks, or one; the simulated driver writes to all memory that it gives. And small parts."""
    monkeypatch.setattr(CuMemAllocator.tuning, "head_bytes", 2 * PAGE)
    monkeypatch.setattr(CuMemAllocator.tuning, "digest_part_bytes", 4 * PAGE)
    monkeypatch.setattr(CuMemAllocator.tuning, "idle_s", 60.0)  # this machine may be busy, and the device is not
    for name in ("slots", "most_slots"):
        monkeypatch.setattr(CuMemAllocator.tuning, name, 2)
    monkeypatch.setattr(CuMemAllocator.tuning, "slot_bytes", (4 * MIB, 2 * MIB))
    monkeypatch.setattr(CuMemAllocator.tuning, "worth_compiling_bytes", 0)
    monkeypatch.setattr(CuMemAllocator.tuning, "prepare_piece_bytes", PAGE)  # is decoded in a slot
    # What it tells apart is not the question here
    monkeypatch.setattr("cumem_sleep.digest.digester.sums_of", quick_sums)
    ample_host_memory(monkeypatch)
    remember_codec(monkeypatch)


def remember_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reference makes of the same bytes it need not make again, at each place of a sweep."""
    for name in ("chunk_bytes", "encode", "decode"):
        work = getattr(exponent, name)

        def remembered(code: Code, content: Bytes, *sizes: Any, work: Callable[..., Any] = work) -> Any:
            return _result_of(work, code, content.tobytes(), *map(tuple, sizes))

        monkeypatch.setattr(exponent, name, remembered)


@lru_cache(maxsize=48)
def _result_of(work: Callable[..., npt.NDArray[Any]], code: Code, content: bytes, *sizes: Any) -> npt.NDArray[Any]:
    result = work(code, np.frombuffer(content, np.uint8), *sizes)
    result.flags.writeable = False
    return result


def bf16(nbytes: int, random: np.random.Generator) -> bytes:
    return bf16_weights(nbytes, random)


def fp16(nbytes: int, random: np.random.Generator) -> bytes:
    return bytes((random.standard_normal(nbytes // 2, np.float32) * np.float32(0.02)).astype("<f2"))


def fp32(nbytes: int, random: np.random.Generator) -> bytes:
    return bytes(random.standard_normal(nbytes // 4, np.float32) * np.float32(0.02))


def e4m3(nbytes: int, random: np.random.Generator) -> bytes:
    values = np.abs(random.standard_normal(nbytes, np.float32))
    exponents = np.clip(np.floor(np.log2(values + 1e-9)) + 8, 0, 14).astype(np.uint8)
    return bytes((exponents << 3) | (random.integers(0, 256, nbytes, np.uint8) & 0x87))


def noise(nbytes: int, random: np.random.Generator) -> bytes:
    return random.bytes(nbytes)


def some_noise(nbytes: int, random: np.random.Generator) -> bytes:
    return bf16(nbytes // 8 * 7, random) + random.bytes(nbytes // 8)


def zeros(nbytes: int, random: np.random.Generator) -> bytes:
    return bytes(nbytes)


Kind = Callable[[int, np.random.Generator], bytes]
KINDS: tuple[Kind, ...] = (bf16, fp16, e4m3, fp32, noise, some_noise)


def write(address: int, content: bytes) -> None:
    """By the CPU; where that is not possible, without the end of the whole run."""
    assert SIMULATED, "device memory of a GPU: this test needs pytest.mark.sim"
    ctypes.memmove(address, content, len(content))


def fill(
    allocator: CuMemAllocator, *kinds: Kind, nbytes: int = 2 * PAGE, tag: str = "weights", device: int = 0
) -> Contents:
    """A segment of each kind."""
    contents = {}
    for kind in kinds:
        content = content_of(kind, nbytes, len(_core.segments()))
        address = allocator.malloc(nbytes, tag, device)
        write(address, content)
        contents[address] = content
    return contents


@lru_cache(maxsize=24)  # many tests want the same, and normal values take long to make
def content_of(kind: Kind, nbytes: int, seed: int) -> bytes:
    return kind(nbytes, np.random.default_rng(seed))


def check_bytes(contents: Mapping[int, bytes]) -> None:
    for address, content in contents.items():
        assert holds(address, content), f"0x{address:x}"


def at(address: int) -> _core.Segment:
    (segment,) = (segment for segment in _core.segments() if segment.address == address)
    return segment


def encodings(allocator: CuMemAllocator, addresses: Sequence[int] | Contents) -> list[str | None]:
    """The names of the layouts; None for what is stored as it is. All must have a complete backup."""
    found = []
    for address in addresses:
        assert allocator._store.catalogue.get(at(address)) is not None
        encoding = allocator._store.catalogue.encoding_of(at(address))
        found.append(encoding.code.layout.name if encoding is not None else None)
    return found


def check_host_bytes(allocator: CuMemAllocator) -> None:
    """Not more than the bytes that are stored need: by what we say, and what the driver says."""
    stored = 0
    for segment in _core.segments():
        backup = allocator._store.catalogue.get(segment)
        if backup is not None:
            mine = backup.encoding.bytes if backup.encoding else segment.bytes
            assert mine <= backup.bytes <= EXACT * mine
            stored += mine
    said = sum(usage.host_bytes for usage in allocator.usage().values())
    assert stored <= said <= EXACT * stored
    assert said <= sim.stats().registered_bytes <= EXACT * stored


def states() -> set[_core.Segment.Sleep]:
    return {segment.sleep for segment in _core.segments()}


def leave_free(nbytes: int) -> None:
    """On every device."""
    used = max(total - free for free, total in map(_core.memory_info, range(_core.device_count())))
    sim.configure(device_bytes=used + nbytes)


def cycle(allocator: CuMemAllocator, contents: Contents) -> None:
    allocator.sleep()
    assert AWAKE not in states()
    allocator.wake_up()
    check_bytes(contents)


def failing(name: str, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
    real, calls = getattr(SimulatedKernels, name), []

    def fail(*arguments: Any) -> None:
        calls.append(name)
        if len(calls) > after:
            raise RuntimeError("no such kernel")
        real(*arguments)

    monkeypatch.setattr(SimulatedKernels, name, fail)


class QuickCodec:
    """In place of the codec's own work, where how it encodes is not the question: chunks by their hash."""

    BYTES = 1_400_000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._chunks: dict[int, Bytes] = {}
        for name in ("chunk_bytes", "encode", "decode"):
            monkeypatch.setattr(f"cumem_sleep.codec.exponent.{name}", getattr(self, name))

    def chunk_bytes(self, _: Code, content: Bytes) -> npt.NDArray[np.int64]:
        return np.array([self.BYTES])

    def encode(self, _: Code, content: Bytes) -> Bytes:
        encoded = np.zeros(self.BYTES, np.uint8)
        key = hash(content.tobytes())
        self._chunks[key] = content.copy()
        encoded[:8].view(np.int64)[0] = key
        return encoded

    def decode(self, _: Code, stored: Bytes, sizes: npt.ArrayLike) -> Bytes:
        return self._chunks[int(stored[:8].view(np.int64)[0])]
