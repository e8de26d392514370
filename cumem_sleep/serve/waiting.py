"""Waiting for no longer than some time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What `work` returns, or its end. `asyncio.wait_for` loses a cancellation that comes as `work` ends, before 3.12.

    Raises:
        asyncio.TimeoutError: it took longer.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there to hear it
    try:
        if not (await asyncio.wait((task,), timeout=seconds))[0]:
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()
