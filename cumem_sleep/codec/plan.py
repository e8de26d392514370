"""Which code each segment gets, and how large that makes it: found before anything is encoded, because both decide
where it goes. Codes are chosen by samples, and sizes are counted.

Sizes that are known only when slots are encoded would come too late to prefault and pin new host memory for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from .. import _core
from ..core.tuning import Tuning
from .chunks import Encoding
from .codec import CHUNK_BYTES, Code, Integers, Layout, parameters_of
from .codecs import all_layouts, choose_codes, make_ready, usual_layouts
from .slots import Slot

_SAMPLE_BYTES = 8 << 10  # bytes sampled from a segment, and from how many places at most
_SAMPLE_PLACES = 4
PLANNED_AT_ONCE = 32  # the most segments of a plan
SAMPLES_BYTES = PLANNED_AT_ONCE * _SAMPLE_BYTES
_WORTH = 0.95


class Planner:
    """What the plans of one workspace have in common.

    Args:
        ready: kernels that are compiled and tested, with their devices.
        stream: copies the samples, to the last `SAMPLES_BYTES` of `block`, which is pinned.
        small: few chunks are counted by one launch, and kernels are compiled however little they are for.
    """

    def __init__(
        self,
        tuning: Tuning,
        ready: set[tuple[Layout, int]],
        stream: _core.CopyStream,
        block: _core.HostBlock,
        *,
        small: bool,
    ) -> None:
        self.device = stream.device
        self.ready = ready
        self.count_rows = tuning.few_rows if small else tuning.rows
        self._worth_compiling_bytes = 0 if small else tuning.worth_compiling_bytes
        self._bytes_of: Counter[Layout] = Counter()  # planned so far: those that suit the layout best
        self._stream = stream
        self._block = block
        self._samples_at = block.bytes - SAMPLES_BYTES

    def sample(self, segments: Sequence[_core.Segment]) -> None:
        """Begin to copy a sample of each, from places all over it. They must not change before `choose`."""
        for number, segment in enumerate(segments):
            places = 1 << (min(_SAMPLE_PLACES, segment.bytes // CHUNK_BYTES).bit_length() - 1)
            nbytes = _SAMPLE_BYTES // places
            for place in range(places):
                at = self._samples_at + number * _SAMPLE_BYTES + place * nbytes
                self._stream.to_host(self._block, at, segment.address + segment.bytes // places * place, nbytes)

    def choose(self, segments: Sequence[_core.Segment]) -> list[tuple[_core.Segment, Code]]:
        """The segments, which are being sampled, with a code for each; without those for which none is worth it.

        Left out are layouts whose kernels are not ready, and that too little would have so far, such as one buffer of
        float32.
        """
        self._stream.synchronize()
        content = np.frombuffer(memoryview(self._block), np.uint8, len(segments) * _SAMPLE_BYTES, self._samples_at)
        samples = content.reshape(-1, _SAMPLE_BYTES)
        codes = choose_codes(samples, _WORTH)
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
        for number, code in zip(others, choose_codes(samples[others], _WORTH, without), strict=True):
            codes[number] = code
        return [(segment, code) for segment, code in zip(segments, codes, strict=True) if code is not None]


class Plan:
    """How to encode some segments of one device. It is found in steps, between which the caller can do other work.

    Attributes:
        is_sampled: not all codes are known.

    Args:
        known: those whose codes are known already.
        sampled: the others that may be encoded, at most `PLANNED_AT_ONCE`. Until `count`, no other plan may be begun.
    """

    def __init__(
        self,
        planner: Planner,
        next_slot: Callable[[], Slot],
        segments: Sequence[_core.Segment],
        known: Sequence[tuple[_core.Segment, Code]],
        sampled: Sequence[_core.Segment],
    ) -> None:
        self.segments = segments
        self.is_sampled = bool(sampled)
        self._planner = planner
        self._next_slot = next_slot
        self._sampled = sampled
        self._encodings: dict[int, Encoding] = {}  # with the sizes that are being counted
        self._at_work: list[tuple[Slot, Integers]] = []
        self._count(known)
        if sampled:
            planner.sample(sampled)

    def count(self) -> None:
        """Wait for the samples, choose codes by them, and begin to count the encoded sizes; once is enough.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        sampled, self._sampled = self._sampled, []
        if sampled:
            self._count(self._planner.choose(sampled))

    def _count(self, coded: Sequence[tuple[_core.Segment, Code]]) -> None:
        for layout in dict.fromkeys(code.layout for _, code in coded):
            chosen = [(segment, code) for segment, code in coded if code.layout == layout]
            make_ready(self._planner.ready, layout, self._planner.device)
            chunks = [segment.bytes // CHUNK_BYTES for segment, _ in chosen]
            parameters = np.repeat(parameters_of([code for _, code in chosen]), chunks, axis=0)
            sources = np.concatenate([np.arange(s.address, s.address + s.bytes, CHUNK_BYTES) for s, _ in chosen])
            sizes = np.zeros(len(sources), np.int64)
            for first in range(0, len(sizes), self._planner.count_rows):
                part = slice(first, first + self._planner.count_rows)
                slot = self._next_slot()
                slot.count(layout, parameters[part], sources[part], sizes[part])
                self._at_work.append((slot, sizes[part]))
            for (segment, code), mine in zip(chosen, np.split(sizes, np.cumsum(chunks)[:-1]), strict=True):
                self._encodings[segment.id] = Encoding(code, mine)

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
        return {number: e for number, e in self._encodings.items() if e.sizes.mean() < _WORTH * CHUNK_BYTES}
