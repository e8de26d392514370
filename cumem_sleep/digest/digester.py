"""Digests of segments: on the GPU where its kernel runs, else on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from .. import _core
from ..core import log
from ..core.extents import Lane, Piece, RangeTable
from ..core.pinned import bounce_block, pinned_block
from ..core.segments import by_device, describe
from ..core.tuning import Tuning
from ..errors import BackupMismatch, DriverError, OutOfHostMemory
from .kernel import GpuSums
from .reference import CHUNK_BYTES, Digest, Words, chunks_of, digests_from, sums_of

_Contents = npt.NDArray[np.int64]  # rows: address, bytes, and the number of the first chunk in what is digested
_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class DeviceDigester:
    """Digests of segments: by a kernel where there is a GPU that runs it, else on the CPU."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._kernel_runs: dict[int, bool] = {}  # by device, once it is known
        self._warned: set[int] = set()  # devices

    def of(self, segments: Sequence[_core.Segment]) -> dict[int, Digest]:
        """The digest of each mapped segment, by its id. Waits for the result, not for other work on the device.

        Raises:
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        with DigestRun(self, segments) as run:
            run.start(segments)
            return run.finish()

    def warm_up(self, device: int) -> None:
        """Load the kernel now, rather than during the first sleep, and run it: a driver that loads lazily has only then
        loaded all of it. It reads nothing but pinned host memory.

        Raises:
            DriverError, OutOfHostMemory: the driver refused that memory.
        """
        if not self.kernel_runs_on(device):
            return
        with closing(pinned_block(CHUNK_BYTES, device)) as block, closing(GpuSums(device, 1)) as sums:
            try:
                sums.start(np.array([(block.address, CHUNK_BYTES, 0)]))
                sums.finish()
            except DriverError as error:
                self.do_without_kernel(device, error)

    def kernel_runs_on(self, device: int) -> bool:
        """Whether the kernel is used there; loads it at the first call."""
        if device not in self._kernel_runs:
            if _core.driver_is_simulated():
                self._kernel_runs[device] = False
            elif not _core.device_info(device).host_pointers:
                self._kernel_runs[device] = False
                self._warn(device, "kernels cannot access pinned host memory by its host address")
            else:
                try:
                    _core.load_digest_kernel(device)
                    self._kernel_runs[device] = True
                except DriverError as error:
                    self.do_without_kernel(device, error)
        return self._kernel_runs.get(device, False)

    def do_without_kernel(self, device: int, error: DriverError | OutOfHostMemory) -> None:
        """The CPU digests what is there. If only memory was missing, the next operation tries the kernel again."""
        if isinstance(error, OutOfHostMemory) or error.error == _OUT_OF_MEMORY:
            self._kernel_runs.pop(device, None)
        else:
            self._kernel_runs[device] = False
        self._warn(device, f"the kernel failed: {error}")

    def _warn(self, device: int, reason: str) -> None:
        if device not in self._warned:
            self._warned.add(device)
            log.warning(
                "digests of device %d are computed on the CPU, at about 1 GB/s (%s); set CUMEM_SLEEP_VERIFY=off and"
                " CUMEM_SLEEP_RETAIN_BACKUPS=0 to do without digests",
                device,
                reason,
            )


class DigestRun:
    """Digests of segments that become ready one after another: the GPU computes them while the next are copied.

    A context manager; leaving it waits.

    Args:
        segments: all that may be digested; they need not be mapped yet.
        ranges: by id, of segments that are not digested as a whole, but as if these lay one after another.
    """

    def __init__(
        self,
        digester: DeviceDigester,
        segments: Sequence[_core.Segment],
        ranges: Mapping[int, RangeTable] | None = None,
    ) -> None:
        self._digester = digester
        self._segments = segments
        self._ranges = ranges or {}
        self._sums: dict[int, GpuSums] = {}  # by device
        self._without_kernel: set[int] = set()  # devices on which it has failed in this run
        self._started: list[tuple[_core.Segment, _Contents]] = []
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
            contents = [self._contents(segment) for segment in mine]
            self._begin(device, np.concatenate(contents))
            self._started += zip(mine, contents, strict=True)

    def finish(self) -> dict[int, Digest]:
        """The digests of what was started since the last `finish`, by segment id; waits for them.

        Raises:
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        started, self._started = self._started, []
        digests: dict[int, Digest] = {}
        for device in by_device(segment for segment, _ in started):
            mine = [(segment, contents) for segment, contents in started if segment.device == device]
            if device in self._sums and device not in self._without_kernel:
                sums = self._sums[device].finish()
            else:
                sums = self._through_host(device, np.concatenate([contents for _, contents in mine]))
            firsts = [*accumulate((len(contents) for _, contents in mine[:-1]), initial=0)]
            sizes = [int(contents[:, 1].sum()) for _, contents in mine]
            values = digests_from(np.add.reduceat(sums, firsts, axis=0), sizes)
            digests.update(zip((segment.id for segment, _ in mine), values, strict=True))
        return digests

    def verify(
        self,
        segments: Iterable[_core.Segment],
        expected: Mapping[int, Digest],
        differ: Callable[[Sequence[_core.Segment]], None],
    ) -> None:
        """Compare the digests of these, which were started, with those expected by segment id.

        Args:
            differ: is called with all whose digests differ, before this raises.

        Raises:
            BackupMismatch: restored bytes are not those at sleep.
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        actual = self.finish()
        if differing := [segment for segment in segments if actual[segment.id] != expected[segment.id]]:
            differ(differing)
            first = differing[0]
            raise BackupMismatch(describe(first), str(expected[first.id]), str(actual[first.id]))

    def begin_copy(self) -> None:
        """For the digest of a copy in pinned host memory, one at a time: `add_copy` each piece, then `finish_copy`."""
        self._copy_sums = np.zeros((1, 2), np.uint64)

    def add_decoded(self, segment: _core.Segment, offset: int, address: int, nbytes: int) -> None:
        """As `add_copy`, for bytes of an encoded copy of `segment` that were decoded to the device's `address`.

        Raises:
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        contents = np.array([(address, nbytes, offset // CHUNK_BYTES)])
        began = self._begin(segment.device, contents)
        self._copy_sums += (
            self._sums[segment.device].finish() if began else self._through_host(segment.device, contents)
        )

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
        contents = np.array([(piece.extent.address + piece.offset, piece.bytes, first_chunk)])
        if lane.kernels_reach and self._begin(segment.device, contents):
            self._copy_sums += self._sums[segment.device].finish()
        else:
            content = lane.content(piece.extent, piece.offset, piece.bytes)
            self._copy_sums += np.array(sums_of(content, first_chunk), np.uint64)

    def finish_copy(self, segment: _core.Segment) -> Digest:
        """The digest of the copy, once all of its pieces were added."""
        return digests_from(self._copy_sums, [segment.bytes])[0]

    def _contents(self, segment: _core.Segment) -> _Contents:
        ranges = self._ranges.get(segment.id)
        if ranges is None:
            return np.array([(segment.address, segment.bytes, 0)])
        chunks = chunks_of(ranges[:, 1])
        return np.column_stack((ranges[:, 0] + segment.address, ranges[:, 1], np.cumsum(chunks) - chunks))

    def _through_host(self, device: int, contents: _Contents) -> Words:
        """The reference on device memory through host memory; works wherever the driver does."""
        most_bytes = min(self._digester._tuning.bounce_bytes, int(contents[:, 1].max()))
        sums = np.zeros((len(contents), 2), np.uint64)
        with closing(bounce_block(most_bytes, device)) as block, _core.CopyStream(device) as stream:
            bounced = np.frombuffer(memoryview(block), np.uint8)
            for number, (address, size, first_chunk) in enumerate(contents.tolist()):
                for start in range(0, size, block.bytes):
                    nbytes = min(block.bytes, size - start)
                    stream.to_host(block, 0, address + start, nbytes)
                    stream.synchronize()
                    part = sums_of(bounced[:nbytes], first_chunk + start // CHUNK_BYTES)
                    sums[number] += np.array(part, np.uint64)
        return sums

    def _begin(self, device: int, contents: _Contents) -> bool:
        """Begin to digest these on the GPU; False if the CPU has to, and then until the end of this run."""
        if device in self._without_kernel or not self._digester.kernel_runs_on(device):
            self._without_kernel.add(device)
            return False
        try:
            if device not in self._sums:
                mine = (self._contents(segment) for segment in self._segments if segment.device == device)
                self._sums[device] = GpuSums(device, int(sum(chunks_of(each[:, 1]).sum() for each in mine)))
            self._sums[device].start(contents)
        except (DriverError, OutOfHostMemory) as error:
            self._without_kernel.add(device)
            self._digester.do_without_kernel(device, error)
            return False
        return True
