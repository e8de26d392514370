"""Servers as child processes: started, watched, stopped with all that they started themselves.

They listen on Unix sockets in a folder of this user alone, or on loopback: their other paths are for nobody else.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import ipaddress
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..http.asgi import within
from .address import Address, from_url
from .config import OF_FRONT, ModelConfig, VaultConfig
from .lock import Lock
from .masking import holds_any, masked

logger = logging.getLogger("cumem_sleep.serve")

STOP_WITHIN_S = 45.0  # what a reaper has to end a server, before both are killed
VAULT_LISTENS_WITHIN_S = 120.0  # it opens the driver first
POLL_S = 0.05
_SYSTEMDS = ("NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY")
_CONTROLS = ("VLLM_SERVER_DEV_MODE", "CUMEM_SLEEP_ADMIN", "CUMEM_SLEEP_ADMIN_TOKEN", "CUMEM_SLEEP_ADMIN_TOKEN_FILE")
_TOKENS = ("VLLM_API_KEY", "CUMEM_SLEEP_SERVE_TOKEN", "CUMEM_SLEEP_SERVE_TOKEN_FILE")
_NOT_FOR_SERVERS = (*_TOKENS, *OF_FRONT, *_CONTROLS, *_SYSTEMDS)
_REAPER = Path(__file__).with_name("reaper.py")
_TAIL_BYTES = 64 << 10
_ASKED = ('"GET /is_sleeping HTTP', '"GET /cumem_sleep/status HTTP')  # in its log, each time that this front asks
_LISTENS = "0A"  # in /proc/net/tcp


class StartFailed(Exception):
    """A server ended or did not become healthy in time. Nothing of it is left.

    Attributes:
        last_words: what its log says, for operators alone; "" without a log.
    """

    def __init__(self, why: str, last_words: str = "") -> None:
        super().__init__(why)
        self.last_words = last_words


@dataclass
class Surroundings:
    """What a server has to do with its front.

    Attributes:
        secrets: of the front and of all its models; new ones may be added.
        leaves: what the front leaves if it is killed, to be removed then: its lock, or its folder; None for nothing.
        lock: that reapers keep until they end; None without one.
        more: variables that servers get beside those of this process.
        keeps_weights: whether the front's own vault does so, for servers that start later.
    """

    secrets: set[str] = field(default_factory=set)
    leaves: Path | None = None
    lock: Lock | None = None
    more: dict[str, str] = field(default_factory=dict)
    keeps_weights: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """What servers inherit."""
        return {**os.environ, **self.more}


class OwnProcess:
    """A process with all that it starts, from its start to `stop`, and again."""

    def __init__(self, log: Path, sockets: Path, around: Surroundings | None) -> None:
        """`sockets`: where it has a folder for its socket while it runs."""
        self.log = log
        self._folder = sockets / f"cumem-sleep-{secrets.token_hex(4)}"
        self._around = around or Surroundings()
        self._process: asyncio.subprocess.Process | None = None
        self._pid: int | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stops = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the server's process, below its reaper's; None without one."""
        return self._pid if self._process is not None else None

    def pids(self) -> list[int]:
        """Of all its processes; empty without any. Looks at every process of the machine."""
        return _members(self._process.pid) if self._process is not None else []

    async def _run(
        self,
        command: list[str],
        variables: Mapping[str, str],
        ready: Callable[[asyncio.subprocess.Process], Awaitable[None]],
        died: Callable[[str, str], None],
    ) -> None:
        """Start it; returns when it is `ready`. Should it end later without being told to, `died` hears why, and its
        last words.

        Raises:
            StartFailed.
        """
        try:
            log = open_log(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self._remove_folder()
            raise StartFailed("its log cannot be written", f"{self.log}: {error.strerror}") from None
        with log:
            try:
                os.write(log.fileno(), f"\n==> {self._masked(shlex.join(command))}\n".encode())
            except OSError as error:  # the disk is full: a server may run all the same
                logger.warning("%s cannot be written: %s", self.log, error.strerror)
            folders = (str(self._folder), str(self._around.leaves or ""))
            creating = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(_REAPER), str(os.getpid()), *folders, *command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,  # for the server's pid
                    stderr=log,
                    env=variables,
                    start_new_session=True,
                    pass_fds=() if self._around.lock is None else (self._around.lock.descriptor,),
                )
            )
            try:
                self._process = await asyncio.shield(creating)
            except asyncio.CancelledError:  # who cancels the making itself may leave a process that nobody knows
                self._process = await creating
                await asyncio.shield(self.stop())
                raise
            except (OSError, ValueError) as error:
                self._remove_folder()
                raise StartFailed("no process can be started for it", str(error)) from None
        try:
            assert self._process.stdout is not None
            said = await self._process.stdout.readline()
            self._pid = int(said) if said else None
            await ready(self._process)
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        self._watch = asyncio.create_task(self._see_it_end(self._process, died))

    async def stop(self) -> None:
        """End all its processes; returns when none is left. Does nothing the second time."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        async with self._stops:  # whoever comes second returns when nothing is left, too
            process, self._process = self._process, None
            if process is not None:
                await _end(process)
                self._remove_folder()

    def tail(self, lines: int) -> list[str]:
        """The end of its log, without keys, and without what this front asks all the time."""
        try:
            with open_log(self.log, os.O_RDONLY) as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                words = log.read(_TAIL_BYTES).decode(errors="replace")
                said = (line for line in self._masked(words).splitlines() if not any(each in line for each in _ASKED))
                return list(deque(said, lines))
        except OSError:
            return []

    def _remove_folder(self) -> None:
        """Its reaper has done so, unless it was killed."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _masked(self, text: str) -> str:
        return masked(text, self._around.secrets)

    async def _see_it_end(self, process: asyncio.subprocess.Process, died: Callable[[str, str], None]) -> None:
        status = await process.wait()
        self._watch = None
        await self.stop()  # what it has started may live on, and hold the GPU
        died(_ended(status), self._last_words())

    def _last_words(self) -> str:
        lines = [line for line in self.tail(20) if line.strip() and not line.startswith("==> ")]
        return f"its log ({self.log}) ends with: {lines[-1][:300]}" if lines else f"its log is {self.log}"


class Server(OwnProcess):
    """One model's server."""

    def __init__(
        self, name: str, model: ModelConfig, logs: Path, sockets: Path, around: Surroundings | None = None
    ) -> None:
        super().__init__(logs / f"{_file_name(name)}.log", sockets, around)
        self.name = name
        self.model = model
        self.address: Address | None = None

    async def start(self, died: Callable[[str, str], None]) -> Address:
        """Start it; returns when it is healthy. `died`: hears of its end, as `OwnProcess._run` has it.

        Raises:
            StartFailed: it did not become healthy.
        """
        model, inherited = self.model, self._around.variables
        token = model.kind.token(model.command or (), {**inherited, **model.env}, model.api_key)
        variables = environment(model, inherited, self._around.secrets, token)
        self.address = address = self._new_address(token)
        command = command_line(self.name, model, address, token, self._around.keeps_weights)
        await self._run(command, variables, lambda process: self._until_healthy(address, process), died)
        return address

    def _new_address(self, token: str | None) -> Address:
        if self.model.kind.uses_socket(self.model.command or ()):
            try:
                self._folder.mkdir(mode=0o700)  # it has the same address each time
            except FileExistsError:  # whoever has made it may have it
                self._folder = Path(tempfile.mkdtemp(prefix="cumem-sleep-", dir=self._folder.parent))
            except OSError as error:
                raise StartFailed("no folder for its socket can be made", str(error)) from None
            return from_url(f"unix:{self._folder / 'server.sock'}", self.model.api_key, token)
        host = self.model.kind.listening_host(self.model.command or ())
        is_ipv6 = ":" in host
        with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as free:
            free.bind((host, 0))
            where = f"[{host}]" if is_ipv6 else host
            return from_url(f"http://{where}:{free.getsockname()[1]}", self.model.api_key, token)

    async def _until_healthy(self, address: Address, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self.model.start_timeout
        engine = self.model.connect(address, self.model.start_timeout)
        try:
            while not await engine.is_healthy():
                if process.returncode is not None:
                    ended = _ended(process.returncode)
                    raise StartFailed(f"its server {ended} before it was ready", self._last_words())
                if loop.time() > ends_at:
                    limit_s = self.model.start_timeout
                    raise StartFailed(f"its server was not ready within {limit_s:g} s", self._last_words())
                await asyncio.sleep(POLL_S)
        finally:
            await engine.close()
        if address.socket is None and (where := open_to_network(port := int(address.port))):
            raise StartFailed(
                "its server listens where other machines may reach it without this front",
                f"it listens at {where}, port {port}: have it listen at 127.0.0.1",
            )

    def _masked(self, text: str) -> str:
        return super()._masked(masked(text, filter(None, (self.model.api_key,))))


class OwnVault(OwnProcess):
    """`cumem-sleep vault`, for the servers of this front.

    Attributes:
        socket: the same each time.
    """

    def __init__(self, config: VaultConfig, logs: Path, sockets: Path, around: Surroundings) -> None:
        super().__init__(logs / "cumem-sleep-vault.log", sockets, around)
        self.socket = self._folder / "vault.sock"
        self._config = config

    async def start(self, died: Callable[[str, str], None]) -> None:
        """Start it; returns when it listens. `died`: as of a server.

        Raises:
            StartFailed: it ended, or does not listen in time, or its folder cannot be made.
        """
        command = [sys.executable, "-m", "cumem_sleep", "vault", f"--socket={self.socket}"]
        command.append(f"--memory={self._config.memory}")
        if self._config.keep_weights is not None:
            command.append(f"--keep-weights={self._config.keep_weights}")
        if self._config.spill is not None:
            command += [f"--spill={self._config.spill}", f"--spill-size={self._config.spill_size}"]
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)  # one that is not private it refuses
        except OSError as error:
            raise StartFailed("no folder for its socket can be made", str(error)) from None
        await self._run(command, _kept(os.environ, self._around.secrets), self._until_it_listens, died)

    async def _until_it_listens(self, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + VAULT_LISTENS_WITHIN_S
        while not self.socket.exists():
            if process.returncode is not None:
                raise StartFailed(f"the vault {_ended(process.returncode)} before it listened", self._last_words())
            if loop.time() > ends_at:
                raise StartFailed(f"the vault did not listen within {VAULT_LISTENS_WITHIN_S:g} s", self._last_words())
            await asyncio.sleep(POLL_S)


def open_to_network(port: int) -> str | None:
    """Where a port of this machine is open to others; None if it is not. Source: proc_pid_net(5)."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                local, _, state = line.split()[1:4]
                words, _, number = local.partition(":")
                if state == _LISTENS and int(number, 16) == port and not (host := _ip(words)).is_loopback:
                    return str(host)
    return None


def _ip(words: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address in words of 32 bits, each as this machine's memory has it."""
    parts = (int(words[first : first + 8], 16).to_bytes(4, sys.byteorder) for first in range(0, len(words), 8))
    found = ipaddress.ip_address(b"".join(parts))
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found


def command_line(
    name: str, model: ModelConfig, address: Address, token: str | None = None, from_vault: bool = False
) -> list[str]:
    """The words of a server's command with where it listens, and with what its engine needs."""
    port = address.port if address.socket is None else ""
    words = [word.replace("{socket}", address.socket or "").replace("{port}", port) for word in model.command or ()]
    return model.kind.completed(words, (name, *model.aliases), address, token, from_vault)


def environment(
    model: ModelConfig, inherited: Mapping[str, str], known: Collection[str] = (), token: str | None = None
) -> dict[str, str]:
    """A server's variables.

    Args:
        known: secrets of this front, of which it gets its own alone.
        token: opens its calls for sleep; None without one.

    Raises:
        StartFailed: it is to use a GPU that this process may not use.
    """
    others = [secret for secret in known if secret != model.api_key]
    kept = _kept(inherited, others)
    visible = [each for each in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if visible and model.gpus[-1] >= len(visible):
        raise StartFailed(f"there is no GPU {model.gpus[-1]}: CUDA_VISIBLE_DEVICES has {len(visible)}")
    gpus = [visible[gpu] if visible else str(gpu) for gpu in model.gpus]
    ours = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONSAFEPATH": "1"}
    found = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **kept, **ours, **model.env}
    return model.kind.environment(model.command or (), found, model.api_key, token)


def _kept(inherited: Mapping[str, str], secrets: Collection[str]) -> dict[str, str]:
    kept = ((name, value) for name, value in inherited.items() if name not in _NOT_FOR_SERVERS)
    return {name: value for name, value in kept if not holds_any(value, secrets)}


def vault_of(model: ModelConfig, inherited: Mapping[str, str]) -> str:
    """The vault that its server is told to use, or would be if it were started here: `auto`, the path of a socket, or
    "" for none.

    Whether it does is for the server to say: without this layer in it, or without a vault for `auto`, it does not.
    """
    found = {**inherited, **model.env}.get("CUMEM_SLEEP_VAULT", "")
    return "" if found == "off" else found


def place_of_sockets() -> Path:
    """Where each server gets a folder of this user alone; the path is short, since those of sockets have 107 bytes."""
    by_systemd = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]  # which removes it if it kills all of us
    where = by_systemd or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(where if len(where) < 40 and Path(where).is_dir() else "/tmp")


def default_logs() -> Path:
    """Where logs go without `logs:`, by the XDG base directory specification."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        home = Path("/")  # of who has none, as in a container: whether that can be written to is seen later
        with suppress(RuntimeError):
            home = Path.home()
        state = home / ".local" / "state"
    return state / "cumem-sleep" / "serve"


def check_logs(folder: Path) -> None:
    """Make the folder of the logs. In a container its user may have no home.

    Raises:
        OSError: nothing can be written there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"logs: nothing can be written to {folder} ({error.strerror}): name another folder") from None


def open_log(path: Path, flags: int) -> BinaryIO:
    """A server's log, for this user alone: it may hold what its server was told in confidence.

    Raises:
        OSError: it cannot be opened, or is no plain file.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    log = os.fdopen(descriptor, "ab" if flags & os.O_APPEND else "rb")
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        if flags & os.O_APPEND:
            os.fchmod(descriptor, 0o600)
    except OSError:
        log.close()
        raise
    return log


def _file_name(model: str) -> str:
    """Different for different models, also where their names have what a path cannot have, or are long."""
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in model)[:40]
    return plain if plain == model else f"{plain}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have its reaper end a server with all that it has started. If that is killed itself, the session is left."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
            process.send_signal(signal.SIGCONT)  # it may be stopped
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + STOP_WITHIN_S
    with suppress(asyncio.TimeoutError):
        await within(STOP_WITHIN_S, process.wait())
    while left := _members(process.pid):
        if loop.time() > ends_at:
            logger.warning("pid %d and what is below it did not end in time, and are killed", process.pid)
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(POLL_S)
    await process.wait()


def _ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _members(session: int) -> list[int]:
    """The living processes of a session. Source: proc_pid_stat(5)."""
    found = []
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            state, _, _, of_session = stat_file.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(of_session) == session and state not in "ZX":
                found.append(int(stat_file.parent.name))
    return found
