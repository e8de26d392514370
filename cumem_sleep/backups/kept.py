"""What is kept of dropped segments: ranges of them, whose bytes come back with the wake if nothing goes wrong.

Unlike a backup it is expendable. What cannot be kept, is lost or has to give way fails no sleep and no wake. But then
nothing else is kept either: whoever asked for it (vLLM's prefix cache) would have to look at every range otherwise.
A vault copies it to its own memory: what a sleeping process has pinned could not be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .. import _core
from ..core.driver import integrated_devices
from ..core.extents import Extent, PieceTable, RangeTable, cut
from ..core.segments import by_device, describe
from ..digest.digester import DeviceDigester, DigestRun
from ..digest.reference import Digest
from ..errors import CumemSleepError
from ..report import PhaseTimer
from .backup import extent_sizes
from .host_tier import HostTier
from .tier import Footprint, Tier

_Sleep = _core.Segment.Sleep
_LANES = 2


@dataclass(eq=False)
class _Place:
    """Where the ranges that one sleep has kept of one device lie, one after another.

    Attributes:
        segments: of which it has kept them.
        extents: all as large as the first, but the last; spare ones are all as large as the tier's.
    """

    tier: Tier
    device: int
    segments: Sequence[_core.Segment]
    extents: list[Extent] = field(default_factory=list)


@dataclass(eq=False)
class _Kept:
    """What is kept of one segment, from the byte `first` of its place on."""

    segment: _core.Segment
    ranges: RangeTable
    digest: Digest | None = None
    place: _Place = field(init=False)
    first: int = 0

    @property
    def nbytes(self) -> int:
        return int(self.ranges[:, 1].sum())


class KeptRanges:
    """All that is kept in this process. Not thread safe: the allocator's lock guards it.

    Args:
        retain: whether its memory stays while the segments are awake, so that the next sleep need not pin it.
    """

    def __init__(self, retain: bool) -> None:
        self._retain = retain
        self._kept: dict[int, _Kept] = {}  # by the segments' ids
        self._lost: dict[int, tuple[_core.Segment, str]] = {}  # asleep, but not kept any more, and why
        self._places: list[_Place] = []  # those that nothing kept lies in any more are spare

    @property
    def bytes(self) -> int:
        """How much of the tiers' memory it takes, asleep or spare."""
        return sum(extent.bytes for extent in self.extents())

    def extents(self) -> list[Extent]:
        """All of it."""
        return [extent for place in self._places for extent in place.extents]

    def bytes_of(self, segments: Iterable[_core.Segment]) -> int:
        """How many bytes are kept of `segments`."""
        return sum(kept.nbytes for segment in segments if (kept := self._kept.get(segment.id)))

    def footprints_of(self, segments: Iterable[_core.Segment]) -> list[Footprint]:
        """What it takes of the tiers' memory for the sake of `segments`; each place counts for its first one."""
        ids = {segment.id for segment in segments}
        mine = [p for p in self._places if next((s.id for s in p.segments if not s.freed), None) in ids]
        return [footprint for place in mine for footprint in place.tier.footprints([place.extents])]

    def keep(
        self,
        tier: Tier,
        segments: Sequence[_core.Segment],
        ranges: Mapping[int, RangeTable],
        digester: DeviceDigester | None,
    ) -> str:
        """Copy these ranges, by the segments' ids. Nobody writes to them any more.

        Args:
            digester: for digests, with which a wake compares; None: it does not.

        Returns:
            "", or why none of them is kept.
        """
        begun = [_Kept(segment, ranges[segment.id]) for segment in segments]
        try:
            digests = {} if digester is None else _digests(digester, begun)
            for kept in begun:
                kept.digest = digests.get(kept.segment.id)
            self._copy_out(tier, begun)
        except (CumemSleepError, MemoryError) as error:
            why = _in_words(error)
            self._lost.update((kept.segment.id, (kept.segment, why)) for kept in begun)
            self.release_spare()
            return why
        return ""

    def _copy_out(self, tier: Tier, begun: Sequence[_Kept]) -> None:
        for device, segments in by_device(kept.segment for kept in begun).items():
            place, nbytes = _Place(tier, device, segments), 0
            for kept in begun:
                if kept.segment.device == device:
                    kept.segment.note_backup()
                    kept.place, kept.first = place, nbytes
                    nbytes += kept.nbytes
            self._reserve(place, nbytes)
        _copy(begun, out=True)
        self._kept.update((kept.segment.id, kept) for kept in begun)

    def _reserve(self, place: _Place, nbytes: int) -> None:
        """Extents for so much: spare ones, and more if the limits leave it, because no backup gives way to this.

        Raises:
            OutOfHostMemory: they do not.
        """
        full = place.tier.extent_bytes
        spare = [p for p in self._spare() if p.device == place.device]
        self._places.append(place)
        for other in spare:
            while other.extents and other.extents[-1].bytes == full and len(place.extents) * full < nbytes:
                place.extents.append(other.extents.pop())
        lacking = nbytes - len(place.extents) * full
        if lacking <= 0:
            return
        sizes = extent_sizes(lacking, None, full)
        if place.tier.expendable_room() >= full * len(sizes):
            sizes[-1] = full  # of use for the next sleep, whatever that keeps
        place.extents += place.tier.reserve_expendable(place.device, sizes)

    def pin_ahead(self, tier: HostTier, segments: Sequence[_core.Segment], nbytes: int) -> int:
        """Take and pin one more extent, for sleeps that keep up to so much of `segments`, all of one device.

        Returns:
            Its bytes; 0: there is enough, or no room for more.

        Raises:
            DriverError, OutOfHostMemory: refused; nothing was taken.
        """
        device, full = segments[0].device, tier.extent_bytes
        has = sum(len(place.extents) for place in self._places if place.device == device)
        if has * full >= nbytes or tier.expendable_room() < full:
            return 0
        for segment in segments:
            segment.note_backup()
        extents = tier.reserve_expendable(device, [full])
        place = next((place for place in self._spare() if place.segments is segments), None)
        if place is None:  # one for all of them: there may be thousands
            place = _Place(tier, device, segments)
            self._places.append(place)
        place.extents += extents
        try:
            tier.pin(device, extents)
        except BaseException:
            self._release(place, len(place.extents) - 1)
            raise
        return full

    def bring_back(
        self, segments: Sequence[_core.Segment], digester: DeviceDigester | None, timer: PhaseTimer
    ) -> tuple[int, str]:
        """Copy what is kept of `segments`, which are mapped again, to where it was.

        Returns:
            How many bytes came back, all of them proven; and "", or why none of them did.

        Raises:
            CumemSleepError: all is kept still. A vault may still write to this memory, so the wake has to fail.
        """
        why = next((self._lost[segment.id][1] for segment in segments if segment.id in self._lost), "")
        mine = [kept for segment in segments if (kept := self._kept.get(segment.id))]
        if mine and not why:
            with timer("keep"):
                why = _brought_back(mine, digester)
        if why:
            self.give_up(why)
            return 0, why
        return sum(kept.nbytes for kept in mine), ""

    def give_up(self, why: str) -> int:
        """Release all that is kept, and remember why until its segments wake; returns its bytes."""
        before = self.bytes
        self._lost.update((kept.segment.id, (kept.segment, why)) for kept in self._kept.values())
        self._kept.clear()
        self.release_spare()
        return before - self.bytes

    def prune(self) -> None:
        """Release what nobody needs: that of segments that are awake, or were freed."""
        self._kept = {key: kept for key, kept in self._kept.items() if _is_asleep(kept.segment)}
        self._lost = {key: lost for key, lost in self._lost.items() if _is_asleep(lost[0])}
        for place in self._spare():
            full = place.tier.extent_bytes  # others would not fit the next sleep
            retains = self._retain and place.device not in integrated_devices()
            is_of_use = retains and not all(segment.freed for segment in place.segments)
            self._release(place, sum(extent.bytes == full for extent in place.extents) if is_of_use else 0)

    def release_spare(self) -> None:
        """Release the memory that nothing kept lies in."""
        for place in self._spare():
            self._release(place, 0)

    def _spare(self) -> list[_Place]:
        needed = {kept.place for kept in self._kept.values()}
        return [place for place in self._places if place not in needed]

    def _release(self, place: _Place, first: int) -> None:
        """Release its extents from `first` on, and forget it if that leaves none."""
        released, place.extents = place.extents[first:], place.extents[:first]
        if not place.extents:
            self._places.remove(place)
        place.tier.release(released)


def _is_asleep(segment: _core.Segment) -> bool:
    return segment.sleep == _Sleep.DROPPED and not segment.freed


def _brought_back(kept: Sequence[_Kept], digester: DeviceDigester | None) -> str:
    """Copy all of it back, and compare; returns "", or why it is not what was kept."""
    try:
        _copy(kept, out=False)
        digests = {} if digester is None else _digests(digester, kept)
    except (CumemSleepError, MemoryError) as error:
        if not all(each.segment.keeps_memory for each in kept):
            raise
        return _in_words(error)
    changed = [each for each in kept if each.digest != digests.get(each.segment.id)]
    return f"the digest of what was kept of {describe(changed[0].segment)} differs" if changed else ""


def _in_words(error: Exception) -> str:
    """Never "", which would say that all is well."""
    return str(error) or type(error).__name__


def _digests(digester: DeviceDigester, kept: Sequence[_Kept]) -> dict[int, Digest]:
    segments = [each.segment for each in kept]
    with DigestRun(digester, segments, {each.segment.id: each.ranges for each in kept}) as run:
        run.start(segments)
        return run.finish()


def _copy(kept: Sequence[_Kept], *, out: bool) -> None:
    """Copy to the places, or back; waits for it.

    Raises:
        DriverError, OutOfHostMemory: not all is copied, but nothing is in flight.
    """
    for place in dict.fromkeys(each.place for each in kept):
        mine = [each for each in kept if each.place is place]
        with place.tier.lane_group() as lane_group, ExitStack() as streams:
            device = mine[0].segment.device
            lanes = [lane_group.lane(streams.enter_context(_core.CopyStream(device))) for _ in range(_LANES)]
            if out:
                lane_group.expect(place.extents)
            for number, (extent, pieces) in enumerate(_by_extent(place, mine)):
                lane = lanes[number % _LANES]
                lane.synchronize()
                lane.begin(extent, pieces, out=out, by_kernel=True)
            for lane in lanes:
                lane.synchronize()


def _by_extent(place: _Place, kept: Sequence[_Kept]) -> Iterator[tuple[Extent, PieceTable]]:
    """The pieces of each extent in order, each in one range."""
    sizes = np.array([extent.bytes for extent in place.extents])
    ends = np.cumsum(sizes)
    rows = np.concatenate([_rows(each) for each in sorted(kept, key=lambda each: each.first)])
    number, pieces = cut(rows, ends)
    pieces[:, 1] -= (ends - sizes)[number]
    for some in np.split(np.arange(len(number)), np.flatnonzero(np.diff(number)) + 1):
        yield place.extents[number[some[0]]], pieces[some[0] : some[-1] + 1]


def _rows(kept: _Kept) -> npt.NDArray[np.int64]:
    """Of each range the device's address, where it lies in the place, and its bytes."""
    nbytes = kept.ranges[:, 1]
    return np.column_stack((kept.segment.address + kept.ranges[:, 0], kept.first + np.cumsum(nbytes) - nbytes, nbytes))
