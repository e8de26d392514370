"""Processes of model servers and one vault: ranks, replicas, several GPUs; and figures that add up."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from running import RunningVault, eventually
from support import PAGE

import cumem_sleep
from cumem_sleep.vault.slabs import UNIT_BYTES

pytestmark = [pytest.mark.sim, pytest.mark.slow]

HERE = pathlib.Path(__file__).parent
PAGES = 4
TWO_GPUS = {"CUMEM_SLEEP_SIM_DEVICES": "2"}


class WorkerProcess:
    """A process that runs `worker.py`."""

    def __init__(self, socket: str, rank: int, device: int, seed: int, pages: int, **environment: str) -> None:
        path = [str(pathlib.Path(cumem_sleep.__path__[0]).parent), str(HERE.parent), str(HERE)]
        variables = {"CUMEM_SLEEP_DRIVER": "sim", "CUMEM_SLEEP_VAULT": socket, "PYTHONPATH": os.pathsep.join(path)}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), *map(str, (rank, device, seed, pages))],
            env={**os.environ, **variables, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def begin(self, *call: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait(30)}"
        return json.loads(line)

    def end(self) -> Any:
        """Of the call that was begun: its answer."""
        said = self._read()
        assert "error" not in said, said["error"]
        return said["answer"]

    def fail(self, *call: object) -> str:
        """How it fails."""
        self.begin(*call)
        said = self._read()
        assert "answer" not in said
        return str(said["error"])

    def call(self, *call: object) -> Any:
        self.begin(*call)
        return self.end()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def start_worker(folder: pathlib.Path) -> Iterator[StartWorker]:
    """Starts processes that use the vault of the test; of one seed, they have the same weights."""
    with ExitStack() as stack:

        def start(
            rank: int = 0, device: int = 0, seed: int = 0, pages: int = PAGES, **environment: str
        ) -> WorkerProcess:
            worker = WorkerProcess(str(folder / "vault.sock"), rank, device, seed, pages, **environment)
            stack.callback(worker.close)
            return worker

        yield start


@pytest.fixture
def own_vault(start_vault: Callable[..., RunningVault]) -> RunningVault:
    running = start_vault("64MiB", "--slab-size", "16MiB")
    running.wait_until_ready()
    return running


def copied_out(vault: RunningVault) -> int:
    return sum(gpu["copied_out_bytes"] for gpu in vault.status()["gpus"])


def host(worker: WorkerProcess) -> tuple[int, int, int]:
    """What its backups hold of the host's memory, of the vault's, and share with others."""
    usages = worker.call("status")["usage"].values()
    return tuple(sum(usage[f"{name}_bytes"] for usage in usages) for name in ("host", "vault", "shared"))  # type: ignore[return-value]


def check_figures(vault: RunningVault, *workers: WorkerProcess) -> None:
    """What the processes say, and what the vault says, is one and the same."""
    status = vault.status()
    by_pid = {client["pid"]: client for client in status["clients"]}
    held = {worker.process.pid: host(worker) for worker in workers}
    for pid, (host_bytes, vault_bytes, shared_bytes) in held.items():
        client = by_pid[pid]
        assert host_bytes == vault_bytes == client["asleep_bytes"] + client["awake_bytes"]
        assert shared_bytes == client["shared_bytes"]
    assert {client["name"] for client in status["clients"]} == {"worker.py"}
    in_all = status["asleep_bytes"] + status["awake_bytes"]
    assert sum(vault_bytes for _, vault_bytes, _ in held.values()) == in_all + status["saved_bytes"]
    assert in_all + status["free_bytes"] == status["pinned_bytes"]
    assert [worker.call("pinned_bytes") for worker in workers] == [0] * len(workers)


class TestReplicas:
    def test_of_three_the_first_one_copies_and_there_is_one_copy(
        self, own_vault: RunningVault, start_worker: StartWorker
    ) -> None:
        replicas = [start_worker() for _ in range(3)]
        reports = [replica.call("fall_asleep") for replica in replicas]
        assert [report["copied_bytes"] for report in reports] == [PAGES * PAGE, 0, 0]
        assert [report["found_bytes"] for report in reports] == [0, PAGES * PAGE, PAGES * PAGE]
        assert "unchanged 8.00 MiB, of which 8.00 MiB found in the vault, dropped 2.00 MiB" in reports[1]["line"]
        assert copied_out(own_vault) == PAGES * PAGE
        assert own_vault.status()["asleep_bytes"] == PAGES * PAGE
        assert [host(replica) for replica in replicas] == [(PAGES * PAGE,) * 3] * 3
        check_figures(own_vault, *replicas)
        for replica in replicas:
            replica.call("wake_up")
            assert replica.call("is_right")
            assert replica.call("fall_asleep")["found_bytes"] == 0, "it is its own by now"

    def test_what_one_changes_is_its_own(self, own_vault: RunningVault, start_worker: StartWorker) -> None:
        first, second = start_worker(), start_worker()
        first.call("fall_asleep")
        second.call("fall_asleep")
        second.call("wake_up")
        second.call("load", 1)
        report = second.call("fall_asleep")
        assert (report["copied_bytes"], report["found_bytes"]) == (PAGES * PAGE, 0)
        assert [host(each) for each in (first, second)] == [(PAGES * PAGE, PAGES * PAGE, 0)] * 2
        check_figures(own_vault, first, second)
        for each in (first, second):
            each.call("wake_up")
            assert each.call("is_right")

    def test_compressed_ones_have_copies_of_their_own(self, own_vault: RunningVault, start_worker: StartWorker) -> None:
        replicas = [start_worker(CUMEM_SLEEP_COMPRESS="auto") for _ in range(2)]
        for replica in replicas:
            assert replica.call("fall_asleep")["copied_bytes"] == PAGES * PAGE
            host_bytes, _, shared_bytes = host(replica)
            assert host_bytes < PAGES * PAGE
            assert host_bytes % UNIT_BYTES == shared_bytes == 0
        check_figures(own_vault, *replicas)
        for replica in replicas:
            replica.call("wake_up")
            assert replica.call("is_right")


class TestRanks:
    def test_two_gpus_two_ranks_two_replicas(
        self, start_vault: Callable[..., RunningVault], start_worker: StartWorker
    ) -> None:
        """Ranks number GPUs each in their own way, as CUDA_VISIBLE_DEVICES makes them."""
        vault = start_vault("64MiB", "--slab-size", "16MiB", **TWO_GPUS)
        servers = [
            start_worker(rank, device, seed=rank, CUMEM_SLEEP_SIM_DEVICE_ORDER=order, **TWO_GPUS)
            for order, devices in (("0,1", (0, 1)), ("1,0", (1, 0)))
            for rank, device in enumerate(devices)
        ]
        for ranks, copied_bytes in ((servers[:2], PAGES * PAGE), (servers[2:], 0)):
            for worker in ranks:  # at once, as vLLM does
                worker.begin("fall_asleep")
            assert [worker.end()["copied_bytes"] for worker in ranks] == [copied_bytes] * 2
        gpus = {gpu["uuid"]: gpu for gpu in vault.status()["gpus"]}
        assert len(gpus) == 2
        for gpu in gpus.values():
            assert (gpu["asleep_bytes"], gpu["copied_out_bytes"]) == (PAGES * PAGE, PAGES * PAGE)
        statuses = [worker.call("status") for worker in servers]
        assert [status["gpu"] for status in statuses] == [*gpus, *gpus]
        assert [status["rank"] for status in statuses] == [0, 1, 0, 1]
        assert {status["place"]["vault"] for status in statuses} == {str(vault.socket)}
        check_figures(vault, *servers)
        for worker in servers:
            worker.begin("wake_up")
        for worker in servers:
            assert worker.end()["verified_bytes"] == PAGES * PAGE
            assert worker.call("is_right")

    def test_two_models_on_one_gpu_sleep_and_wake_at_once(
        self, own_vault: RunningVault, start_worker: StartWorker
    ) -> None:
        models = [start_worker(seed=seed, pages=PAGES * (seed + 1)) for seed in range(2)]
        for _ in range(3):
            for model in models:
                model.begin("fall_asleep")
            for number, model in enumerate(models):
                assert model.end()["freed_bytes"] == (PAGES * (number + 1) + 1) * PAGE
            check_figures(own_vault, *models)
            for model in models:
                model.begin("wake_up")
            for model in models:
                model.end()
                assert model.call("is_right")
        assert copied_out(own_vault) == 3 * PAGES * PAGE, "later sleeps copy nothing"


class TestWhereBackupsAre:
    def test_without_a_vault_they_are_this_process_s_own(self, start_worker: StartWorker) -> None:
        worker = start_worker(CUMEM_SLEEP_VAULT="off")
        report = worker.call("fall_asleep")
        assert report["place"] == {"vault": "", "lost": "", "relays": []}
        assert "backups in" not in report["line"]
        assert host(worker) == (PAGES * PAGE, 0, 0)
        assert worker.call("pinned_bytes") == PAGES * PAGE

    def test_a_look_at_a_vault_that_is_silent_does_no_harm(
        self, own_vault: RunningVault, start_worker: StartWorker
    ) -> None:
        first, second = start_worker(), start_worker()
        first.call("fall_asleep")
        second.call("fall_asleep")
        own_vault.signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                assert host(first) == (PAGES * PAGE, PAGES * PAGE, 0), "who shares it cannot be known now"
        finally:
            own_vault.signal(signal.SIGCONT)
        eventually(lambda: host(first) == (PAGES * PAGE,) * 3, "it is known again")
        assert first.call("status")["place"]["lost"] == ""
        check_figures(own_vault, first, second)
        first.call("wake_up")
        assert first.call("is_right")
