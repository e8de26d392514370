"""How much of some files the kernel holds in memory: what loading a checkpoint costs depends on it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


def cached_fraction(files: Iterable[Path]) -> float:
    """Of all their bytes, from 0 to 1."""
    pages = cached = 0
    for path in files:
        with path.open("rb") as file:
            states = _page_states(file.fileno(), os.fstat(file.fileno()).st_size)
        pages += len(states)
        cached += len(states) - states.count(0)
    return cached / pages if pages else 0.0


def drop(files: Iterable[Path]) -> None:
    """Out of the page cache, as if nobody had read them; files in memory (tmpfs) stay there."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages that are not on the disk yet would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _page_states(descriptor: int, nbytes: int) -> bytes:
    """One byte for each page, 0 if it is not in memory."""
    pages = -(-nbytes // mmap.PAGESIZE)
    if not pages:
        return b""
    states = ctypes.create_string_buffer(pages)
    address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        if _libc.mincore(address, nbytes, states):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        _libc.munmap(address, nbytes)
    return states.raw
