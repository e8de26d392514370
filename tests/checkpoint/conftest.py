"""Something stays at level 1, as with a real driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpointing import CONTEXT_BYTES
from support import DEVICE_BYTES

from cumem_sleep import sim
from cumem_sleep.checkpoint.process import THIS_PROCESS


@pytest.fixture(autouse=True)
def context_bytes(nothing_left_behind: None) -> Iterator[None]:  # noqa: ARG001  (comes first)
    """Simulated contexts take memory."""
    sim.configure(context_bytes=CONTEXT_BYTES)
    yield
    sim.configure(device_bytes=DEVICE_BYTES, context_bytes=0)
    THIS_PROCESS.bring_back({})  # after a test that failed half-way
