"""Digests of segments: on the GPU where its kernel runs, else on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from .. import _core, log
from ..errors import DriverError
from ..extents import Lane, Piece
from ..pinned import pinned_block
from ..segments import by_device
from ..tuning import Tuning
from .kernel import GpuSums
from .reference import CHUNK_BYTES, MASK, Digest, Words, digests_from, sums_of


class DeviceDigester:
    """Digests of segments: by a kernel where there is a GPU that can run it, else on the CPU."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._kernel_runs: dict[int, bool] = {}  # by device

    @property
    def on_gpu(self) -> bool:
        """Whether the kernel is used on all devices so far (False before the first digest)."""
        return bool(self._kernel_runs) and all(self._kernel_runs.values())

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
        """Load the kernel now, rather than during the first sleep."""
        self.kernel_runs_on(device)

    def kernel_runs_on(self, device: int) -> bool:
        """Whether the kernel is used there. Loads it at the first call; if that fails, or it could not reach its table
        in pinned memory, the CPU digests what is on the device, and a warning says so.
        """
        if device not in self._kernel_runs:
            self._kernel_runs[device] = _load_kernel(device)
        return self._kernel_runs[device]


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
            if (sums := self._on_gpu(device)) is not None:
                sums.start([(segment.address, segment.bytes) for segment in mine])
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
            if (on_gpu := self._on_gpu(device)) is not None:
                sums = on_gpu.finish()
            else:
                sums = self._through_host(device, [(segment.address, segment.bytes) for segment in mine])
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
        if (on_gpu := self._on_gpu(segment.device)) is not None:
            on_gpu.start([(address, nbytes)], first_chunk)
            self._copy_sums += on_gpu.finish()
        else:
            self._copy_sums += self._through_host(segment.device, [(address, nbytes)], first_chunk)

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
        if lane.kernels_reach and (on_gpu := self._on_gpu(segment.device)) is not None:
            on_gpu.start([(piece.extent.address + piece.offset, piece.bytes)], first_chunk)
            self._copy_sums += on_gpu.finish()
        else:
            content = lane.content(piece.extent, piece.offset, piece.bytes)
            self._copy_sums += np.array(sums_of(content, first_chunk), np.uint64)

    def finish_copy(self, segment: _core.Segment) -> Digest:
        """The digest of the copy, once all of its pieces were added."""
        return digests_from(self._copy_sums, [segment.bytes])[0]

    def _through_host(self, device: int, contents: Sequence[tuple[int, int]], first_chunk: int = 0) -> Words:
        """The reference on device memory, (address, bytes), through a pinned block; works wherever the driver does."""
        nbytes = min(self._digester._tuning.bounce_bytes, max(nbytes for _, nbytes in contents))
        with closing(pinned_block(nbytes, device, -1)) as block, _core.CopyStream(device) as stream:
            sums = [_sums_of_memory(content, first_chunk, stream, block) for content in contents]
        return np.array(sums, np.uint64)

    def _on_gpu(self, device: int) -> GpuSums | None:
        """The sums that the kernel of `device` computes; None if there is none."""
        if not self._digester.kernel_runs_on(device):
            return None
        if device not in self._sums:
            mine = (segment for segment in self._segments if segment.device == device)
            self._sums[device] = GpuSums(device, sum(segment.bytes for segment in mine) // CHUNK_BYTES)
        return self._sums[device]


def _load_kernel(device: int) -> bool:
    if _core.driver_is_simulated():
        return False
    if not _core.device_info(device).host_pointers:
        _warn_of_slow_digests(f"kernels of device {device} cannot access pinned host memory by its host address")
        return False
    try:
        _core.load_digest_kernel(device)
    except DriverError as error:
        _warn_of_slow_digests(f"the kernel failed: {error}")
        return False
    return True


def _warn_of_slow_digests(reason: str) -> None:
    log.warning(
        "digests are computed on the CPU, at about 1 GB/s (%s); set CUMEM_SLEEP_VERIFY=off and"
        " CUMEM_SLEEP_RETAIN_BACKUPS=0 to do without digests",
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
