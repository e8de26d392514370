"""The vault's memory: slabs of its own, and those that another vault has left behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from .. import _core
from ..core import log
from ..errors import CumemSleepError, VaultError, format_bytes

NO_MORE_FILES = "the vault can open no more files: raise the limit of its open files (ulimit -n)"
_PREFAULT_BYTES = 64 << 20
# fcntl.h; Python names them from 3.13 on
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_WRITE = 2, 4, 8


class Slab:
    """A memfd that is mapped and registered here. `descriptor` reads it; that is what owners get."""

    def __init__(self, block: _core.HostBlock, descriptor: int, is_adopted: bool) -> None:
        self.block = block
        self.descriptor = descriptor
        self.is_adopted = is_adopted
        facts = os.fstat(descriptor)
        self.identity = facts.st_dev, facts.st_ino  # of the file, the same for every descriptor of it

    @property
    def nbytes(self) -> int:
        """Of the whole slab."""
        return self.block.bytes

    def let_go(self) -> None:
        """Unmap it. Others who have a descriptor of it can still read it. No copy may be in flight."""
        os.close(self.descriptor)
        self.block.close()

    def close(self) -> None:
        """Give the memory back. No copy may be in flight. What is adopted goes when its owners close it, too."""
        try:
            if not self.is_adopted:  # owners of earlier backups may still have it open
                with mmap.mmap(self.block.fd, self.nbytes) as pages:
                    for start in range(0, self.nbytes, _PREFAULT_BYTES):  # each holds the interpreter up
                        pages.madvise(mmap.MADV_REMOVE, start, min(_PREFAULT_BYTES, self.nbytes - start))
        except OSError as error:
            log.warning("%s of a slab go back only when its owners close it: %s", format_bytes(self.nbytes), error)
        finally:
            self.let_go()


def take(
    nbytes: int,
    node: int,
    device: int,
    threads: int,
    prefaulted: Callable[[int], None],
    *,
    reserved_huge_pages: bool = False,
) -> Slab:
    """A new slab, prefaulted and registered.

    Args:
        node: the NUMA node of its pages; -1: wherever.
        device: the GPU whose context registers it, for all GPUs.
        threads: how many of them prefault its pages.
        prefaulted: called with the number of bytes that were just prefaulted.
        reserved_huge_pages: use only huge pages that the system has reserved.

    Raises:
        OutOfHostMemory: the system gives no more memory, or the driver registers no more.
    """
    block = _core.HostBlock.shared(nbytes, node, reserved_huge_pages)
    try:
        with ThreadPoolExecutor(threads, "vault-prefault") as pool:
            starts = range(0, nbytes, _PREFAULT_BYTES)
            sizes = [min(_PREFAULT_BYTES, nbytes - start) for start in starts]
            for size, _ in zip(sizes, pool.map(block.prefault, starts, sizes), strict=True):
                prefaulted(size)
        block.pin(device)
        descriptor = os.open(f"/proc/self/fd/{block.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        block.close()
        raise
    return Slab(block, descriptor, is_adopted=False)


def adopt(descriptor: int, device: int) -> Slab:
    """The slab of another vault, from a descriptor that one of its clients shows; the descriptor is the slab's then.

    Others will share what lies there, so nobody may change it any more. The kernel sees to that: it seals the file
    against writing, and refuses as long as anybody, the other vault above all, has it mapped for writing.

    Raises:
        VaultError: it is not a slab, or somebody can still write to it. The descriptor stays the caller's.
    """
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        raise VaultError(
            "the descriptor offered for adoption is not a vault memfd: it is of another kind of file"
        ) from None
    if seals & (_F_SEAL_SHRINK | _F_SEAL_GROW) != _F_SEAL_SHRINK | _F_SEAL_GROW:
        raise VaultError("the descriptor offered for adoption is not a vault memfd: its size could change")
    if not seals & _F_SEAL_WRITE:
        _seal_against_writing(descriptor)
    read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        block = _core.HostBlock.mapped(read_only, os.fstat(read_only).st_size, False)
    except BaseException:
        os.close(read_only)
        raise
    with suppress(CumemSleepError):  # a driver that registers nothing read-only: copies are slower then
        block.pin(device)
    os.close(descriptor)
    return Slab(block, read_only, is_adopted=True)


def _seal_against_writing(descriptor: int) -> None:
    try:
        os.fchmod(descriptor, 0o600)
        try:
            writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.fchmod(descriptor, 0o400)
        try:
            fcntl.fcntl(writable, _F_ADD_SEALS, _F_SEAL_WRITE)
        finally:
            os.close(writable)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise VaultError(NO_MORE_FILES) from None
        raise VaultError(
            f"the memory of the other vault cannot be sealed ({error.strerror}): is that vault still there? Its backups"
            " stay readable; offer them again when it has ended"
        ) from None
