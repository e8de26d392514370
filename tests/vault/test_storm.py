"""The vault and its clients are killed at random moments: no wrong byte, nothing left behind, nobody hangs."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from running import RunningVault, eventually

import cumem_sleep

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = pathlib.Path(__file__).parent
KILLS = int(os.environ.get("CUMEM_SLEEP_TEST_VAULT_KILLS", "12"))


def start(vault: RunningVault, seed: int, steps: int) -> subprocess.Popen[str]:
    path = [str(pathlib.Path(cumem_sleep.__path__[0]).parent), str(HERE.parent), str(HERE)]
    return subprocess.Popen(
        [sys.executable, str(HERE / "storm_client.py"), str(vault.socket), str(seed), str(steps)],
        env={**os.environ, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_vault_is_killed_again_and_again(start_vault: Callable[..., RunningVault]) -> None:
    options = ("40MiB", "--slab-size", "8MiB")
    vault = start_vault(*options)
    chance = random.Random(1)
    clients = [start(vault, seed, 10**6) for seed in range(3)]
    try:
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.2, 1.5))
            assert [each.poll() for each in clients] == [None] * 3, [each.communicate() for each in clients]
            vault.kill()
            vault = start_vault(*options)
        eventually(lambda: len(vault.status()["clients"]) >= 3, "all have found the last one")
        assert [each.poll() for each in clients] == [None] * 3
        assert vault.status()["cut_off"] == 0
    finally:
        for each in clients:
            each.kill()
            each.communicate()
    eventually(vault.is_unused, "nothing is left in the vault")
    eventually(lambda: vault.status()["adopted_bytes"] == 0, "what it had adopted is gone")
    vault.wait_until_ready()


def test_clients_are_killed_again_and_again(start_vault: Callable[..., RunningVault]) -> None:
    vault = start_vault("40MiB", "--slab-size", "8MiB")
    vault.wait_until_ready()
    chance = random.Random(2)
    survivor = start(vault, 0, 300)
    for seed in range(1, KILLS + 1):
        victim = start(vault, seed, 10**6)
        eventually(lambda: len(vault.status()["clients"]) >= 1, "somebody is connected")
        time.sleep(chance.uniform(0.3, 1))
        victim.kill()
        victim.communicate()
    _, errors = survivor.communicate(timeout=300)
    assert survivor.returncode == 0, errors
    eventually(vault.is_unused, "nothing is left in the vault")
    status = vault.status()
    assert (status["free_bytes"], status["cut_off"]) == (status["memory_bytes"], 0)
