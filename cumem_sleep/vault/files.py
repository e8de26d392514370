"""The file that the vault spills to: without a name, in a folder that only its user can enter.

It is read and written past the page cache (`O_DIRECT`) where the filesystem can do that: that cache would take the
memory that spilling is to free. Nothing is left of it when the last process that has it open has ended.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ..errors import VaultError
from .protocol import check_folder, close_all
from .slabs import SlabRange

PAGE_BYTES = 4096  # what offsets, sizes and addresses of direct requests are multiples of
_NAME = ".cumem-sleep-file"
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def punch(descriptor: int, offset: int, nbytes: int) -> None:
    """Give the space of this part of a file back, if the filesystem can do that."""
    libc.fallocate(descriptor, _PUNCH_HOLE | KEEP_SIZE, offset, nbytes)


class SpillError(VaultError):
    """A file could not be read or written.

    Attributes:
        folder: where it is; it has no name.
        offset, nbytes: of what was asked for.
        code: the `errno`; 0: fewer bytes came or went.
    """

    def __init__(self, what: str, folder: Path, offset: int, nbytes: int, code: int, done: int = 0) -> None:
        """`what` failed; so many bytes are `done`."""
        why = os.strerror(code) if code else f"only {done} bytes were"
        super().__init__(f"{what} {nbytes} bytes at {offset} of a spill file in {folder}: {why}")
        self.folder, self.offset, self.nbytes, self.code = folder, offset, nbytes, code


class SpillFile:
    """One range of bytes. All offsets and sizes are multiples of `PAGE_BYTES`.

    Attributes:
        folder: where it is.
        nbytes: the most that it holds.
        is_direct: it is read and written past the page cache.
        read_only: a descriptor for owners, through the page cache.
        worker: one thread that does in order what it is given.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        """Others may put something else in the folder's place later.

        Raises:
            VaultError: it is not private, others can move it, it keeps files in memory, or no file can be made there.
        """
        self.folder, self.nbytes = folder, nbytes
        self.is_direct = True
        try:
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise VaultError(f"the spill folder {folder}: {error.strerror}") from None
        try:
            _check(folder, place)
            self._descriptor = self._open(place)
        finally:
            close_all([place])
        self.read_only = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self.worker = ThreadPoolExecutor(1, "vault-files")
        self._is_closed = False

    def _open(self, place: int) -> int:
        try:
            return _open_unnamed(place, os.O_DIRECT if self.is_direct else 0)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise VaultError(f"a spill file in {self.folder}: {error.strerror}") from None
        self.is_direct = False
        return self._open(place)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Have the filesystem set space aside, so that a full disk is found before anything is written.

        Raises:
            SpillError: there is too little.
        """
        code = ctypes.get_errno() if libc.fallocate(self._descriptor, 0, offset, nbytes) else 0
        if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
            raise SpillError("allocating", self.folder, offset, nbytes, code)

    def write(self, content: memoryview, offset: int) -> None:
        """Write all of it there. Raises SpillError."""
        _do(os.pwritev, "writing", self._descriptor, content, offset, self.folder)

    def sync(self) -> None:
        """Return when what was written is on the disk: without direct requests failures show here, and once only.

        Raises:
            SpillError: it is not.
        """
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise SpillError("syncing", self.folder, 0, self.nbytes, error.errno or errno.EIO) from None

    def read(self, content: memoryview, offset: int) -> None:
        """Fill it from there. Raises SpillError."""
        read_into(self._descriptor, content, offset, self.folder)

    def freed(self, extents: Iterable[SlabRange]) -> None:
        """These ranges hold nothing any more: their space goes back before anything else is done."""
        if self._is_closed:  # owners may read on
            return
        for _, offset, nbytes in extents:
            self.worker.submit(punch, self._descriptor, offset, nbytes)

    def close(self) -> None:
        """Finish what is being done. Who has a descriptor of it reads it on."""
        self._is_closed = True
        self.worker.shutdown()
        close_all([self._descriptor, self.read_only])


def _check(folder: Path, descriptor: int) -> None:
    check_folder(folder, "the spill folder", private=True, descriptor=descriptor)
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise VaultError(
                f"others can write to {parent}, and so move the spill folder {folder}: `chmod go-w {parent}`"
            )
    kind = filesystem_of(descriptor)
    if kind in _IN_MEMORY:
        raise VaultError(f"the spill folder {folder} is on {kind}, which is memory itself: name one on a disk")


def _open_unnamed(folder: int, flags: int, tries: int = 10) -> int:
    """A new file, which has a name for a moment only: not each filesystem makes one without."""
    _unlink(_NAME, folder)  # of one that was killed between the next two calls
    try:
        flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(_NAME, flags, 0o600, dir_fd=folder)
    except FileExistsError:  # of one that starts at the same moment
        if not tries:
            raise
        return _open_unnamed(folder, flags, tries - 1)
    finally:
        _unlink(_NAME, folder)


def _unlink(name: str, folder: int) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)


def read_into(descriptor: int, content: memoryview, offset: int, folder: Path) -> None:
    """Fill `content` from a file in that folder. Raises SpillError."""
    _do(os.preadv, "reading", descriptor, content, offset, folder)


def _do(
    call: Callable[[int, list[memoryview], int], int],
    what: str,
    descriptor: int,
    content: memoryview,
    offset: int,
    folder: Path,
) -> None:
    try:
        done, code = call(descriptor, [content], offset), 0
    except OSError as error:
        done, code = 0, error.errno or errno.EIO
    if done != len(content):
        raise SpillError(what, folder, offset, len(content), code, done)


def filesystem_of(place: Path | int) -> str:
    """The kind of filesystem that a path or an open file is on, such as `ext4`; "" if the system does not say."""
    device = os.stat(place).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if fields.split()[2] == wanted:
                return kind.split()[0]
    return ""
