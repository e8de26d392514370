"""A vault in a process of its own, and segments of this one that it keeps."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from support import DRIVER

import cumem_sleep
from cumem_sleep import _core
from cumem_sleep.vault.client import Key, LentMemory, VaultBackup, VaultClient
from cumem_sleep.vault.link import LinkGroup, VaultLink
from cumem_sleep.vault.protocol import Table
from cumem_sleep.vault.relay import Relaying
from cumem_sleep.vault.slabs import UNIT_BYTES

MIB = 1 << 20
SECONDS = 60  # until something is taken for hung


def eventually(is_so: Callable[[], bool], what: str) -> None:
    """Wait for what another process does by itself."""
    ends = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < ends, f"never: {what}"
        time.sleep(0.005)


class RunningVault:
    """`cumem-sleep vault`, on the driver of the test run."""

    def __init__(self, folder: pathlib.Path, memory: str = "64MiB", *options: str, **environment: str) -> None:
        self.socket = folder / "vault.sock"
        self.lines: list[str] = []
        command = [sys.executable, "-m", "cumem_sleep", "vault", "--memory", memory, "--socket", str(self.socket)]
        root = str(pathlib.Path(cumem_sleep.__path__[0]).parent)
        self.process = subprocess.Popen(
            [*command, *options],
            env={**os.environ, "CUMEM_SLEEP_DRIVER": DRIVER, "PYTHONPATH": root, **environment},
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            eventually(lambda: self.said("listens at") or self.process.poll() is not None, "the vault listens")
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += iter(self.process.stderr.readline, "")  # as they come

    def said(self, text: str) -> bool:
        return any(text in line for line in list(self.lines))

    def client(self, name: str = "test", deadline_s: float = SECONDS) -> VaultClient:
        return VaultClient(self.socket, name, deadline_s)

    def status(self) -> dict[str, Any]:
        client = self.client("looks")
        try:
            return client.status()
        finally:
            client.close()

    def wait_until_ready(self) -> None:
        eventually(lambda: self.status()["pinned_bytes"] == self.status()["memory_bytes"], "all memory is there")

    def is_unused(self) -> bool:
        status = self.status()
        return not status["clients"] and not status["asleep_bytes"] and not status["awake_bytes"]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        """Wait for its end; returns its exit code."""
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        if self.process.stderr is not None and not self.process.stderr.closed:
            self.end()


def flip_a_bit(vault: RunningVault, name: str, at: int) -> None:
    """Of what it keeps under this name, in its memory or its file: of this byte of the first entry."""
    looks = vault.client("looks")
    found = looks.adopt(looks.gpus[0], name)
    assert found is not None
    ((slab, offset, _), *_rest) = found[1][0].extents
    descriptor = looks.slabs.by_number[slab][0]
    facts = os.fstat(descriptor)
    for path in pathlib.Path(f"/proc/{vault.process.pid}/fd").iterdir():
        with suppress(OSError):
            there = path.stat()
            if (there.st_dev, there.st_ino) == (facts.st_dev, facts.st_ino):
                writable = os.open(path, os.O_RDWR)
                break
    (byte,) = os.pread(writable, 1, offset + at)
    os.pwrite(writable, bytes([byte ^ 4]), offset + at)
    os.close(writable)
    looks.close()


class Segment:
    """Memory of this process, and the part of an owner that the vault's clients play."""

    def __init__(self, client: VaultClient, address: int, nbytes: int, device: int = 0) -> None:
        self.client, self.address, self.nbytes = client, address, nbytes
        self.gpu = _core.device_info(device).uuid

    def lend(self) -> tuple[LentMemory, int]:
        """Its memory, and where in that it lies."""
        descriptor, base, nbytes = _core.export_memory(self.address)
        return self.client.lend(self.gpu, descriptor, nbytes), self.address - base

    def begin(self, backup: VaultBackup, lent: LentMemory, lent_offset: int = 0, *, to_host: bool) -> int:
        """In pieces that are not whole pages."""
        step = 3 * MIB + 17
        rows = [(lent_offset + start, start, min(step, backup.bytes - start)) for start in range(0, backup.bytes, step)]
        return self.client.copy(lent, backup, np.array(rows), to_host=to_host)

    def back_up(self, nbytes: int | None = None) -> VaultBackup:
        (backup,) = self.client.reserve(self.gpu, [self.nbytes if nbytes is None else nbytes])
        self.write(backup)
        return backup

    def write(self, backup: VaultBackup) -> None:
        lent, offset = self.lend()
        self.client.wait([self.begin(backup, lent, offset, to_host=True)])
        take_back(self.client, [lent])

    def read(self, backup: VaultBackup) -> None:
        lent, offset = self.lend()
        self.client.wait([self.begin(backup, lent, offset, to_host=False)])
        take_back(self.client, [lent])


def table(*rows: tuple[int, int, int]) -> Table:
    """Of ranges: an offset in lent memory, one in the backup, and bytes."""
    return np.array(rows, np.int64).reshape(-1, 3)


def lone_link(device: int, to_host: bool) -> VaultLink:
    """Without others that could help."""
    return VaultLink(device, LinkGroup(to_host, Relaying([]).refusal))


def take_back(client: VaultClient, lent: Sequence[LentMemory]) -> None:
    """Return when the vault has given this memory back."""
    request = client.begin_to_take_back(lent)
    client.wait([] if request is None else [request])


def seal(client: VaultClient, backup: VaultBackup, name: str) -> Key:
    key = Key(name, backup.bytes, "")
    client.seal([(backup, key)])
    return key


def from_slabs(client: VaultClient, backup: VaultBackup) -> bytes:
    """The backup, as its owner reads it without the vault."""
    content = b""
    for slab, offset, nbytes in backup.extents:
        descriptor, slab_bytes = client.slabs.by_number[slab]
        block = _core.HostBlock.mapped(descriptor, slab_bytes, False)
        content += np.frombuffer(memoryview(block), np.uint8)[offset : offset + nbytes].tobytes()
    return content[: backup.bytes]


def taken(sizes: Sequence[int]) -> int:
    """What backups of these sizes take."""
    return sum(-(-size // UNIT_BYTES) * UNIT_BYTES for size in sizes)
