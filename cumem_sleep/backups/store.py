"""All backups of a process."""

from __future__ import annotations

from .. import _core
from ..core.tuning import Tuning
from ..settings import Settings
from .catalogue import Catalogue
from .room import BackupRoom
from .turns import Turns


class BackupStore:
    """All backups of the process: what is where, and the room for more. What one holds, it knows itself (`Backup`).

    Attributes:
        catalogue, room: the two parts, which the allocator's lock guards.
        turns: who may change them when.
    """

    def __init__(self, settings: Settings, lock: _core.OperationLock, tuning: Tuning) -> None:
        self.catalogue = Catalogue(settings.retain_backups)
        self.turns = Turns(lock, self.catalogue)
        self.room = BackupRoom(settings, tuning, self.turns, self.catalogue)
