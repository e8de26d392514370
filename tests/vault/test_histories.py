"""The random histories of `test_random_faults.py`, through a vault that is stopped, goes on late, or is killed.

An oracle compares every byte, also after the vault has made the copies that its client gave up on.
"""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from running import eventually
from support import AWAKE, free_everything, reset_simulation
from test_random_faults import HISTORIES, ONLY, History, small_and_quick
from test_recovery import tier_of
from test_sleeping import leave
from test_storm import Vaults

from cumem_sleep import CumemSleepError, _core, sim
from cumem_sleep.backups import vault_tier as tiers
from cumem_sleep.backups.vault_tier import VaultLaneGroup
from cumem_sleep.errors import VaultError
from cumem_sleep.vault import files, protocol

__all__ = ["small_and_quick"]  # a fixture

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(3600)]

DEADLINE_S = 0.4
FEW_DESCRIPTORS = 4  # so that a new vault is shown slabs in several messages; a backup lies in no more


class LateVault(Vaults):
    """May be stopped when copies begin."""

    def __init__(self, folder: pathlib.Path, spills: bool) -> None:
        options: tuple[str, ...] = ()
        if spills:
            (folder / "files").mkdir(mode=0o700)
            options = ("--spill", str(folder / "files"), "--spill-size", "256MiB", "--spill-free", "32MiB")
        super().__init__(folder, "96MiB", "2MiB", *options, CUMEM_SLEEP_SIM_DEVICES="2")
        self.is_stopped = False
        self.stops_after: int | None = None  # so many steps of copies

    def step(self) -> None:
        if self.stops_after is not None:
            self.stops_after -= 1
            if self.stops_after < 0:
                self.stop()

    def stop(self) -> None:
        self.stops_after, self.is_stopped = None, True
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Returns when it has done what it was asked for."""
        self.stops_after = None
        if self.is_stopped:
            self.is_stopped = False
            self.signal(signal.SIGCONT)
            for _ in range(2):  # what had come before the first look is done before the second
                eventually(
                    lambda: not any(client["open_requests"] for client in self.status()["clients"]), "it has done all"
                )

    def start_anew(self) -> None:
        self.stops_after, self.is_stopped = None, False
        self.kill()
        self.start()


@pytest.fixture
def vault(number: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateVault]:
    """Every other one spills, also ahead."""
    folder = tmp_path / "v"
    folder.mkdir(mode=0o700)
    late = LateVault(folder, spills=number % 2 == 1 and files.filesystem_of(folder) not in files._IN_MEMORY)
    for name in ("begin", "begun"):
        monkeypatch.setattr(VaultLaneGroup, name, after_a_step(late, getattr(VaultLaneGroup, name)))
    monkeypatch.setattr(tiers, "DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(protocol, "MAX_DESCRIPTORS", FEW_DESCRIPTORS)
    yield late
    late.signal(signal.SIGCONT)
    leave()
    late.close()
    reset_simulation()


def after_a_step(vault: LateVault, call: Callable[..., None]) -> Callable[..., None]:
    def stepping(*arguments: Any) -> None:
        vault.step()
        call(*arguments)

    return stepping


class VaultHistory(History):
    def __init__(self, number: int, patch: pytest.MonkeyPatch, vault: LateVault) -> None:
        self.vault = vault
        super().__init__(number, patch, vault=str(vault.socket), host_budget_bytes=None)

    def attempt(
        self,
        name: str,
        operation: Callable[[], object],
        finished: Callable[[CumemSleepError | None], None],
        *,
        faults: bool = True,
    ) -> None:
        """As in the other histories; the vault may stop meanwhile, and go on, or be replaced, when all is written."""
        if faults:
            self.vault.stops_after = self.random.choice((None, None, 0, 0, 1, 2, 3, 5))
        error: CumemSleepError | None = None
        for count in self.random.choice(((0,), (1,), (1, 0), (1, 0, 0), (2, 1, 0), (3, 0, 1))):
            error = self.once(name, operation, count if faults else 0)
            finished(error)
            if error is None:
                break
        while self.vault.is_stopped and self.random.random() < 0.8 and self.some_are_awake():
            self.write()
        sim.reset()  # not before: the next operation, and `check`, take what the driver has refused
        self.check()
        if faults and self.random.random() < 0.25:
            self.log.append("another vault")
            self.vault.start_anew()
            if not _core.driver_calls_suspended():  # as they are at level 3
                eventually(self.connects, "all that sleeps was shown to it")
        else:
            self.vault.go_on()
        self.check()
        if error is not None:

            def succeeds() -> bool:
                error = self.once(name, operation, 0)
                finished(error)
                return error is None

            eventually(succeeds, f"{name} succeeds")
            self.check()

    def connects(self) -> bool:
        """A vault that has just begun takes memory first, and may take longer than it has to answer."""
        with suppress(VaultError):
            tier_of(self.allocator).client()
            return True
        return False

    def fault(self) -> tuple[str, int, str, int]:
        """Mostly of what undoes a wake, or a step of it, for as long as a second one takes to succeed."""
        if self.random.random() < 0.4:
            return super().fault()
        after, times = self.random.choice((0, 0, 1, 3)), self.random.choice((2, 4, 4, 6, 8, 12))
        return self.random.choice(("cuMemUnmap", "cuMemRelease")), after, "CUDA_ERROR_UNKNOWN", times

    def some_are_awake(self) -> bool:
        return any(each.sleep == AWAKE for each in self.expected.values())


@pytest.mark.parametrize("number", range(max(1, HISTORIES // 2)) if ONLY is None else [int(ONLY)])
def test_history(vault: LateVault, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    history = VaultHistory(number, monkeypatch, vault)
    try:
        history.run()
        eventually(lambda: is_left(history), "the vault has given back what it had")
        status = vault.status()
        assert (status["asleep_bytes"], status["awake_bytes"]) == (0, 0)
        free_everything()
    except BaseException as error:
        raise AssertionError(f"history {number}: {error!r}\n" + "\n".join(history.log[-16:])) from error


def is_left(history: VaultHistory) -> bool:
    """Everything is freed, and the vault has heard of that."""
    with suppress(VaultError):
        for segment in _core.segments():
            history.allocator.free(segment.address)
        tier_of(history.allocator).client().release([])
        return not any(client["lent_bytes"] for client in history.vault.status()["clients"])
    return False
