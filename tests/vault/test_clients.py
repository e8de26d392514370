"""What clients may do to the vault: nonsense, floods, other versions, other users, forks, and dying."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from running import RunningVault, Segment, eventually, from_slabs
from support import PAGE, PREAMBLE, Memory, assert_clean_exit, run_script

from cumem_sleep import (
    CuMemAllocator,
    InvalidArgument,
    InvalidState,
    OutOfHostMemory,
    VaultError,
    VaultLost,
    VaultUnavailable,
    _core,
)
from cumem_sleep.vault import protocol
from cumem_sleep.vault.client import Key, VaultClient
from cumem_sleep.vault.protocol import Channel

pytestmark = [pytest.mark.sim, pytest.mark.slow]


@pytest.fixture
def neighbour(vault: RunningVault, allocator: CuMemAllocator, memory: Memory) -> Iterator[None]:
    """Has a backup in the vault, and finds it untouched at the end of the test, over the same connection."""
    client = vault.client("neighbour")
    mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
    content = memory.fill_random(mine.address, PAGE)
    backup = mine.back_up()
    yield
    memory.fill_random(mine.address, PAGE)
    mine.read(backup)
    assert memory.read(mine.address, PAGE) == content
    client.close()


def connect(vault: RunningVault) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(30)
    connection.connect(str(vault.socket))
    return connection


def framed(text: bytes, version: int = protocol.VERSION, descriptors: int = 0) -> bytes:
    return struct.pack("<4sHHI", b"CMSV", version, descriptors, len(text)) + text


def said(**body: object) -> bytes:
    return framed(json.dumps(body).encode())


HELLO = said(id=0, do="hello", name="raw", identity="raw")


def last_words(connection: socket.socket) -> dict[str, object]:
    """What the vault says last before it ends the connection."""
    content = b""
    while chunk := connection.recv(1 << 16):
        content += chunk
    body: dict[str, object] = {}
    while content:
        _, _, _, nbytes = struct.unpack_from("<4sHHI", content)
        body, content = json.loads(content[12 : 12 + nbytes]), content[12 + nbytes :]
    return body


NONSENSE = {
    "other bytes": b"GET / HTTP/1.1\r\nHost: vault\r\n\r\n",
    "no JSON": HELLO + framed(b"{]"),
    "no object": HELLO + framed(b"[1, 2]"),
    "deep": HELLO + framed(b'{"a":' + b"[" * 100_000),
    "no UTF-8": HELLO + framed(b'"\xff\xfe"'),
    "too long": HELLO + struct.pack("<4sHHI", b"CMSV", protocol.VERSION, 0, 0xFFFFFFFF),
    "no number": HELLO + said(do="status"),
    "no verb": HELLO + said(id=1),
    "unknown verb": HELLO + said(id=1, do="give me everything"),
    "hello twice": HELLO + HELLO,
    "no hello": said(id=1, do="status"),
    "negative size": HELLO + said(id=1, do="reserve", gpu="GPU-63756d65-6d2d-7369-6d2d-303030303000", sizes=[-1]),
    "size as text": HELLO + said(id=1, do="release", numbers=["1"], slabs=[]),
    "true as number": HELLO + said(id=1, do="release", numbers=[True], slabs=[]),
    "huge number": HELLO + said(id=1, do="release", numbers=[1 << 70], slabs=[]),
    "null": HELLO + said(id=1, do="mark", numbers=None, needed=True),
    "missing descriptor": HELLO + framed(b'{"id":1,"do":"status"}', descriptors=1),
}


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("content", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_ends_its_connection_and_nobody_else_notices(vault: RunningVault, content: bytes) -> None:
    cut_off = vault.status()["cut_off"]
    with connect(vault) as connection:
        connection.sendall(content)
        reason = last_words(connection)["cut"]
    assert isinstance(reason, str)
    assert reason
    assert vault.status()["cut_off"] == cut_off + 1
    eventually(lambda: vault.said(reason), "its user is told")


@pytest.mark.usefixtures("neighbour")
def test_half_a_message_holds_nobody_up(vault: RunningVault) -> None:
    cut_off = vault.status()["cut_off"]
    with connect(vault) as connection:
        connection.sendall(HELLO[:-1])
        assert vault.status()["cut_off"] == cut_off
        connection.sendall(HELLO[-1:])
        assert b"memory_bytes" in connection.recv(1 << 16)


@pytest.mark.usefixtures("neighbour")
def test_a_client_that_floods_and_reads_nothing_holds_nobody_up(vault: RunningVault) -> None:
    flood = said(id=1, do="status") * 500
    cut_off = vault.status()["cut_off"]
    with connect(vault) as connection:
        connection.sendall(HELLO)
        connection.setblocking(False)
        sent = 0
        try:
            while sent < 1 << 28:
                sent += connection.send(flood)
                assert vault.status()["cut_off"] == cut_off
        except BlockingIOError:
            pass
        assert sent < 1 << 28, "the vault took in all of it"
        assert len(vault.status()["clients"]) == 2
    eventually(lambda: len(vault.status()["clients"]) == 1, "it is gone")


def test_a_client_of_another_version_is_told_so(vault: RunningVault) -> None:
    with connect(vault) as connection:
        later = protocol.VERSION + 1
        connection.sendall(framed(b'{"id":0,"do":"greet","in":"the manner of a later version"}', version=later))
        assert f"received version {later} of the protocol, expected version {protocol.VERSION}" in str(
            last_words(connection)["cut"]
        )


def test_what_is_too_long_is_refused_and_ends_nothing(client: VaultClient) -> None:
    gpu = client.gpus[0]
    (backup,) = client.reserve(gpu, [PAGE])
    for refused in (
        lambda: client._ask(
            "reserve", gpu=gpu, sizes=[1] * (protocol.MAX_BACKUPS + 1), more_bytes=0, wait=False, expendable=False
        ),
        lambda: client._ask("release", numbers=[], slabs=[1] * 65537),
        lambda: client.find("x" * 257, []),
        lambda: client.find(gpu, [Key("x" * 65, 1, "")]),
        lambda: client.seal([(backup, Key("x", PAGE, "n" * 65))]),
    ):
        with pytest.raises(InvalidArgument, match="at most"):
            refused()
    client.seal([(backup, Key("x", PAGE, "n" * 64))])
    client.release([backup])
    assert client.lost is None


def test_a_client_that_is_cut_off_keeps_its_backups_until_it_goes(
    vault: RunningVault, allocator: CuMemAllocator, memory: Memory
) -> None:
    client = vault.client()
    mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
    content = memory.fill_random(mine.address, PAGE)
    backup = mine.back_up()
    with pytest.raises(VaultLost, match="cut this process off: unknown request 'dance'") as lost:
        client._ask("dance")
    assert lost.value.may_go_on
    assert client.lost is lost.value
    other = vault.client("other")
    with pytest.raises(OutOfHostMemory):
        other.reserve(mine.gpu, [64 << 20])
    assert from_slabs(client, backup) == content
    client.close()
    eventually(lambda: vault.status()["asleep_bytes"] == 0, "its backups are gone")
    other.close()


# Messages, without a vault


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    left, right = (Channel(each, 1 << 20, 1 << 20) for each in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_messages_keep_their_descriptors(channels: tuple[Channel, Channel]) -> None:
    left, right = channels
    files = [os.memfd_create(str(number)) for number in range(4)]
    inodes = [os.fstat(each).st_ino for each in files]
    left.send({"n": 0})
    left.send({"n": 1}, files[:1])
    left.send({"n": 2})
    left.send({"n": 3}, files[1:])
    got = []
    while len(got) < 4:
        right.receive()
        while (message := right.next_message()) is not None:
            got.append(message)
    assert [message.body["n"] for message in got] == [0, 1, 2, 3]
    assert [[os.fstat(each).st_ino for each in message.descriptors] for message in got] == [
        [],
        inodes[:1],
        [],
        inodes[1:],
    ]
    for message in got:
        protocol.close_all(message.descriptors)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files[0])


class FullKernel:
    """A socket that takes nothing at times, and no descriptors: too many are on their way."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.is_full = connection, False

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)

    def sendmsg(self, content: list[memoryview], ancillary: list[object], flags: int) -> int:
        if self.is_full:
            raise BlockingIOError
        if ancillary:
            raise OSError(errno.ETOOMANYREFS, "injected")
        return self.connection.sendmsg(content, ancillary, flags)


def test_descriptors_that_the_kernel_does_not_send_are_lost_and_no_message_is(
    channels: tuple[Channel, Channel],
) -> None:
    """So many may be on their way to those who sleep, and so read nothing. The socket was full when it was said."""
    left, right = channels
    kernel = FullKernel(left._socket)
    left._socket = kernel  # type: ignore[assignment]
    kernel.is_full = True
    descriptors = [os.dup(0), os.dup(0)]
    left.send({"slab": 1}, descriptors)
    left.send({"id": 1})
    kernel.is_full = False
    assert left.flush() == 1
    assert left.unsent_bytes == 0
    assert right.receive()
    assert right.next_message() == ({"slab": 1}, [], True)
    assert right.next_message() == ({"id": 1}, [], False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_a_client_that_can_open_no_more_files_holds_nothing(
    vault: RunningVault, client: VaultClient, allocator: CuMemAllocator
) -> None:
    mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest_free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limit[1]))
    try:
        with pytest.raises(VaultError, match="this process can open no more files"):
            client.reserve(mine.gpu, [PAGE])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    client.release([])
    assert vault.status()["asleep_bytes"] == 0
    backup = mine.back_up()
    assert len(from_slabs(client, backup)) == PAGE


# Other users, and folders


@pytest.fixture
def in_this_process(folder: pathlib.Path) -> Iterator[Callable[..., VaultClient]]:
    """Connects to a vault that runs in a thread here, so that what it reads can be patched."""
    import threading

    from cumem_sleep.vault.address import VaultAddress
    from cumem_sleep.vault.pool import VaultHost
    from cumem_sleep.vault.server import Vault, visible_gpus

    _core.open_driver(str(pathlib.Path(_core.__file__).parent / "libcuda_sim.so"))
    lines: list[str] = []
    vault = Vault(VaultAddress(folder / "vault.sock"), 4 * PAGE, visible_gpus(), VaultHost(1, lines.append))
    thread = threading.Thread(target=vault.run)
    thread.start()
    yield lambda deadline_s=30: VaultClient(folder / "vault.sock", "test", deadline_s)
    vault.stop(wait=False)
    thread.join(30)
    assert not thread.is_alive()


def test_another_user_is_cut_off(in_this_process: Callable[..., VaultClient], monkeypatch: pytest.MonkeyPatch) -> None:
    def credentials(connection: socket.socket) -> tuple[int, int]:
        is_ours = connection.getsockname() == ""  # a client's end has no name
        return 1, os.getuid() + (0 if is_ours else 1)

    monkeypatch.setattr(protocol, "peer_credentials", credentials)
    with pytest.raises(VaultUnavailable, match=rf"runs as user {os.getuid() + 1}"):
        in_this_process()


def test_a_vault_of_another_user_is_not_used(
    in_this_process: Callable[..., VaultClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "peer_credentials", lambda _: (1, os.getuid() + 1))
    with pytest.raises(VaultUnavailable, match=f"belongs to user {os.getuid() + 1}"):
        in_this_process()


def test_the_socket_is_private(vault: RunningVault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vault.socket.stat().st_mode & 0o777 == 0o600
    assert vault.socket.with_name("vault.sock.lock").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert protocol.default_socket() == pathlib.Path("/run/user/7/cumem-sleep/vault.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    assert protocol.default_socket() == pathlib.Path(f"/tmp/cumem-sleep-{os.getuid()}/vault.sock")


def test_a_folder_that_others_can_write_to_is_not_used(folder: pathlib.Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(VaultError, match="others can write"):
        protocol.check_folder(folder)
    with pytest.raises(VaultUnavailable, match="others can write"):
        VaultClient(folder / "vault.sock")
    folder.chmod(0o1777)
    protocol.check_folder(folder)
    (folder / "link").symlink_to(folder)
    with pytest.raises(VaultError, match="is not a folder"):
        protocol.check_folder(folder / "link")
    with pytest.raises(VaultError, match="No such file"):
        protocol.check_folder(folder / "missing")


def test_nobody_answers_where_there_is_no_vault(folder: pathlib.Path) -> None:
    with pytest.raises(VaultUnavailable, match=r"no vault answers at .*cumem-sleep vault"):
        VaultClient(folder / "vault.sock")


# Processes that end


CLIENT = (
    PREAMBLE
    + f"""
import pathlib, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from running import *
client = VaultClient(pathlib.Path(sys.argv[1]), "child")
allocator, memory = CuMemAllocator(Settings(driver="sim")), Memory()
allocator.get_current_usage()
mine = Segment(client, allocator.malloc(8 * PAGE, "weights"), 8 * PAGE)
"""
)


def start_client(vault: RunningVault, script: str) -> subprocess.Popen[str]:
    import cumem_sleep

    path = [str(pathlib.Path(cumem_sleep.__path__[0]).parent), str(pathlib.Path(__file__).parent.parent)]
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT + script, str(vault.socket)],
        env={**os.environ, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == line + "\n"


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("copies", ["mine.write(backup)", "mine.read(backup)", "pass"])
def test_a_client_that_is_killed_gives_everything_back(vault: RunningVault, copies: str) -> None:
    descriptors = len(os.listdir(f"/proc/{vault.process.pid}/fd"))
    script = f"""
backup = mine.back_up()
mine.lend()
print("asleep", flush=True)
while True:
    {copies}
"""
    with start_client(vault, script) as process:
        wait_for_line(process, "asleep")
        process.kill()
    eventually(lambda: vault.status()["asleep_bytes"] == PAGE, "its bytes are back")
    eventually(lambda: [each["name"] for each in vault.status()["clients"]] == ["neighbour"], "it is gone")
    held = vault.process.pid
    eventually(lambda: len(os.listdir(f"/proc/{held}/fd")) <= descriptors + 1, "its descriptors are closed")
    assert vault.status()["free_bytes"] == vault.status()["memory_bytes"] - PAGE


def test_a_child_of_a_fork_is_refused_and_keeps_nothing(vault: RunningVault) -> None:
    script = """
import os, time
backup = mine.back_up()
child = os.fork()
if child == 0:
    assert "fork" in str(client.lost)
    client.release([backup])
    with raises(VaultLost, "fork"):
        client.status()
    with raises(OSError, "Bad file descriptor"):
        os.fstat(3 if False else client._channel.fileno())
    print("child", flush=True)
    time.sleep(60)
    os._exit(0)
sys.stdin.readline()
mine.read(backup)
print("parent", os.getpid(), child, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""
    with start_client(vault, script) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        wait_for_line(process, "child")
        process.stdin.write("\n")
        process.stdin.flush()
        _, _, child = process.stdout.readline().split()
        assert vault.status()["asleep_bytes"] == 8 * PAGE
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(30)
        try:
            eventually(lambda: vault.status()["asleep_bytes"] == 0, "the parent's bytes are back, its child lives")
            os.kill(int(child), 0)
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_importing_the_client_opens_no_driver(vault: RunningVault) -> None:
    script = f"""
        import pathlib, threading
        from cumem_sleep.vault.client import VaultClient
        from cumem_sleep import _core
        client = VaultClient(pathlib.Path({str(vault.socket)!r}))
        assert client.vault_pid == {vault.process.pid}
        assert not _core.driver_is_open() and threading.active_count() == 1
        client.close()
        client.close()
        assert client.lost is not None
        """
    assert_clean_exit(run_script(script, preamble=""))


def test_errors_of_the_vault_are_typed() -> None:
    for error in (InvalidState("a"), VaultError("b"), VaultLost("c", may_go_on=True)):
        again = protocol.error_from_json(protocol.error_to_json(error))
        assert str(again) == str(error)
    for strange in (None, {}, {"type": "SystemExit", "arguments": []}, {"type": "DriverError", "arguments": [1] * 9}):
        assert isinstance(protocol.error_from_json(strange), VaultError)
