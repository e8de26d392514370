"""Content digests of device memory: 128 bits, position-dependent, the same from the GPU and from NumPy.

The bytes are little-endian 64-bit words, cut into chunks of `CHUNK_BYTES`; a chunk is `ROWS` rows of `LANES` words.
Each lane walks down its column with two independent chains,

    a = (a ^ word) * K;  a ^= a >> s        (all modulo 2^64; the second chain takes the word with its halves swapped)

that start from the chunk's number and the lane's. A step is a bijection of the state for a given word, and of the word
for a given state, so a changed word always changes the end of its chain. Ends are mixed (MurmurHash3's 64-bit
finaliser, also a bijection) and summed over all lanes and chunks, once per chain: a single changed word always changes
both sums. Changes of the highest bits of two words can be made to cancel in one chain, but those are not the highest
bits for the other; damage that nobody designed goes unseen with probability near 2^-128. Sums do not depend on order,
so chunks run in parallel. This detects damage; it does not resist an adversary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from .. import _core, log
from ..errors import CumemSleepError

if TYPE_CHECKING:
    from ..backups.store import Piece
    from .kernel import GpuSums


LANES = 2048
ROWS = 64
CHUNK_BYTES = LANES * ROWS * 8

# Odd constants with well-spread bits: golden ratio, MurmurHash3 and SplitMix64.
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
_SHIFTS = (32, 29)
_SEEDS = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
_FINAL = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_MASK = (1 << 64) - 1

_BOUNCE_BYTES = 32 << 20
_NUMPY_CHUNKS = 8  # chunks at once: their state stays in a core's cache

Words = npt.NDArray[np.uint64]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Digest:
    """128 bits that stand for the content of some memory, length included."""

    high: int
    low: int

    def __str__(self) -> str:
        return f"{self.high:016x}{self.low:016x}"


def digest_of(data: npt.ArrayLike) -> Digest:
    """The reference: the digest of the bytes of an array (any dtype, any length), on the CPU."""
    content = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return _digests_from(np.array([sums_of(content)], np.uint64), [content.size])[0]


def sums_of(content: npt.NDArray[np.uint8], first_chunk: int = 0) -> tuple[int, int]:
    """Both sums over the chunks of `content`, whose first chunk is number `first_chunk`; the end is padded with zeros.

    Sums of pieces that start on chunk boundaries add up (modulo 2^64) to the sums of the whole.
    """
    totals = [0, 0]
    step = _NUMPY_CHUNKS * CHUNK_BYTES
    for start in range(0, content.size, step):
        piece = content[start : start + step]
        if padding := -piece.size % CHUNK_BYTES:
            piece = np.concatenate([piece, np.zeros(padding, np.uint8)])
        words = piece.view("<u8").reshape(-1, ROWS, LANES)
        swapped = (words << np.uint64(32)) | (words >> np.uint64(32))
        numbers = np.arange(len(words), dtype=np.uint64) + np.uint64(first_chunk + start // CHUNK_BYTES)
        for chain, taken in enumerate((words, swapped)):
            totals[chain] = (totals[chain] + _chain_sum(taken, numbers, chain)) & _MASK
    return totals[0], totals[1]


def _chain_sum(words: Words, numbers: Words, chain: int) -> int:
    multiplier, shift = np.uint64(_MULTIPLIERS[chain]), np.uint64(_SHIFTS[chain])
    lanes = np.arange(LANES, dtype=np.uint64)
    state = (numbers[:, None] * np.uint64(LANES) + lanes + np.uint64(1)) * np.uint64(_SEEDS[chain])
    scratch = np.empty_like(state)
    for row in range(ROWS):
        np.bitwise_xor(state, words[:, row], out=state)
        np.multiply(state, multiplier, out=state)
        np.right_shift(state, shift, out=scratch)
        np.bitwise_xor(state, scratch, out=state)
    for constant in (*_FINAL, None):
        state ^= state >> np.uint64(33)
        if constant is not None:
            state *= np.uint64(constant)
    return int(state.sum(dtype=np.uint64))


def _digests_from(sums: Words, sizes: Sequence[int]) -> list[Digest]:
    """From both sums of each content, and its length: contents differ by that even where padding would hide it."""
    mixed = (sums ^ np.array(sizes, np.uint64)[:, None]) * np.array(_MULTIPLIERS, np.uint64)
    mixed ^= mixed >> np.uint64(32)
    return [Digest(high, low) for high, low in mixed.tolist()]


class DeviceDigester:
    """Digests of segments: by the Triton kernel where PyTorch and Triton reach the GPU, else on the CPU."""

    def __init__(self) -> None:
        self._chosen = False
        self._kernel: ModuleType | None = None
        self._reaches_host: dict[int, bool] = {}  # by device

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU kernel is used (known after the first digest)."""
        return self._kernel is not None

    def of(self, segments: Sequence[_core.Segment]) -> dict[int, Digest]:
        """The digest of each mapped segment, by its id. Waits for the result, not for other work on the device.

        Raises:
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        with self.run(segments) as run:
            run.start(segments)
            return run.finish()

    def run(self, segments: Sequence[_core.Segment]) -> DigestRun:
        """For digests of (some of) `segments` that are wanted one after another."""
        return DigestRun(self, segments)

    def warm_up(self, device: int) -> None:
        """Compile the kernels and load them now (half a second the first time), rather than during the first sleep."""
        self._choose()
        try:
            if (kernel := self._kernel_for(device)) is not None:
                kernel.warm_up(device)
        except CumemSleepError:
            raise
        except Exception as error:
            self._fall_back(error)

    def _choose(self) -> None:
        if not self._chosen:
            self._kernel = _choose_kernel()
            self._chosen = True

    def _kernel_for(self, device: int) -> ModuleType | None:
        """None, too, where kernels do not reach pinned memory under its host address: there lie the tables of ours."""
        if self._kernel is None:
            return None
        if device not in self._reaches_host:
            self._reaches_host[device] = _core.device_info(device).host_pointers
            if not self._reaches_host[device]:
                _warn_of_slow_digests(f"kernels of device {device} do not reach pinned host memory by its host address")
        return self._kernel if self._reaches_host[device] else None

    def _fall_back(self, error: Exception) -> None:
        """Triton compiles at the first use, and there is no end of ways in which that fails."""
        if self._kernel is None:
            return  # another thread has done so
        _warn_of_slow_digests(f"the kernel failed: {error}")
        self._kernel = None


class DigestRun:
    """Digests of segments that become ready one after another: the GPU computes them beside the copies of the next.

    `segments` are all that may be asked for; they need not be mapped yet. It is a context, and leaving it waits.
    """

    def __init__(self, digester: DeviceDigester, segments: Sequence[_core.Segment]) -> None:
        self._digester = digester
        self._segments = segments
        self._sums: dict[int, GpuSums] = {}  # by device
        self._started: list[_core.Segment] = []
        self._copy_sums: Words

    def __enter__(self) -> DigestRun:
        self._digester._choose()
        return self

    def __exit__(self, *exception: object) -> None:
        while self._sums:
            self._sums.popitem()[1].close()

    def start(self, segments: Sequence[_core.Segment]) -> None:
        """Their bytes are in place: begin. Where the CPU computes, it does so in `finish`.

        Raises:
            DriverError, OutOfHostMemory: the driver refused.
        """
        for device, mine in _by_device(segments).items():
            contents = [(segment.address, segment.bytes) for segment in mine]
            self._on_gpu(device, partial(_start, contents=contents))
            self._started += mine

    def finish(self) -> dict[int, Digest]:
        """The digests of what was started since the last `finish`, by the segments' ids; waits for them.

        Raises:
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        started, self._started = self._started, []
        digests: dict[int, Digest] = {}
        for device, mine in _by_device(started).items():
            _core.stop_if_asked()
            sums = self._on_gpu(device, _finish)
            if sums is None:
                contents = [(segment.address, segment.bytes) for segment in mine]
                sums = np.array([_sums_through_host(device, contents)], np.uint64).reshape(-1, 2)
            values = _digests_from(sums, [segment.bytes for segment in mine])
            digests.update(zip((segment.id for segment in mine), values, strict=True))
        return digests

    def begin_copy(self) -> None:
        """For the digest of a copy in pinned host memory, one at a time: `add_copy` each piece, then `finish_copy`."""
        self._copy_sums = np.zeros((1, 2), np.uint64)

    def add_decoded(self, segment: _core.Segment, offset: int, address: int, nbytes: int) -> None:
        """As `add_copy`, for bytes of an encoded copy of `segment` that were decoded again, to the device's `address`.

        Raises:
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        first_chunk = offset // CHUNK_BYTES
        self._on_gpu(segment.device, partial(_start, contents=[(address, nbytes)], first_chunk=first_chunk))
        sums = self._on_gpu(segment.device, _finish)
        if sums is None:
            sums = np.array(_sums_through_host(segment.device, [(address, nbytes)], first_chunk), np.uint64)
        self._copy_sums += sums

    def add_copy(self, segment: _core.Segment, piece: Piece) -> None:
        """Take one piece of the copy of `segment` into account; waits for it.

        The GPU reads it a piece at a time because what it reads from the host holds up whatever else it does.

        Raises:
            DriverError: the driver refused.
        """
        first_chunk = (piece.address - segment.address) // CHUNK_BYTES
        content = (piece.block.address + piece.offset, piece.bytes)
        self._on_gpu(segment.device, partial(_start, contents=[content], first_chunk=first_chunk))
        sums = self._on_gpu(segment.device, _finish)
        if sums is None:
            content_of_block = np.frombuffer(memoryview(piece.block), np.uint8)
            sums = np.array(
                [sums_of(content_of_block[piece.offset : piece.offset + piece.bytes], first_chunk)], np.uint64
            )
        self._copy_sums += sums

    def finish_copy(self, segment: _core.Segment) -> Digest:
        """The digest of the copy, all of whose pieces were added."""
        return _digests_from(self._copy_sums, [segment.bytes])[0]

    def _on_gpu(self, device: int, compute: Callable[[GpuSums], _Result]) -> _Result | None:
        """None: there is no kernel, or none any more."""
        kernel = self._digester._kernel_for(device)
        if kernel is None:
            return None
        try:
            if device not in self._sums:
                mine = (segment for segment in self._segments if segment.device == device)
                self._sums[device] = kernel.GpuSums(device, sum(segment.bytes for segment in mine) // CHUNK_BYTES)
            return compute(self._sums[device])
        except CumemSleepError:
            raise
        except Exception as error:
            self._digester._fall_back(error)
            return None


def _start(sums: GpuSums, contents: Sequence[tuple[int, int]], first_chunk: int = 0) -> None:
    sums.start(contents, first_chunk)


def _finish(sums: GpuSums) -> Words:
    return sums.finish()


def _by_device(segments: Iterable[_core.Segment]) -> dict[int, list[_core.Segment]]:
    by_device: dict[int, list[_core.Segment]] = {}
    for segment in segments:
        by_device.setdefault(segment.device, []).append(segment)
    return by_device


def _choose_kernel() -> ModuleType | None:
    if _core.driver_is_simulated():
        return None
    try:
        import torch

        from . import kernel as digest_kernel

        if torch.cuda.is_available():
            return digest_kernel
        reason = "PyTorch does not reach the GPU"
    except ImportError as error:
        reason = str(error)
    _warn_of_slow_digests(reason)
    return None


def _warn_of_slow_digests(reason: str) -> None:
    log.warning(
        "digests are computed on the CPU, at about 1 GB/s (%s); the GPU kernel needs PyTorch with CUDA and Triton:"
        " install them, or set CUMEM_SLEEP_VERIFY=off and CUMEM_SLEEP_RETAIN_BACKUPS=0 to do without digests",
        reason,
    )


def _sums_through_host(device: int, contents: Sequence[tuple[int, int]], first_chunk: int = 0) -> list[tuple[int, int]]:
    """The reference on device memory, (address, bytes), by way of a pinned block; works wherever the driver does."""
    block = _core.HostBlock(min(_BOUNCE_BYTES, max(nbytes for _, nbytes in contents)), -1)
    with closing(block), _core.CopyStream(device) as stream:
        block.touch(0, block.bytes)
        block.pin(device)
        return [_sums_of_memory(content, first_chunk, stream, block) for content in contents]


def _sums_of_memory(
    content: tuple[int, int], first_chunk: int, stream: _core.CopyStream, block: _core.HostBlock
) -> tuple[int, int]:
    address, size = content
    bounced = np.frombuffer(memoryview(block), np.uint8)
    totals = (0, 0)
    for start in range(0, size, block.bytes):
        _core.stop_if_asked()
        nbytes = min(block.bytes, size - start)
        stream.to_host(block, 0, address + start, nbytes)
        stream.synchronize()
        part = sums_of(bounced[:nbytes], first_chunk + start // CHUNK_BYTES)
        totals = ((totals[0] + part[0]) & _MASK, (totals[1] + part[1]) & _MASK)
    return totals
