"""What survives of dropped memory, in the vault: it is kept there like any backup, whatever becomes of the vault."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest
from running import MIB, RunningVault, eventually
from support import DROPPED, PAGE, Memory, weights_of
from test_sleeping import leave

from cumem_sleep import CuMemAllocator, OutOfHostMemory, _core
from cumem_sleep.for_plugin import drop_kept
from cumem_sleep.vault import files
from cumem_sleep.vault.ledger import Key

pytestmark = [pytest.mark.sim, pytest.mark.slow]

MakeAllocator = Callable[..., CuMemAllocator]
StartVault = Callable[..., RunningVault]

BYTES = 6 * PAGE
LOST = [(48, PAGE), (4 * PAGE + 16, PAGE)]  # offsets and bytes
REST = [(0, 48), (PAGE + 48, 3 * PAGE - 32), (5 * PAGE + 16, PAGE - 16)]
REST_BYTES = sum(nbytes for _, nbytes in REST)


@pytest.fixture
def running(start_vault: StartVault, tmp_path: pathlib.Path) -> RunningVault:
    """Of 64 MiB, and files."""
    folder = tmp_path / "spill"
    folder.mkdir(mode=0o700)
    if files.filesystem_of(folder) in files._IN_MEMORY:
        pytest.skip("pytest's folder is in memory")
    vault = start_vault("72MiB", "--slab-size", "16MiB", "--spill", str(folder), "--spill-size", "256MiB")
    vault.wait_until_ready()
    return vault


@pytest.fixture
def through(make_allocator: MakeAllocator) -> Iterator[MakeAllocator]:
    yield make_allocator
    leave()


def asleep(allocator: CuMemAllocator, memory: Memory, *tags: str) -> dict[int, bytes]:
    """A segment of each tag, with the same bytes, asleep but for the same rest."""
    contents = {}
    for tag in tags:
        address = allocator.malloc(BYTES, tag)
        contents[address] = weights_of(BYTES // PAGE, 7)
        memory.write(address, contents[address])
        report = allocator.discard(tag, drop={address: LOST})
        assert report.dropped_bytes == BYTES - REST_BYTES
    assert {segment.sleep for segment in _core.segments()} == {DROPPED}
    return contents


def check(memory: Memory, contents: dict[int, bytes]) -> None:
    for address, content in contents.items():
        now = memory.read(address, BYTES)
        assert all(now[at : at + nbytes] == content[at : at + nbytes] for at, nbytes in REST)


WITHOUT_DIGESTS: dict[str, object] = {"verify": "off", "retain_backups": False}


@pytest.mark.parametrize(
    ("vault_is", "settings"),
    [
        ("alive", {"compress": "auto"}),
        ("killed", {}),
        ("killed", WITHOUT_DIGESTS),
        ("another", {"compress": "auto"}),
        ("short of memory", {}),
    ],
    ids=str,
)
def test_it_comes_back(
    through: MakeAllocator,
    memory: Memory,
    running: RunningVault,
    start_vault: StartVault,
    vault_is: str,
    settings: dict[str, object],
) -> None:
    allocator = through(vault=str(running.socket), **settings)
    contents = asleep(allocator, memory, "weights")
    assert running.status()["asleep_bytes"] == REST_BYTES
    assert allocator.usage()["weights"].vault_bytes == REST_BYTES
    if vault_is in ("killed", "another"):
        running.kill()
    if vault_is == "another":
        start_vault("72MiB", "--slab-size", "16MiB").wait_until_ready()
    if vault_is == "short of memory":
        other = running.client("other")
        (backup,) = other.reserve(other.gpus[0], [60 * MIB])
        other.seal([(backup, Key("of another", 60 * MIB, ""))])
        assert running.status()["spilled_bytes"] == REST_BYTES
    assert allocator.release_backups() == drop_kept(allocator) == 0
    read = allocator.read_backup(next(iter(contents)) + PAGE + 64, PAGE)
    assert read is not None
    assert read.tobytes() == next(iter(contents.values()))[PAGE + 64 : 2 * PAGE + 64]
    report = allocator.wake_up()
    assert (report.restored_bytes, report.kept_bytes) == (REST_BYTES, 0)
    check(memory, contents)
    if vault_is == "short of memory":
        other.close()


def test_it_is_stored_once(through: MakeAllocator, memory: Memory, running: RunningVault) -> None:
    allocator = through(vault=str(running.socket))
    contents = asleep(allocator, memory, "weights", "kv_cache")
    assert running.status()["asleep_bytes"] == REST_BYTES
    allocator.wake_up()
    check(memory, contents)
    weights, cache = contents
    report = allocator.sleep(2, drop={weights: LOST, cache: LOST})
    assert (report.copied_bytes, report.clean_bytes) == (0, 2 * REST_BYTES)
    allocator.wake_up()
    check(memory, contents)


def test_what_is_merely_retained_gives_way(through: MakeAllocator, memory: Memory, start_vault: StartVault) -> None:
    """Awake it does; asleep, others are refused."""
    vault = start_vault("64MiB", "--slab-size", "16MiB")
    vault.wait_until_ready()
    allocator = through(vault=str(vault.socket))
    contents = asleep(allocator, memory, "weights")
    (address,) = contents
    other = vault.client("other")
    with pytest.raises(OutOfHostMemory):
        other.reserve(other.gpus[0], [64 * MIB])
    allocator.wake_up()
    check(memory, contents)
    other.release(other.reserve(other.gpus[0], [64 * MIB]))
    assert allocator.usage()["weights"].backed_up_bytes == 0
    memory.write(address, contents[address])
    eventually(lambda: allocator.sleep(2, drop={address: LOST}).copied_bytes == REST_BYTES, "it is made again")
    allocator.wake_up()
    check(memory, contents)
    other.close()
