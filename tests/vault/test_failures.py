"""Sleeps and wakes through the vault while something fails in this process: driver calls, descriptors, the GPUs."""

from __future__ import annotations

import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from running import SECONDS, RunningVault, Segment, eventually
from support import AWAKE, PAGE, Memory, assert_clean_exit, bf16_weights, run_script
from test_sleeping import MakeAllocator, check, fill, leave, through
from test_storm import Vaults
from world import Phase, World, check_every_call, phases

from cumem_sleep import CuMemAllocator, CumemSleepError, OutOfHostMemory, _core, sim
from cumem_sleep.errors import VaultError, VaultLost, VaultUnavailable
from cumem_sleep.vault import memory as slabs
from cumem_sleep.vault import protocol
from cumem_sleep.vault.client import VaultClient
from cumem_sleep.vault.ledger import UNIT_BYTES

__all__ = ["through"]  # a fixture

pytestmark = [pytest.mark.sim, pytest.mark.slow]


class VaultWorld(World):
    """Whose backups the vault keeps: nothing of them is pinned here."""

    def unaccounted_bytes(self) -> int:
        return sim.stats().registered_bytes

    def forget_devices(self) -> None:
        super().forget_devices()
        self.allocator._store.room.tier._gpus.clear()  # type: ignore[attr-defined]


THROUGH_IT = ("first sleep", "sleep of changed", "sleep of parts", "wake of all", "wake of parts", "release backups")


@pytest.mark.parametrize("phase", phases(*THROUGH_IT), ids=str)
def test_every_driver_call_may_fail_once(vault: RunningVault, phase: Phase) -> None:
    world = VaultWorld(vault=str(vault.socket))
    world.allocator._store.room.tier.client()  # type: ignore[attr-defined]  # whose calls are not the phase's
    try:
        check_every_call(world, phase, "CUDA_ERROR_UNKNOWN", False)
        world.wake()
        eventually(lambda: lent_bytes(vault) == 0, "the vault has none of its memory")
    finally:
        sim.reset()
        leave()


def lent_bytes(vault: RunningVault) -> int:
    return sum(client["lent_bytes"] for client in vault.status()["clients"])


def test_a_mistake_of_the_vault_reaches_who_waits_for_copies(folder: pathlib.Path, allocator: CuMemAllocator) -> None:
    """It ends, for it cannot copy any more; otherwise they would hear for ever that it is at work."""
    vault = Vaults(folder, BROKEN_LINKS="1")
    segment = Segment(vault.client(), allocator.malloc(PAGE), PAGE)
    with pytest.raises(VaultLost):
        segment.back_up()
    assert "AttributeError" in (folder / "said").read_text()
    vault.process.communicate()
    segment.client.close()
    allocator.free(segment.address)


# Open files


@contextmanager
def descriptors_left(pid: int, count: int) -> Iterator[None]:
    """So many more files may this process open."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    folder = f"/proc/{pid}/fd"
    occupied = {int(each) for each in os.listdir(folder) if os.path.lexists(f"{folder}/{each}")}  # not the list's own
    free = sorted(set(range(max(occupied) + count + 2)) - occupied)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[count], limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("slab", ["2MiB", "64MiB"])
def test_slabs_leave_files_to_others_where_few_may_be_open(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, slab: str
) -> None:
    """The soft limit is raised to the hard one; slabs of 2 MiB would take more than that."""
    limited = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (32, 64))
    monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, preexec_fn=limited))
    vault = RunningVault(folder, "128MiB", "--slab-size", slab)
    try:
        vault.wait_until_ready()
        clients = [vault.client() for _ in range(8)]
        assert len(clients[0].reserve(clients[0].gpus[0], [PAGE] * 64)) == 64
        for each in clients:
            each.close()
    finally:
        vault.close()


SHORT = {
    "client": r"this process can open no more files|\w+: this process has reached its limit of open files"
    "|cuMemCreate failed with CUDA_ERROR_OPERATING_SYSTEM",  # memory of the simulated driver is a file
    "vault": r"the vault can open no more files|in the vault: \w+: this process has reached its limit of open files",
}


@contextmanager
def suppress_files_short(refused: dict[str, int], operation: str, whose: str) -> Iterator[None]:
    """Counts the error, which says what is short."""
    try:
        yield
    except CumemSleepError as error:
        if not re.match(SHORT[whose], str(error)):
            raise
        refused[operation] += 1


@pytest.mark.parametrize("whose", ["client", "vault"])
def test_no_more_files_can_be_opened(through: MakeAllocator, memory: Memory, vault: RunningVault, whose: str) -> None:
    """Whatever step lacks one, nothing has changed, and nothing is kept."""
    allocator = through()
    contents = fill(allocator, memory, "weights", "default", "weights")
    memory.close()
    allocator._store.room.tier.client()  # type: ignore[attr-defined]
    pid = os.getpid() if whose == "client" else vault.process.pid
    refused = {"sleep": 0, "wake": 0}
    for operation, count in ((operation, count) for operation in refused for count in range(12)):
        if operation == "wake":
            allocator.sleep()
        else:
            allocator.release_backups()
        before = [segment.sleep for segment in _core.segments()]
        with suppress_files_short(refused, operation, whose), descriptors_left(pid, count):
            allocator.sleep() if operation == "sleep" else allocator.wake_up()
            before = []
        if before:
            assert [segment.sleep for segment in _core.segments()] == before
        allocator.wake_up()
        check(memory, contents)
        status = vault.status()
        assert lent_bytes(vault) == 0
        assert status["asleep_bytes"] == 0
    assert refused["sleep"] > 0
    assert refused["wake"] > 0


def test_those_who_come_when_the_vault_can_open_no_more_files_wait(vault: RunningVault) -> None:
    there = vault.client()
    with descriptors_left(vault.process.pid, 0):
        with pytest.raises(VaultUnavailable):
            VaultClient(vault.socket, deadline_s=0.3)
        assert there.status()["pid"] == vault.process.pid, "it serves those that it has"
    vault.client().close()
    there.close()


@pytest.mark.slow
def test_what_cannot_all_be_shown_to_a_new_vault_leaves_no_file_open(
    make_allocator: MakeAllocator, memory: Memory, start_vault: Callable[..., RunningVault]
) -> None:
    vault = start_vault("32MiB", "--slab-size", str(PAGE))
    vault.wait_until_ready()
    allocator = make_allocator(vault=str(vault.socket))
    contents = fill(allocator, memory, *["weights"] * 4)
    allocator.sleep()
    vault.kill()
    start_vault("32MiB", "--slab-size", str(PAGE)).wait_until_ready()
    before = len(os.listdir("/proc/self/fd"))
    tier = allocator._store.room.tier
    with descriptors_left(os.getpid(), 4), pytest.raises(VaultError, match="this process can open no more files"):
        tier.client()  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "no more than the connection"
    allocator.wake_up()
    check(memory, contents)
    leave()


@pytest.mark.slow
def test_a_new_vault_adopts_more_slabs_than_a_message_has_descriptors(
    make_allocator: MakeAllocator, memory: Memory, start_vault: Callable[..., RunningVault]
) -> None:
    """Those of two vaults before it, in which one backup lies in 190 slabs, and each of the others in one."""
    sim.configure(device_bytes=400 * PAGE)
    vault = start_vault("400MiB", "--slab-size", str(PAGE))
    vault.wait_until_ready()
    allocator = make_allocator(vault=str(vault.socket))
    contents = fill(allocator, memory, "weights", pages=190)
    allocator.sleep()
    vault.kill()
    vault = start_vault("800MiB", "--slab-size", str(PAGE))
    contents.update(fill(allocator, memory, *["default"] * 80, pages=2))
    allocator.sleep()
    vault.kill()
    vault = start_vault("800MiB", "--slab-size", str(PAGE))
    late = allocator.malloc(PAGE, "default")
    contents[late] = memory.fill_random(late, PAGE)
    assert len(allocator._store.room.tier._client.slabs.by_number) > protocol.MAX_DESCRIPTORS  # type: ignore[attr-defined]
    assert allocator.sleep().copied_bytes == PAGE
    assert vault.status()["asleep_bytes"] == 351 * PAGE
    allocator.wake_up()
    check(memory, contents)
    leave()


def test_a_slab_is_given_back_without_opening_a_file(allocator: CuMemAllocator) -> None:
    allocator._operations.open()
    before = sim.stats().registered_bytes
    slab = slabs.take(PAGE, -1, 0, 1, lambda _: None)
    with descriptors_left(os.getpid(), 0):
        slab.close()
    assert not slab.block.pinned
    assert sim.stats().registered_bytes == before


def test_a_slab_that_cannot_be_adopted_stays_unwritable(allocator: CuMemAllocator) -> None:
    allocator._operations.open()
    slab = slabs.take(PAGE, -1, 0, 1, lambda _: None)
    shown = os.dup(slab.descriptor)
    slab.let_go()
    with descriptors_left(os.getpid(), 0), pytest.raises(VaultError, match="the vault can open no more files"):
        slabs.adopt(shown, 0)
    assert os.fstat(shown).st_mode & 0o777 == 0o400
    slabs.adopt(shown, 0).close()


# Memory


def test_slabs_that_cannot_be_registered_are_read_all_the_same(
    through: MakeAllocator, memory: Memory, vault: RunningVault
) -> None:
    """The bytes are nowhere else, and some drivers register nothing that is read-only."""
    allocator = through()
    contents = fill(allocator, memory, "weights", "default")
    memory.close()
    allocator.sleep()
    vault.kill()
    sim.fail("cuMemHostRegister", error="CUDA_ERROR_NOT_SUPPORTED")
    try:
        allocator.wake_up()
    finally:
        sim.reset()
    check(memory, contents)


def test_a_wake_that_cannot_map_the_slabs_is_undone(vault: RunningVault) -> None:
    script = f"""
        import os, resource, signal, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        allocator, memory = CuMemAllocator(Settings(driver="sim", vault={str(vault.socket)!r})), Memory()
        address = allocator.malloc(4 * PAGE, "weights")
        content = memory.fill_random(address, 4 * PAGE)
        allocator.sleep()
        os.kill({vault.process.pid}, signal.SIGKILL)
        while allocator._store.room.tier._client.lost is None:
            pass
        refused = 0
        for mib in range(2, 40, 4):
            pages = int(open("/proc/self/statm").read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (mib << 20), -1))
            try:
                allocator.wake_up()
                break
            except (OutOfHostMemory, DriverError, InvalidState) as error:
                refused += 1
                assert {{s.sleep for s in _core.segments()}} == {{BACKED_UP}}, error
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        assert refused > 1, refused
        allocator.wake_up()
        assert memory.read(address, 4 * PAGE) == content
        """
    process = run_script(script)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("settings", [{}, {"compress": "auto"}])
def test_memory_is_short_at_any_stage(
    through: MakeAllocator, memory: Memory, vault: RunningVault, settings: dict[str, object]
) -> None:
    """However much others leave: a call succeeds, or changes nothing, here and in the vault."""
    allocator = through(**settings)
    contents = fill(allocator, memory, "weights", "default", "weights", pages=2)
    other = vault.client("other")
    refused = 0
    for left in range(0, 14 * PAGE, 2 * PAGE):
        allocator.release_backups()
        (taken,) = other.reserve(other.gpus[0], [(64 << 20) - left - UNIT_BYTES])
        for change in (False, True):
            if change:
                address = next(iter(contents))
                contents[address] = bf16_weights(2 * PAGE, np.random.default_rng(left))
                memory.write(address, contents[address])
            try:
                allocator.sleep()
            except OutOfHostMemory:
                refused += 1
                assert {segment.sleep for segment in _core.segments()} == {AWAKE}
                assert vault.status()["asleep_bytes"] == taken.nbytes
            allocator.wake_up()
            check(memory, contents)
        other.release([taken])
    assert 2 < refused < 14
    other.close()
    allocator.sleep()
    allocator.wake_up()
    check(memory, contents)


def free_huge_pages() -> int:
    folder = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    counts = [folder / f"{name}_hugepages" for name in ("free", "resv")]
    free, promised = (int(each.read_text()) if each.exists() else 0 for each in counts)
    return free - promised


def test_reserved_huge_pages_are_taken_first(
    make_allocator: MakeAllocator, memory: Memory, start_vault: Callable[..., RunningVault]
) -> None:
    """As many whole slabs as there are; where there are none this shows what is done then."""
    before, pages_of_slab = free_huge_pages(), 8
    options = ("64MiB", "--slab-size", "16MiB", "--reserved-huge-pages")
    vault = start_vault(*options)
    vault.wait_until_ready()
    slabs = min(4, before // pages_of_slab)
    assert before - free_huge_pages() == slabs * pages_of_slab
    none_left = "no slab of reserved huge pages is left"
    if slabs < 4:
        eventually(lambda: vault.said(none_left), "it has said so")
    else:
        assert not vault.said(none_left)
    allocator = make_allocator(vault=str(vault.socket))
    contents = fill(allocator, memory, "weights", "default", pages=4)
    allocator.sleep()
    allocator.wake_up()
    check(memory, contents)
    allocator.sleep()
    vault.kill()
    another = start_vault(*options)  # which adopts that memory
    allocator.wake_up()
    check(memory, contents)
    assert another.status()["adopted_bytes"] > 0
    assert allocator.sleep().copied_bytes == 0
    another.kill()
    allocator.wake_up()
    check(memory, contents)
    leave()
    eventually(lambda: free_huge_pages() == before, "all of them are back")


# Other users


AS_NOBODY = """
import os, pathlib, socket, sys
sys.path[:0] = sys.argv[2:]
from cumem_sleep.vault.client import VaultClient, VaultUnavailable
os.setgid(65534)
os.setuid(65534)
path = pathlib.Path(sys.argv[1])
try:
    VaultClient(path)
except VaultUnavailable as error:
    print(error)
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(str(path))
    print("connected")
except PermissionError:
    print("no permission")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_gets_nowhere(start_vault: Callable[..., RunningVault], tmp_path: pathlib.Path) -> None:
    """Not even into a folder that everybody may enter."""
    import cumem_sleep

    vault = start_vault()
    for folder in vault.socket.parents:
        if folder.stat().st_uid == 0 and folder != pathlib.Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    package = str(pathlib.Path(cumem_sleep.__path__[0]).parent)
    command = [sys.executable, "-c", AS_NOBODY, str(vault.socket), package]

    def try_to_connect() -> list[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout.splitlines()

    refused, connected = try_to_connect()
    assert "no vault answers" in refused
    assert connected == "no permission"
    vault.socket.chmod(0o666)  # a careless administrator
    refused, connected = try_to_connect()
    assert "belongs to user 0" in refused
    assert connected == "connected"
    eventually(lambda: vault.said("it runs as user 65534, and this vault serves user 0 only"), "it is cut off")


# GPUs, forks, ends


@pytest.mark.parametrize("at_exit", ["hand-over", "wait"])
def test_a_vault_that_is_told_to_end_keeps_what_sleeps(
    make_allocator: MakeAllocator, memory: Memory, start_vault: Callable[..., RunningVault], at_exit: str
) -> None:
    vault = start_vault("64MiB", "--at-exit", at_exit)
    vault.wait_until_ready()
    allocator = make_allocator(vault=str(vault.socket))
    contents = fill(allocator, memory, "weights", "default")
    allocator.sleep()
    vault.signal(signal.SIGTERM)
    eventually(lambda: vault.said(f"asleep: pid {os.getpid()}"), "it says for whom it is bad")
    if at_exit == "hand-over":
        assert vault.end() == 0
    allocator.wake_up()
    check(memory, contents)
    assert vault.end() == 0
    leave()


def test_a_vault_that_serves_none_of_these_gpus_is_not_used(
    start_vault: Callable[..., RunningVault],
) -> None:
    two = {"CUMEM_SLEEP_SIM_DEVICES": "2"}
    vault = start_vault("64MiB", "--gpus", "1", **two)
    script = f"""
        allocator, memory = CuMemAllocator(Settings(driver="sim", vault={str(vault.socket)!r})), Memory()
        contents = {{}}
        for device in range(DEVICES):
            address = allocator.malloc(PAGE, "weights", device)
            contents[address] = memory.fill_random(address, PAGE, device)
        with raises(VaultError, EXPECTED):
            allocator.sleep()
        assert {{s.sleep for s in _core.segments()}} == {{AWAKE}}
        assert all(memory.read(a, PAGE, d) == content for d, (a, content) in enumerate(contents.items()))
        """
    imports = "from cumem_sleep.errors import VaultError\n        "
    for devices, expected in ((1, "give the vault the GPUs that this process uses"), (2, "see its --gpus")):
        text = script.replace("DEVICES", str(devices)).replace("EXPECTED", repr(expected))
        text = text.replace("allocator, memory", imports + "allocator, memory", 1)
        assert_clean_exit(run_script(text, CUMEM_SLEEP_SIM_DEVICES=str(devices)))


def test_a_child_of_a_fork_that_exits_takes_nothing_with_it(vault: RunningVault) -> None:
    """Asleep, and its child runs all that Python runs at its end."""
    script = f"""
        import os, sys
        allocator, memory = CuMemAllocator(Settings(driver="sim", vault={str(vault.socket)!r})), Memory()
        address = allocator.malloc(PAGE, "weights")
        content = memory.fill_random(address, PAGE)
        allocator.sleep()
        child = os.fork()
        if child == 0:
            for call in (allocator.wake_up, allocator.sleep, allocator.release_backups):
                with raises(InvalidState, "fork"):
                    call()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert allocator.wake_up().verified_bytes == PAGE
        assert memory.read(address, PAGE) == content
        assert allocator.sleep().copied_bytes == 0
        """
    process = run_script(script)
    assert process.returncode == 0, process.stderr
