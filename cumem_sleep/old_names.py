"""Names of before, which `CuMemAllocator` has for one release more. None is needed: each is said another way."""

from __future__ import annotations

from typing import Any

from . import for_plugin
from .allocator import CuMemAllocator
from .core.levels import DEFERRABLE_TAGS

__all__ = ["CuMemAllocator"]


def _forget(self: CuMemAllocator, tags: Any = None, *, drop: Any = None) -> int:
    """`release_backups` of these tags; None: of `weights` and `kv_cache`."""
    return self.release_backups(DEFERRABLE_TAGS if tags is None else tags, drop=drop)


def _add(name: str, value: object) -> None:
    setattr(CuMemAllocator, name, value)


_add("forget", _forget)
for _name in ("drop_kept", "filling", "prepare_to_end", "stay_at_level_1"):
    _add(_name, getattr(for_plugin, _name))
for _name in ("agreement", "asleep_tags", "may_be_asleep"):
    _add(_name, property(getattr(for_plugin, _name)))
_add("call_of_ranks", for_plugin.vote_of_ranks)
_add("deepen", for_plugin.checkpoint)
_add("may_deepen", property(for_plugin.may_checkpoint))
