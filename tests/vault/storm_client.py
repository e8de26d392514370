"""A client of the storm: a random history of sleeps and wakes, whatever happens to the vault. Every byte is compared.

Run as `storm_client.py SOCKET SEED STEPS`; exits with 0 if every byte was right.
"""

from __future__ import annotations

import hashlib
import pathlib
import random
import sys
import time

import numpy as np
from running import Segment, from_slabs
from support import PAGE, Memory, fresh_allocator

from cumem_sleep import OutOfHostMemory, VaultError, VaultLost, VaultUnavailable
from cumem_sleep.vault.client import Backup, Key, Sealed, Shown, VaultClient

RECONNECT_WITHIN_S = 60


class Weights:
    """A segment whose content is one of few, so that processes share backups."""

    def __init__(self, storm: Storm, address: int) -> None:
        self.storm, self.address = storm, address
        self.is_asleep = False
        self.backup: Backup | None = None
        self.client: VaultClient | None = None  # that has the backup
        self.change()

    def change(self) -> None:
        """New contents, as a trainer writes them."""
        self.forget()
        self.nbytes = self.storm.random.choice((1, 2, 3)) * PAGE - self.storm.random.choice((0, 5))
        seed = self.storm.random.randrange(6)
        self.content = np.random.default_rng(seed).bytes(self.nbytes)
        self.key = Key(hashlib.md5(self.content, usedforsecurity=False).hexdigest(), self.nbytes, "")
        self.storm.memory.write(self.address, self.content)

    def forget(self) -> None:
        if self.backup is not None and self.client is not None:
            self.client.release([self.backup])
        self.backup = self.client = None

    def sleep(self) -> None:
        """As a tier does it: nothing is given up before the backup is there."""
        client = self.storm.client
        mine = Segment(client, self.address, self.nbytes)
        if self.backup is not None and self.client is client and client.mark([self.backup], needed=True):
            self.forget()
        if self.backup is not None and self.client is not client:
            self.forget()
        if self.backup is None:
            (found,) = client.find(mine.gpu, [self.key])
            self.backup, self.client = found, client
        if self.backup is None:
            (self.backup,) = client.reserve(mine.gpu, [self.nbytes])
            mine.write(self.backup)
            client.seal([Sealed(self.backup, self.key)])
        self.storm.memory.write(self.address, b"\xff" * self.nbytes)
        self.is_asleep = True

    def wake(self) -> None:
        assert self.backup is not None
        assert self.client is not None
        try:
            Segment(self.client, self.address, self.nbytes).read(self.backup)
            restored = self.storm.memory.read(self.address, self.nbytes)
        except VaultLost:
            restored = from_slabs(self.client, self.backup)
            self.storm.memory.write(self.address, restored)
        assert restored == self.content, "WRONG BYTES"
        self.is_asleep = False
        self.client.mark([self.backup], needed=False) if self.client.lost is None else self.forget()

    def move(self, client: VaultClient) -> None:
        """To a new vault: share what is there, or show what the old one left."""
        assert self.backup is not None
        assert self.client is not None
        gpu = Segment(client, self.address, self.nbytes).gpu
        (found,) = client.find(gpu, [self.key])
        if found is None:
            (found,) = client.show(gpu, [Shown(self.backup, self.key, self.client.slabs)])
        assert from_slabs(client, found) == self.content, "WRONG BYTES ADOPTED"
        self.forget()
        self.backup, self.client = found, client


class Storm:
    def __init__(self, socket: pathlib.Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.socket = socket
        self.memory = Memory()
        allocator = fresh_allocator()
        addresses = [allocator.malloc(3 * PAGE, "weights") for _ in range(4)]
        self.client = self.connect()
        self.weights = [Weights(self, address) for address in addresses]

    def connect(self) -> VaultClient:
        ends = time.monotonic() + RECONNECT_WITHIN_S
        while True:
            try:
                return VaultClient(self.socket, "storm")
            except VaultUnavailable:
                assert time.monotonic() < ends, "no vault comes back"
                time.sleep(0.01)

    def step(self) -> None:
        if self.client.lost is not None:
            self.client = self.connect()
        for each in self.weights:
            if each.is_asleep and each.client is not self.client:
                try:
                    each.move(self.client)
                except VaultError:  # the old vault is still dying
                    return
                except OutOfHostMemory:
                    each.wake()
        each = self.random.choice(self.weights)
        if each.is_asleep:
            each.wake()
        elif self.random.random() < 0.3:
            each.change()
        else:
            try:
                each.sleep()
            except VaultError:
                each.forget()
                raise
            except OutOfHostMemory:
                each.forget()

    def run(self, steps: int) -> None:
        lost = 0
        for _ in range(steps):
            before = time.monotonic()
            try:
                self.step()
            except VaultLost:
                lost += 1
            assert time.monotonic() - before < RECONNECT_WITHIN_S, "HANGS"
            for each in self.weights:
                if not each.is_asleep:
                    now = self.memory.read(each.address, each.nbytes)
                    assert now == each.content, "WRONG BYTES OF A SEGMENT THAT IS AWAKE"
        for each in self.weights:
            if each.is_asleep:
                each.wake()
        print(f"lost the vault {lost} times", flush=True)


if __name__ == "__main__":
    Storm(pathlib.Path(sys.argv[1]), int(sys.argv[2])).run(int(sys.argv[3]))
