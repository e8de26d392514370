"""All backups of a process."""

from __future__ import annotations

from .. import _core
from ..core.tuning import Tuning
from ..settings import Settings
from .catalogue import Catalogue
from .memory import BackupMemory
from .pruning import PruningLock


class BackupStore:
    """All backups of the process: what is where, and the memory for more. What one holds, it knows itself (`Backup`).

    Attributes:
        catalogue, memory: the two parts, which the allocator's lock guards.
        lock: the allocator's; whoever takes it forgets the backups of freed segments.
    """

    def __init__(self, settings: Settings, lock: _core.OperationLock, tuning: Tuning) -> None:
        self.catalogue = Catalogue(settings.retain_backups)
        self.lock = PruningLock(lock, self.catalogue)
        self.memory = BackupMemory(settings, tuning, self.lock, self.catalogue)
