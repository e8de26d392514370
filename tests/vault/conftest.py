from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest
from running import RunningVault

from cumem_sleep import CuMemAllocator
from cumem_sleep.vault.client import VaultClient


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """For the socket, whose path may have 107 bytes only."""
    private = tmp_path / "v"
    private.mkdir(mode=0o700)
    return private


@pytest.fixture
def start_vault(folder: pathlib.Path) -> Iterator[Callable[..., RunningVault]]:
    """Starts vaults, all on one socket; none of them is left behind."""
    started: list[RunningVault] = []

    def start(memory: str = "64MiB", *options: str, **environment: str) -> RunningVault:
        started.append(RunningVault(folder, memory, *options, **environment))
        return started[-1]

    yield start
    for vault in started:
        vault.close()


@pytest.fixture
def vault(start_vault: Callable[..., RunningVault]) -> RunningVault:
    running = start_vault("64MiB", "--slab-size", "16MiB")
    running.wait_until_ready()
    return running


@pytest.fixture
def client(vault: RunningVault, allocator: CuMemAllocator) -> Iterator[VaultClient]:
    connected = vault.client()
    yield connected
    connected.close()
