"""Which tiers there are."""

from __future__ import annotations

from ..settings import Settings
from ..tuning import Tuning
from .host import HostTier
from .tier import Tier, Turn


def open_tier(settings: Settings, tuning: Tuning, turn: Turn) -> Tier:
    """The tier that the settings ask for."""
    return HostTier(settings, tuning, turn)
