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

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import _core
from .errors import CumemSleepError

logger = logging.getLogger("cumem_sleep")

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
    return _with_length(sums_of(content), content.size)


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


def _with_length(sums: tuple[int, int], nbytes: int) -> Digest:
    """Memory of different lengths differs even where padding would hide it."""
    high, low = (((total ^ nbytes) * multiplier) & _MASK for total, multiplier in zip(sums, _MULTIPLIERS, strict=True))
    return Digest(high ^ (high >> 32), low ^ (low >> 32))


class DeviceDigester:
    """Digests of segments: by the Triton kernel where PyTorch and Triton reach the GPU, else on the CPU."""

    def __init__(self) -> None:
        self._kernel: Callable[[int, Sequence[_core.Segment]], dict[int, tuple[int, int]]] | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU kernel is used (known after the first digest)."""
        return self._kernel is not None and self._kernel is not _sums_through_host

    def of(self, segments: Sequence[_core.Segment]) -> dict[int, Digest]:
        """The digest of each mapped segment, by its id. Waits for the result, not for other work on the device.

        Raises:
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        digests: dict[int, Digest] = {}
        for device in sorted({segment.device for segment in segments}):
            mine = [segment for segment in segments if segment.device == device]
            sums = self._sums(device, mine)
            digests.update({segment.id: _with_length(sums[segment.id], segment.bytes) for segment in mine})
        return digests

    def _sums(self, device: int, segments: Sequence[_core.Segment]) -> dict[int, tuple[int, int]]:
        if self._kernel is None:
            self._kernel = _choose_kernel()
        try:
            return self._kernel(device, segments)
        except CumemSleepError:
            raise
        except Exception as error:  # Triton compiles at the first use, and there is no end of ways in which that fails
            if not self.on_gpu:
                raise
            _warn_of_slow_digests(f"the kernel failed: {error}")
            self._kernel = _sums_through_host
            return self._kernel(device, segments)


def _choose_kernel() -> Callable[[int, Sequence[_core.Segment]], dict[int, tuple[int, int]]]:
    if _core.driver_is_simulated():
        return _sums_through_host
    try:
        import torch

        from . import digest_kernel

        if torch.cuda.is_available():
            return digest_kernel.sums_on_gpu
        reason = "PyTorch does not reach the GPU"
    except ImportError as error:
        reason = str(error)
    _warn_of_slow_digests(reason)
    return _sums_through_host


def _warn_of_slow_digests(reason: str) -> None:
    logger.warning(
        "digests are computed on the CPU, at about 1 GB/s, because the GPU kernel needs PyTorch with CUDA and Triton"
        " (%s); install them, or set CUMEM_SLEEP_VERIFY=off and CUMEM_SLEEP_RETAIN_BACKUPS=0 to do without digests",
        reason,
    )


def _sums_through_host(device: int, segments: Sequence[_core.Segment]) -> dict[int, tuple[int, int]]:
    """The reference on device memory, by way of a pinned block; works wherever the driver does."""
    sums: dict[int, tuple[int, int]] = {}
    if not segments:
        return sums
    block = _core.HostBlock(min(_BOUNCE_BYTES, max(segment.bytes for segment in segments)), -1)
    with closing(block), _core.CopyStream(device) as stream:
        block.touch(0, block.bytes)
        block.pin(device)
        content = np.frombuffer(memoryview(block), np.uint8)
        for segment in segments:
            totals = (0, 0)
            for start in range(0, segment.bytes, block.bytes):
                nbytes = min(block.bytes, segment.bytes - start)
                stream.to_host(block, 0, segment.address + start, nbytes)
                stream.synchronize()
                part = sums_of(content[:nbytes], start // CHUNK_BYTES)
                totals = ((totals[0] + part[0]) & _MASK, (totals[1] + part[1]) & _MASK)
            sums[segment.id] = totals
    return sums
