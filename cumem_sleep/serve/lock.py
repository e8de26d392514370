"""One front for each models.yaml: a second one would start the same servers on the same GPUs.

The lock is a file beside it, or models.yaml itself where nothing can be written there. Reapers of servers keep it
open: a front that is killed gives it up when the last of its servers has ended.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

WITHIN_S = 20.0  # that the servers of a front that was killed have to end
_POLL_S = 0.05


class AlreadyServed(Exception):
    """Another front serves the same models."""


class Lock:
    """Held from its making to `close`.

    Attributes:
        path: of its file; None where models.yaml itself is locked.
        descriptor: of the locked file.
    """

    def __init__(self, models: Path) -> None:
        """Lock models.yaml; waits for the servers of a front that was killed.

        Raises:
            AlreadyServed: another front lives, or servers of one that was killed do not end.
            OSError: the file cannot be opened, or cannot be locked where it is.
        """
        models = models.resolve()
        self.path: Path | None = models.with_name(f".{models.name}.lock")
        ends_at = time.monotonic() + WITHIN_S
        while (found := self._try(models)) is None or isinstance(found, str):
            if found is not None and (_lives(found) or time.monotonic() > ends_at):
                raise AlreadyServed(
                    f"another `cumem-sleep serve` (pid {found or 'unknown'}) serves {models}: end it first"
                )
            time.sleep(_POLL_S)
        self.descriptor = found
        if self.path is not None:
            os.ftruncate(found, 0)
            os.pwrite(found, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Give it up."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        os.close(self.descriptor)

    def _try(self, models: Path) -> int | str | None:
        """The locked descriptor, or the pid in the file that another front has locked; None to try again."""
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        try:
            if self.path is None:
                descriptor = os.open(models, os.O_RDONLY | flags)
            else:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, 0o600)
        except OSError as error:
            if self.path is None or (os.path.lexists(self.path) and error.errno != errno.EROFS):
                raise
            self.path = None  # nothing can be written there
            return None
        where = str(self.path or models)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "expected a plain file", where)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.path is None or os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            pid = os.pread(descriptor, 20, 0).decode(errors="replace").strip() if self.path is not None else ""
            os.close(descriptor)
            return pid
        except OSError as error:  # some network file systems have no locks
            os.close(descriptor)
            why = f"cannot be locked ({error.strerror}): have models.yaml on a file system of this machine"
            raise OSError(error.errno, why, where) from None
        os.close(descriptor)  # its owner has just removed it
        return None


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, ValueError):
        return False
