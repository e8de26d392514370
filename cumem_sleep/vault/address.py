"""The socket of a vault, and the lock that keeps other vaults from it."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from ..errors import VaultError
from . import protocol


class VaultAddress:
    """A socket that this process alone serves."""

    def __init__(self, path: Path) -> None:
        """Take the path, from a vault that has died if need be.

        Raises:
            VaultError: another vault has it, or its folder is not private.
        """
        self.path = path
        if path == protocol.default_socket():
            path.parent.mkdir(mode=0o700, exist_ok=True)
        protocol.check_folder(path.parent)
        self._lock = _lock(path.with_name(path.name + ".lock"))
        try:
            path.unlink(missing_ok=True)
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                self.listener.bind(str(path))
            finally:
                os.umask(before)
            self.listener.listen(1024)  # a connection beyond that would be refused
            self.listener.setblocking(False)
        except OSError as error:
            os.close(self._lock)
            raise VaultError(f"the vault's socket {path}: {error.strerror or error}") from None

    def close(self) -> None:
        """Give the path up."""
        self.listener.close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def _lock(path: Path) -> int:
    """A descriptor of the lock file, locked for this process."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise VaultError(f"the vault's lock {path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.read(descriptor, 20).decode(errors="replace").strip()
        os.close(descriptor)
        raise VaultError(
            f"another vault (pid {pid or 'unknown'}) serves {path.with_suffix('')}: use it, or name another socket"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
