"""The device memory that a workspace works in."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

from .. import _core
from ..core.tuning import Tuning
from ..errors import OutOfDeviceMemory
from .codec import CHUNK_BYTES
from .slots import head_bytes


def workspace_bytes(tuning: Tuning, slots: int, slot_bytes: int) -> int:
    """The size of all slots, in whole pages."""
    nbytes = slots * (head_bytes(tuning.rows) + slot_bytes)
    return -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES


def take_memory(device: int, tuning: Tuning, spare_bytes: int) -> tuple[_core.Scratch | None, int, int]:
    """Memory for slots (None: there is none), how many they are, and how many bytes of encoded chunks each takes.

    Args:
        spare_bytes: how much may be taken.
    """
    for slots, slot_bytes in ((tuning.most_slots, tuning.slot_bytes[0]), *product([tuning.slots], tuning.slot_bytes)):
        nbytes = workspace_bytes(tuning, slots, slot_bytes)
        with suppress(OutOfDeviceMemory):
            if nbytes <= spare_bytes:
                return _core.Scratch(device, nbytes), slots, slot_bytes
    return None, tuning.slots, tuning.slot_bytes[-1]
