"""Models whose backups lie in a real `cumem-sleep vault`, on the simulated driver."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection, Coroutine, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from servers_of_tests import config, running, until

from cumem_sleep.serve import fleet as fleets
from cumem_sleep.serve import hardware, policy, servers
from cumem_sleep.serve.config import VaultConfig
from cumem_sleep.serve.fleet import Fleet
from cumem_sleep.serve.servers import OwnVault
from cumem_sleep.serve.status import ModelStatus, Phase, VaultStatus
from cumem_sleep.serve.units import Unit, Units
from cumem_sleep.tools import serve as tools
from cumem_sleep.vault import files
from cumem_sleep.vault.client import VaultClient

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(300)]

MIB, GIB = 1 << 20, 1 << 30
WITHIN_S = 240.0
SERVER = f"{sys.executable} {Path(__file__).parent / 'vault_server.py'}"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, WITHIN_S))


class Vault:
    """`cumem-sleep vault`, from `start` on."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.socket = folder / "vault.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, memory: str = "64MiB", *options: str) -> None:
        line = [sys.executable, "-m", "cumem_sleep", "vault", "--memory", memory, "--socket", str(self.socket)]
        self._process = subprocess.Popen([*line, *options], stderr=subprocess.DEVNULL)
        end = time.monotonic() + WITHIN_S
        while tools.look_at_vaults([str(self.socket)]) is None:
            assert self._process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    vault = Vault(tmp_path / "v")
    yield vault
    vault.kill()


def model(name: str, vault: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    """With weights of 40 MiB."""
    command = f"{SERVER} --uds {{socket}} --served-model-name {name} --weights-bytes {40 * MIB} --seed {seed}"
    return {"command": command, "env": {"CUMEM_SLEEP_VAULT": vault}, "host_memory": None, **more}


def levels(fleet: Fleet) -> dict[str, int | None]:
    return {each.name: each.level for each in fleet.status().models}


def only(fleet: Fleet) -> ModelStatus:
    (found,) = fleet.status().models
    return found


def test_the_vault_limits_those_in_it_and_the_budget_all_others(tmp_path: Path, vault: Vault) -> None:
    """The command, with room for one model in the vault, and for one beside it."""
    vault.start()
    socket = str(vault.socket)
    models = {
        "one": model("one", socket),
        "replica": model("replica", socket),
        "other": model("other", socket, 1),  # for which the vault has no room
        "beside": model("beside", "off", 2),
        "too-many": model("too-many", "off", 3),
    }
    front = {"front": {"port": 0}, "logs": str(tmp_path / "logs"), "host_memory": "50MiB"}
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({**front, "models": {name: {**each, "idle": "never"} for name, each in models.items()}}))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "cumem_sleep", "serve", str(file)], stdout=log, stderr=log)
    try:
        end = time.monotonic() + WITHIN_S
        status: dict[str, Any] = {}
        while not status or {each["phase"] for each in status["models"]} != {"asleep"} or not status["host"]["vault"]:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.05)
            said = (tmp_path / "log").read_text().partition("listens at ")[2]
            if ";" in said:
                with urllib.request.urlopen(f"{said.partition(';')[0]}/status", timeout=WITHIN_S) as answer:
                    status = json.load(answer)
    finally:
        process.terminate()
        process.wait()
    found = {each["name"]: (each["level"], each["in_vault"]) for each in status["models"]}
    in_vault, beside = {"one": (1, True), "replica": (1, True), "other": (2, True)}, {"beside": (1, False)}
    assert found == {**in_vault, **beside, "too-many": (2, False)}
    host = status["host"]
    assert (host["budget_bytes"], host["held_bytes"]) == (50 * MIB, 40 * MIB)
    assert (host["vault"]["memory_bytes"], host["vault"]["asleep_bytes"]) == (64 * MIB, 40 * MIB)


async def test_models_that_the_vault_has_in_files_are_shown_so(
    tmp_path: Path, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has memory for one of three, and none of them goes deeper for want of it."""
    spill = tmp_path / "spill"
    spill.mkdir(mode=0o700)
    if files.filesystem_of(spill) in files._IN_MEMORY:
        pytest.skip("pytest's folder is in memory")
    vault.start("72MiB", "--spill", str(spill), "--spill-size", "1GiB")
    monkeypatch.setattr(fleets, "LOOK_AT_MACHINE_EVERY_S", 0.05)

    socket = str(vault.socket)
    parsed = config(tmp_path, **{name: model(name, socket, seed) for seed, name in enumerate("abc")})
    read_ahead: list[str] = []

    def read(path: str, pids: Collection[int]) -> None:
        assert pids
        read_ahead.append(path)
        tools.read_ahead(path, pids)

    async with running(parsed, look_at_vaults=tools.look_at_vaults, read_ahead=read) as fleet:
        await until(fleet, a=Phase.ASLEEP, b=Phase.ASLEEP, c=Phase.ASLEEP)
        assert set(levels(fleet).values()) == {1}
        while sum(each.files_bytes for each in fleet.status().models) < 80 * MIB:
            await asyncio.sleep(0.01)
        host = fleet.status().host.vault
        assert host is not None
        assert (host.asleep_bytes, host.spilled_bytes) == (120 * MIB, 80 * MIB)
        in_files = next(each.name for each in fleet.status().models if each.files_bytes)
        await fleet.wake(in_files)
        assert read_ahead == [socket]
        while not any(each.files_s for each in fleet.status().models):
            await asyncio.sleep(0.01)
        table = tools.models_table([asdict(each) for each in fleet.status().models])
        assert any("40.00 MiB in files (read in" in str(cell) for cell in table.columns[6].cells)


async def test_what_the_vault_has_yet_to_take_is_not_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "host_available_bytes", lambda: 256 * GIB)
    asked = []

    def look(sockets: Any) -> VaultStatus:
        asked.append(sockets)
        return VaultStatus(200 * GIB, 150 * GIB, 0, 200 * GIB)

    monkeypatch.setenv("CUMEM_SLEEP_VAULT", "/run/of-all")
    models: dict[str, Any] = {"a": {}, "b": {"env": {"CUMEM_SLEEP_VAULT": "auto"}}}
    models |= {"c": {"env": {"CUMEM_SLEEP_VAULT": "off"}}, "d": {"url": "http://127.0.0.1:1"}}
    stopped = {name: {**each, "at_start": "stopped"} for name, each in models.items()}
    parsed = replace(config(tmp_path, **stopped), host_memory=None)
    async with running(parsed, look_at_vaults=look) as fleet:
        assert fleet.status().host.budget_bytes == (256 - 150 - 2) * GIB
        assert asked == [{"auto", "/run/of-all"}]


async def test_a_vault_that_dies_costs_level_1_until_there_is_one_again(
    tmp_path: Path, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "host_available_bytes", lambda: 0)
    monkeypatch.setattr(fleets, "LOOK_AT_MACHINE_EVERY_S", 0.05)
    vault.start()

    parsed = config(tmp_path, a=model("a", str(vault.socket)))
    async with running(parsed, look_at_vaults=tools.look_at_vaults) as fleet:
        await until(fleet, a=Phase.ASLEEP)
        assert levels(fleet) == {"a": 1}
        await until_vault(fleet, is_there=True)
        vault.kill()
        await until_vault(fleet, is_there=False)
        await fleet.wake("a")  # from the vault's memory, that its server still has
        await fleet.sleep("a")
        assert levels(fleet) == {"a": 2}
        await fleet.wake("a")
        vault.start()
        await fleet.sleep("a")
        assert levels(fleet) == {"a": 1}
        assert only(fleet).restarts == 0
        await until_vault(fleet, is_there=True)


async def test_its_own_vault_is_started_again_and_ends_after_its_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "host_available_bytes", lambda: 0)
    monkeypatch.setattr(fleets, "LOOK_AT_MACHINE_EVERY_S", 0.05)
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.01)
    folders, make = [], asyncio.create_subprocess_exec

    async def refuse(*_command: str, **_options: Any) -> asyncio.subprocess.Process:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", make)
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    command_line, from_vault = servers.command_line, list[bool]()

    def note(*arguments: Any) -> list[str]:
        from_vault.append(arguments[-1])
        return command_line(*arguments)

    monkeypatch.setattr(servers, "command_line", note)
    own = VaultConfig(64 * MIB, keep_weights=32 * MIB)
    parsed = replace(config(tmp_path, a={**model("a", ""), "env": {}}), vault=own)
    async with running(parsed, look_at_vaults=tools.look_at_vaults) as fleet:
        await until(fleet, a=Phase.ASLEEP)
        assert (only(fleet).level, only(fleet).in_vault) == (1, True)
        await until_vault(fleet, is_there=True)
        vault = fleet._units._vault
        assert vault is not None
        client = VaultClient(vault.socket, "looks")
        assert client.status()["keep_bytes"] == 32 * MIB
        client.close()
        assert from_vault == [True]
        folders.append(vault.socket.parent)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)  # the first time that it is started again
        os.kill(int(vault.pid or 0), signal.SIGKILL)
        await until_vault(fleet, is_there=False)
        await until_vault(fleet, is_there=True)
        await fleet.wake("a")
        await fleet.sleep("a")
        assert (only(fleet).level, only(fleet).restarts) == (1, 0)
    assert [folder for folder in folders if folder.exists()] == []


async def test_its_own_vault_that_ends_while_the_front_does_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.01)
    started = []
    parsed = replace(config(tmp_path, a={"url": "http://127.0.0.1:1"}), vault=VaultConfig(64 * MIB))
    async with running(parsed, look_at_vaults=tools.look_at_vaults) as fleet:
        units, end_unit = fleet._units, Units._end
        vault = units._vault
        assert vault is not None

        async def start(*_arguments: object) -> None:
            started.append(vault)

        async def end(unit: Unit) -> None:
            watch = vault._watch
            assert watch is not None
            os.kill(int(vault.pid or 0), signal.SIGKILL)
            await asyncio.wait([watch])
            await end_unit(unit)

        monkeypatch.setattr(OwnVault, "start", start)
        monkeypatch.setattr(Units, "_end", staticmethod(end))
    assert started == []


def test_its_own_vault_ends_with_a_front_that_is_killed(tmp_path: Path) -> None:
    file, mark = tmp_path / "models.yaml", tmp_path.name.encode()
    file.write_text(f"vault: {{memory: 64MiB}}\nlogs: {tmp_path}\nmodels: {{a: {{url: 'http://127.0.0.1:1'}}}}\n")

    def vaults() -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes() and b"vault" in (process / "cmdline").read_bytes():
                    found.append(process.name)
        return found

    front = subprocess.Popen(
        [sys.executable, "-m", "cumem_sleep", "serve", str(file), "--port", "0"],
        env={**os.environ, "MARK": tmp_path.name},
        stderr=subprocess.PIPE,
    )
    assert front.stderr is not None
    assert b"listens at" in front.stderr.readline()
    assert vaults()
    front.kill()
    front.wait()
    while vaults():
        time.sleep(0.05)


async def test_a_front_whose_own_vault_does_not_start_does_not_start_either(tmp_path: Path) -> None:
    fleet = Fleet(replace(config(tmp_path, a={}), vault=VaultConfig(1 << 60)))
    with pytest.raises(OSError, match=r"vault: the vault ended with status 2 .* give the vault less"):
        await fleet.start()
    await fleet.stop()


async def until_vault(fleet: Fleet, *, is_there: bool) -> None:
    async for status in fleet.watch():
        if (status.host.vault is not None) is is_there:
            return


async def test_a_front_does_not_wait_for_ever_for_its_own_vault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "VAULT_LISTENS_WITHIN_S", 0.0)
    fleet = Fleet(replace(config(tmp_path, a={}), vault=VaultConfig(64 * MIB)))
    try:
        with pytest.raises(OSError, match=r"vault: the vault did not listen within 0 s; its log"):
            await fleet.start()
        assert fleet._units._vault is not None
        assert fleet._units._vault.pids() == []
    finally:
        await fleet.stop()
