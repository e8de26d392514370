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
from ..core.driver import open_driver
from ..errors import InvalidArgument, counted, format_bytes
from ..settings import Settings
from ..vault import protocol
from ..vault.address import VaultAddress
from ..vault.client import VaultClient
from ..vault.pool import VaultHost
from ..vault.server import Vault, keep_pauses_short, visible_gpus
from ..vault.service import VaultGpu
from ..vault.spill import SpillPlan
from .vault_metrics import MetricsServer, prometheus

# Of a GPU, measured on H200s (docs/vault.md): a bare context, and what maps each pinned GiB there.
_CONTEXT_BYTES, _CONTEXT_BYTES_PER_GIB = 512 << 20, 2 << 20
_MOST_THREADS = 16  # threads that prefault memory; more are not faster


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
            host = VaultHost(threads, say, options.reserved_huge_pages)
            vault = Vault(
                address,
                options.memory,
                gpus,
                host,
                options.slab_size,
                used_at_once,
                relays,
                spill,
                options.keep_weights,
            )
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
        mark = "simulated: " if self.simulated else ""
        return f"{mark}vault of pid {facts['pid']} at {facts['socket']}: {taken}"

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
        if not self.facts["keep_bytes"]:
            return [memory, gpus, clients]
        memory.add_row("under names", format_bytes(self.facts["kept_bytes"]))
        memory.add_row("under names, at most", format_bytes(self.facts["keep_bytes"]))
        kept = _table("kept under a name", "bytes")
        for each in self.facts["kept"]:
            kept.add_row(each["name"], format_bytes(each["bytes"]))
        return [memory, gpus, clients, kept]

    def conclusion(self) -> str:
        """What is wrong with the vault, or worth knowing."""
        short, failure = self.facts["short"], self.facts["files_failure"]
        said = [f"it cannot take more memory now: {short}"] if short else []
        return "; ".join([*said, f"it could not spill: {failure}"] if failure else said)

    def prometheus(self) -> str:
        """For Prometheus."""
        return prometheus(self.facts)


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


def forget(path: Path | None, name: str) -> None:
    """Have the vault at that socket keep no longer what has this name.

    Raises:
        VaultUnavailable: none answers there.
        InvalidArgument: nothing has.
    """
    client = VaultClient(path, "vault forget")
    try:
        if not client.drop(name):
            raise InvalidArgument(f"name={name!r}: the vault keeps nothing under it: see `cumem-sleep vault status`")
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
