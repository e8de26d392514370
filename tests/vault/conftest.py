from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest
from running import RunningVault, eventually

from cumem_sleep import CuMemAllocator
from cumem_sleep.vault.client import VaultClient


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """For the socket, whose path may have 107 bytes only."""
    private = tmp_path / "v"
    private.mkdir(mode=0o700)
    return private


@pytest.fixture(scope="session")
def lasting() -> Iterator[list[RunningVault]]:
    """The vault of many tests, the last one that was started."""
    started: list[RunningVault] = []
    yield started
    for vault in started:
        vault.close()


@pytest.fixture
def vault(lasting: list[RunningVault], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningVault]:
    """Of 64 MiB in four slabs, all there. A test may kill it; otherwise nothing may be left in it."""
    if not lasting or lasting[-1].process.poll() is not None:
        lasting.append(RunningVault(tmp_path_factory.mktemp("v"), "64MiB", "--slab-size", "16MiB"))
    running = lasting[-1]
    running.wait_until_ready()
    yield running
    if running.process.poll() is None:
        eventually(running.is_unused, "nothing is left in the vault")


@pytest.fixture
def start_vault(folder: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., RunningVault]]:
    """Starts vaults, all on one socket, that of `vault` in a test that has it; none of them is left behind."""
    started: list[RunningVault] = []
    if "vault" in request.fixturenames:
        folder = request.getfixturevalue("vault").socket.parent

    def start(memory: str = "64MiB", *options: str, **environment: str) -> RunningVault:
        started.append(RunningVault(folder, memory, *options, **environment))
        return started[-1]

    yield start
    for running in started:
        running.close()


@pytest.fixture
def client(vault: RunningVault, allocator: CuMemAllocator) -> Iterator[VaultClient]:
    """Of this process, which has an allocator."""
    assert allocator is not None
    connected = vault.client()
    yield connected
    connected.close()
