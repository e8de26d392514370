"""Tensors of a process, in one layout or another. Run as `tensors.py SOCKET-OF-VAULT NAME`: offers them, and says so.

A number after these: it is killed when it has sent so many requests to the vault.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from typing import Any

import numpy as np
from support import MIB, PAGE, Memory, fresh_allocator

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.vault.client import VaultClient

NAME = "a model"
PAGES = (4, 2)
# The segment of each tensor, where in it, and how many bytes. In both layouts something lies beside them.
OFFERED = {"w": (0, 0, 5 * MIB), "tiny": (0, 5 * MIB, 48), "x": (0, 6 * MIB, 16), "all": (1, 0, 2 * PAGE)}
ADOPTED = {"all": (0, 16, 2 * PAGE), "x": (1, 0, 16), "tiny": (1, 32, 48), "w": (0, 5 * MIB, 5 * MIB)}
BYTES = sum(PAGES) * PAGE


def content_of(name: str) -> bytes:
    return np.random.default_rng(len(name) + ord(name[0])).bytes(OFFERED[name][2])


class Tensors:
    """In memory of the allocator, all of which holds `filler` but for the tensors that are filled."""

    def __init__(
        self, allocator: CuMemAllocator, memory: Memory, layout: dict[str, tuple[int, int, int]], filler: int = 7
    ) -> None:
        self.allocator, self.memory, self.layout, self.filler = allocator, memory, layout, filler
        ends = [max((at + size for seg, at, size in layout.values() if seg == each), default=1) for each in range(2)]
        self.segments = [allocator.malloc(-(-end // PAGE) * PAGE, "weights") for end in ends]
        self.sizes = [-(-end // PAGE) * PAGE for end in ends]
        for address, nbytes in zip(self.segments, self.sizes, strict=True):
            memory.write(address, bytes([filler]) * nbytes)
        self.places = {name: (self.segments[seg] + at, size) for name, (seg, at, size) in layout.items()}

    def fill(self) -> Tensors:
        for name, (address, _) in self.places.items():
            self.memory.write(address, content_of(name))
        return self

    def hold(self, expected: dict[str, bytes] | int) -> bool:
        """Whether they hold this (of each, or one byte), and what lies beside them what it held."""
        for number, (address, nbytes) in enumerate(zip(self.segments, self.sizes, strict=True)):
            wanted = bytearray([self.filler]) * nbytes
            for name, (segment, at, size) in self.layout.items():
                if segment == number:
                    one = bytes([expected]) * size if isinstance(expected, int) else expected[name]
                    wanted[at : at + size] = one
            if self.memory.read(address, nbytes) != wanted:
                return False
        return True

    def are_right(self) -> bool:
        return self.hold({name: content_of(name) for name in self.layout})

    def free(self) -> None:
        for address in self.segments:
            self.allocator.free(address)


def die_after(requests: int) -> None:
    real = VaultClient._begin
    sent = []

    def begin(client: VaultClient, verb: str, *args: Any, **facts: Any) -> int:
        number = real(client, verb, *args, **facts)
        sent.append(verb)
        if len(sent) == requests:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    VaultClient._begin = begin  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    vault, name, *requests = sys.argv[1:]
    if requests:
        die_after(int(requests[0]))
    allocator = fresh_allocator(vault=vault)
    memory = Memory()
    tensors = Tensors(allocator, memory, OFFERED).fill()
    if name != NAME:  # none of its segments is like another model's
        memory.write(tensors.places["w"][0], name.encode())
        memory.write(tensors.places["all"][0], name.encode())
    allocator.offer(name, tensors.places)
    report = allocator.sleep()
    print("offered", report.copied_bytes, flush=True)
    pathlib.Path("/dev/stdin").read_text()
    assert _core.driver_is_open()
    os._exit(0)
