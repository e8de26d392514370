"""What does not fit in the vault's memory lies in files: no wrong byte, and nothing is left, whatever fails."""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from disk_faults import DiskFaults
from running import MIB, SECONDS, RunningVault, Segment, eventually, seal, taken
from support import PAGE, Memory
from test_recovery import fall_silent, once_it_goes_on, speak, tier_of
from test_sleeping import leave
from test_storm import Vaults

import cumem_sleep
from cumem_sleep import CuMemAllocator, OutOfHostMemory, _core
from cumem_sleep.backups import vault_tier as tiers
from cumem_sleep.errors import VaultError, VaultLost
from cumem_sleep.tools import cli
from cumem_sleep.vault import files
from cumem_sleep.vault import spill as spill_module
from cumem_sleep.vault.client import VaultBackup, VaultClient
from cumem_sleep.vault.files import SpillError, SpillFile
from cumem_sleep.vault.ledger import FILES
from cumem_sleep.vault.slabs import SlabRange

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SWITCHES = 20

StartVault = Callable[..., RunningVault]


@pytest.fixture
def spill(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "spill"
    folder.mkdir(mode=0o700)
    if files.filesystem_of(folder) in files._IN_MEMORY:
        pytest.skip("pytest's folder is in memory")
    return folder


def content_of(nbytes: int) -> memoryview:
    return memoryview(bytes(range(256)) * (nbytes // 256))


class TestFiles:
    def test_what_was_written_is_read_again_and_the_folder_stays_empty(self, spill: pathlib.Path) -> None:
        file = SpillFile(spill, 1 << 20)
        file.allocate(0, 1 << 20)
        pages = memoryview(mmap.mmap(-1, 1 << 20))
        pages[:] = content_of(1 << 20)
        file.write(pages, 0)
        again = memoryview(mmap.mmap(-1, 1 << 20))
        file.read(again, 0)
        assert again == content_of(1 << 20)
        assert os.pread(file.read_only, 1 << 20, 0) == again, "the owner reads the same"
        assert (os.fstat(file.read_only).st_mode & 0o777, list(spill.iterdir())) == (0o600, [])
        file.freed([SlabRange(FILES, 0, 1 << 19)])
        file.worker.submit(int).result()
        assert os.fstat(file.read_only).st_blocks * 512 < 1 << 20
        file.close()

    @pytest.mark.parametrize(
        ("failing", "what", "code"),
        [("pwritev", "writing", errno.ENOSPC), ("preadv", "reading", errno.EIO), ("pwritev", "writing", 0)],
    )
    def test_a_failure_names_folder_offset_and_size(
        self, failing: str, what: str, code: int, spill: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> int:
            if code:
                raise OSError(code, "injected")
            return 512

        file = SpillFile(spill, 1 << 20)
        file.allocate(0, 8192)
        monkeypatch.setattr(os, failing, fail)
        content = memoryview(bytearray(4096))
        with pytest.raises(SpillError, match=f"{what} 4096 bytes at 4096 of a spill file in {spill}") as failure:
            (file.write if what == "writing" else file.read)(content, 4096)
        error = failure.value
        assert (error.folder, error.offset, error.nbytes, error.code) == (spill, 4096, 4096, code)
        file.close()

    def test_a_folder_that_others_can_enter_is_refused(self, spill: pathlib.Path) -> None:
        spill.chmod(0o750)
        with pytest.raises(VaultError, match="chmod 700"):
            SpillFile(spill, 1 << 20)

    def test_what_takes_its_place_gets_no_files(
        self, spill: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        theirs, moved = tmp_path / "theirs", tmp_path / "moved"
        theirs.mkdir()
        check = files.check_folder

        def replace(*folder: Any, **facts: Any) -> None:
            check(*folder, **facts)
            spill.rename(moved)
            spill.symlink_to(theirs)

        with monkeypatch.context() as patch:
            patch.setattr(files, "check_folder", replace)
            file = SpillFile(spill, 1 << 20)
        assert os.readlink(f"/proc/self/fd/{file.read_only}").startswith(f"{moved}/")
        file.close()
        with pytest.raises(VaultError, match="the spill folder"):
            SpillFile(spill, 1 << 20)

    @pytest.mark.parametrize("mode", [0o777, 0o770])
    def test_where_others_can_move_it_it_is_refused(self, tmp_path: pathlib.Path, mode: int) -> None:
        """As in /tmp they cannot."""
        parent, spill = tmp_path / "parent", tmp_path / "parent" / "folder" / "spill"
        spill.mkdir(0o700, parents=True)
        parent.chmod(mode)
        with pytest.raises(VaultError, match=f"others can write to {parent}, .*chmod go-w {parent}"):
            SpillFile(spill, 1 << 20)
        parent.chmod(mode | 0o1000)
        SpillFile(spill, 1 << 20).close()

    def test_memory_is_no_place_to_spill_to(self, spill: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "filesystem_of", lambda _: "tmpfs")
        with pytest.raises(VaultError, match="tmpfs, which is memory itself"):
            SpillFile(spill, 1 << 20)

    def test_the_name_that_a_killed_vault_has_left_goes(self, spill: pathlib.Path) -> None:
        (spill / files._NAME).touch()
        (spill / "other").touch()
        file = SpillFile(spill, 1 << 20)
        assert [each.name for each in spill.iterdir()] == ["other"]
        file.close()

    def test_vaults_that_start_at_the_same_moment_have_one_each(
        self, spill: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own, others = files._unlink, iter(range(3))

        def unlink(name: str, folder: int) -> None:
            own(name, folder)
            if next(others, None) is not None:
                (spill / name).touch()  # another's, before it has taken the name away again

        monkeypatch.setattr(files, "_unlink", unlink)
        file = SpillFile(spill, 1 << 20)
        assert not list(spill.iterdir())
        file.close()

    def test_through_the_page_cache_where_there_is_no_direct_access(
        self, spill: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = os.open

        def fail(path: object, flags: int, *mode: int, **folder: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return own(path, flags, *mode, **folder)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(os, "open", fail)
        file = SpillFile(spill, 1 << 20)
        file.allocate(0, 8192)
        file.write(content_of(4096), 4096)
        assert os.pread(file.read_only, 4096, 4096) == content_of(4096)
        assert not file.is_direct
        file.close()


class SpillingSleeper(Segment):
    """A model of a process of its own, as far as the vault can see: it sleeps, or it is awake."""

    def __init__(self, vault: RunningVault, allocator: CuMemAllocator, memory: Memory, name: str) -> None:
        super().__init__(vault.client(name), allocator.malloc(SIZE), SIZE)
        self.memory, self.name = memory, name
        self.content = memory.fill_random(self.address, SIZE)
        self.backup: VaultBackup | None = None

    def sleep(self) -> None:
        if self.backup is None or self.client.mark([self.backup], needed=True):
            self.backup = self.back_up()
            seal(self.client, self.backup, self.name)
        self.memory.write(self.address, bytes(SIZE))

    def wake(self) -> None:
        assert self.backup is not None
        self.read(self.backup)
        assert self.memory.read(self.address, SIZE) == self.content
        self.client.mark([self.backup], needed=False)

    def read_itself(self) -> None:
        """As the owner does when the vault has ended."""
        assert self.backup is not None
        self.client.slabs.hear()
        parts = [
            os.pread(self.client.slabs.by_number[slab][0], nbytes, offset)
            for slab, offset, nbytes in self.backup.extents
        ]
        assert b"".join(parts)[:SIZE] == self.content

    def close(self) -> None:
        self.client.close()


SIZE = 12 * PAGE + 4096 + 16  # a little over a third of the memory that is left


@pytest.fixture
def spilling(start_vault: StartVault, spill: pathlib.Path) -> RunningVault:
    running = start_vault("72MiB", "--slab-size", "16MiB", "--spill", str(spill), "--spill-size", "256MiB")
    running.wait_until_ready()
    return running


@pytest.fixture
def sleepers(spilling: RunningVault, allocator: CuMemAllocator, memory: Memory) -> Iterator[list[SpillingSleeper]]:
    """Five, for two of which there is memory."""
    made = [SpillingSleeper(spilling, allocator, memory, f"model{number}") for number in range(5)]
    yield made
    for each in made:
        each.close()


def test_five_models_in_memory_for_two_take_turns(spilling: RunningVault, sleepers: list[SpillingSleeper]) -> None:
    chance = random.Random(1)
    for each in sleepers:
        each.sleep()
    status = spilling.status()
    assert status["asleep_bytes"] > status["memory_bytes"]
    assert status["spilled_bytes"] >= 2 * SIZE
    for _ in range(SWITCHES):
        each = chance.choice(sleepers)
        each.wake()
        each.sleep()
    assert spilling.status()["files_read_bytes"] > 0
    assert spilling.status()["refused"] == 0


def test_what_is_about_to_wake_is_read_ahead_where_memory_is_free(
    spilling: RunningVault, sleepers: list[SpillingSleeper]
) -> None:
    for each in sleepers[:4]:
        each.sleep()
    first, *others = sleepers
    assert first.client.read_ahead() == 0 or spilling.status()["spilled_bytes"] >= SIZE
    for each in others[1:]:
        each.close()
    eventually(lambda: spilling.status()["free_bytes"] >= SIZE, "there is free memory")
    wanted = first.client.read_ahead([os.getpid()])
    assert wanted >= SIZE
    eventually(lambda: spilling.status()["spilled_bytes"] == 0, "all of it is in memory")
    read = spilling.status()["files_read_bytes"]
    first.wake()
    assert spilling.status()["files_read_bytes"] == read, "it has come from memory"


def asleep_in_files(
    vault: RunningVault, make_allocator: Callable[..., CuMemAllocator], memory: Memory
) -> tuple[CuMemAllocator, int, bytes, VaultClient]:
    """An allocator, an address and its content, and the other client that has taken all memory."""
    allocator = make_allocator(vault=str(vault.socket))
    address = allocator.malloc(SIZE, "weights")
    content = memory.fill_random(address, SIZE)
    allocator.sleep()
    other = vault.client("other")
    other.reserve(vault.status()["gpus"][0]["uuid"], [vault.status()["memory_bytes"]])
    assert vault.status()["spilled_bytes"] >= SIZE
    return allocator, address, content, other


def test_what_is_prepared_for_wakes_without_the_disk(
    spilling: RunningVault, make_allocator: Callable[..., CuMemAllocator], memory: Memory
) -> None:
    allocator, address, content, other = asleep_in_files(spilling, make_allocator, memory)
    other.close()
    allocator.prepare().wait()
    eventually(lambda: spilling.status()["spilled_bytes"] == 0, "it is in memory")
    allocator.wake_up()
    assert memory.read(address, SIZE) == content
    assert spilling.status()["files_read_bytes"] == 0
    allocator.free(address)
    leave()


def test_what_was_spilled_once_is_not_written_again(spilling: RunningVault, sleepers: list[SpillingSleeper]) -> None:
    for each in sleepers:
        each.sleep()
    written = spilling.status()["files_written_bytes"]
    for each in sleepers[:2]:
        each.wake()
        each.sleep()
    assert spilling.status()["files_written_bytes"] == written


def test_owners_read_files_themselves_when_the_vault_is_killed(
    spilling: RunningVault, sleepers: list[SpillingSleeper], spill: pathlib.Path
) -> None:
    for each in sleepers:
        each.sleep()
    spilling.kill()
    for each in sleepers:
        assert each.client.lost is not None
        each.read_itself()
    assert list(spill.iterdir()) == []


def test_files_give_their_space_back_when_their_owners_go(
    spilling: RunningVault, sleepers: list[SpillingSleeper]
) -> None:
    for each in sleepers:
        each.sleep()
    for each in sleepers:
        each.close()
    eventually(lambda: spilling.status()["files_free_bytes"] == spilling.status()["files_bytes"], "all of it is free")
    assert spilling.is_unused()


def test_what_fits_neither_in_memory_nor_in_files_is_refused(
    start_vault: StartVault, spill: pathlib.Path, allocator: CuMemAllocator, memory: Memory
) -> None:
    vault = start_vault("72MiB", "--slab-size", "16MiB", "--spill", str(spill), "--spill-size", "32MiB")
    vault.wait_until_ready()
    made = [SpillingSleeper(vault, allocator, memory, f"model{number}") for number in range(4)]
    for each in made[:3]:
        each.sleep()
    with pytest.raises(OutOfHostMemory, match="of files are free"):
        made[3].sleep()
    for each in made[:3]:
        each.wake()
    made[3].sleep()
    made[3].wake()
    for each in made:
        each.close()


@pytest.mark.parametrize("how", ["seals", "gives up"])
def test_one_waits_for_what_another_is_about_to_seal(spilling: RunningVault, how: str) -> None:
    """Both fall asleep at once: what the first has reserved cannot be spilled before it is written."""
    first, second = spilling.client("first"), spilling.client("second")
    gpu, size = first.gpus[0], 40 * MIB
    (backup,) = first.reserve(gpu, [size])
    with ThreadPoolExecutor(1) as pool:
        reserved = pool.submit(second.reserve, gpu, [size])
        eventually(lambda: spilling.status()["waiting"] == 1, "the second waits")
        if how == "seals":
            seal(first, backup, "of the first")
        else:
            first.release([backup])
        (got,) = reserved.result(SECONDS)
    assert got.bytes == size
    assert spilling.status()["spilled_bytes"] == (size if how == "seals" else 0)
    for each in (first, second):
        each.close()


def test_of_two_that_wait_for_each_other_one_is_refused_at_once(spilling: RunningVault) -> None:
    """As two models over two GPUs, each of which has reserved for its first one."""
    first, second = spilling.client("first"), spilling.client("second")
    gpu, begins = first.gpus[0], time.monotonic()
    clients = (first, second)
    has = {client: client.reserve(gpu, [25 * MIB]) for client in clients}

    def reserve_more(client: VaultClient) -> bool:
        try:
            has[client] += client.reserve(gpu, [25 * MIB])
        except OutOfHostMemory:
            client.release(has[client])
            return False
        for number, backup in enumerate(has[client]):
            seal(client, backup, f"part {number}")
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(reserve_more, clients)) == [False, True]
    assert time.monotonic() - begins < spill_module.SEALED_WITHIN_S / 3
    first.close()
    second.close()


def test_one_does_not_wait_for_ever_for_what_another_never_seals(
    start_vault: StartVault, spill: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import cumem_sleep.vault.spill as spill; spill.SEALED_WITHIN_S = 2.0\n")
    path = os.pathsep.join([str(tmp_path), str(pathlib.Path(cumem_sleep.__path__[0]).parent)])
    options = ("--slab-size", "16MiB", "--spill", str(spill), "--spill-size", "256MiB")
    vault = start_vault("72MiB", *options, PYTHONPATH=path)
    vault.wait_until_ready()
    first, second = vault.client("first"), vault.client("second")
    first.reserve(first.gpus[0], [40 * MIB])
    begins = time.monotonic()
    with pytest.raises(OutOfHostMemory, match=r"\(first\) holds 40"):
        second.reserve(second.gpus[0], [40 * MIB])
    assert time.monotonic() - begins > 1.5
    with pytest.raises(OutOfHostMemory, match="of files are free"):
        second.reserve(second.gpus[0], [512 * MIB])
    first.close()
    second.close()


def test_memory_is_kept_free_ahead(
    start_vault: StartVault, spill: pathlib.Path, allocator: CuMemAllocator, memory: Memory
) -> None:
    sizes = ("--spill-size", "256MiB", "--spill-free", "48MiB")
    vault = start_vault("72MiB", "--slab-size", "16MiB", "--spill", str(spill), *sizes)
    vault.wait_until_ready()
    sleeper = SpillingSleeper(vault, allocator, memory, "model")
    sleeper.sleep()
    eventually(lambda: vault.status()["left_bytes"] >= 48 * MIB, "it has spilled ahead")
    assert vault.status()["spilled_bytes"] == 0, "it is in memory as long as nobody wants that"
    sleeper.wake()
    sleeper.close()


def test_an_allocator_wakes_from_files_that_a_killed_vault_has_left(
    spilling: RunningVault, make_allocator: Callable[..., CuMemAllocator], memory: Memory
) -> None:
    allocator, address, content, client = asleep_in_files(spilling, make_allocator, memory)
    spilling.kill()
    with pytest.raises(VaultLost):
        client.status()
    allocator.wake_up()
    assert memory.read(address, SIZE) == content
    assert not tier_of(allocator)._client.slabs.by_number, "the disk's space is had back"  # type: ignore[union-attr]
    client.close()
    allocator.free(address)
    leave()


def open_files() -> Iterator[str]:
    """Of this process."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def test_what_a_stopped_vault_moves_when_it_goes_on_is_read_again(
    spilling: RunningVault,
    spill: pathlib.Path,
    make_allocator: Callable[..., CuMemAllocator],
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its owner reads by itself, and the memory is somebody else's before it has."""
    allocator = make_allocator(vault=str(spilling.socket))
    address = allocator.malloc(SIZE, "weights")
    content = memory.fill_random(address, SIZE)
    allocator.sleep()
    nbytes = spilling.status()["memory_bytes"]
    scratch = _core.Scratch(0, nbytes)
    other = Segment(spilling.client("other"), scratch.address, nbytes)
    takes_all = threading.Thread(target=other.back_up)
    fall_silent(spilling, allocator)
    with pytest.raises(VaultLost):
        allocator.wake_up()
    takes_all.start()
    real = tiers.VaultLane._read_itself

    def late(lane: tiers.VaultLane, read: tiers._OwnRead) -> None:
        if takes_all.is_alive():
            speak(spilling, allocator)
            takes_all.join()
        real(lane, read)

    monkeypatch.setattr(tiers.VaultLane, "_read_itself", late)
    allocator.wake_up()
    assert not takes_all.is_alive(), "it has read by itself"
    assert memory.read(address, SIZE) == content
    other.client.close()
    scratch.close()
    once_it_goes_on(tier_of(allocator).client)
    assert sum(place.startswith(str(spill)) for place in open_files()) == 1, "of the connection that there is"
    allocator.free(address)
    leave()


class FailingDisk:
    """Of a vault, with sleepers of which the first is in its files."""

    def __init__(self, folder: pathlib.Path, spill: pathlib.Path, allocator: CuMemAllocator, memory: Memory) -> None:
        self.faults = DiskFaults(folder / "disk")
        options = ("--spill", str(spill), "--spill-size", "256MiB")
        self.vault = Vaults(folder, "72MiB", "16MiB", *options, FAULTS_OF_THE_DISK=str(folder / "disk"))
        self.sleepers = [SpillingSleeper(self.vault, allocator, memory, f"model{number}") for number in range(4)]
        for each in self.sleepers:
            each.sleep()

    def close(self) -> None:
        for each in self.sleepers:
            each.close()
        self.vault.close()


@pytest.fixture
def disk(folder: pathlib.Path, spill: pathlib.Path, allocator: CuMemAllocator, memory: Memory) -> Iterator[FailingDisk]:
    made = FailingDisk(folder, spill, allocator, memory)
    yield made
    made.close()


def test_the_link_copies_while_the_disk_reads(disk: FailingDisk) -> None:
    """The first pieces arrive before the last ones are read."""
    before = disk.vault.status()
    disk.faults.throttle("read", 1)  # MiB a second for each of four requests, of 2 MiB
    waking = threading.Thread(target=disk.sleepers[0].wake)
    waking.start()
    read = []

    def has_arrived() -> bool:
        status = disk.vault.status()
        read.append(status["files_read_bytes"] - before["files_read_bytes"])
        return bool(status["gpus"][0]["copied_in_bytes"] > before["gpus"][0]["copied_in_bytes"])

    eventually(has_arrived, "something has arrived")
    assert read[-1] < SIZE
    disk.faults.throttle("read", 0)
    waking.join()


@pytest.mark.parametrize(("kind", "why"), [("EIO", "Input/output error"), ("short", "only [0-9]+ bytes were")])
def test_what_cannot_be_read_says_where_it_is_and_can_be_read_later(
    kind: str, why: str, disk: FailingDisk, spill: pathlib.Path
) -> None:
    disk.faults.set("read", kind)
    with pytest.raises(VaultError, match=rf"backup \d+: reading \d+ bytes at \d+ of a spill file in {spill}: {why}"):
        disk.sleepers[0].wake()
    disk.sleepers[0].wake()


def test_on_a_full_disk_what_is_merely_retained_in_files_gives_way(disk: FailingDisk) -> None:
    first, *others = disk.sleepers
    other = disk.vault.client("other")
    first.wake()
    disk.faults.set("write", "ENOSPC")
    other.reserve(first.gpu, [SIZE])
    status = disk.vault.status()
    assert (status["files_failure"], status["evicted_bytes"]) == ("", taken([SIZE]))
    disk.faults.set("write", "ENOSPC", 255)
    with pytest.raises(OutOfHostMemory, match="No space left"):
        other.reserve(first.gpu, [SIZE])
    disk.faults.clear()
    assert first.client.mark([first.backup], needed=True) == [first.backup]  # type: ignore[list-item]
    for each in others:
        each.wake()
    other.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--spill-size", "1GiB"], "--spill is missing"),
        (["--spill", "."], "--spill-size is missing"),
        (["--spill", ".", "--spill-size", "1KiB"], "spill_size=1024"),
        (["--spill", ".", "--spill-size", "1GiB", "--spill-free", "1GiB"], "spill_free="),
        (["--spill", "nowhere", "--spill-size", "1GiB"], "the spill folder"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    options: list[str], said: str, folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = str(folder / "vault.sock")
    assert cli.main(["vault", "--memory", "64MiB", "--socket", socket, *options]) != 0
    assert said in capsys.readouterr().err
