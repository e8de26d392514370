"""A client of the storm: a random history of an allocator, whatever happens to the vault. Every byte is compared.

The driver refuses some of the calls that take memory away. Run as `storm_client.py SOCKET SEED STEPS DEADLINE_S`;
SIGTERM ends it early. It wakes everything at the end, gives everything back, and exits with 0 if every byte was right,
no call hung, and nothing is left.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import numpy as np
from running import eventually
from support import AWAKE, DROPPED, PAGE, Memory, bf16_weights, free_everything

from cumem_sleep import CuMemAllocator, DriverError, InvalidState, OutOfHostMemory, Settings, VaultError, _core, sim
from cumem_sleep.backups import vault_tier as tiers
from cumem_sleep.backups.vault_tier import VaultTier
from cumem_sleep.vault.client import VaultClient
from cumem_sleep.vault.slabs import UNIT_BYTES

HANGS_S = 120  # what is slow on a busy machine does not hang; `longest` says how long it took
TAGS = ("weights", "default", "kv_cache")
SETTINGS: tuple[dict[str, object], ...] = (
    {},
    {"compress": "auto"},
    {"verify": "off", "retain_backups": False},  # nothing proves the bytes but this script
)


def succeeds(call: Callable[[], object]) -> bool:
    with suppress(VaultError):
        call()
        return True
    return False


class Storm:
    def __init__(self, socket: pathlib.Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.socket = socket
        self.fragments: VaultClient | None = None
        settings = SETTINGS[seed % len(SETTINGS)]
        self.allocator = CuMemAllocator(Settings(driver="sim", vault=str(socket), **settings))  # type: ignore[arg-type]
        self.retains = bool(settings.get("retain_backups", True))
        self.memory = Memory()
        self.contents: dict[int, bytes] = {}  # by address
        self.steps = self.failed = 0
        self.longest = 0.0, ""  # of all calls, in seconds, and its name
        self.is_asked_to_stop = False
        for number in range(5):
            self.allocate(TAGS[number % len(TAGS)])
        self.descriptors = len(os.listdir("/proc/self/fd"))

    # Steps

    def allocate(self, tag: str) -> None:
        device = self.random.randrange(int(os.environ.get("CUMEM_SLEEP_SIM_DEVICES", "1")))
        address = self.allocator.malloc(self.random.choice((1, 2, 3)) * PAGE, tag, device)
        self.contents[address] = b""
        self.write(address)

    def write(self, address: int) -> None:
        """One of few contents, so that processes share backups."""
        (segment,) = (segment for segment in _core.segments() if segment.address == address)
        self.contents[address] = bf16_weights(segment.bytes, np.random.default_rng(self.random.randrange(6)))
        self.memory.write(address, self.contents[address], segment.device)

    def change(self) -> None:
        """As a trainer does."""
        awake = [segment for segment in _core.segments() if segment.sleep == AWAKE]
        if awake:
            self.write(self.random.choice(awake).address)

    def refuse(self) -> None:
        """From here on, over several steps, the driver refuses to take memory away."""
        for _ in range(self.random.choice((1, 2))):
            call = self.random.choice(("cuMemUnmap", "cuMemRelease", "cuMemAddressFree"))
            sim.fail(call, after=self.random.choice((0, 0, 1, 3)), times=self.random.choice((1, 2, 4, 6, 8)))

    def replace(self) -> None:
        sim.reset()
        segment = self.random.choice(_core.segments())
        tag = segment.tag
        self.allocator.free(segment.address)
        del self.contents[segment.address]
        self.allocate(tag)

    def fragment(self) -> None:
        """Another client of this process has many small backups, of which every other one goes; they go at the next."""
        before, self.fragments = self.fragments, None
        if before is not None:
            before.close()
            return
        self.fragments = VaultClient(self.socket, "fragments", tiers.DEADLINE_S)
        gpu = self.random.choice(self.fragments.gpus)
        backups = self.fragments.reserve_now(gpu, [UNIT_BYTES] * self.random.choice((8, 32, 64))) or []
        self.fragments.release(backups[::2])
        self.fragments.mark(backups[1::4], needed=False)

    def prepare(self) -> None:
        if self.retains:
            preparation = self.allocator.prepare()
            preparation.wait(self.random.choice((0.0, 0.01, HANGS_S)))

    def step(self) -> None:
        """Any call; everything is as before if it fails."""
        steps: tuple[tuple[str, Callable[[], object], int], ...] = (
            ("sleep", self.allocator.sleep, 8),
            ("sleep(2)", lambda: self.allocator.sleep(2), 1),
            ("sleep of all", lambda: self.allocator.sleep(offload_tags=TAGS), 4),
            ("wake", self.allocator.wake_up, 8),
            ("wake of weights", lambda: self.allocator.wake_up("weights"), 3),
            ("discard", lambda: self.allocator.discard("kv_cache"), 1),
            ("fragment", self.fragment, 3),
            ("prepare", self.prepare, 2),
            ("release", self.allocator.release_backups, 1),
            ("change", self.change, 6),
            ("replace", self.replace, 2),
            ("refuse", self.refuse, 4),
        )
        ((name, call, _),) = self.random.choices(steps, [weight for _, _, weight in steps])
        before = {segment.address: segment.sleep for segment in _core.segments()}
        try:
            self.timed(name, call)
        except (VaultError, OutOfHostMemory, DriverError):
            self.failed += 1
            after = {segment.address: segment.sleep for segment in _core.segments()}
            assert after == before, "A CALL THAT FAILED HAS CHANGED SOMETHING"
        self.look()
        self.steps += 1

    def timed(self, name: str, call: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            call()
        finally:
            self.longest = max(self.longest, (time.monotonic() - began, name))
            assert self.longest[0] < HANGS_S, f"HANGS: {name}"

    def look(self) -> None:
        """What was dropped has undefined bytes: it gets new ones when it wakes."""
        for segment in _core.segments():
            address = segment.address
            if segment.sleep == DROPPED:
                self.contents[address] = b""
            elif segment.sleep == AWAKE and not self.contents[address]:
                self.write(address)
            elif segment.sleep == AWAKE:
                content = self.memory.read(address, segment.bytes, segment.device)
                assert content == self.contents[address], "WRONG BYTES"

    # All of it

    def run(self, steps: int) -> None:
        while self.steps < steps and not self.is_asked_to_stop:
            self.step()
            time.sleep(self.random.uniform(0, 0.01))  # leaves some of the machine to the others
        self.wake_all()
        self.leave()
        print(
            f"steps={self.steps} failed={self.failed} longest={self.longest[0]:.2f} s ({self.longest[1]})", flush=True
        )

    def wake_all(self) -> None:
        sim.reset()
        eventually(lambda: succeeds(lambda: self.timed("wake", self.allocator.wake_up)), "a wake succeeds")
        self.look()

    def leave(self) -> None:
        """Nothing is left here once the vault answers."""
        if self.fragments is not None:
            self.fragments.close()
        self.memory.close()
        free_everything()
        tier = self.allocator._store.memory.tier
        assert isinstance(tier, VaultTier)
        eventually(lambda: succeeds(lambda: tier.client().release([])) and not tier.client().lost, "a vault is there")
        tier.release([])
        assert not tier._held
        assert not tier._left
        assert not tier.client().slabs.by_number, "descriptors of slabs are left"
        assert sim.stats().mapped_bytes == 0, "device memory is left"
        more = len(os.listdir("/proc/self/fd")) - self.descriptors
        assert more <= 1, f"{more} more descriptors are open than at the beginning"  # the connection

    def ask_to_stop(self, _number: int, _frame: FrameType | None) -> None:
        self.is_asked_to_stop = True


if __name__ == "__main__":
    tiers.DEADLINE_S = float(sys.argv[4])
    storm = Storm(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
    signal.signal(signal.SIGTERM, storm.ask_to_stop)
    print("begins", flush=True)
    try:
        storm.run(int(sys.argv[3]))
    except InvalidState as error:
        raise AssertionError(f"after {storm.steps} steps: {error}") from error
