"""What the doctor says of the vault: none, one that serves, and ones with which something is wrong."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from running import RunningVault
from support import PAGE

from cumem_sleep import CuMemAllocator, _core, sim
from cumem_sleep.tools.doctor import Check, CheckStatus, examine
from cumem_sleep.tools.doctor.vault import vault as look
from cumem_sleep.tools.machine import Machine
from cumem_sleep.vault import protocol
from cumem_sleep.vault.client import DEADLINE_S, VaultClient

pytestmark = pytest.mark.sim

SIMULATED = {"CUMEM_SLEEP_DRIVER": "sim"}


@pytest.fixture(autouse=True)
def _driver(allocator: CuMemAllocator) -> None:
    """It is open."""
    allocator.free(allocator.malloc(PAGE))


def checked(at: object, devices: int = 1) -> Check:
    """What is little on a real machine is much here."""
    environment = {} if at is None else {"CUMEM_SLEEP_VAULT": str(at)}
    return look(Machine(environment=environment, little_bytes=PAGE), range(devices))


class TestNone:
    @pytest.fixture(autouse=True)
    def _empty(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))

    def test_none_is_wanted(self) -> None:
        assert checked(None) == Check("vault", CheckStatus.OK, "not used (CUMEM_SLEEP_VAULT is off)")
        assert checked("off") == checked(None)

    def test_one_would_be_used(self) -> None:
        check = checked("auto")
        assert check.status is CheckStatus.WARN
        assert check.found.startswith("no vault answers at ")
        assert "memory of each process instead" in check.advice

    def test_one_is_needed(self, folder: pathlib.Path) -> None:
        check = checked(folder / "vault.sock")
        assert check.status is CheckStatus.FAIL
        assert check.found.startswith(f"no vault answers at {folder}/vault.sock")
        assert "every sleep at level 1 is refused" in check.advice


class TestOneAnswers:
    def test_it_serves(self, vault: RunningVault, monkeypatch: pytest.MonkeyPatch) -> None:
        check = checked(vault.socket)
        found = f"pid {vault.process.pid} at {vault.socket}: 64.00 MiB left of 64.00 MiB, 0 clients"
        assert check == Check("vault", CheckStatus.OK, found)
        monkeypatch.setattr(protocol, "default_socket", lambda: vault.socket)
        assert checked("auto") == check
        assert checked(None) == Check(
            "vault", CheckStatus.OK, f"not used (CUMEM_SLEEP_VAULT is off), but one answers: {found}"
        )

    def test_it_has_little_left(self, vault: RunningVault) -> None:
        client = vault.client()
        client.reserve(_core.device_info(0).uuid, [63 << 20])
        check = checked(vault.socket)
        client.close()
        assert check.status is CheckStatus.WARN
        assert check.found.endswith("1.00 MiB left of 64.00 MiB, 1 client; it has little left")
        assert "vault status" in check.advice

    @pytest.mark.parametrize(
        ("facts", "found", "advice"),
        [
            ({"version": "0.0.9"}, "it is cumem-sleep 0.0.9, and this is ", "install the same version"),
            ({"short": "host memory: …"}, "it cannot take more memory now: host memory: …", "a smaller --memory"),
        ],
    )
    def test_something_is_wrong_with_it(
        self,
        vault: RunningVault,
        monkeypatch: pytest.MonkeyPatch,
        facts: Mapping[str, Any],
        found: str,
        advice: str,
    ) -> None:
        status = VaultClient.status
        monkeypatch.setattr(VaultClient, "status", lambda client: {**status(client), **facts})
        check = checked(vault.socket)
        assert check.status is CheckStatus.WARN
        assert found in check.found
        assert advice in check.advice

    def test_it_does_not_serve_every_gpu(self, vault: RunningVault) -> None:
        sim.configure(devices=2)
        check = checked(vault.socket, devices=2)
        assert check.status is CheckStatus.WARN
        assert check.found.endswith("; it does not serve GPU 1")


@pytest.mark.slow
def test_it_is_among_the_checks(vault: RunningVault) -> None:
    report = examine(Machine(environment={**SIMULATED, "CUMEM_SLEEP_VAULT": str(vault.socket)}, little_bytes=PAGE))
    (check,) = [check for check in report.checks if check.name == "vault"]
    assert check.status is CheckStatus.OK


@pytest.mark.slow
def test_a_stopped_one_is_not_waited_for_long(
    start_vault: Callable[..., RunningVault], folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_vault()
    defaults = VaultClient.__init__.__defaults__ or ()
    patience = tuple(0.3 if each == DEADLINE_S else each for each in defaults)
    monkeypatch.setattr(VaultClient.__init__, "__defaults__", patience)
    running.signal(signal.SIGSTOP)
    check = checked(running.socket)
    running.signal(signal.SIGCONT)
    assert check.status is CheckStatus.FAIL
    assert "silent for 0.3 s" in check.found
