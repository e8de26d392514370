"""Which tiers there are, and which one the settings ask for."""

from __future__ import annotations

from pathlib import Path

from ..core import log
from ..core.tuning import Tuning
from ..errors import VaultUnavailable
from ..settings import Settings
from .host_tier import HostTier
from .tier import Tier, TryLock
from .vault_tier import VaultTier


def open_tier(settings: Settings, tuning: Tuning, try_lock: TryLock) -> Tier:
    """The tier that the settings ask for."""
    if settings.vault == "off":
        return HostTier(settings, tuning, try_lock)
    if settings.vault != "auto":
        return VaultTier(settings, Path(settings.vault))
    tier = VaultTier(settings, None)
    try:
        client = tier.client()
    except VaultUnavailable as error:
        log.info("CUMEM_SLEEP_VAULT=auto: backups lie in this process's own memory (%s)", error)
        return HostTier(settings, tuning, try_lock)
    log.info("CUMEM_SLEEP_VAULT=auto: backups lie in the vault at %s", client.path)
    return tier
