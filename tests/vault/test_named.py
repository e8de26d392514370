"""Tensors that the vault keeps under a name: they outlive their process, and nobody ever gets wrong ones."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import tensors as offering
from forking import PATH
from running import MIB, SECONDS, RunningVault, eventually, flip_a_bit
from support import PAGE, Memory, around_copies
from tensors import ADOPTED, BYTES, NAME, OFFERED, Tensors
from test_sleeping import leave
from test_spill import spill
from test_spill_attacks import take_memory

from cumem_sleep import (
    AdoptionFailed,
    CuMemAllocator,
    CumemSleepError,
    InvalidArgument,
    InvalidState,
    OutOfHostMemory,
    VaultError,
    VaultLost,
    sim,
)
from cumem_sleep.digest.digester import DeviceDigester
from cumem_sleep.operations import named
from cumem_sleep.tools import cli
from cumem_sleep.vault.client import VaultClient
from cumem_sleep.vault.ledger import Key

__all__ = ["spill"]
pytestmark = [pytest.mark.sim, pytest.mark.slow]

StartVault = Callable[..., RunningVault]
MakeAllocator = Callable[..., CuMemAllocator]
NAN, AS_BEFORE = 0xFF, 7


@pytest.fixture
def keeping(start_vault: StartVault) -> RunningVault:
    running = start_vault("72MiB", "--slab-size", "16MiB", "--keep-weights", "32MiB")
    running.wait_until_ready()
    return running


@pytest.fixture
def through(make_allocator: MakeAllocator, keeping: RunningVault) -> Iterator[CuMemAllocator]:
    yield make_allocator(vault=str(keeping.socket))
    leave()


@contextmanager
def offerer(vault: RunningVault, name: str = NAME, *requests: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that offers its tensors, and then sleeps until it is told to end."""
    folder = pathlib.Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, str(folder / "tensors.py"), str(vault.socket), name, *requests],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([PATH, str(folder)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


def offer(vault: RunningVault, name: str = NAME, end: signal.Signals | None = None) -> None:
    """By another process, which has ended when this returns."""
    with offerer(vault, name) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "offered 0\n", "the sleep after that copies nothing"
        status = vault.status()
        assert (status["kept_bytes"], status["asleep_bytes"]) == (BYTES, BYTES), "it is there once"
        if end is not None:
            process.send_signal(end)
        process.communicate("", timeout=SECONDS)
    eventually(lambda: not vault.status()["clients"], "it has gone")


def held_bytes(vault: RunningVault) -> int:
    status = vault.status()
    return int(status["asleep_bytes"] + status["awake_bytes"])


@pytest.mark.parametrize("end", [None, signal.SIGKILL])
@pytest.mark.parametrize("staging", [None, named._LEAST_STAGING_BYTES])
def test_another_process_adopts_what_one_that_has_ended_offered(
    keeping: RunningVault,
    through: CuMemAllocator,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    end: signal.Signals | None,
    staging: int | None,
) -> None:
    if staging is not None:
        monkeypatch.setattr(named, "_STAGING_BYTES", staging)
    offer(keeping, end=end)
    assert held_bytes(keeping) == BYTES
    mine = Tensors(through, memory, ADOPTED)
    assert through.adopt(NAME, mine.places)
    assert mine.are_right()
    status = keeping.status()
    assert (status["asleep_bytes"], status["kept"]) == (0, [{"name": NAME, "bytes": BYTES}])
    assert not any(client["lent_bytes"] for client in status["clients"])
    through.sleep()
    through.wake_up()
    assert mine.are_right()
    through.offer(NAME, mine.places)  # in this one's layout: what was there before goes
    assert held_bytes(keeping) == keeping.status()["kept_bytes"] == sum(mine.sizes)
    again = Tensors(through, memory, OFFERED)
    assert through.adopt(NAME, again.places)
    assert again.are_right()


def test_a_name_that_nothing_is_kept_under_changes_nothing(
    keeping: RunningVault, through: CuMemAllocator, memory: Memory
) -> None:
    offer(keeping)
    mine = Tensors(through, memory, ADOPTED)
    assert not through.adopt("another model", mine.places)
    assert mine.hold(AS_BEFORE)


OTHERS: dict[str, Callable[[dict[str, tuple[int, int]]], object]] = {
    "one less": lambda places: places.pop("x"),
    "one more": lambda places: places.update(y=(places["x"][0] + 96, 16)),
    "a longer one": lambda places: places.update(x=(places["x"][0], 32)),
    "another name": lambda places: places.update(y=places.pop("x")),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_other_tensors_are_not_filled(
    keeping: RunningVault,
    through: CuMemAllocator,
    memory: Memory,
    change: Callable[[dict[str, tuple[int, int]]], object],
) -> None:
    offer(keeping)
    mine = Tensors(through, memory, ADOPTED)
    other = dict(mine.places)
    change(other)
    with pytest.raises(InvalidState, match=f"'{NAME}' holds other tensors: [xy] has"):
        through.adopt(NAME, other)
    assert mine.hold(AS_BEFORE)
    assert held_bytes(keeping) == BYTES
    assert through.adopt(NAME, mine.places)


@pytest.mark.parametrize("where", ["memory", "files"])
def test_a_byte_that_has_changed_is_adopted_by_nobody(
    start_vault: StartVault, make_allocator: MakeAllocator, memory: Memory, spill: pathlib.Path, where: str
) -> None:
    files = ("--spill", str(spill), "--spill-size", "256MiB") if where == "files" else ()
    vault = start_vault("72MiB", "--slab-size", "16MiB", "--keep-weights", "32MiB", *files)
    vault.wait_until_ready()
    offer(vault)
    if where == "files":
        take_memory(vault)
        eventually(lambda: vault.status()["spilled_bytes"] == BYTES, "all is in files only")
    allocator = make_allocator(vault=str(vault.socket))
    mine = Tensors(allocator, memory, ADOPTED)
    assert allocator.adopt(NAME, mine.places)
    assert mine.are_right()
    flip_a_bit(vault, NAME, 0 if where == "files" else 6 * MIB)  # "x"; in files it is the first byte that there is
    with pytest.raises(AdoptionFailed, match=r"(x|w) of 'a model' has digest .* \(1 tensor in all\)"):
        allocator.adopt(NAME, mine.places)
    assert mine.hold(NAN)
    assert not allocator.adopt(NAME, mine.places)
    assert held_bytes(vault) == 0
    leave()


def edited(manifest: str, **changes: Any) -> str:
    places = named._places(NAME, manifest)
    return named._manifest(NAME, {**places, "x": places["x"]._replace(**changes)})


MANIFESTS: dict[str, tuple[Callable[[str], str], str, int]] = {
    "a character": (lambda said: said[:60] + chr(ord(said[60]) ^ 1) + said[61:], "cannot be read", AS_BEFORE),
    "its end": (lambda said: said[:-8], "cannot be read", AS_BEFORE),
    "nothing": (lambda _: "", "cannot be read", AS_BEFORE),
    "of another name": (lambda said: named._manifest("b", named._places(NAME, said)), "cannot be read", AS_BEFORE),
    "another place": (lambda said: edited(said, offset=6 * MIB + 16), "has digest", NAN),
    "another digest": (lambda said: edited(said, digest="0" * 32), "has digest", NAN),
    "beyond": (lambda said: edited(said, offset=8 * MIB), "beyond", NAN),
}


@pytest.mark.parametrize(("change", "said", "left"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_has_changed_fills_nothing_that_could_be_taken_for_whole(
    keeping: RunningVault,
    through: CuMemAllocator,
    memory: Memory,
    change: Callable[[str], str],
    said: str,
    left: int,
) -> None:
    offer(keeping)
    other = keeping.client("meddles")
    found = other.adopt(other.gpus[0], NAME)
    assert found is not None
    other.keep(NAME, change(found[0]), found[1])
    other.close()
    mine = Tensors(through, memory, ADOPTED)
    with pytest.raises(AdoptionFailed if left == NAN else VaultError, match=said):
        through.adopt(NAME, mine.places)
    assert mine.hold(left)


@pytest.mark.parametrize("is_backed_up", [False, True])
def test_what_is_written_to_meanwhile_is_not_offered(
    keeping: RunningVault, through: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, is_backed_up: bool
) -> None:
    """While it is copied, or where nothing has to be, while each tensor is digested."""
    mine = Tensors(through, memory, OFFERED).fill()

    def write() -> None:
        memory.write(mine.places["w"][0], b"other bytes")

    if is_backed_up:
        through.offer(NAME, mine.places)
        digests_of = DeviceDigester.of

        def written(*arguments: Any) -> Any:
            write()
            return digests_of(*arguments)

        monkeypatch.setattr(DeviceDigester, "of", written)
    else:
        around_copies(monkeypatch, after=write)
    before = keeping.status()["kept"]
    with pytest.raises(InvalidState, match="was written to"):
        through.offer(NAME, mine.places)
    assert keeping.status()["kept"] == before


def test_a_name_stands_for_what_was_offered_last(
    keeping: RunningVault, through: CuMemAllocator, memory: Memory
) -> None:
    offer(keeping)
    mine = Tensors(through, memory, OFFERED).fill()
    memory.write(mine.places["tiny"][0], bytes(48))
    through.offer(NAME, mine.places)
    other = Tensors(through, memory, ADOPTED)
    assert through.adopt(NAME, other.places)
    assert memory.read(*other.places["tiny"]) == bytes(48)
    memory.write(other.places["tiny"][0], offering.content_of("tiny"))
    assert other.are_right()


class TestRefusals:
    def test_without_a_vault_that_keeps_names(
        self, make_allocator: MakeAllocator, memory: Memory, vault: RunningVault
    ) -> None:
        for where in ("off", str(vault.socket)):
            allocator = make_allocator(vault=where)
            mine = Tensors(allocator, memory, OFFERED)
            with pytest.raises(InvalidState, match="--keep-weights"):
                allocator.offer(NAME, mine.places)
            assert not allocator.adopt(NAME, mine.places)
            assert mine.hold(AS_BEFORE)
            leave()

    def test_more_than_the_quota(self, start_vault: StartVault, make_allocator: MakeAllocator, memory: Memory) -> None:
        vault = start_vault("64MiB", "--keep-weights", "11MiB")
        vault.wait_until_ready()
        allocator = make_allocator(vault=str(vault.socket))
        mine = Tensors(allocator, memory, OFFERED).fill()
        with pytest.raises(OutOfHostMemory, match="--keep-weights"):
            allocator.offer(NAME, mine.places)
        allocator.offer("less", {"w": mine.places["w"]})
        assert [each["name"] for each in vault.status()["kept"]] == ["less"]
        leave()

    def test_compressed_backups(self, make_allocator: MakeAllocator, memory: Memory, keeping: RunningVault) -> None:
        allocator = make_allocator(vault=str(keeping.socket), compress="auto")
        mine = Tensors(allocator, memory, OFFERED).fill()
        with pytest.raises(InvalidState, match="CUMEM_SLEEP_COMPRESS=off"):
            allocator.offer(NAME, mine.places)
        leave()

    @pytest.mark.parametrize("call", ["offer", "adopt"])
    def test_bad_arguments(self, keeping: RunningVault, through: CuMemAllocator, memory: Memory, call: str) -> None:
        offer(keeping)
        mine = Tensors(through, memory, OFFERED)
        method = getattr(through, call)
        address, _ = mine.places["all"]
        for name in ("", "x" * 257, "a\nb", 5):
            with pytest.raises(InvalidArgument, match="name="):
                method(name, mine.places)
        with pytest.raises(InvalidArgument, match="at least one"):
            method(NAME, {})
        for place in ((address + 8, 16), (address, 24), (address, 0), (address, 3 * PAGE), (16, 16), (1 << 70, 16)):
            with pytest.raises(InvalidArgument, match="t"):
                method(NAME, {"t": place})
        for tensors in ({1: (address, 16)}, {"t": address}, {"t": (address,)}):
            with pytest.raises(InvalidArgument, match="expected a name, and"):
                method(NAME, tensors)
        with pytest.raises(InvalidArgument, match="overlaps"):
            method(NAME, {"t": (address, 32), "u": (address + 16, 16)})
        through.sleep()
        with pytest.raises(InvalidState, match="sleeps"):
            method(NAME, mine.places)
        through.wake_up()
        assert mine.hold(AS_BEFORE)
        assert keeping.status()["kept"] == [{"name": NAME, "bytes": BYTES}]

    def test_what_the_vault_cannot_take(self, keeping: RunningVault, through: CuMemAllocator, memory: Memory) -> None:
        mine = Tensors(through, memory, OFFERED).fill()
        many = {f"{number:060}": (mine.places["w"][0] + 16 * number, 16) for number in range(50_000)}
        with pytest.raises(InvalidArgument, match="manifest of"):
            through.offer(NAME, many)
        client = keeping.client("meddles")
        (unproven,) = client.reserve(client.gpus[0], [PAGE])
        with pytest.raises(InvalidState, match="not proven"):
            client.keep(NAME, "", [unproven])
        client.close()
        assert keeping.status()["kept"] == []


class TestKills:
    def test_a_process_is_killed_at_every_request_of_its_offer(
        self, keeping: RunningVault, through: CuMemAllocator, memory: Memory
    ) -> None:
        """What it offered is there as a whole, or not at all."""
        mine = Tensors(through, memory, ADOPTED)
        assert not through.adopt(NAME, mine.places)
        requests, was_kept = 0, False
        while not was_kept:
            requests += 1
            with offerer(keeping, NAME, str(requests)) as process:
                process.communicate("", timeout=SECONDS)
            eventually(lambda: len(keeping.status()["clients"]) < 2, "it has gone")
            was_kept = bool(keeping.status()["kept"])
            wanted = BYTES if was_kept else 0
            eventually(lambda wanted=wanted: held_bytes(keeping) == wanted, "no copy is under way")  # type: ignore[misc]
            assert through.adopt(NAME, mine.places) is was_kept
            assert mine.are_right() if was_kept else mine.hold(AS_BEFORE)
        assert requests > 5

    @pytest.mark.parametrize("call", ["offer", "adopt"])
    def test_the_vault_is_killed_at_every_request(
        self,
        start_vault: StartVault,
        make_allocator: MakeAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
    ) -> None:
        """Tensors are filled as a whole, or with NaN, or not at all; and those that are offered stay as they are."""
        killed_at, is_over = 0, False
        real = VaultClient._begin
        while not is_over:
            vault = start_vault("72MiB", "--slab-size", "16MiB", "--keep-weights", "32MiB")
            vault.wait_until_ready()
            if call == "adopt":
                offer(vault)
            allocator = make_allocator(vault=str(vault.socket))
            mine = Tensors(allocator, memory, OFFERED if call == "offer" else ADOPTED)
            if call == "offer":
                mine.fill()
            killed_at += 1
            left = [killed_at]

            def begin(
                client: VaultClient,
                verb: str,
                *args: Any,
                left: list[int] = left,
                vault: RunningVault = vault,
                **facts: Any,
            ) -> int:
                left[0] -= 1
                if not left[0]:
                    vault.kill()
                return real(client, verb, *args, **facts)

            monkeypatch.setattr(VaultClient, "_begin", begin)
            result = None
            with suppress(CumemSleepError):
                result = getattr(allocator, call)(NAME, mine.places)
            monkeypatch.setattr(VaultClient, "_begin", real)
            is_over = left[0] > 0
            if call == "offer":
                assert mine.are_right()
            else:
                assert mine.are_right() if result else mine.hold(NAN) or mine.hold(AS_BEFORE)
            mine.free()
            leave()
            vault.close()
        assert killed_at > 4

    def test_a_vault_that_was_given_up_never_writes_to_tensors(
        self,
        keeping: RunningVault,
        through: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It is stopped with a copy under way, and goes on when the tensors were filled in another way."""
        offer(keeping)
        mine = Tensors(through, memory, ADOPTED)
        real = VaultClient.copy

        def copy(client: VaultClient, *args: Any, **facts: Any) -> int:
            client.deadline_s = 1.0
            keeping.signal(signal.SIGSTOP)
            return real(client, *args, **facts)

        monkeypatch.setattr(VaultClient, "copy", copy)
        with pytest.raises(AdoptionFailed, match="does not answer"):
            through.adopt(NAME, mine.places)
        monkeypatch.setattr(VaultClient, "copy", real)
        assert mine.hold(NAN)
        for address, nbytes in mine.places.values():
            memory.write(address, bytes(nbytes))
        keeping.signal(signal.SIGCONT)
        eventually(lambda: keeping.status()["gpus"][0]["last_in_bytes"] > 0, "the vault has copied")
        assert mine.hold(0)
        other = Tensors(through, memory, OFFERED)

        def adopts() -> bool:
            with suppress(VaultLost):
                return through.adopt(NAME, other.places)
            return False

        eventually(adopts, "it is adopted from the vault that goes on")
        assert other.are_right()
        assert mine.hold(0)

    @pytest.mark.parametrize("name", ["cuMemcpyDtoDAsync_v2", "cuStreamSynchronize"])
    def test_the_driver_refuses(
        self, keeping: RunningVault, through: CuMemAllocator, memory: Memory, name: str
    ) -> None:
        offer(keeping)
        mine = Tensors(through, memory, ADOPTED)
        sim.fail(name)
        with pytest.raises(CumemSleepError) as failure:
            through.adopt(NAME, mine.places)
        assert mine.hold(NAN if failure.type is AdoptionFailed else AS_BEFORE)
        assert through.adopt(NAME, mine.places)
        assert mine.are_right()

    def test_the_driver_refuses_to_fill_them_with_nan_too(
        self, keeping: RunningVault, through: CuMemAllocator, memory: Memory
    ) -> None:
        """Whoever takes tensors for what they were, after another error, would take some that are half filled."""
        offer(keeping)
        mine = Tensors(through, memory, ADOPTED)
        sim.fail("cuMemcpyDtoDAsync_v2", after=1)
        sim.fail("cuMemsetD32Async")
        with pytest.raises(AdoptionFailed, match=r"cuMemcpyDtoDAsync .*; they cannot be filled with NaN: cuMemsetD32"):
            through.adopt(NAME, mine.places)
        assert not mine.hold(AS_BEFORE)


def test_on_a_full_device_little_is_enough(keeping: RunningVault, through: CuMemAllocator, memory: Memory) -> None:
    offer(keeping)
    mine = Tensors(through, memory, ADOPTED)
    sim.configure(device_bytes=sum(mine.sizes) + named._LEAST_STAGING_BYTES)
    assert through.adopt(NAME, mine.places)
    assert mine.are_right()


def test_sleepers_come_before_what_is_kept(
    start_vault: StartVault, make_allocator: MakeAllocator, memory: Memory, spill: pathlib.Path
) -> None:
    """It goes to files first, and gives way when these are full, too."""
    options = ("--spill", str(spill), "--spill-size", "16MiB", "--keep-weights", "64MiB")
    vault = start_vault("72MiB", "--slab-size", "16MiB", *options)
    vault.wait_until_ready()
    for name in ("first", "second", "third"):
        with offerer(vault, name) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.communicate("", timeout=SECONDS)
        memory_bytes = vault.status()["memory_bytes"]
    allocator = make_allocator(vault=str(vault.socket))
    sleeper = vault.client("sleeps")
    sleeper.reserve(sleeper.gpus[0], [memory_bytes])
    sleeper.close()
    mine = Tensors(allocator, memory, ADOPTED)
    assert [each["name"] for each in vault.status()["kept"]] == ["third"]
    assert vault.status()["spilled_bytes"] == BYTES
    assert allocator.adopt("third", mine.places)
    assert memory.read(mine.places["w"][0], 5) == b"third"
    leave()


def test_what_is_kept_gives_way_beside_sleepers_that_are_spilled(start_vault: StartVault, spill: pathlib.Path) -> None:
    """Neither is enough alone."""
    options = ("--spill", str(spill), "--spill-size", "16MiB", "--keep-weights", "64MiB")
    vault = start_vault("72MiB", "--slab-size", "16MiB", *options)
    vault.wait_until_ready()
    for name in ("first", "second"):
        with offerer(vault, name) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.communicate("", timeout=SECONDS)
    asleep, falls_asleep = vault.client("asleep"), vault.client("falls asleep")
    gpu, memory_bytes = asleep.gpus[0], vault.status()["memory_bytes"]
    (backup,) = asleep.reserve(gpu, [BYTES])
    asleep.seal([(backup, Key("0" * 32, BYTES, ""))])
    with pytest.raises(OutOfHostMemory):
        falls_asleep.reserve(gpu, [memory_bytes + MIB])
    assert len(vault.status()["kept"]) == 2
    falls_asleep.reserve(gpu, [memory_bytes])
    assert vault.status()["kept"] == []
    assert vault.status()["spilled_bytes"] == BYTES
    falls_asleep.close()
    asleep.close()


def test_the_room_of_what_gives_way_is_had_at_once(start_vault: StartVault, spill: pathlib.Path) -> None:
    options = ("--spill", str(spill), "--spill-size", "4MiB", "--keep-weights", "64MiB")
    vault = start_vault("72MiB", "--slab-size", "16MiB", *options)
    vault.wait_until_ready()
    with offerer(vault, "first") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.communicate("", timeout=SECONDS)
    client = vault.client("falls asleep")
    assert client.reserve_now(client.gpus[0], [vault.status()["memory_bytes"]]) is not None
    client.close()


def test_people_see_it_and_drop_it(keeping: RunningVault, capsys: pytest.CaptureFixture[str]) -> None:
    offer(keeping)
    at = ("--socket", str(keeping.socket))
    assert cli.main(["vault", "status", *at]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^{NAME} +12\.00 MiB$", shown, re.MULTILINE)
    assert re.search(r"^under names, at most +32\.00 MiB$", shown, re.MULTILINE)
    assert cli.main(["vault", "forget", NAME, *at]) == 0
    assert held_bytes(keeping) == 0
    assert cli.main(["vault", "forget", NAME, *at]) == 2
    assert "keeps nothing under it" in capsys.readouterr().err
    assert cli.main(["vault", "status", "--json", *at]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["keep_bytes"], facts["kept_bytes"], facts["kept"]) == (32 * MIB, 0, [])


def test_a_vault_that_waits_for_sleepers_does_not_wait_for_what_is_kept(start_vault: StartVault) -> None:
    vault = start_vault("64MiB", "--keep-weights", "32MiB", "--at-exit", "wait")
    vault.wait_until_ready()
    offer(vault)
    vault.signal(signal.SIGTERM)
    assert vault.end() == 0
