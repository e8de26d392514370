"""Five models in memory for two: they take turns at random, while vaults, models and the disk fail.

No byte is wrong, a call that fails has changed nothing, nothing that fits in memory and on the disk is refused, and at
the end nothing is left. What takes time is real: the memory of devices, copies, digests and files are.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import pytest
from disk_faults import DiskFaults
from model import PAGES
from running import eventually
from support import PAGE
from test_storm import Vaults, is_as_new, start_python

from cumem_sleep.vault import files

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(900)]

SWITCHES = int(os.environ.get("CUMEM_SLEEP_TEST_SWITCHES", "150"))
MODELS = 5
MODEL_MIB = sum(PAGES) * PAGE >> 20
FAULTS = (*[("", "")] * 8, ("write", "EIO"), ("write", "ENOSPC"), ("write", "short"))
FAULTS += (("read", "EIO"), ("read", "short"), ("read", "torn"))


class ModelProcess:
    """The test's side of one."""

    def __init__(self, nursery: subprocess.Popen[str], vault: pathlib.Path, folder: pathlib.Path, seed: int) -> None:
        self.is_awake = True
        self.seed = seed
        path = folder / f"m{seed}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen()
            assert nursery.stdin is not None
            print(vault, path, seed, file=nursery.stdin, flush=True)
            self._connection, _ = listener.accept()
        self._said: TextIO = self._connection.makefile("rw")
        self.pid = int(self.ask("pid"))

    def begin(self, command: str) -> None:
        print(command, file=self._said, flush=True)

    def end(self) -> str:
        said = self._said.readline().strip()
        assert said, f"model {self.seed} has ended"
        assert not said.startswith("WRONG"), f"model {self.seed}: {said}"
        return said

    def ask(self, command: str) -> str:
        self.begin(command)
        return self.end()

    def close(self) -> None:
        self._said.close()
        self._connection.close()


class SwitchingWorld:
    """A vault that spills, and the models, of which any may sleep."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.chance = random.Random(1)
        self.folder, self.spill = folder, folder / "files"
        self.spill.mkdir(mode=0o700)
        self.faults = DiskFaults(folder / "disk")
        # Of the memory an eighth is the ring.
        memory, options = f"{2 * MODEL_MIB + 4}MiB", ("--spill", str(self.spill), "--spill-size", "256MiB")
        self.vault = Vaults(folder, memory, "4MiB", *options, FAULTS_OF_THE_DISK=str(folder / "disk"))
        self.nursery = start_python("model.py", errors=subprocess.DEVNULL)
        self.models: list[ModelProcess] = []
        self.started = self.refused = 0
        self.failed_before = False
        self.begin_models()

    def begin_models(self) -> None:
        while len(self.models) < MODELS:
            self.started += 1
            self.models.append(ModelProcess(self.nursery, self.vault.socket, self.folder, self.started))

    def switch(self) -> None:
        """One falls asleep while another wakes, on a disk that fails at times."""
        wakes = self.chance.choice([model for model in self.models if not model.is_awake])
        sleeps = self.chance.choice([model for model in self.models if model.is_awake])
        if self.chance.random() < 0.5:
            sleeps.ask("change")
        way, kind = self.chance.choice(FAULTS)
        if way:
            self.faults.set(way, kind, self.chance.randrange(1, 4))
        what = self.chance.choices(("", "kill", "stop"), (SWITCHES, 12, 12))[0]
        sleeps.begin("sleep")
        if self.chance.random() < 0.5:  # otherwise it has slept before
            wakes.begin("wake")
            self.disturb(what)
            both = sleeps.end(), wakes.end()
        else:
            self.disturb(what)
            both = sleeps.end(), wakes.ask("wake")
        self.faults.clear()
        for model, command, said in zip((sleeps, wakes), ("sleep", "wake"), both, strict=True):
            if said != "ok":
                assert way or what or self.failed_before, f"{command} of model {model.seed} was refused: {said}"
                self.refused += 1
                self.insist(model, command)
            model.is_awake = command == "wake"
        self.failed_before = way == "write"  # for a while the vault writes nothing then

    def insist(self, model: ModelProcess, command: str) -> None:
        """Soon it succeeds."""
        said = [""]

        def succeeds() -> bool:
            said.append(model.ask(command))
            return said[-1] == "ok"

        try:
            eventually(succeeds, f"{command} of model {model.seed} succeeds")
        except AssertionError:
            raise AssertionError(f"{command} of model {model.seed}: {said[-1]}; {self.vault.status()}") from None

    def disturb(self, what: str) -> None:
        time.sleep(self.chance.uniform(0, 0.02) if what else 0)
        if what == "kill":
            self.vault.kill()
            self.vault.start()
        elif what == "stop":
            self.vault.signal(signal.SIGSTOP)
            time.sleep(self.chance.uniform(0, 0.1))
            self.vault.signal(signal.SIGCONT)

    def replace_a_model(self) -> None:
        """It is killed, whatever it has, in the middle of a sleep or a wake."""
        victim = self.chance.choice(self.models)
        victim.begin("sleep" if victim.is_awake else "wake")
        time.sleep(self.chance.uniform(0, 0.02))
        os.kill(victim.pid, signal.SIGKILL)
        victim.close()
        self.models.remove(victim)
        self.begin_models()

    def close(self) -> None:
        for model in self.models:
            model.close()
        self.nursery.communicate()
        self.vault.close()


@pytest.fixture
def world(tmp_path: pathlib.Path) -> Iterator[SwitchingWorld]:
    folder = tmp_path / "w"
    folder.mkdir(mode=0o700)
    if files.filesystem_of(folder) in files._IN_MEMORY:
        pytest.skip("pytest's folder is in memory")
    made = SwitchingWorld(folder)
    yield made
    made.close()


def test_models_take_turns_while_everything_fails(world: SwitchingWorld) -> None:
    for model in world.models[1:]:
        assert model.ask("sleep") == "ok"
        model.is_awake = False
    assert world.vault.status()["spilled_bytes"] > 0
    for number in range(SWITCHES):
        world.switch()
        if number % (SWITCHES // 10 + 1) == 5:
            world.replace_a_model()
            if not any(model.is_awake for model in world.models[:-1]):
                continue
            world.insist(world.models[-1], "sleep")
            world.models[-1].is_awake = False
    for model in world.models:
        if not model.is_awake:
            world.insist(model, "wake")
        model.close()
    world.models.clear()
    is_as_new(world.vault)
    eventually(
        lambda: world.vault.status()["files_free_bytes"] == world.vault.status()["files_bytes"], "no file is used"
    )
    assert list(world.spill.iterdir()) == []
    eventually(lambda: blocks_taken(world.vault.pid, world.spill) == [0, 0], "the one file takes no space")


def blocks_taken(pid: int, folder: pathlib.Path) -> list[int]:
    """By each descriptor of a file in that folder that it has open, also of one without a name."""
    found = []
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if os.readlink(link).startswith(f"{folder}/"):
                found.append(link.stat().st_blocks)
    return found
