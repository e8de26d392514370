"""The command `cumem-sleep vault`: runs the vault, or shows what one holds."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.table import Table

from ..backups import limits
from ..driver import open_driver
from ..errors import format_bytes
from ..settings import Settings
from ..vault import protocol
from ..vault.address import Address
from ..vault.client import VaultClient
from ..vault.pool import DEFAULT_SLAB_BYTES, Host
from ..vault.server import Vault, visible_gpus

_MOST_THREADS = 16  # that touch memory: more of them do not touch it faster

DESCRIPTION = """\
One process that owns this host's pinned memory and keeps the backups of all others. They
then pin nothing themselves, and equal bytes are kept once.

It takes its memory in the background, and serves at once with what is there. It uses a GPU
from a client's first copy on; the first GPU, at once. It ends with SIGTERM or Ctrl-C."""

EPILOG = """\
examples:
  cumem-sleep vault --memory 200GiB
  cumem-sleep vault --memory 64GiB --gpus 0 1 --socket /run/models/vault.sock
  cumem-sleep vault status
  cumem-sleep vault status --json | jq '.clients[].asleep_bytes'
  cumem-sleep vault status --prometheus"""

STATUS_DESCRIPTION = """\
Shows the memory of the vault, its GPUs, and its clients. "asleep" is what segments that sleep
need; "awake" are retained backups of segments that are awake, which go when memory is short."""


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
    text = "the GPUs to serve, by CUDA ordinal or UUID (default: all)"
    command.add_argument("--gpus", nargs="+", default=[], metavar="GPU", help=text)
    text = f"take memory in slabs of this size (default: {format_bytes(DEFAULT_SLAB_BYTES)}, or more with much memory)"
    command.add_argument("--slab-size", type=size, metavar="SIZE", help=text)
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
        VaultError: another vault serves that socket, or its folder is not private.
        InvalidArgument: a size or a GPU is wrong.
        DriverError: there is no driver.
    """

    def tell(line: str) -> None:
        try:
            say(line)
        except OSError:  # whoever read this has gone; the clients have not
            _write_to_nobody()

    open_driver(Settings.from_environment().driver)
    gpus = visible_gpus(options.gpus)
    threads = min(_MOST_THREADS, max(1, limits.usable_cores() * 3 // 4))
    address = Address(options.socket or protocol.default_socket())
    try:
        vault = Vault(address, options.memory, gpus, Host(room_bytes, threads, tell), options.slab_size)
    except BaseException:
        address.close()
        raise

    def stop(number: int, _frame: FrameType | None) -> None:
        vault.stop(wait=options.at_exit == "wait" and not stopped)
        stopped.append(number)

    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    names = ", ".join(f"{gpu.name} {gpu.uuid}" for gpu in gpus)
    tell(f"listens at {address.path}; takes {format_bytes(vault.memory_bytes)}; serves {names}")
    notify_systemd("READY=1")
    vault.run()
    tell("ends")


def _write_to_nobody() -> None:
    """Standard error leads nowhere from now on: else the exit would write again what could not be written, and fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def room_bytes() -> int:
    """What the host can still give, by the kernel's estimate and the container's limit."""
    limited = [limits.mem_available_bytes(), limits.cgroup_available_bytes()]
    return min((each for each in limited if each is not None), default=1 << 62)


def notify_systemd(what: str) -> None:
    """Tell the service manager, as `Type=notify` wants it; does nothing outside of systemd."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
        notifier.sendto(what.encode(), "\0" + path[1:] if path.startswith("@") else path)


@dataclass(frozen=True)
class Status:
    """What a vault says of itself; see `Vault.status`."""

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
        for name in ("asleep", "awake", "free", "shared", "saved", "evicted"):
            memory.add_row(name, format_bytes(self.facts[f"{name}_bytes"]))
        gpus = _table("GPU", "asleep", "awake", "out", "in")
        for gpu in self.facts["gpus"]:
            rates = [_rate(gpu[f"copied_{way}_bytes"], gpu[f"{way}_gbps"]) for way in ("out", "in")]
            name = f"{gpu['name']} {gpu['uuid']}"
            gpus.add_row(name, format_bytes(gpu["asleep_bytes"]), format_bytes(gpu["awake_bytes"]), *rates)
        clients = _table("client", "asleep", "awake", "shared")
        for client in self.facts["clients"]:
            held = [format_bytes(client[f"{name}_bytes"]) for name in ("asleep", "awake", "shared")]
            clients.add_row(f"{client['name']} (pid {client['pid'] or 'unknown'})", *held)
        return [memory, gpus, clients]

    def conclusion(self) -> str:
        """What is not as it should be, or what there is to know."""
        short = self.facts["short"]
        return f"it cannot take more memory now: {short}" if short else ""

    def prometheus(self) -> str:
        """As Prometheus reads it (text format 0.0.4)."""
        lines: list[str] = []
        for name, kind, text in _METRICS:
            value = self.facts[name]
            lines += _metric(f"cumem_sleep_vault_{name}", kind, text, [({}, value)])
        for name, kind, text in _GPU_METRICS:
            samples = [({"gpu": gpu["uuid"]}, gpu[name]) for gpu in self.facts["gpus"]]
            lines += _metric(f"cumem_sleep_vault_gpu_{name}", kind, text, samples)
        clients = self.facts["clients"]
        lines += _metric("cumem_sleep_vault_clients", "gauge", "clients that are connected", [({}, len(clients))])
        for name, kind, text in _CLIENT_METRICS:
            samples = [({"pid": str(each["pid"]), "name": each["name"]}, each[name]) for each in clients]
            lines += _metric(f"cumem_sleep_vault_client_{name}", kind, text, samples)
        return "\n".join(lines) + "\n"


def status(options: argparse.Namespace) -> Status:
    """What the vault at that socket holds.

    Raises:
        VaultUnavailable: none answers there.
    """
    client = VaultClient(options.socket, "vault status")
    try:
        return Status(client.status())
    finally:
        client.close()


_METRICS = (
    ("memory_bytes", "gauge", "what the vault may hold"),
    ("pinned_bytes", "gauge", "what it has taken and pinned"),
    ("adopted_bytes", "gauge", "what it has adopted from another vault"),
    ("free_bytes", "gauge", "pinned, and no backup in it"),
    ("asleep_bytes", "gauge", "backups of segments that sleep"),
    ("awake_bytes", "gauge", "retained backups of segments that are awake"),
    ("shared_bytes", "gauge", "backups that several processes share"),
    ("saved_bytes", "gauge", "what sharing saves"),
    ("evicted_bytes", "counter", "retained backups that had to go"),
    ("refused", "counter", "requests that were refused"),
    ("cut_off", "counter", "clients that were cut off"),
)
_GPU_METRICS = (
    ("asleep_bytes", "gauge", "backups of segments of this GPU that sleep"),
    ("awake_bytes", "gauge", "retained backups of segments of this GPU that are awake"),
    ("copied_out_bytes", "counter", "copied from the GPU"),
    ("copied_in_bytes", "counter", "copied to the GPU"),
    ("busy_out_s", "counter", "seconds in which copies from the GPU were in flight"),
    ("busy_in_s", "counter", "seconds in which copies to the GPU were in flight"),
)
_CLIENT_METRICS = (
    ("asleep_bytes", "gauge", "backups of the client's segments that sleep"),
    ("awake_bytes", "gauge", "retained backups of the client's segments that are awake"),
    ("shared_bytes", "gauge", "how much of both others have, too"),
)


def _metric(name: str, kind: str, text: str, samples: list[tuple[dict[str, str], Any]]) -> list[str]:
    name += "_total" if kind == "counter" else ""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        said = ",".join(f'{label}="{_escaped(each)}"' for label, each in labels.items())
        lines.append(f"{name}{{{said}}} {value}" if said else f"{name} {value}")
    return lines


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _rate(nbytes: int, gbps: float | None) -> str:
    return format_bytes(nbytes) + (f", {gbps:.1f} GB/s" if gbps is not None else "")
