"""Files that the vault spills to: without names, in a folder that only its user can enter.

They are read and written past the page cache (`O_DIRECT`) where the filesystem can do that: that cache would take the
memory that spilling is to free. Nothing is left of a file when the last process that has it open has ended.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ..errors import VaultError
from .protocol import check_folder, close_all
from .slabs import SlabRange

PAGE_BYTES = 4096  # what offsets, sizes and addresses of direct requests are multiples of
_LEAST_FILE_BYTES, _MOST_FILES = 1 << 30, 64  # owners have a descriptor of each that they have bytes in
_FIRST_NUMBER = 1 << 40  # of what owners call a file
_NAME = ".cumem-sleep-"  # of a file for a moment, where the filesystem makes none without a name
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


class SpillFolder:
    """Where spill files are made.

    Attributes:
        is_direct: they are read and written past the page cache.
    """

    def __init__(self, path: Path) -> None:
        """Look at it, and make a file there for trial. Others may put something else in its place later.

        Raises:
            VaultError: it is not private, others can move it, it keeps files in memory, or no file can be made there.
        """
        self.path = path
        self.is_direct = True
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise VaultError(f"the spill folder {path}: {error.strerror}") from None
        try:
            self._check()
            close_all([self.open()])
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        check_folder(self.path, "the spill folder", private=True, descriptor=self._descriptor)
        for parent in self.path.resolve().parents:
            mode = parent.stat().st_mode
            if mode & 0o022 and not mode & stat.S_ISVTX:
                raise VaultError(
                    f"others can write to {parent}, and so move the spill folder {self.path}: `chmod go-w {parent}`"
                )
        kind = filesystem_of(self._descriptor)
        if kind in _IN_MEMORY:
            raise VaultError(f"the spill folder {self.path} is on {kind}, which is memory itself: name one on a disk")

    def close(self) -> None:
        """No more files are made."""
        close_all([self._descriptor])
        self._descriptor = -1

    def open(self) -> int:
        """A descriptor of a new file. Raises VaultError: there can be none."""
        try:
            return self._open(os.O_DIRECT if self.is_direct else 0)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise VaultError(f"a spill file in {self.path}: {error.strerror}") from None
        self.is_direct = False
        return self.open()

    def _open(self, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC
        try:
            return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
        for left in os.listdir(self._descriptor):  # by one that was killed between the next two calls
            if left.startswith(_NAME):
                self._unlink(left)
        name = f"{_NAME}{os.getpid()}"
        try:
            return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._descriptor)
        finally:
            self._unlink(name)

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self._descriptor)


class SpillFile:
    """One file, made when it is first written to. All offsets and sizes are multiples of `PAGE_BYTES`.

    Attributes:
        number: what owners call it.
        read_only: a descriptor for owners, through the page cache; -1 before the first write.
    """

    def __init__(self, folder: SpillFolder, number: int) -> None:
        self._folder, self.number = folder, number
        self._descriptor = self.read_only = -1

    def allocate(self, offset: int, nbytes: int) -> None:
        """Have the filesystem set space aside, so that a full disk is found before anything is written.

        Raises:
            SpillError: there is too little.
            VaultError: the file could not be made.
        """
        if self._descriptor < 0:
            self._descriptor = self._folder.open()
            self.read_only = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        code = ctypes.get_errno() if libc.fallocate(self._descriptor, 0, offset, nbytes) else 0
        if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
            raise SpillError("allocating", self._folder.path, offset, nbytes, code)

    def free(self, offset: int, nbytes: int) -> None:
        """Give the space there back to the filesystem, if that can."""
        if self._descriptor >= 0:
            punch(self._descriptor, offset, nbytes)

    def write(self, content: memoryview, offset: int) -> None:
        """Write all of it there. Raises SpillError."""
        _do(os.pwritev, "writing", self._descriptor, content, offset, self._folder.path)

    def sync(self) -> None:
        """Return when what was written is on the disk: without direct requests failures show here, and once only.

        Raises:
            SpillError: it is not.
        """
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            nbytes = os.fstat(self._descriptor).st_size
            raise SpillError("syncing", self._folder.path, 0, nbytes, error.errno or errno.EIO) from None

    def read(self, content: memoryview, offset: int) -> None:
        """Fill it from there. Raises SpillError."""
        read_into(self._descriptor, content, offset, self._folder.path)

    def close(self) -> None:
        """It is not needed any more, and nothing is left in it."""
        close_all([self._descriptor, self.read_only])
        self._descriptor = self.read_only = -1


class SpillFiles:
    """All files of a vault, as one range of bytes. Its calls belong to one thread; what takes long, `worker` does.

    Attributes:
        worker: one thread that does in order what it is given.
    """

    def __init__(self, folder: SpillFolder, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self.worker = ThreadPoolExecutor(1, "vault-files")
        self._file_bytes = max(_LEAST_FILE_BYTES, -(-nbytes // _MOST_FILES // PAGE_BYTES) * PAGE_BYTES)
        self._files: dict[int, SpillFile] = {}  # by their places in the range
        self._used: Counter[int] = Counter()  # bytes of each
        self._last_number = _FIRST_NUMBER
        self._is_closed = False

    def take(self, extents: Iterable[SlabRange]) -> None:
        """These ranges are about to be written."""
        for at, _, nbytes in self._parts(extents):
            if at not in self._files:
                self._last_number += 1
                self._files[at] = SpillFile(self.folder, self._last_number)
            self._used[at] += nbytes

    def parts(self, extents: Iterable[SlabRange]) -> Iterator[tuple[SpillFile, int, int]]:
        """The file, the offset there and the bytes of these ranges, in order."""
        for at, offset, nbytes in self._parts(extents):
            yield self._files[at], offset, nbytes

    def freed(self, extents: Iterable[SlabRange]) -> None:
        """These ranges hold nothing any more: their space goes back before anything else is done."""
        for at, offset, nbytes in self._parts(extents):
            if self._is_closed:  # owners may read on
                return
            self._used[at] -= nbytes
            self.worker.submit(self._files[at].free, offset, nbytes)  # of what is closed, too: owners may have it open
            if not self._used[at]:
                self.worker.submit(self._files.pop(at).close)

    def close(self) -> None:
        """Finish what is being done, and close all."""
        self._is_closed = True
        self.worker.shutdown()
        for file in self._files.values():
            file.close()
        self.folder.close()

    def _parts(self, extents: Iterable[SlabRange]) -> Iterator[tuple[int, int, int]]:
        for _, start, nbytes in extents:
            done = 0
            while done < nbytes:
                at, offset = divmod(start + done, self._file_bytes)
                size = min(nbytes - done, self._file_bytes - offset)
                yield at, offset, size
                done += size


def is_file(number: int) -> bool:
    """Whether owners call a file so; otherwise it is a slab, which is memory."""
    return number > _FIRST_NUMBER


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
