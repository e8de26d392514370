"""From a level, or tags, to a plan: what a sleep keeps, backs up and drops.

Memory with a plan of its own (`Segment.backup`, torch_memory_saver's regions) sleeps and wakes where its tag is named;
all other memory by levels, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from .. import _core
from ..errors import InvalidArgument, InvalidArgumentType, shown

# The only tags that a wake by tags may leave asleep, and that a level may drop (as in vLLM).
DEFERRABLE_TAGS = ("weights", "kv_cache")
DROPPED_AT_LEVEL_1 = ("kv_cache",)

# What each level does, and which tags it drops; it backs up the rest. None: it touches no memory.
LEVELS: Mapping[int, tuple[str, tuple[str, ...] | None]] = {
    0: ("keep all", None),
    1: ("back up all but kv_cache", DROPPED_AT_LEVEL_1),
    2: ("drop weights and kv_cache", DEFERRABLE_TAGS),
    3: ("level 1, then the CUDA state leaves the GPU", DROPPED_AT_LEVEL_1),
}
_CHECKPOINT = 3
_DESCRIBED = [f"{level} ({text})" for level, (text, _) in LEVELS.items()]
EXPECTED_LEVELS = f"expected {', '.join(_DESCRIBED[:-1])} or {_DESCRIBED[-1]}"

IsDropped = Callable[[str], bool]
SegmentChoice = Callable[[_core.Segment], bool]
# The segments that a call is about: those that there are at the moment.
SegmentGroup = Callable[[], list[_core.Segment]]


def dropped_at_level(level: object) -> IsDropped | None:
    """A function that says which tags a level (None: 1) drops; None for the level that touches nothing.

    Raises:
        InvalidArgument: no such level.
    """
    if level is None:
        level = 1
    if isinstance(level, bool) or not isinstance(level, int):
        raise InvalidArgumentType(f"level={level!r}: {EXPECTED_LEVELS}")
    if level not in LEVELS:
        raise InvalidArgument(f"level={shown(level)}: {EXPECTED_LEVELS}")
    _, dropped = LEVELS[level]
    return None if dropped is None else dropped.__contains__


def is_checkpoint(level: object) -> bool:
    """Whether a sleep at this level goes on from level 1 to the CUDA state of the process."""
    return isinstance(level, int) and level == _CHECKPOINT  # an array of tags has no truth value


def in_pools(tags: set[str] | None = None) -> SegmentGroup:
    """The segments that levels decide about, with these tags (None: all)."""
    return partial(_core.segments_in, own_plan=False, tags=tags)


def with_own_plan(tags: set[str] | None = None) -> SegmentGroup:
    """The segments with a plan of their own, with these tags (None: all)."""
    return partial(_core.segments_in, own_plan=True, tags=tags)


def named(tags: set[str] | None) -> SegmentGroup:
    """The segments with these tags; None: those that levels decide about."""
    return in_pools() if tags is None else partial(_core.segments_in, own_plan=None, tags=tags)


def by_plan(is_dropped: IsDropped) -> SegmentChoice:
    """Whether a sleep drops a segment, as its own plan says; if it has none, as `is_dropped` says of its tag."""
    by_level, never = _core.BackupPlan.BY_LEVEL, _core.BackupPlan.NEVER
    return lambda segment: is_dropped(segment.tag) if segment.backup == by_level else segment.backup == never


def woken(tags: set[str] | None) -> SegmentGroup:
    """The segments that a wake of `tags` (None: all that levels decide about) wakes."""
    if tags is None:
        return in_pools()
    by_level = _core.BackupPlan.BY_LEVEL
    return lambda: [
        s for s in _core.segments() if s.tag in tags or (s.backup == by_level and s.tag not in DEFERRABLE_TAGS)
    ]
