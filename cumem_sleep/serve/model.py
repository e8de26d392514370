"""What the scheduler knows of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from .policy import Spec, Use
from .status import Phase

CHANGING = frozenset((Phase.STARTING, Phase.WAKING, Phase.FALLING_ASLEEP, Phase.STOPPING))


class KeptState(Enum):
    """What becomes of the KV cache that a sleeper keeps."""

    EXPENDABLE = "it may be given up"
    LEAVING = "its server is being told to give it up"
    STAYS = "its server was told to, and is not told again"


@dataclass
class Model:
    """What is known of a model.

    Attributes:
        level: at which it sleeps, or is about to.
        changes_asleep: it goes deeper, or its server is being stopped, without having woken.
        cannot_go_deeper: it would go no deeper than it sleeps now, and is not asked again before it has woken.
        has_layer: so that it need not wake to get from level 1 to 3.
        in_vault: what it holds of the host is memory of the vault.
        waiting: requests in the order of their arrival, with the time and the number of it.
        running: requests that were granted.
        operation: the number of the change that is under way.
        last_used: when a request last ran or, before the first one, when it woke.
        draining_since: when it began to let its requests end.
        revoked_at: when those that did not were told to.
        started_at: when its server became ready.
        deaths: consecutive ones of its server, in quick succession.
        retry_at: a change that failed is not tried again before.
        failures: in a row, of starts and wakes or of sleeps.
        refused: depths at which it cannot sleep for now, until it has slept once.
        held_bytes: host memory that its backups take, also while it is awake again.
        kept_bytes: host memory of the KV cache that it keeps while it sleeps.
        kept: what becomes of that.
        starts_unasked: it is to be started (and put to sleep) although nobody waits for it.
        sleeps_once_started: it was started without a request, and is to sleep at once.
        order: a depth that an operator wants.
        successor: what replaces `spec` when it has stopped. With `removed`, nothing does.
        cause: what its waiting requests wait for.
    """

    spec: Spec
    phase: Phase = Phase.STOPPED
    level: int | None = None
    changes_asleep: bool = False
    cannot_go_deeper: bool = False
    has_layer: bool = False
    in_vault: bool = False
    phase_since: float = 0.0
    waiting: dict[int, tuple[float, int]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    operation: int = 0
    awake_since: float = 0.0
    last_used: float = 0.0
    draining_since: float | None = None
    revoked_at: float | None = None
    started_at: float = 0.0
    deaths: int = 0
    retry_at: float = 0.0
    failures: int = 0
    error: str | None = None
    refused: set[int] = field(default_factory=set)
    held_bytes: int = 0
    kept_bytes: int = 0
    kept: KeptState = KeptState.EXPENDABLE
    starts_unasked: bool = False
    sleeps_once_started: bool = False
    order: int | None = None
    successor: Spec | None = None
    removed: bool = False
    cause: str = ""
    cause_since: float = 0.0
    caused_s: dict[str, float] = field(default_factory=dict)

    @property
    def oldest(self) -> float:
        """When the request arrived that has waited longest; infinite without any."""
        return next(iter(self.waiting.values()), (math.inf, 0))[0]

    @property
    def queue_position(self) -> int:
        """In the queue of models: the arrival number of the oldest waiting request."""
        return next(iter(self.waiting.values()))[1]

    @property
    def use(self) -> Use:
        """For the policy."""
        may_give_up = self.phase is Phase.ASLEEP and not self.in_vault and self.kept is KeptState.EXPENDABLE
        kept_bytes = self.kept_bytes if may_give_up else 0  # a vault gives it up by itself
        return Use(self.spec, not self.running, self.last_used, self.awake_since, kept_bytes)

    @property
    def holds(self) -> bool:
        """Whether it holds its GPUs' memory, or may."""
        return self.phase not in (Phase.STOPPED, Phase.ASLEEP) and not self.changes_asleep

    @property
    def is_up(self) -> bool:
        """Awake, whether it takes new requests or not."""
        return self.phase in (Phase.AWAKE, Phase.DRAINING)

    @property
    def must_leave(self) -> bool:
        """It sleeps or stops as soon as its requests have ended, whether or not anybody wants its GPUs."""
        return self.order is not None or self.successor is not None or self.removed
