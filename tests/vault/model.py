"""Models that do what they are told: each is a process with an allocator, forked so that to start it costs little.

Run as `model.py`. For each line of standard input, `SOCKET-OF-VAULT SOCKET-OF-TEST SEED`, a model begins; it connects
to the test. To each line that comes from there it answers with one: `ok`, or what kept it from that.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import sys
from typing import TextIO

import numpy as np
from support import AWAKE, PAGE, Memory, bf16_weights, free_everything

from cumem_sleep import CuMemAllocator, CumemSleepError, Settings, _core
from cumem_sleep.backups import vault_tier as tiers

PAGES = (1, 2, 1)  # of its segments


class SwitchedModel:
    def __init__(self, vault: pathlib.Path, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.is_compressed = seed % 10 == 1
        compress = "auto" if self.is_compressed else "off"
        self.allocator = CuMemAllocator(Settings(driver="sim", vault=str(vault), compress=compress))
        self.memory = Memory()
        self.contents = {self.allocator.malloc(pages * PAGE, "weights"): b"" for pages in PAGES}
        for address in self.contents:
            self.write(address)

    def write(self, address: int) -> None:
        (segment,) = (each for each in _core.segments() if each.address == address)
        self.contents[address] = (
            bf16_weights(segment.bytes, self.random) if self.is_compressed else self.random.bytes(segment.bytes)
        )
        self.memory.write(address, self.contents[address])

    def change(self) -> None:
        self.write(int(self.random.choice(list(self.contents))))

    def sleep(self) -> None:
        self.allocator.sleep()

    def wake(self) -> None:
        self.allocator.wake_up()

    def ask(self, command: str) -> str:
        if command == "pid":
            return str(os.getpid())
        said = "ok"
        try:
            getattr(self, command)()
        except CumemSleepError as error:
            said = f"{type(error).__name__}: {error}".replace("\n", " ")
        are_awake = [segment.sleep == AWAKE for segment in _core.segments()]
        is_to_be_awake = (command == "sleep") is (said != "ok")
        if command != "change" and set(are_awake) != {is_to_be_awake}:
            return f"WRONG STATE after {command}: {said}"
        for address, content in self.contents.items() if are_awake[0] else ():
            if self.memory.read(address, len(content)) != content:
                return f"WRONG BYTES after {command}: {said}"
        return said

    def leave(self) -> None:
        self.memory.close()
        free_everything()
        self.allocator._store.memory.stop()


def run(vault: str, test: str, seed: int) -> None:
    tiers.DEADLINE_S = 5.0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(test)
        commands: TextIO = connection.makefile("rw")
        model = SwitchedModel(pathlib.Path(vault), seed)
        for line in commands:
            print(model.ask(line.strip()), file=commands, flush=True)
        model.leave()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        vault, test, seed = line.split()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(vault, test, int(seed))
            os._exit(0)
