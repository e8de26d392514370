"""Digests of segments: on the GPU where its kernel runs, else on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from .. import _core, log
from ..errors import CumemSleepError
from ..extents import Lane, Piece
from ..pinned import pinned_block
from ..segments import by_device
from ..tuning import Tuning
from .reference import CHUNK_BYTES, MASK, Digest, Words, digests_from, sums_of

if TYPE_CHECKING:
    from .kernel import GpuSums

_Result = TypeVar("_Result")


class DeviceDigester:
    """Digests of segments: by the Triton kernel where PyTorch and Triton reach the GPU, else on the CPU."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
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
        """For digesting (some of) `segments` one after another."""
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
        """None also if kernels cannot access pinned memory by its host address, because our tables are there."""
        if self._kernel is None:
            return None
        if device not in self._reaches_host:
            self._reaches_host[device] = _core.device_info(device).host_pointers
            if not self._reaches_host[device]:
                _warn_of_slow_digests(
                    f"kernels of device {device} cannot access pinned host memory by its host address"
                )
        return self._kernel if self._reaches_host[device] else None

    def _fall_back(self, error: Exception) -> None:
        """Use the CPU from now on. Triton compiles at the first use, which may fail in countless ways."""
        if self._kernel is None:
            return  # another thread has done this already
        _warn_of_slow_digests(f"the kernel failed: {error}")
        self._kernel = None


class DigestRun:
    """Digests of segments that become ready one after another: the GPU computes them while the next are copied.

    `segments` are all that may be digested; they need not be mapped yet. A context manager; leaving it waits.
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
        """Begin to digest these, whose bytes are in place. On the CPU, `finish` does the work.

        Raises:
            DriverError, OutOfHostMemory: the driver refused.
        """
        for device, mine in by_device(segments).items():
            contents = [(segment.address, segment.bytes) for segment in mine]
            self._on_gpu(device, partial(_start, contents=contents))
            self._started += mine

    def finish(self) -> dict[int, Digest]:
        """The digests of what was started since the last `finish`, by segment id; waits for them.

        Raises:
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        started, self._started = self._started, []
        digests: dict[int, Digest] = {}
        for device, mine in by_device(started).items():
            _core.stop_if_asked()
            sums = self._on_gpu(device, _finish)
            if sums is None:
                contents = [(segment.address, segment.bytes) for segment in mine]
                sums = np.array([self._through_host(device, contents)], np.uint64).reshape(-1, 2)
            values = digests_from(sums, [segment.bytes for segment in mine])
            digests.update(zip((segment.id for segment in mine), values, strict=True))
        return digests

    def begin_copy(self) -> None:
        """For the digest of a copy in pinned host memory, one at a time: `add_copy` each piece, then `finish_copy`."""
        self._copy_sums = np.zeros((1, 2), np.uint64)

    def add_decoded(self, segment: _core.Segment, offset: int, address: int, nbytes: int) -> None:
        """As `add_copy`, for bytes of an encoded copy of `segment` that were decoded to the device's `address`.

        Raises:
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        first_chunk = offset // CHUNK_BYTES
        self._on_gpu(segment.device, partial(_start, contents=[(address, nbytes)], first_chunk=first_chunk))
        sums = self._on_gpu(segment.device, _finish)
        if sums is None:
            sums = np.array(self._through_host(segment.device, [(address, nbytes)], first_chunk), np.uint64)
        self._copy_sums += sums

    def add_copy(self, segment: _core.Segment, piece: Piece, lane: Lane) -> None:
        """Add one piece of the copy of `segment` to the digest; waits for it.

        The GPU reads it if kernels can access it; one piece at a time, because reading host memory delays all other
        work on the GPU.

        Args:
            lane: reaches the extent that holds it.

        Raises:
            DriverError: the driver refused.
        """
        first_chunk = (piece.address - segment.address) // CHUNK_BYTES
        sums = None
        if lane.kernels_reach:
            contents = [(piece.extent.address + piece.offset, piece.bytes)]
            self._on_gpu(segment.device, partial(_start, contents=contents, first_chunk=first_chunk))
            sums = self._on_gpu(segment.device, _finish)
        if sums is None:
            content = lane.content(piece.extent, piece.offset, piece.bytes)
            sums = np.array([sums_of(content, first_chunk)], np.uint64)
        self._copy_sums += sums

    def finish_copy(self, segment: _core.Segment) -> Digest:
        """The digest of the copy, once all of its pieces were added."""
        return digests_from(self._copy_sums, [segment.bytes])[0]

    def _through_host(
        self, device: int, contents: Sequence[tuple[int, int]], first_chunk: int = 0
    ) -> list[tuple[int, int]]:
        """The reference on device memory, (address, bytes), through a pinned block; works wherever the driver does."""
        nbytes = min(self._digester._tuning.bounce_bytes, max(nbytes for _, nbytes in contents))
        with closing(pinned_block(nbytes, device, -1)) as block, _core.CopyStream(device) as stream:
            return [_sums_of_memory(content, first_chunk, stream, block) for content in contents]

    def _on_gpu(self, device: int, compute: Callable[[GpuSums], _Result]) -> _Result | None:
        """The result of `compute`; None if there is no kernel, or if it has failed."""
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
        totals = ((totals[0] + part[0]) & MASK, (totals[1] + part[1]) & MASK)
    return totals
