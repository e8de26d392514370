"""The demo itself: it loads, sleeps, wakes and reloads, and compares every byte of the weights after each step.

It does not rely on the layer's digests: it reads device memory back and compares it with the source. It needs no
PyTorch: tensors are packed into segments from `allocator.malloc`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np

from ... import _core
from ...allocator import CuMemAllocator
from ...errors import InvalidArgument, format_bytes
from ..console import Progress
from ..layout import DevicePiece, SegmentLayout
from ..safetensors import Tensor
from .copies import DeviceCopies
from .report import DemoReport, DemoStep
from .source import Source

_KV_SEGMENT_BYTES = 1 << 30

_PROBE_BYTES = 1 << 20


def run(
    allocator: CuMemAllocator,
    source: Source,
    weights: list[SegmentLayout],
    *,
    device: int,
    kv_bytes: int,
    rounds: int,
    progress: Progress,
) -> DemoReport:
    """Load, sleep, wake, reload; stop at the first step whose result is wrong. Everything allocated is freed.

    Raises:
        CumemSleepError: the layer or the driver refused a call.
    """
    device_count = _core.device_count()
    if not 0 <= device < device_count:
        raise InvalidArgument(f"--device {device}: there are {device_count}, numbered from 0")
    report = DemoReport(
        simulated=_core.driver_is_simulated(),
        device=device,
        device_name=_core.device_info(device).name,
        source=source.description,
        tensors=len(source.tensors),
        dtypes=source.dtypes,
        weights_bytes=source.nbytes,
        weights_segments=len(weights),
        kv_cache_bytes=kv_bytes,
    )
    with ExitStack() as stack:
        demo = _Demo(allocator, source, weights, device, progress, stack)
        stack.callback(demo.free)
        with suppress(_StepFailedError):
            demo.play(kv_bytes, rounds)
    return replace(report, steps=tuple(demo.steps))


class _StepFailedError(Exception):
    """The last step's result is wrong, so there is no point in going on."""


class _Demo:
    def __init__(
        self,
        allocator: CuMemAllocator,
        source: Source,
        weights: list[SegmentLayout],
        device: int,
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        self.steps: list[DemoStep] = []
        self._allocator = allocator
        self._source = source
        self._weights = weights
        self._device = device
        self._progress = progress
        self._stack = stack
        self._kv: list[tuple[int, int]] = []  # address, bytes
        self._addresses: list[tuple[int, int]] = []
        self._round = 1

    def play(self, kv_bytes: int, rounds: int) -> None:
        self._progress("allocate", 0, 0)
        self._copies = DeviceCopies(self._stack, self._device)
        self._allocate(kv_bytes)
        self._load("load weights")
        for self._round in range(1, rounds + 1):
            self._sleep("sleep level 1" if self._round == 1 else f"round {self._round}: sleep level 1", level=1)
            self._wake("wake")
            self._sleep("sleep level 1 again", level=1, unchanged=True)
            self._wake("wake weights only", tags=("weights",))
            self._wake("wake kv_cache", tags=("kv_cache",))
            self._sleep("sleep level 2", level=2)
            self._wake("wake, weights blank", restored=False)
            self._load("reload weights")

    def free(self) -> None:
        for segment in self._weights:
            if segment.address:
                self._allocator.free(segment.address)
                segment.address = 0
        for address, _ in self._kv:
            self._allocator.free(address)
        self._kv.clear()

    # Steps

    def _allocate(self, kv_bytes: int) -> None:
        for segment in self._weights:
            segment.address = self._allocator.malloc(segment.nbytes, "weights", self._device)
        for start in range(0, kv_bytes, _KV_SEGMENT_BYTES):
            nbytes = min(_KV_SEGMENT_BYTES, kv_bytes - start)
            self._kv.append((self._allocator.malloc(nbytes, "kv_cache", self._device), nbytes))
        self._addresses = self._addresses_now()

    def _load(self, name: str) -> None:
        start = time.perf_counter()
        for done in self._copies.write(self._pieces()):
            self._progress(name, done, self._source.nbytes)
        seconds = time.perf_counter() - start
        self._finish(name, seconds, self._source.nbytes, self._differences())

    def _sleep(self, name: str, level: int, unchanged: bool = False) -> None:
        self._progress(name, 0, 0)
        report = self._allocator.sleep(level)
        still_mapped = sum(usage.mapped_bytes for usage in self._allocator.usage().values())
        wrong = [f"{format_bytes(still_mapped)} is still on the GPU"] if still_mapped else []
        expects_clean = unchanged and self._allocator.settings.retain_backups
        if expects_clean and report.copied_bytes:
            wrong.append(f"{format_bytes(report.copied_bytes)} was copied, though nothing had changed")
        found = [f"{format_bytes(report.copied_bytes)} copied"] if report.copied_bytes else ["nothing copied"]
        if report.clean_bytes:
            found.append(f"{format_bytes(report.clean_bytes)} unchanged")
        found.append(f"{format_bytes(report.dropped_bytes)} dropped")
        self._finish(name, report.seconds, report.copied_bytes, wrong, ", ".join(found), verified_bytes=0)

    def _wake(self, name: str, tags: Sequence[str] | None = None, restored: bool = True) -> None:
        self._progress(name, 0, 0)
        report = self._allocator.wake_up(tags)
        usage = self._allocator.usage()
        wrong, found, verified_bytes = [], [], 0
        if self._addresses_now() != self._addresses:
            wrong.append("an address changed")
        if restored:
            wrong += self._differences()
            verified_bytes = self._source.nbytes
            found.append(f"{format_bytes(verified_bytes)} = source")
        found.append("same addresses")
        if tags is not None and "kv_cache" not in tags:
            if usage["kv_cache"].mapped_bytes:
                wrong.append("kv_cache woke too")
            found.append("kv_cache asleep")
        else:
            wrong += self._probe_kv_cache()
            found.append("kv_cache usable")
        self._finish(name, report.seconds, report.restored_bytes, wrong, ", ".join(found), verified_bytes)

    def _finish(
        self,
        name: str,
        seconds: float,
        moved_bytes: int,
        wrong: Sequence[str],
        found: str | None = None,
        verified_bytes: int | None = None,
    ) -> None:
        usage = self._allocator.usage().values()
        device_used = None
        if not _core.driver_is_simulated():
            free_bytes, total_bytes = _core.memory_info(self._device)
            device_used = total_bytes - free_bytes
        step = DemoStep(
            round=self._round,
            name=name,
            layer_bytes=sum(tag.mapped_bytes for tag in usage),
            device_used_bytes=device_used,
            host_bytes=sum(tag.host_bytes for tag in usage),
            moved_bytes=moved_bytes,
            seconds=seconds,
            verified_bytes=self._source.nbytes if verified_bytes is None else verified_bytes,
            result="; ".join(wrong) or found or f"{format_bytes(self._source.nbytes)} = source",
            ok=not wrong,
        )
        self.steps.append(step)
        if wrong:
            raise _StepFailedError

    # Checks

    def _pieces(self) -> Iterator[DevicePiece]:
        for segment in self._weights:
            yield from segment.pieces()

    def _differences(self) -> list[str]:
        """The tensors that differ from the source, with their first wrong byte; empty if all are equal."""
        different: dict[str, str] = {}
        done = 0
        for piece, content in self._copies.read(self._pieces()):
            for offset, tensor, start, nbytes in piece.parts:
                actual, expected = content[offset : offset + nbytes], tensor.data[start : start + nbytes]
                done += nbytes
                if tensor.name not in different and not np.array_equal(actual, expected):
                    first = int(np.flatnonzero(actual != expected)[0])
                    different[tensor.name] = (
                        f"byte {start + first} of {tensor.name} is {actual[first]:#04x}, not {expected[first]:#04x}"
                    )
            self._progress("compare with the source", done, self._source.nbytes)
        if len(different) > 1:
            return [f"{len(different)} tensors differ from the source: {next(iter(different.values()))}, …"]
        return list(different.values())

    def _probe_kv_cache(self) -> list[str]:
        """Write to the first and last bytes of every kv_cache segment and read them back."""
        pattern = Tensor("kv_cache", "U8", (_PROBE_BYTES,), np.resize(np.arange(251, dtype=np.uint8), _PROBE_BYTES))
        for address, nbytes in self._kv:
            size = min(_PROBE_BYTES, nbytes)
            for start in (address, address + nbytes - size):
                probe = [DevicePiece(start, size, ((0, pattern, 0, size),))]
                for _ in self._copies.write(probe):
                    pass
                for _, content in self._copies.read(probe):
                    if not np.array_equal(content, pattern.data[:size]):
                        return [f"kv_cache at 0x{start:x} does not hold what was written to it"]
        return []

    def _addresses_now(self) -> list[tuple[int, int]]:
        """The number and the address of every segment of the layer."""
        return [(segment.id, segment.address) for segment in _core.segments()]
