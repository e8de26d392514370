"""The vault and its clients are killed, and stopped, at random moments: no wrong byte, nothing is left, nobody hangs.

`CUMEM_SLEEP_TEST_VAULT_KILLS` says how often, for a longer run by hand.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from running import RunningVault, eventually

import cumem_sleep
from cumem_sleep.errors import VaultUnavailable

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = pathlib.Path(__file__).parent
KILLS = int(os.environ.get("CUMEM_SLEEP_TEST_VAULT_KILLS", "6"))
FOREVER = 10**6


class Vaults(RunningVault):
    """Vaults on one socket, one after the other. Each is forked, so that to start it costs little."""

    def __init__(
        self, folder: pathlib.Path, memory: str = "40MiB", slab: str = "8MiB", *options: str, **environment: str
    ) -> None:
        self.socket = folder / "vault.sock"
        with (folder / "said").open("w") as said:  # nobody reads that, and a pipe would fill up
            arguments = ("--memory", memory, "--slab-size", slab, "--socket", str(self.socket), *options)
            self.process = start_python("nursery.py", *arguments, errors=said.fileno(), **environment)
        self.pid = 0
        self.start()

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.pid = int(self._line())
        eventually(self.answers, "it answers")

    def answers(self) -> bool:
        with suppress(VaultUnavailable):
            self.status()
            return True
        return False

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._line() == "ended\n"
        self.pid = 0

    def close(self) -> None:
        if self.pid:
            self.kill()
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def vault(folder: pathlib.Path) -> Iterator[Vaults]:
    vaults = Vaults(folder)
    yield vaults
    vaults.close()


def start_python(
    script: str, *arguments: str, errors: int = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    path = [str(pathlib.Path(cumem_sleep.__path__[0]).parent), str(HERE.parent), str(HERE)]
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        env={**os.environ, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": os.pathsep.join(path), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )


def start(
    vault: RunningVault, seed: int, steps: int = FOREVER, deadline_s: float = 5, **environment: str
) -> subprocess.Popen[str]:
    arguments = str(vault.socket), str(seed), str(steps), str(deadline_s)
    client = start_python("storm_client.py", *arguments, **environment)
    assert client.stdout is not None
    assert client.stdout.readline() == "begins\n"
    return client


def all_are_well(clients: list[subprocess.Popen[str]]) -> bool:
    return not [each.communicate() for each in clients if each.poll() is not None]


def end(clients: list[subprocess.Popen[str]]) -> None:
    """They wake everything, give everything back, and have found nothing wrong."""
    for each in clients:
        each.send_signal(signal.SIGTERM)
    for seed, each in enumerate(clients):
        said, errors = each.communicate(timeout=300)
        assert each.returncode == 0, errors
        print(seed, said.strip())


def kill(clients: list[subprocess.Popen[str]]) -> None:
    for each in clients:
        each.kill()
        each.communicate()


def is_as_new(vault: RunningVault) -> None:
    eventually(vault.is_unused, "nothing is left in the vault")
    vault.wait_until_ready()
    status = vault.status()
    assert (status["free_bytes"], status["cut_off"]) == (status["memory_bytes"], 0)


def test_the_vault_is_killed_again_and_again(vault: Vaults) -> None:
    chance = random.Random(1)
    clients = [start(vault, seed) for seed in range(3)]
    try:
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.05, 1))
            assert all_are_well(clients)
            vault.kill()
            vault.start()
        end(clients)
    finally:
        kill(clients)
    is_as_new(vault)


def test_the_vault_is_stopped_again_and_again(vault: Vaults) -> None:
    """For less or more than the deadline of its clients; sometimes it never goes on."""
    chance = random.Random(3)
    clients = [start(vault, seed, deadline_s=1.2) for seed in range(3)]
    try:
        for _ in range(max(1, KILLS // 2)):
            time.sleep(chance.uniform(0.05, 1))
            assert all_are_well(clients)
            vault.signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.5, 3))
            if chance.random() < 0.3:
                vault.kill()
                vault.start()
            else:
                vault.signal(signal.SIGCONT)
        end(clients)
    finally:
        kill(clients)
    is_as_new(vault)


def test_clients_are_killed_again_and_again(vault: Vaults) -> None:
    vault.wait_until_ready()
    chance = random.Random(2)
    survivor = start(vault, 0)
    try:
        for seed in range(1, KILLS + 1):
            victim = start(vault, seed)
            eventually(lambda: len(vault.status()["clients"]) >= 2, "it is connected")
            time.sleep(chance.uniform(0.05, 0.8))
            assert all_are_well([survivor, victim])
            kill([victim])
            eventually(lambda: len(vault.status()["clients"]) < 2, "it is gone")
        end([survivor])
    finally:
        kill([survivor])
    is_as_new(vault)


def test_first_clients_of_gpus_come_and_the_vault_is_killed_again_and_again(folder: pathlib.Path) -> None:
    """It has many slabs, and a new context takes about a second; each vault after the first one makes its own again."""
    several = {"CUMEM_SLEEP_SIM_DEVICES": "3", "CUMEM_SLEEP_SIM_CONTEXT_US_PER_MIB": "20000"}
    vault = Vaults(folder, "48MiB", "2MiB", **several)
    chance = random.Random(4)
    clients: list[subprocess.Popen[str]] = []
    try:
        for seed in range(max(2, KILLS // 2)):
            clients.append(start(vault, seed, **several))
            time.sleep(chance.uniform(0.05, 2))
            assert all_are_well(clients)
            vault.kill()
            vault.start()
        end(clients)
        is_as_new(vault)
    finally:
        kill(clients)
        vault.close()
