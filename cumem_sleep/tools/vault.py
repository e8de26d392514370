"""The command `cumem-sleep vault`: runs the vault, or shows the status of one."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.table import Table

from .. import host_facts
from ..core.commitment import left_bytes
from ..core.driver import open_driver
from ..errors import InvalidArgument, counted, format_bytes
from ..settings import Settings
from ..vault import protocol
from ..vault.address import VaultAddress
from ..vault.client import VaultClient
from ..vault.pool import DEFAULT_SLAB_BYTES, VaultHost
from ..vault.server import Vault, keep_pauses_short, visible_gpus
from ..vault.service import VaultGpu
from ..vault.spill import SpillPlan
from .vault_metrics import MetricsServer, prometheus

# Of a GPU, measured on H200s (docs/vault.md): a bare context, and what maps each pinned GiB there.
_CONTEXT_BYTES, _CONTEXT_BYTES_PER_GIB = 512 << 20, 2 << 20
_MOST_THREADS = 16  # threads that prefault memory; more are not faster

DESCRIPTION = """\
One process that owns this host's pinned memory and keeps the backups of all others. They
then pin nothing themselves, and equal bytes are kept once.

It takes its memory in the background, and serves at once with what is there. On each GPU that
it uses it takes about 0.5 GiB and 2 MiB for each GiB of its memory: on those that --gpus names
at once, otherwise on the first one at once and on others when their first client comes.

That client waits until all memory is mapped there (on an H200 2 s for 100 GiB). The vault ends
with SIGTERM or Ctrl-C."""

EPILOG = """\
examples:
  cumem-sleep vault --memory 200GiB
  cumem-sleep vault --memory 64GiB --gpus 0 1 --socket /run/models/vault.sock
  cumem-sleep vault --memory 200GiB --metrics 9400
  cumem-sleep vault --memory 64GiB --spill /nvme/cumem-sleep --spill-size 500GiB
  cumem-sleep vault status
  cumem-sleep vault status --json | jq '.clients[].asleep_bytes'
  cumem-sleep vault status --prometheus"""

STATUS_DESCRIPTION = """\
Shows the memory of the vault, its GPUs, and its clients. "asleep" is what segments that sleep
need; "awake" are retained backups of segments that are awake, and kept ranges: both are evicted when
memory runs short. "relayed" is what a GPU's link has carried for other GPUs."""


def add_command(
    new: Callable[..., Any],
    commands: Any,
    size: Callable[[str], int],
    path: Callable[[str], Path],
    run: Callable[[argparse.Namespace], int],
    status: Callable[[argparse.Namespace], int],
) -> None:
    """Add `vault` and `vault status` to the parser."""
    text = "keep the backups of all processes of this host"
    command = new(commands.add_parser, "vault", help=text, description=DESCRIPTION, epilog=EPILOG)
    command.set_defaults(run=run, command="vault", json=False)
    text = "how much host memory to take, as 200GiB (needed to run it)"
    command.add_argument("--memory", type=size, metavar="SIZE", help=text)
    socket_text = "where clients find it (default: $XDG_RUNTIME_DIR/cumem-sleep/vault.sock, or in /tmp without that)"
    command.add_argument("--socket", type=path, metavar="PATH", help=socket_text)
    text = "the GPUs to serve, by CUDA ordinal or UUID, all prepared at the start (default: all, of which the first is)"
    command.add_argument("--gpus", nargs="+", default=[], metavar="GPU", help=text)
    text = "whose links carry copies for other GPUs, over NVLink: those of all GPUs that the vault uses already (auto,"
    text += " default), none (off), or those of these GPUs, by CUDA ordinal or UUID, which it prepares at the start"
    command.add_argument("--relay", nargs="+", default=["auto"], metavar="GPU", help=text)
    text = f"take memory in slabs of this size (default: {format_bytes(DEFAULT_SLAB_BYTES)}, or more with much memory)"
    command.add_argument("--slab-size", type=size, metavar="SIZE", help=text)
    text = "serve Prometheus metrics at http://HOST:PORT/metrics (HOST by default 127.0.0.1; port 0: any that is free)"
    command.add_argument("--metrics", type=_address, metavar="[HOST:]PORT", help=text)
    text = "take the huge pages that the system has reserved (vm.nr_hugepages) first, and other memory after them"
    command.add_argument("--reserved-huge-pages", action="store_true", help=text)
    text = "spill what sleeps longest to files in this folder, when memory runs short; only this user may enter it"
    command.add_argument("--spill", type=path, metavar="DIR", help=text)
    text = "how much the files may hold (needed with --spill)"
    command.add_argument("--spill-size", type=size, metavar="SIZE", help=text)
    text = "spill in the background so that this much memory is free, or can be at once (default: 0)"
    command.add_argument("--spill-free", type=size, metavar="SIZE", help=text)
    text = "when it is told to end while others sleep: hand-over (default): end; they wake from its memory themselves,"
    text += " and the next vault adopts it. wait: end when they have woken; a second signal ends it"
    command.add_argument("--at-exit", choices=("hand-over", "wait"), default="hand-over", help=text)

    subcommands = command.add_subparsers(title="commands", metavar="COMMAND")
    text = "what it holds, and for whom"
    status_command = new(subcommands.add_parser, "status", help=text, description=STATUS_DESCRIPTION)
    status_command.add_argument("--socket", type=path, metavar="PATH", help=socket_text)
    form = status_command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--prometheus", action="store_true", help="print metrics as Prometheus reads them")
    status_command.set_defaults(run=status, command="vault status")


def serve(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Run the vault until a signal ends it.

    Raises:
        InvalidArgument: a size or a GPU is wrong.
        VaultError: another vault serves that socket, or its folder or that of the files is not private.
        DriverError: there is no driver.
    """
    open_driver(Settings.from_environment().driver)
    gpus = visible_gpus(options.gpus)
    used_at_once = gpus if options.gpus else gpus[:1]
    relays = _relays(options.relay, gpus)
    if options.relay != ["auto"]:
        used_at_once = [*used_at_once, *relays]
    total = host_facts.mem_total_bytes()
    if total is not None and options.memory > total:
        raise InvalidArgument(f"memory={options.memory}: this host has {format_bytes(total)}: give the vault less")
    spill = _spill_plan(options)
    threads = host_facts.prefault_threads(_MOST_THREADS)
    path = options.socket or protocol.default_socket()
    with _metrics(options.metrics, path) as metrics:
        address = VaultAddress(path)
        try:
            host = VaultHost(room_bytes, threads, say, options.reserved_huge_pages)
            vault = Vault(address, options.memory, gpus, host, options.slab_size, used_at_once, relays, spill)
        except BaseException:
            address.close()
            raise
        _end_at_signals(vault, wait=options.at_exit == "wait")
        names = ", ".join(f"{gpu.name} {gpu.uuid}" for gpu in gpus)
        say(f"listens at {address.path}; takes {format_bytes(vault.memory_bytes)}; serves {names}")
        say(_said_of_contexts(vault.memory_bytes, used_at_once, gpus))
        if spill is not None:
            how = "" if vault.spills_directly else ", through the page cache, since the filesystem has no direct I/O"
            say(f"spills up to {format_bytes(spill.nbytes)} to files in {spill.folder}{how}")
        if metrics is not None:
            say(f"metrics at {metrics.url}")
        notify_systemd("READY=1")
        keep_pauses_short()
        threading.excepthook = vault.thread_failed
        vault.run()
    say("ends")


def _relays(named: Sequence[str], gpus: Sequence[VaultGpu]) -> Sequence[VaultGpu]:
    """The GPUs whose links help others. Raises InvalidArgument: there is no such GPU, or it is not served."""
    if named in (["auto"], ["off"]):
        return gpus if named == ["auto"] else []
    relays = visible_gpus(named)
    for gpu in relays:
        if gpu not in gpus:
            raise InvalidArgument(f"relay={gpu.uuid!r}: --gpus does not name it")
    return relays


def _spill_plan(options: argparse.Namespace) -> SpillPlan | None:
    """What may be spilled. Raises InvalidArgument: one option needs another."""
    if options.spill is None:
        if options.spill_size is not None or options.spill_free is not None:
            raise InvalidArgument("--spill is missing: --spill-size and --spill-free say how much is spilled there")
        return None
    if options.spill_size is None:
        raise InvalidArgument(
            "--spill-size is missing: it says how much the files may hold, for example --spill-size 500GiB"
        )
    return SpillPlan(options.spill, options.spill_size, options.spill_free or 0)


def _said_of_contexts(memory_bytes: int, used_at_once: Sequence[VaultGpu], gpus: Sequence[VaultGpu]) -> str:
    """What the vault takes of which GPUs."""
    nbytes = _CONTEXT_BYTES + memory_bytes * _CONTEXT_BYTES_PER_GIB // (1 << 30)
    used = dict.fromkeys(gpu.ordinal for gpu in used_at_once)
    said = f"takes about {format_bytes(nbytes)} of GPU {' and '.join(map(str, used))} for a context"
    is_all = len(used) == len(gpus)
    return said if is_all else f"{said}; of each other one when its first client comes, which waits for that"


def _end_at_signals(vault: Vault, wait: bool) -> None:
    """At the first one wait for sleepers, if that is wanted; not at the second one."""
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        vault.stop(wait=wait and not stopped)
        stopped.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _metrics(at: tuple[str, int] | None, path: Path) -> AbstractContextManager[MetricsServer | None]:
    """The server of metrics, if one is wanted. Raises VaultError: somebody else has that port."""
    return nullcontext() if at is None else MetricsServer(*at, lambda: look(path).prometheus())


def _address(text: str) -> tuple[str, int]:
    """`9400` or `0.0.0.0:9400` or `[::1]:9400`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
    if not (host and port.isdecimal() and port.isascii() and int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port from 0 to 65535, such as 9400 or 0.0.0.0:9400")
    return host, int(port)


def room_bytes(committed: Mapping[Path, int]) -> int:
    """How much memory the host has left, by the kernel's estimate and the container's limit.

    Args:
        committed: by others (`core.commitment`).
    """
    return min(left_bytes(committed=committed).values(), default=1 << 62)


def notify_systemd(what: str) -> None:
    """Notify systemd (`Type=notify`); does nothing outside of it."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
        notifier.sendto(what.encode(), "\0" + path[1:] if path.startswith("@") else path)


@dataclass(frozen=True)
class VaultReport:
    """The status that a vault reports; see `Vault.status`."""

    facts: Mapping[str, Any]

    @property
    def simulated(self) -> bool:
        """Whether it uses no GPU."""
        return bool(self.facts["simulated"])

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {name: value for name, value in self.facts.items() if name not in ("version", "simulated")}

    def headline(self) -> str:
        """One line."""
        facts = self.facts
        taken = f"{format_bytes(facts['pinned_bytes'])} of {format_bytes(facts['memory_bytes'])} pinned"
        adopted = f", {format_bytes(facts['adopted_bytes'])} adopted" if facts["adopted_bytes"] else ""
        mark = "simulated: " if self.simulated else ""
        return f"{mark}vault of pid {facts['pid']} at {facts['socket']}: {taken}{adopted}"

    def tables(self) -> list[Table]:
        """Memory, GPUs, clients."""
        memory = _table("memory", "")
        for name in ("asleep", "awake", "free", "left", "shared", "saved", "evicted"):
            memory.add_row(name, format_bytes(self.facts[f"{name}_bytes"]))
        if self.facts["files_bytes"]:
            memory.add_row("in files only", format_bytes(self.facts["spilled_bytes"]))
            memory.add_row("being spilled", format_bytes(self.facts["files_writing_bytes"]))
            memory.add_row("files, free", format_bytes(self.facts["files_free_bytes"]))
            for way in ("written", "read"):
                nbytes, rate = (self.facts[f"files_{way}_{unit}"] for unit in ("bytes", "gbps"))
                memory.add_row(f"files, {way}", f"{format_bytes(nbytes)} {_rate(rate)}".strip())
        for name, noun in (("waiting", "request"), ("refused", "request"), ("cut_off", "client")):
            if self.facts[name]:
                memory.add_row(name.replace("_", " "), counted(self.facts[name], noun))
        has_relayed = any(gpu["relayed_out_bytes"] or gpu["relayed_in_bytes"] for gpu in self.facts["gpus"])
        gpus = _table("GPU", "asleep", "awake", "shared", "last out", "last in", *["relayed"] * has_relayed)
        for gpu in self.facts["gpus"]:
            rates = [_rate(gpu[f"last_{way}_gbps"]) for way in ("out", "in")]
            relayed = [format_bytes(gpu["relayed_out_bytes"] + gpu["relayed_in_bytes"])] * has_relayed
            gpus.add_row(f"{gpu['ordinal']}: {gpu['name']} {gpu['uuid']}", *_held(gpu), *rates, *relayed)
        spills = bool(self.facts["files_bytes"])
        clients = _table("client", "asleep", "awake", "shared", *["in files"] * spills, "GPUs")
        ordinals = {gpu["uuid"]: str(gpu["ordinal"]) for gpu in self.facts["gpus"]}
        for client in self.facts["clients"]:
            name = f"{client['name']} (pid {client['pid'] or 'unknown'})"
            in_files = [format_bytes(client["spilled_bytes"])] * spills
            clients.add_row(name, *_held(client), *in_files, " ".join(ordinals[gpu["uuid"]] for gpu in client["gpus"]))
        return [memory, gpus, clients]

    def conclusion(self) -> str:
        """What is wrong with the vault, or worth knowing."""
        short, failure = self.facts["short"], self.facts["files_failure"]
        said = [f"it cannot take more memory now: {short}"] if short else []
        return "; ".join([*said, f"it could not spill: {failure}"] if failure else said)

    def prometheus(self) -> str:
        """For Prometheus."""
        return prometheus(self.facts)


def status(options: argparse.Namespace) -> VaultReport:
    """What the vault at that socket holds.

    Raises:
        VaultUnavailable: none answers there.
    """
    return look(options.socket)


def look(path: Path | None) -> VaultReport:
    """What the vault at that socket holds, or this user's own.

    Raises:
        VaultUnavailable: none answers there.
    """
    client = VaultClient(path, "vault status")
    try:
        return VaultReport(client.status())
    finally:
        client.close()


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _held(facts: Mapping[str, Any]) -> list[str]:
    return [format_bytes(facts[f"{name}_bytes"]) for name in ("asleep", "awake", "shared")]


def _rate(gbps: float | None) -> str:
    return "" if gbps is None else f"{gbps:.1f} GB/s"
