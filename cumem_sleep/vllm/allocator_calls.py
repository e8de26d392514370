"""Calls that vLLM's worker makes of the allocator itself, with what it does not know of added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..allocator import CuMemAllocator

AllocatorCall = Callable[..., Any]


@contextmanager
def wrapped(name: str, wrap: Callable[[AllocatorCall], AllocatorCall]) -> Iterator[None]:
    """Inside, this method of the allocator is what `wrap` makes of it. May be nested."""
    allocator = CuMemAllocator.get_instance()
    before = vars(allocator).get(name)
    setattr(allocator, name, wrap(getattr(allocator, name)))
    try:
        yield
    finally:
        if before is None:
            delattr(allocator, name)
        else:
            setattr(allocator, name, before)
