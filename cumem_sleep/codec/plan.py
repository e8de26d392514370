"""Which code each segment gets, and how large that makes it: found before anything is encoded, because both decide
where it goes. Codes are chosen by samples, and sizes are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing

import numpy as np

from .. import _core
from ..core.pinned import pinned_block
from ..core.tuning import Tuning
from .chunks import Encoding
from .codec import CHUNK_BYTES, Bytes, Code, Integers, Layout, parameters_of
from .codecs import all_layouts, choose_codes, make_ready, usual_layouts
from .slots import Slot

_SAMPLE_BYTES = 8 << 10  # bytes sampled from a segment, and from how many places at most
_SAMPLE_PLACES = 4
PLANNED_AT_ONCE = 32  # segments whose codes are chosen together
_WORTH = 0.95


class Planner:
    """What the plans of one workspace have in common.

    Args:
        ready: kernels that are compiled and tested, with their devices.
        small: few chunks are counted by one launch, and kernels are compiled however little they are for.
    """

    def __init__(self, device: int, tuning: Tuning, ready: set[tuple[Layout, int]], *, small: bool) -> None:
        self.device = device
        self.ready = ready
        self.count_rows = tuning.few_rows if small else tuning.rows
        self._worth_compiling_bytes = 0 if small else tuning.worth_compiling_bytes
        self._bytes_of: Counter[Layout] = Counter()  # planned so far: those that suit the layout best
        self.samples: list[ContentSamples] = []  # as many as were ever in use at once

    def idle_samples(self, segments: int) -> ContentSamples:
        """For so many segments. They are used again, because pinning memory takes long while copies are in flight."""
        for samples in self.samples:
            if not samples.segments and samples.room >= segments:
                return samples
        self.samples.append(ContentSamples(max(segments, PLANNED_AT_ONCE), self.device))
        return self.samples[-1]

    def choose(self, segments: Sequence[_core.Segment], content: Bytes) -> list[Code | None]:
        """A code for each segment by its sample; None where none is worth it.

        Left out are layouts whose kernels are not ready, and that too little would have so far, such as one buffer of
        float32.
        """
        codes = choose_codes(content, _WORTH)
        for segment, code in zip(segments, codes, strict=True):
            if code is not None:
                self._bytes_of[code.layout] += segment.bytes
        without = {
            layout
            for layout in all_layouts()
            if layout not in usual_layouts()
            and self._bytes_of[layout] < self._worth_compiling_bytes
            and (layout, self.device) not in self.ready
        }
        others = [number for number, code in enumerate(codes) if code is not None and code.layout in without]
        for number, code in zip(others, choose_codes(content[others], _WORTH, without), strict=True):
            codes[number] = code
        return codes


class Plan:
    """How to encode some segments of one device. It is found in steps, between which the caller can do other work.

    Attributes:
        samples: by which the codes are still to be chosen.
    """

    def __init__(self, planner: Planner, next_slot: Callable[[], Slot], segments: Sequence[_core.Segment]) -> None:
        self.segments = segments
        self.samples: ContentSamples | None = None
        self._planner = planner
        self._next_slot = next_slot
        self._coded: list[tuple[_core.Segment, Code, Integers]] = []  # with the sizes that are being counted
        self._at_work: list[tuple[Slot, Integers]] = []

    def begin(self, codes: Mapping[int, Code]) -> None:
        """Begin to count the segments with these codes, by their ids, and to copy samples of the others.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        whole = [segment for segment in self.segments if segment.bytes % CHUNK_BYTES == 0]
        self._count((segment, codes.get(segment.id)) for segment in whole)
        if new := [segment for segment in whole if segment.id not in codes]:
            self.samples = self._planner.idle_samples(len(new))
            self.samples.begin(new)

    def count(self) -> None:
        """Wait for the samples, choose codes by them, and begin to count the encoded sizes; once is enough.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        samples, self.samples = self.samples, None
        if samples is not None:
            segments, content = samples.segments, samples.finish()
            self._count(zip(segments, self._planner.choose(segments, content), strict=True))

    def finish(self) -> dict[int, Encoding]:
        """Wait for the counts: how to encode each segment, by id, without those better stored uncompressed.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        self.count()
        for slot, sizes in self._at_work:
            if not sizes[0]:  # otherwise the slot may already have other work
                slot.finish()
        return {s.id: Encoding(code, sizes) for s, code, sizes in self._coded if sizes.sum() < _WORTH * s.bytes}

    def _count(self, coded: Iterable[tuple[_core.Segment, Code | None]]) -> None:
        """Begin to count the encoded sizes of those segments that have codes, layout by layout."""
        with_codes = [(segment, code) for segment, code in coded if code is not None]
        for layout in dict.fromkeys(code.layout for _, code in with_codes):
            chosen = [(segment, code) for segment, code in with_codes if code.layout == layout]
            make_ready(self._planner.ready, layout, self._planner.device)
            chunks = [segment.bytes // CHUNK_BYTES for segment, _ in chosen]
            parameters = np.repeat(parameters_of([code for _, code in chosen]), chunks, axis=0)
            sources = np.concatenate([np.arange(s.address, s.address + s.bytes, CHUNK_BYTES) for s, _ in chosen])
            sizes = np.zeros(len(sources), np.int64)
            for first in range(0, len(sizes), self._planner.count_rows):
                _core.stop_if_asked()
                part = slice(first, first + self._planner.count_rows)
                slot = self._next_slot()
                slot.count(layout, parameters[part], sources[part], sizes[part])
                self._at_work.append((slot, sizes[part]))
            parts = zip(chosen, np.split(sizes, np.cumsum(chunks)[:-1]), strict=True)
            self._coded += [(segment, code, mine) for (segment, code), mine in parts]


class ContentSamples:
    """A sample of each of some segments, from places all over it, copied to the host.

    Attributes:
        room: the most segments.
        segments: whose samples are being copied.
    """

    def __init__(self, room: int, device: int) -> None:
        self.room = room
        self.segments: Sequence[_core.Segment] = ()
        self._stream = _core.CopyStream(device)  # before the block: destroyed in this order if nobody closes this
        self._block = pinned_block(room * _SAMPLE_BYTES, device, -1)

    def begin(self, segments: Sequence[_core.Segment]) -> None:
        """Begin to copy samples of these, which must not change before `finish`."""
        self.segments = segments
        for number, segment in enumerate(segments):
            places = 1 << (min(_SAMPLE_PLACES, segment.bytes // CHUNK_BYTES).bit_length() - 1)
            nbytes = _SAMPLE_BYTES // places
            for place in range(places):
                address = segment.address + segment.bytes // places * place
                self._stream.to_host(self._block, number * _SAMPLE_BYTES + place * nbytes, address, nbytes)

    def finish(self) -> Bytes:
        """Wait for the copies, and return them; shape (segments, _SAMPLE_BYTES)."""
        self._stream.synchronize()
        content = np.frombuffer(memoryview(self._block), np.uint8).reshape(-1, _SAMPLE_BYTES)
        samples: Bytes = content[: len(self.segments)].copy()
        self.segments = ()
        return samples

    def close(self) -> None:
        """Wait for the copies, and free the memory. Closing again does nothing."""
        with closing(self._block), self._stream:
            pass


def parts_to_plan(segments: Iterable[_core.Segment], part_bytes: int) -> list[list[_core.Segment]]:
    """Parts in order, each of one device, and no larger than the limit unless a single segment is."""
    parts: list[list[_core.Segment]] = []
    nbytes = 0  # of the last one
    for segment in segments:
        nbytes += segment.bytes
        if not parts or nbytes > part_bytes or segment.device != parts[-1][0].device:
            parts.append([])
            nbytes = segment.bytes
        parts[-1].append(segment)
    return parts
