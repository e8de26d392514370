"""Digests of whole files: what weights are kept under in the vault, never names, headers or times alone.

A digest is remembered as long as the file is the same (device, inode) and untouched (size, mtime, ctime), where a local
filesystem keeps ctime, which no program can set. Two writes within one tick of the clock leave the same ctime, so what
was changed right before is not remembered.

Nor is what lies in a container's image (overlayfs): it has the ctime of the layer below, which may be one that the
image was made with (squashfs, EROFS). Two images may have weights of one size under one inode number, of one time.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidArgument, InvalidState, VaultError
from ..vault.files import filesystem_of
from ..vault.protocol import check_folder

TRUSTED = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs")  # every write changes ctime there
SETTLED_NS = 2 * 10**9
MOST_REMEMBERED = 4096  # files: 0.8 MB
_PART_BYTES = 8 << 20
_MOST_THREADS = 32
_MOST_MEMORY_BYTES = 4 << 20


class FileDigest(NamedTuple):
    """Which file, when it was touched last, and the digest of its bytes. Two are equal if nothing has changed."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int
    digest: str


def remembered_in() -> Path:
    """The file that digests are remembered in: in `$XDG_CACHE_HOME`, or `~/.cache`. Raises RuntimeError: no home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return Path(cache if os.path.isabs(cache) else Path.home() / ".cache") / "cumem-sleep" / "file_digests.json"


def digests_of(paths: Iterable[Path | str]) -> list[FileDigest]:
    """Of these files, in order, those that symbolic links lead to; reads what is not remembered.

    Raises:
        InvalidArgument: one is no file, or cannot be read.
        InvalidState: one was changed meanwhile.
    """
    remembered = _remembered()
    new: dict[str, FileDigest] = {}
    found = []
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "file-digest") as threads:
        for path in paths:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # of a pipe it would wait
            except OSError as error:
                raise InvalidArgument(f"{path}: {error.strerror}") from None
            try:
                each, may_remember = _digest(path, descriptor, remembered, threads)
            except OSError as error:
                raise InvalidArgument(f"{path}: {error.strerror}") from None
            finally:
                os.close(descriptor)
            found.append(each)
            if may_remember:
                new[_name(each)] = each
    if any(remembered.get(name) != each for name, each in new.items()):
        _remember(new)
    return found


def _digest(
    path: Path | str, descriptor: int, remembered: dict[str, FileDigest], threads: ThreadPoolExecutor
) -> tuple[FileDigest, bool]:
    """Of an open file, and whether it may be remembered."""
    began_ns = time.time_ns()
    before = _untouched(descriptor)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise InvalidArgument(f"{path} is no file")
    is_trusted = filesystem_of(descriptor) in TRUSTED
    known = remembered.get(_name(before))
    if is_trusted and known is not None and known[:-1] == before[:-1]:
        return known, True
    parts = threads.map(lambda start: _part(descriptor, start, before.nbytes), range(0, before.nbytes, _PART_BYTES))
    whole = sha256(b"".join(parts) + str(before.nbytes).encode()).hexdigest()
    if _untouched(descriptor) != before:
        raise InvalidState(f"{path} was changed while it was being read")
    is_settled = began_ns - max(before.mtime_ns, before.ctime_ns) >= SETTLED_NS
    return before._replace(digest=whole), is_trusted and is_settled


def _untouched(descriptor: int) -> FileDigest:
    facts = os.fstat(descriptor)
    return FileDigest(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, "")


def _part(descriptor: int, start: int, end: int) -> bytes:
    """The digest of one part of a file of `end` bytes."""
    content = os.pread(descriptor, min(_PART_BYTES, end - start), start)
    if len(content) != min(_PART_BYTES, end - start):
        raise InvalidState(f"a file of {end} bytes was cut off at {start + len(content)} while it was being read")
    return sha256(content).digest()


def _name(each: FileDigest) -> str:
    return f"{each.device}:{each.inode}"


# What is remembered: one line that proves the next, and that. Whatever is wrong with it, nothing is remembered.


def _remembered() -> dict[str, FileDigest]:
    try:
        file = remembered_in()
        check_folder(file.parent, private=True)
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:
            facts = os.fstat(descriptor)
            if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or not stat.S_ISREG(facts.st_mode):
                return {}
            proof, _, text = opened.read(_MOST_MEMORY_BYTES).partition(b"\n")
        if sha256(text).hexdigest().encode() != proof:
            return {}
        rows = (FileDigest(*row) for row in json.loads(text))
        return {_name(row): row for row in rows}
    except (OSError, VaultError, ValueError, TypeError, RuntimeError):
        return {}


def _remember(new: dict[str, FileDigest]) -> None:
    """Add these, for which the oldest go; what another process adds at the same moment may be lost."""
    with suppress(OSError, VaultError, RuntimeError):
        file = remembered_in()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(file.parent, private=True)
        rows = [row for name, row in _remembered().items() if name not in new] + list(new.values())
        text = json.dumps(rows[-MOST_REMEMBERED:]).encode()
        descriptor, name = tempfile.mkstemp(dir=file.parent)  # of mode 0600
        try:
            with open(descriptor, "wb") as opened:
                opened.write(sha256(text).hexdigest().encode() + b"\n" + text)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise
