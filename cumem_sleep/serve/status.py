"""What `serve` says of itself: facts for the page, the metrics and the command line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from ..metrics import Histogram

_Facts = TypeVar("_Facts")


class Phase(str, Enum):
    """Where a model is."""

    STOPPED = "stopped"  # there is no process; a request starts it
    STARTING = "starting"
    AWAKE = "awake"
    DRAINING = "draining"  # awake, lets its running requests end, takes no more
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    STOPPING = "stopping"


SWITCHES = ("sleep", "wake", "start", "stop")
OUTCOMES = ("granted", "not_in_time", "failed", "cancelled")
FOUND = {
    Phase.AWAKE: "awake",
    **dict.fromkeys((Phase.DRAINING, Phase.FALLING_ASLEEP, Phase.ASLEEP, Phase.WAKING), "asleep"),
    **dict.fromkeys((Phase.STOPPING, Phase.STOPPED, Phase.STARTING), "stopped"),
}
"""What a request found its model in, or on the way to or from: how much has to be done before it is answered."""


@dataclass(frozen=True)
class Switch:
    """A sleep, wake, start or stop that ended.

    Attributes:
        kind: as in `SWITCHES`.
        level: of a sleep, and what a wake woke from; None for starts and stops.
        seconds: that it took.
        ended_at: Unix time.
        error: why it failed; None if it did not.
    """

    kind: str
    level: int | None
    seconds: float
    ended_at: float
    error: str | None = None


@dataclass(frozen=True)
class ModelStatus:
    """One model.

    Attributes:
        gpus: that it uses while awake.
        share: how much of each GPU's memory, from 0 to 1.
        level: at which it sleeps; None if it does not.
        phase_since: Unix time.
        waiting: requests that wait for it.
        oldest_wait_s: how long the first of them has waited; 0 without any.
        running: requests that it answers now.
        last_switch: None before the first.
        host_bytes: host memory that it holds by this front's ledger.
        error: why it cannot be had now, or why its last switch failed; None if all is well.
        last_words: of a server that died or did not start; None without any.
        retry_in_s: when that is tried again; None if nothing is to be tried.
        url: of its server, without which it has no process; a Unix socket as `unix:PATH`.
        log: path of its server's log; None if somebody else started it.
        restarts: how often its server died and was started again.
        layer: whether cumem-sleep is in it: its version; "" if not; None if not known yet.
        in_vault: what it holds of the host is memory of the vault.
        kept_bytes: of the host, what it holds beside that: the KV cache that it keeps while it sleeps.
        files_bytes: of what it holds while it sleeps, what the vault has in files only.
        files_s: what reading that takes, at the rate of the disk so far; None where nothing was read yet.
        engine: as in models.yaml. One without sleep mode (`command`) is stopped, and started again.
    """

    name: str
    aliases: tuple[str, ...]
    gpus: tuple[int, ...]
    share: float
    phase: Phase
    level: int | None
    phase_since: float
    waiting: int
    oldest_wait_s: float
    running: int
    last_switch: Switch | None
    host_bytes: int
    error: str | None
    last_words: str | None
    retry_in_s: float | None
    url: str | None
    log: str | None
    pid: int | None
    restarts: int
    layer: str | None
    in_vault: bool = False
    kept_bytes: int = 0
    files_bytes: int = 0
    files_s: float | None = None
    engine: str = "vllm"


@dataclass(frozen=True)
class Holder:
    """A model that holds memory of a GPU, or is about to take or give it."""

    model: str
    share: float
    phase: Phase


@dataclass(frozen=True)
class GpuStatus:
    """One GPU.

    Attributes:
        total_bytes: None where nobody can say, as without `nvidia-smi`.
        used_bytes: by all processes, sleepers' remainders too; None likewise.
        holders: models that are not asleep, in the order of their names. Their shares never exceed 1.
    """

    gpu: int
    name: str
    total_bytes: int | None
    used_bytes: int | None
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class VaultStatus:
    """The memory of `cumem-sleep vault`, as it says itself.

    Attributes:
        memory_bytes: what it may hold.
        to_come_bytes: of these, what it has yet to take from the system.
        asleep_bytes: what sleepers hold, also those of others. Equal bytes count once.
        left_bytes: what can still fall asleep, in memory and in files.
        spilled_bytes: of what sleepers hold, what is in files only.
        files_gbps: the rate at which these were read so far; None where nothing was.
        spilled_by_pid: who has how much of it.
    """

    memory_bytes: int
    to_come_bytes: int
    asleep_bytes: int
    left_bytes: int
    spilled_bytes: int = 0
    files_gbps: float | None = None
    spilled_by_pid: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HostStatus:
    """Host memory.

    Attributes:
        budget_bytes: what sleepers may hold, those in the vault aside.
        held_bytes: what they hold, by the ledger.
        available_bytes: what the system can still give; None if it does not say.
        vault: that models use; None if none does, or none answers.
        kept_bytes: what sleepers keep of their KV cache beside `held_bytes`, and give up first.
    """

    budget_bytes: int
    held_bytes: int
    available_bytes: int | None
    vault: VaultStatus | None = None
    kept_bytes: int = 0


@dataclass(frozen=True)
class FleetStatus:
    """Everything at one moment.

    Attributes:
        at: Unix time.
        simulated: `--demo`: no GPU is used.
        draining: it takes no new requests: an operator wants it empty.
    """

    at: float
    version: str
    simulated: bool
    gpus: tuple[GpuStatus, ...]
    models: tuple[ModelStatus, ...]
    host: HostStatus
    draining: bool = False

    def to_json(self) -> dict[str, Any]:
        """For programs; phases as their words."""
        return asdict(self)

    @staticmethod
    def from_json(found: Any) -> FleetStatus:
        """What `to_json` gave, also of a version that says more, or a little less.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: it is something else.
        """
        models = tuple(
            _made(
                ModelStatus,
                {"url": None, "log": None, "pid": None, "last_words": None} | model,
                aliases=tuple(model["aliases"]),
                gpus=tuple(model["gpus"]),
                phase=Phase(model["phase"]),
                last_switch=_made(Switch, model["last_switch"]) if model["last_switch"] else None,
            )
            for model in found["models"]
        )
        gpus = tuple(
            _made(GpuStatus, gpu, holders=tuple(_made(Holder, h, phase=Phase(h["phase"])) for h in gpu["holders"]))
            for gpu in found["gpus"]
        )
        vault = found["host"]["vault"]
        host = _made(HostStatus, found["host"], vault=_made(VaultStatus, vault) if vault else None)
        return _made(FleetStatus, found, models=models, gpus=gpus, host=host)


def _made(cls: type[_Facts], found: Mapping[str, Any], **more: object) -> _Facts:
    known = {each.name: found[each.name] for each in fields(cls) if each.name in found}  # type: ignore[arg-type]
    return cls(**{**known, **more})


@dataclass
class Counters:
    """What only grows, for the metrics.

    Attributes:
        switches: by model, kind (as in `SWITCHES`) and result (`ok`, `failed`).
        switch_seconds: by model and kind.
        waited_seconds: what requests waited in all, by model and cause: `start`, `wake`, `room` (others were drained
            or put to sleep), `turn` (others were first), `failure` (backoff after a failed switch).
        requests: by model and outcome, as in `OUTCOMES`.
        actuation: of requests that were granted, by model and by what they found, as in `FOUND`.
        first_token: of answers that were streamed, likewise.
    """

    switches: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    switch_seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    waited_seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    actuation: defaultdict[tuple[str, str], Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    first_token: defaultdict[tuple[str, str], Histogram] = field(default_factory=lambda: defaultdict(Histogram))
