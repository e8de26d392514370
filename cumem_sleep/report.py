"""What sleep, wake and usage report: frozen facts whose `str` is the log line."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from .errors import format_bytes


class PhaseTimer:
    """Adds up the seconds spent in named phases, in the order in which they first ended.

    What a phase inside another one takes counts for the inner one only.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._inner_s = 0.0
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what runs inside as part of `phase`."""
        start, before_s = time.perf_counter(), self._inner_s
        self._inner_s = 0.0
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - start
            self.phases[phase] = self.phases.get(phase, 0.0) + elapsed_s - self._inner_s
            self._inner_s = before_s + elapsed_s

    @property
    def seconds(self) -> float:
        """Since the timer was made."""
        return time.perf_counter() - self._start


def rate_gbps(nbytes: int, seconds: float) -> float:
    """10⁹ bytes per second; 0 where nothing was measured."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


@dataclass(frozen=True)
class BackupPlace:
    """Where the backups of this process lie.

    Attributes:
        vault: the socket of the vault that keeps them; "" if they lie in pinned memory of this process.
        lost: why that vault cannot be asked any more, or "". This process then reads its backups itself.
        relays: UUIDs of other GPUs whose links have carried copies of the last operation that had any.
    """

    vault: str = ""
    lost: str = ""
    relays: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.vault:
            return "memory of this process"
        if self.lost:
            return f"memory of the vault at {self.vault}, which is lost"
        return f"the vault at {self.vault}" + (f", over {1 + len(self.relays)} links" if self.relays else "")


@dataclass(frozen=True)
class SleepReport:
    """What one sleep did. Bytes are whole segments; seconds are wall clock.

    Attributes:
        freed_bytes: device memory that was given back. Not what a stopped vault has still, since that is not free; but
            what any other process maps still (`held_elsewhere` of `left`).
        copied_bytes: copied to backups in host memory by this call.
        clean_bytes: unchanged since their backup, so not copied.
        found_bytes: of these, what the vault already held, as a rule for another process, so it was not copied here.
        dropped_bytes: released without a backup; the bytes are gone.
        kept_bytes: what is kept of dropped memory, because `keep` named it. What is backed up comes back anyway.
        not_kept: why nothing of that is kept, if it is not.
        stored_bytes: what the copied bytes take in host memory; less than copied_bytes if they are compressed.
        left_bytes: what is still in use afterwards on the devices concerned, by this process (the CUDA context,
            graphs, buffers of NCCL, memory of no pool) and by others; 0 where nothing was done, or nobody asked.
        left: about how `left_bytes` is made up, by name; empty if all of it is others'. `awake`: memory of this layer.
            `held_elsewhere`: of `freed_bytes`, what did not become free, because another process maps what was exported
            to it; at most that, since others may also have allocated meanwhile. `rest`: all else.
        checkpointed_bytes: at level 3, of the CUDA state of this process that left its devices as well.
        why_not_deeper: why a sleep at level 3 stayed at level 1, if it did.
        seconds: the whole call.
        phases: seconds by phase; `agree` is with the other ranks, until the last of them was ready; `keep` digests and
            copies what is kept of dropped memory; `lock` and `checkpoint` take the CUDA state off the GPU.
        note: why nothing was done, if nothing was.
        simulated: it ran on the simulated driver, so the seconds mean nothing.
        operation: `sleep`, or `discard`.
        place: where backups lie.
    """

    freed_bytes: int = 0
    copied_bytes: int = 0
    clean_bytes: int = 0
    found_bytes: int = 0
    dropped_bytes: int = 0
    kept_bytes: int = 0
    not_kept: str = ""
    stored_bytes: int = 0
    left_bytes: int = 0
    left: Mapping[str, int] = field(default_factory=dict)
    checkpointed_bytes: int = 0
    why_not_deeper: str = ""
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    simulated: bool = False
    operation: str = "sleep"
    place: BackupPlace = BackupPlace()

    def __str__(self) -> str:
        if self.note:
            return f"{_prefix(self.simulated)}{self.operation}: {self.note}"
        found = f", of which {format_bytes(self.found_bytes)} found in the vault" if self.found_bytes else ""
        taken = f", checkpointed {format_bytes(self.checkpointed_bytes)}" if self.checkpointed_bytes else ""
        stayed = f", stays at level 1: {self.why_not_deeper}" if self.why_not_deeper else ""
        left = f", {format_bytes(self.left_bytes)} left on the GPU{_items(self.left)}" if self.left_bytes else ""
        return (
            f"{_prefix(self.simulated)}{self.operation}: freed {format_bytes(self.freed_bytes)} in {self.seconds:.3f} s"
            f" (copied {format_bytes(self.copied_bytes)}{_rate(self.copied_bytes, self.phases)}"
            f"{_stored('as', self.stored_bytes, self.copied_bytes)},"
            f" unchanged {format_bytes(self.clean_bytes)}{found},"
            f" dropped {format_bytes(self.dropped_bytes)}{_kept(self.kept_bytes, self.not_kept)})"
            f"{_in(self.place, self.copied_bytes + self.clean_bytes)}{taken}{stayed}{left}{_phases(self.phases)}"
        )


@dataclass(frozen=True)
class WakeReport:
    """What one wake did. Bytes are whole segments; seconds are wall clock.

    Attributes:
        mapped_bytes: device memory that was taken again.
        restored_bytes: of these, copied back from backups.
        verified_bytes: of these, proven equal to the bytes at sleep by their digest.
        kept_bytes: what came back of dropped memory, because the sleep kept it, proven like the rest.
        not_kept: why nothing of that came back, although it was to be kept.
        stored_bytes: what the restored bytes take in host memory; less than restored_bytes if they are compressed.
        seconds: the whole call.
        phases: seconds by phase: `restore` and `unlock` (from level 3), `copy` (with mapping and digests beside it),
            `map` (what was left to map after that), `verify` (what was left of the digests), `keep` (what was kept of
            dropped memory, with its digests), `agree` (with the other ranks, until the last of them was ready).
        note: why nothing was done, if nothing was.
        simulated: it ran on the simulated driver, so the seconds mean nothing.
        operation: `wake`.
        place: where backups lie.
    """

    mapped_bytes: int = 0
    restored_bytes: int = 0
    verified_bytes: int = 0
    kept_bytes: int = 0
    not_kept: str = ""
    stored_bytes: int = 0
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    simulated: bool = False
    operation: str = "wake"
    place: BackupPlace = BackupPlace()

    def __str__(self) -> str:
        if self.note:
            return f"{_prefix(self.simulated)}wake: {self.note}"
        return (
            f"{_prefix(self.simulated)}wake: mapped {format_bytes(self.mapped_bytes)} in {self.seconds:.3f} s"
            f" (restored {format_bytes(self.restored_bytes)}{_rate(self.restored_bytes, self.phases)}"
            f"{_stored('from', self.stored_bytes, self.restored_bytes)}, verified {format_bytes(self.verified_bytes)}"
            f"{_kept(self.kept_bytes, self.not_kept)})"
            f"{_in(self.place, self.restored_bytes)}{_phases(self.phases)}"
        )


@dataclass(frozen=True)
class TagUsage:
    """What the segments of one tag hold.

    Attributes:
        segments: how many there are.
        bytes: their total size, mapped or not.
        mapped_bytes: how much of that is backed by physical device memory.
        host_bytes: host memory held by their backups; less than what they back up, if they are compressed.
        vault_bytes: of these, what the vault holds; the rest is this process's own memory, pinned but at level 3.
        shared_bytes: of these, what other processes share; each of them counts it. 0 while no vault answers.
        kept_bytes: of `host_bytes`, what is kept of dropped memory (`sleep(keep=...)`).
        asleep_segments: how many sleep.
        backed_up_bytes: their bytes that have a complete backup, awake or asleep (`prepare` makes this grow).
    """

    segments: int = 0
    bytes: int = 0
    mapped_bytes: int = 0
    host_bytes: int = 0
    vault_bytes: int = 0
    shared_bytes: int = 0
    kept_bytes: int = 0
    asleep_segments: int = 0
    backed_up_bytes: int = 0


@dataclass(frozen=True)
class OperationTotals:
    """All calls of one operation (`sleep`, `wake`, `discard`) so far, except those that had nothing to do.

    Attributes:
        count: how many calls succeeded.
        failures: how many calls raised, and left everything as it was.
        seconds: the total time of those that succeeded.
        phases: their seconds by phase.
        bytes: by what was done: `freed`, `copied`, `clean`, `found`, `dropped` or `mapped`, `restored`, `verified`;
            `kept`; and `stored`, what the copied or restored bytes take in host memory.
    """

    count: int = 0
    failures: int = 0
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)

    def plus(self, report: SleepReport | WakeReport) -> OperationTotals:
        """These totals plus one more report."""
        names = (
            ("freed", "copied", "clean", "found", "dropped", "kept", "stored")
            if isinstance(report, SleepReport)
            else ("mapped", "restored", "verified", "kept", "stored")
        )
        return replace(
            self,
            count=self.count + 1,
            seconds=self.seconds + report.seconds,
            phases={
                phase: self.phases.get(phase, 0.0) + report.phases.get(phase, 0.0)
                for phase in {**self.phases, **report.phases}
            },
            bytes={name: self.bytes.get(name, 0) + getattr(report, f"{name}_bytes") for name in names},
        )


def _prefix(simulated: bool) -> str:
    return "[simulated] " if simulated else ""


def _rate(nbytes: int, phases: Mapping[str, float]) -> str:
    return f" at {rate_gbps(nbytes, phases.get('copy', 0.0)):.1f} GB/s" if nbytes else ""


def _stored(preposition: str, stored_bytes: int, nbytes: int) -> str:
    if not 0 < stored_bytes < nbytes:
        return ""
    return f" {preposition} {format_bytes(stored_bytes)}, {stored_bytes / nbytes:.3f} of it"


_LEFT = {
    "awake": "{} awake",
    "held_elsewhere": "up to {} freed here and still held elsewhere",
    "rest": "{} the rest",
}


def _items(left: Mapping[str, int]) -> str:
    items = [words.format(format_bytes(left[name])) for name, words in _LEFT.items() if left.get(name)]
    return f" (about {', '.join(items)})" if items else ""


def _kept(nbytes: int, why_not: str) -> str:
    if why_not:
        return f", nothing kept: {why_not}"
    return f", kept {format_bytes(nbytes)}" if nbytes else ""


def _in(place: BackupPlace, nbytes: int) -> str:
    return f", backups in {place}" if place.vault and nbytes else ""


def _phases(phases: Mapping[str, float]) -> str:
    return "; " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items()) if phases else ""
