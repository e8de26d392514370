"""Which model is awake, starts, sleeps or waits: a state machine. No I/O, no clock, no asyncio.

So what must never happen, such as a request on a model that sleeps, does not depend on how tasks interleave.
Events go in with their time, actions come out; `next_time` says when `TimePassed` is wanted. What may be decided in
more than one way is decided in `policy`.

    actions = scheduler.handle(events.Arrived(1, "qwen-8b", deadline=300.0), now=0.0)  # [actions.Wake("qwen-8b", ...)]
    actions = scheduler.handle(events.Done("qwen-8b", operation=1), now=0.5)           # [actions.Grant(1)]
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from . import actions, events, policy
from .model import CHANGING, KeptState, Model
from .policy import OF_LAYER, STOP, Spec
from .status import Phase


class Scheduler:
    """See the module."""

    def __init__(self, specs: Iterable[Spec], host_bytes: int, now: float = 0.0) -> None:
        """`host_bytes`: what sleepers may hold, those in the vault aside."""
        self.host_bytes = host_bytes
        self.models: dict[str, Model] = {}
        self._model_of: dict[int, Model] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._operations = self._arrivals = 0
        self._actions: list[actions.Action] = []
        self._now = now
        for spec in specs:
            self._add(spec)

    def handle(self, event: events.FrontEvent, now: float) -> Sequence[actions.Action]:
        """What is to be done after an event. Times never go back."""
        self._now = max(now, self._now)
        self._actions = []
        self._take(event)
        self._refuse_late()
        self._plan()
        if isinstance(event, events.Arrived) and self._waits(event.request):
            heapq.heappush(self._deadlines, (event.deadline, event.request))
            self._refuse_late()  # it may wait for no time at all
        self._give_up_kept(
            self.held_bytes() + self.kept_bytes() - self.host_bytes, "sleepers hold all of `host_memory`"
        )
        return self._actions

    def next_time(self) -> float:
        """When `TimePassed` is to come, if nothing else does before; infinite for never."""
        return min((time for time in self._times() if time > self._now), default=math.inf)

    def free_share(self, gpu: int) -> float:
        """How much of a GPU's memory nobody holds."""
        return 1.0 - sum(model.spec.share for model in self._holders((gpu,)))

    def held_bytes(self) -> int:
        """Host memory that models hold by the ledger, those in the vault aside."""
        return sum(model.held_bytes for model in self.models.values() if not model.in_vault)

    def kept_bytes(self) -> int:
        """What sleepers keep of their KV cache beside that, and are not giving up, those in the vault aside."""
        kept = (model for model in self.models.values() if not model.in_vault and model.kept is not KeptState.LEAVING)
        return sum(model.kept_bytes for model in kept)

    def waited_s(self, model: Model, now: float) -> dict[str, float]:
        """For how long requests of a model have had to wait until now, by cause, if they waited all the time."""
        self._now = max(now, self._now)
        self._blame(model, model.cause)
        return dict(model.caused_s)

    # Events

    def _take(self, event: events.FrontEvent) -> None:
        match event:
            case events.Arrived():
                self._arrived(event)
            case events.Gone():
                self._gone(event.request)
            case events.Done():
                self._done(event)
            case events.Found():
                self._found(event)
            case events.Died():
                self._died(self.models[event.model], event.error)
            case events.Ordered():
                self._ordered(self.models[event.model], event.depth)
            case events.KeptBytes():
                self._kept(event)
            case events.LacksHostMemory():
                if not self.models[event.model].in_vault:
                    self._give_up_kept(1, f"{event.model} lacks host memory to fall asleep")
            case events.HasLayer():
                model = self.models[event.model]
                model.has_layer, model.in_vault = event.has_layer, event.in_vault
                if event.host_bytes is not None:
                    model.spec = replace(model.spec, host_bytes=event.host_bytes)
                    model.held_bytes = min(model.held_bytes, event.host_bytes)
            case events.Configured():
                self._configured(event)
            case events.TimePassed():
                pass

    def _add(self, spec: Spec) -> None:
        self.models[spec.name] = Model(spec, phase_since=self._now, starts_unasked=spec.at_start != "stopped")

    def _arrived(self, event: events.Arrived) -> None:
        model = self.models[event.model]
        if model.removed:
            return self._do(actions.Refuse(event.request, "the model is being removed", 60.0))
        if self._is_hopeless(model):
            return self._do(
                actions.Refuse(event.request, model.error or "it fails", model.retry_at - self._now, failed=True)
            )
        self._model_of[event.request] = model
        self._arrivals += 1
        model.waiting[event.request] = (self._now, self._arrivals)
        return None

    def _gone(self, request: int) -> None:
        model = self._model_of.pop(request, None)
        if model is None:
            return
        model.waiting.pop(request, None)
        if request in model.running:
            model.running.remove(request)
            model.last_used = self._now

    def _refuse_late(self) -> None:
        while self._deadlines:
            deadline, request = self._deadlines[0]
            if self._waits(request):
                if deadline > self._now:
                    return
                model = self._model_of[request]
                self._refuse(model, request, f"the model is {model.phase.value}, and did not become available in time")
            heapq.heappop(self._deadlines)

    def _waits(self, request: int) -> bool:
        return request in self._model_of and request in self._model_of[request].waiting

    def _refuse(self, model: Model, request: int, why: str, *, failed: bool = False) -> None:
        del self._model_of[request], model.waiting[request]
        why += f" ({model.error})" if model.error and not failed else ""
        after_s = max(1.0, model.retry_at - self._now)
        self._do(actions.Refuse(request, why, after_s, failed))

    def _is_hopeless(self, model: Model) -> bool:
        """Whether starting or waking it has failed so often that nobody is kept waiting for the next attempt."""
        has_failed = model.failures >= policy.ATTEMPTS and self._now < model.retry_at
        return has_failed and model.phase in (Phase.STOPPED, Phase.ASLEEP)

    def _ordered(self, model: Model, depth: int) -> None:
        if depth == STOP and not model.spec.owned:
            return self._do(actions.Obeyed(model.spec.name, depth, "its server was started by somebody else"))
        if model.phase is Phase.STOPPED or (model.phase is Phase.ASLEEP and (model.level or 0) >= depth):
            return self._do(actions.Obeyed(model.spec.name, depth))
        if model.order not in (None, depth):
            self._obey(model, "another order came")
        model.order = depth
        return None

    def _configured(self, event: events.Configured) -> None:
        self.host_bytes = event.host_bytes
        specs = {spec.name: spec for spec in event.specs}
        for name, spec in specs.items():
            model = self.models.get(name)
            if model is None:
                self._add(spec)
            elif model.spec.identity == spec.identity and not model.removed:
                model.spec = replace(spec, host_bytes=spec.host_bytes or model.spec.host_bytes)
                model.successor = None
            else:
                model.successor, model.removed = spec, False
        for name, model in self.models.items():
            if name not in specs:
                model.removed, model.successor = True, None
                for request in list(model.waiting):
                    self._refuse(model, request, "the model was removed")

    def _kept(self, event: events.KeptBytes) -> None:
        model = self.models.get(event.model)
        if model is None or model.level is None:
            return
        model.kept_bytes = event.kept_bytes
        if event.was_told and model.kept is KeptState.LEAVING:  # not of a sleep before this one
            model.kept = KeptState.STAYS

    def _found(self, event: events.Found) -> None:
        model = self.models.get(event.model)
        if model is None:
            return
        if event.state is Phase.ASLEEP and model.is_up:
            for request in model.running:
                self._do(actions.Revoke(request, "somebody else put the model to sleep"))
            model.refused.clear()
            model.failures, model.error = 0, None
            self._become_asleep(model, event.level or 1)
        elif event.state is Phase.AWAKE and model.phase is Phase.ASLEEP:
            model.failures, model.error = 0, None
            self._become_awake(model)
            model.awake_since = model.last_used = self._now

    def _died(self, model: Model, error: str) -> None:
        for request in model.running:
            self._do(actions.Revoke(request, error))
        has_run_long = self._now - model.started_at > policy.LONGEST_PAUSE_S
        model.deaths = 1 if has_run_long else model.deaths + 1
        model.failures = max(model.failures, model.deaths - 1)  # starts that succeed do not end the pauses
        self._failed(model, error)
        model.operation = 0
        model.starts_unasked = model.spec.at_start != "stopped" and not model.must_leave
        self._become_stopped(model)

    # Changes that have ended

    def _done(self, event: events.Done) -> None:
        model = self.models.get(event.model)
        if model is None or event.operation != model.operation:
            return
        model.operation = 0
        outcome = event.outcome
        if outcome.error is None:
            self._succeeded(model, outcome)
        elif model.phase is Phase.FALLING_ASLEEP:
            self._sleep_failed(model, outcome, outcome.error)
        else:
            self._failed(model, outcome.error)
            self._settle_failed(model, outcome)

    def _succeeded(self, model: Model, outcome: events.Outcome) -> None:
        if model.phase is Phase.STOPPING or outcome.state is Phase.STOPPED:
            return self._become_stopped(model)
        if model.phase is Phase.FALLING_ASLEEP or outcome.state is Phase.ASLEEP:
            if model.phase is Phase.FALLING_ASLEEP:
                model.refused.clear()
                model.failures, model.error = 0, None
            self._become_asleep(model, outcome.level or model.level or 1)
            if outcome.why_not_deeper:
                model.cannot_go_deeper, model.error = True, outcome.why_not_deeper
                self._obey(model, outcome.why_not_deeper)
            return None
        model.failures, model.error = 0, None
        if model.phase is Phase.STARTING:
            model.started_at = self._now
        is_unasked = model.phase is Phase.STARTING and not model.waiting and model.spec.at_start != "awake"
        can_sleep = any(depth != STOP for depth in model.spec.levels)
        model.sleeps_once_started = is_unasked and model.spec.owned and can_sleep
        model.starts_unasked = False
        self._become_awake(model)
        model.awake_since = model.last_used = self._now
        return None

    def _sleep_failed(self, model: Model, outcome: events.Outcome, error: str) -> None:
        depth = model.level or 1
        if outcome.state is Phase.ASLEEP:  # it had slept already, and could not go deeper
            self._failed(model, error)
            self._become_asleep(model, outcome.level or depth)
            return self._obey(model, error)
        if outcome.lacks_host_memory and outcome.state is Phase.AWAKE:
            model.refused.add(depth)
            model.error = error
        else:
            self._failed(model, error)
            if model.failures >= policy.ATTEMPTS:
                model.refused.add(depth)
        if outcome.state is Phase.AWAKE:
            self._become_awake(model)
        else:
            self._settle_failed(model, outcome)
        if not outcome.lacks_host_memory:
            self._obey(model, error)
        return None

    def _settle_failed(self, model: Model, outcome: events.Outcome) -> None:
        """Where a change that failed has left the model. If that is unknown, stop or probe its server."""
        is_hopeless = model.failures >= policy.ATTEMPTS
        may_restart = model.spec.owned and model.phase is not Phase.STARTING
        if outcome.state is Phase.AWAKE:
            self._become_awake(model)
        elif outcome.state is Phase.ASLEEP and not (is_hopeless and may_restart):
            self._become_asleep(model, outcome.level or model.level or 1)
        elif outcome.state is Phase.STOPPED:
            self._become_stopped(model)
        elif model.spec.owned:
            model.retry_at = self._now if may_restart else model.retry_at
            self._begin_stop(model)
        else:  # it may be awake, so it keeps its GPUs until it has been found out
            self._begin_start(model)
        if is_hopeless:
            model.starts_unasked = False  # the next request starts it
        if is_hopeless and not may_restart:
            for request in list(model.waiting):
                self._refuse(model, request, model.error or "it fails", failed=True)

    def _failed(self, model: Model, error: str) -> None:
        model.failures += 1
        model.error = error
        model.retry_at = self._now + policy.pause_s(model.failures)

    def _become(self, model: Model, phase: Phase) -> None:
        model.phase, model.phase_since = phase, self._now

    def _become_awake(self, model: Model) -> None:
        model.level = model.draining_since = model.revoked_at = None
        model.cannot_go_deeper = model.changes_asleep = False
        model.kept_bytes = 0
        self._become(model, Phase.AWAKE)

    def _become_asleep(self, model: Model, level: int) -> None:
        model.level = level
        model.sleeps_once_started = model.starts_unasked = model.changes_asleep = False
        model.held_bytes = model.spec.host_bytes_at(level)
        model.kept = KeptState.EXPENDABLE
        model.draining_since = model.revoked_at = None
        self._become(model, Phase.ASLEEP)
        if level >= (model.order or 0):
            self._obey(model)

    def _become_stopped(self, model: Model) -> None:
        model.operation = 0  # of a server by URL that is dropped while it is looked for: what it is in counts no more
        model.level = model.draining_since = model.revoked_at = None
        model.held_bytes = model.kept_bytes = 0
        model.sleeps_once_started = False
        model.refused.clear()
        model.cannot_go_deeper = model.changes_asleep = False
        self._become(model, Phase.STOPPED)
        self._obey(model)
        if model.removed:
            for request in [*model.waiting, *model.running]:
                self._model_of.pop(request, None)
            del self.models[model.spec.name]
            self._do(actions.Removed(model.spec.name))
        elif model.successor is not None:
            model.spec, model.successor = model.successor, None
            model.failures, model.error, model.retry_at = 0, None, 0.0
            model.starts_unasked = model.spec.at_start != "stopped"

    def _obey(self, model: Model, error: str | None = None) -> None:
        """Its order, if there is one, was carried out, or cannot be."""
        if model.order is not None:
            self._do(actions.Obeyed(model.spec.name, model.order, error))
            model.order = None

    # What follows

    def _plan(self) -> None:
        self._grant()
        leaving = self._serve_in_order() | self._too_many()
        changed = False  # so that others can go on
        for model in list(self.models.values()):
            before = model.phase
            if model.must_leave or (model.sleeps_once_started and not model.waiting):
                self._leave(model, self._depth_of_leaving(model))
            elif model.spec.name in leaving:
                self._leave(model, 0)
            elif model.phase is Phase.DRAINING:  # its room is no longer wanted
                self._become_awake(model)
                changed = True
            elif not model.waiting:
                self._idle(model)
            changed |= model.phase is Phase.STOPPED and before is not Phase.STOPPED
        if changed:
            self._plan()

    def _depth_of_leaving(self, model: Model) -> int:
        if model.removed or model.successor is not None:
            return STOP
        return model.order or 0

    def _grant(self) -> None:
        for model in self.models.values():
            if model.phase is not Phase.AWAKE or model.must_leave or not model.waiting:
                continue
            model.sleeps_once_started = False
            for request in model.waiting:
                model.running.add(request)
                self._do(actions.Grant(request))
            model.waiting.clear()
            model.last_used = self._now

    def _serve_in_order(self) -> set[str]:
        """Start and wake what is wanted where there is room; returns who has to leave so that there is."""
        leaving: set[str] = set()
        kept: set[int] = set()  # GPUs that somebody earlier in the queue waits for
        locked = self._locked()
        for model in self._wanted():
            gpus = model.spec.gpus
            if model.phase in CHANGING:
                if model.phase in (Phase.FALLING_ASLEEP, Phase.STOPPING):
                    kept |= gpus
                    self._blame(model, "turn")
                continue
            if model.phase is Phase.DRAINING:  # its turn is over, or comes back below if nobody needs its room
                self._blame(model, "turn")
                kept |= gpus
                continue
            if model.retry_at > self._now:
                self._blame(model, "failure")
                continue
            if gpus & kept:
                self._blame(model, "turn")
            elif self._has_room(model) and not gpus & self._in_the_way(model, locked):
                self._begin(model)
                locked = self._locked()
            else:
                pushed = self._evicted_for(model)
                self._blame(model, "turn" if pushed is None else "room")
                leaving |= set(pushed or ())
            kept |= gpus
        return leaving

    def _wanted(self) -> list[Model]:
        """Models that should be awake and are not, the one first that was asked for first; then those to be started."""
        waited = [
            model
            for model in self.models.values()
            if model.waiting and not model.must_leave and model.phase is not Phase.AWAKE
        ]
        unasked = [
            model
            for model in self.models.values()
            if model.starts_unasked and not model.waiting and not model.must_leave and model.phase is Phase.STOPPED
        ]
        return sorted(waited, key=lambda model: model.queue_position) + unasked

    def _has_room(self, model: Model) -> bool:
        return all(policy.fits(model.spec.share, self.free_share(gpu)) for gpu in model.spec.gpus)

    def _locked(self) -> set[int]:
        """GPUs on which a server starts: it measures their memory, which must not change meanwhile."""
        starting = [model for model in self.models.values() if model.phase is Phase.STARTING]
        return {gpu for model in starting for gpu in model.spec.gpus}

    def _in_the_way(self, model: Model, locked: set[int]) -> set[int]:
        """GPUs on which the change that a model needs would meet another one that it must not meet."""
        if model.phase is not Phase.STOPPED:
            return locked
        return {gpu for other in self.models.values() if other.phase in CHANGING for gpu in other.spec.gpus}

    def _evicted_for(self, model: Model) -> list[str] | None:
        """Who has to leave, including those already leaving; None if not all of them may be evicted yet."""
        may_go = (
            other
            for other in self._holders(model.spec.gpus)
            if other.use.protected_until() <= self._now
            and (model.waiting or (not model.failures and not other.running and other.spec.at_start != "awake"))
        )
        return self._evicted(model.spec, may_go)

    def _too_many(self) -> set[str]:
        """Who has to leave GPUs of which models hold more than there is, since somebody else woke one of them."""
        gpus = {gpu for model in self.models.values() for gpu in model.spec.gpus}
        overcommitted = frozenset(gpu for gpu in gpus if not policy.fits(0.0, self.free_share(gpu)))
        nobody = Spec("", overcommitted, share=0.0)
        return set(self._evicted(nobody, self._holders(overcommitted)) or ())

    def _evicted(self, wanted: Spec, may_go: Iterable[Model]) -> list[str] | None:
        holders = self._holders(wanted.gpus)
        going = [other for other in holders if other.phase in (Phase.FALLING_ASLEEP, Phase.STOPPING)]
        free = {
            gpu: self.free_share(gpu) + sum(other.spec.share for other in going if gpu in other.spec.gpus)
            for gpu in wanted.gpus
        }
        return policy.models_to_evict(wanted, free, [other.use for other in may_go if other.is_up])

    def _holders(self, gpus: Iterable[int]) -> list[Model]:
        wanted = set(gpus)
        return [model for model in self.models.values() if model.holds and model.spec.gpus & wanted]

    def _begin(self, model: Model) -> None:
        """Start or wake a model for which there is room."""
        if model.phase is Phase.STOPPED:
            return self._begin_start(model)
        operation = self._begin_operation(model)
        self._become(model, Phase.WAKING)
        self._blame(model, "wake")
        self._do(actions.Wake(model.spec.name, operation, model.level or 1))
        return None

    def _begin_start(self, model: Model) -> None:
        operation = self._begin_operation(model)
        self._become(model, Phase.STARTING)
        self._blame(model, "start")
        self._do(actions.Start(model.spec.name, operation))

    def _leave(self, model: Model, depth: int) -> None:
        """Drain a model, and then put it to sleep at a depth (0: as its levels say); or go on with that."""
        if depth == STOP and not model.spec.owned:  # a server we do not own is only dropped from our records
            may_be_told = model.is_up or model.phase in (Phase.WAKING, Phase.FALLING_ASLEEP)
            if not may_be_told or model.failures >= policy.ATTEMPTS:
                return self._become_stopped(model) if not model.running else None
            depth = 0  # it sleeps first: whoever gets its GPUs next would meet it there
        if model.phase is Phase.ASLEEP:
            if not self._go_deeper(model, depth):
                in_use = "it has to wake to go deeper, but its GPUs or the host's memory are in use"
                self._obey(model, model.error if model.cannot_go_deeper else in_use)
            return None
        if model.phase is Phase.STOPPED:
            return self._become_stopped(model)
        if model.phase is Phase.STARTING and depth == STOP:
            return self._begin_stop(model)
        if not model.is_up:
            return None
        if model.draining_since is None:
            model.draining_since = self._now
            self._become(model, Phase.DRAINING)
        if model.running and not self._has_drained(model):
            return None
        if model.retry_at <= self._now and not self._locked() & model.spec.gpus:
            self._begin_sleep(model, depth)
        return None

    def _has_drained(self, model: Model) -> bool:
        """Whether requests that still run may be passed over; those whose time is up are revoked."""
        if model.revoked_at is None:
            if self._now < (model.draining_since or 0.0) + model.spec.drain_s:
                return False
            model.revoked_at = self._now
            for request in model.running:
                self._do(
                    actions.Revoke(request, f"the GPU is needed for another model, after {model.spec.drain_s:g} s")
                )
        return self._now >= model.revoked_at + policy.REVOKED_WITHIN_S

    def _begin_sleep(self, model: Model, first: int) -> None:
        free = self._free_bytes(model)
        depth = policy.eviction_depth(model.spec, model.held_bytes, free, model.refused, first)
        if depth is None:
            self._failed(model, "it does not fit in host memory, and no other sleep level is allowed")
            model.refused.clear()
            if model.order is not None:
                self._obey(model, model.error)
            return
        if depth == STOP:
            return self._begin_stop(model)
        more_bytes = max(0, model.spec.host_bytes_at(depth) - model.held_bytes)
        model.held_bytes += more_bytes
        model.level = depth
        operation = self._begin_operation(model)
        self._become(model, Phase.FALLING_ASLEEP)
        self._do(actions.Sleep(model.spec.name, operation, depth, more_bytes))

    def _free_bytes(self, model: Model) -> float:
        """Of host memory, for a model that is to sleep. The vault refuses by itself: it alone knows what is shared."""
        return math.inf if model.in_vault else self.host_bytes - self.held_bytes()

    def _give_up_kept(self, nbytes: float, why: str) -> None:
        """The least recently used sleeper's first; of all, that of those comes last for which somebody waits."""
        if nbytes <= 0:
            return
        sleepers = self.models.values()
        uses = [replace(each.use, last_used=math.inf) if each.waiting else each.use for each in sleepers]
        for name in policy.to_give_up(uses, nbytes):
            self.models[name].kept = KeptState.LEAVING
            self._do(actions.GiveUpKept(name, why))

    def _begin_stop(self, model: Model) -> None:
        operation = self._begin_operation(model)
        model.changes_asleep = model.phase is Phase.ASLEEP
        self._become(model, Phase.STOPPING)
        self._do(actions.Stop(model.spec.name, operation))

    def _idle(self, model: Model) -> None:
        if model.running or model.retry_at > self._now or model.phase not in (Phase.AWAKE, Phase.ASLEEP):
            return
        depth = policy.idle_depth(model.spec, self._now - model.last_used)
        if depth <= (model.level or 0):
            return
        if model.phase is Phase.ASLEEP:
            self._go_deeper(model, depth)
        elif not self._locked() & model.spec.gpus:
            self._begin_sleep(model, depth)

    def _go_deeper(self, model: Model, depth: int) -> bool:
        """From one sleep to a deeper one. Most take the GPUs in between, so that they must be free and not wanted."""
        if depth == STOP:
            if not self._locked() & model.spec.gpus:  # what is left of it goes, too
                self._begin_stop(model)
            return True
        if model.cannot_go_deeper and depth == OF_LAYER:
            return False
        sleeps_on = model.has_layer and (model.level, depth) == (1, OF_LAYER)
        wanted = {gpu for other in self._wanted() for gpu in other.spec.gpus}
        has_room = sleeps_on or (self._has_room(model) and not model.spec.gpus & wanted)
        more_bytes = max(0, model.spec.host_bytes_at(depth) - model.held_bytes)
        has_memory = more_bytes <= self._free_bytes(model)
        if model.spec.gpus & self._locked() or not has_room or not has_memory:
            return False
        model.held_bytes += more_bytes
        model.changes_asleep = sleeps_on
        operation, level = self._begin_operation(model), model.level
        model.level = depth
        self._become(model, Phase.FALLING_ASLEEP)
        self._do(actions.Sleep(model.spec.name, operation, depth, more_bytes, level))
        return True

    def _begin_operation(self, model: Model) -> int:
        self._operations += 1
        model.operation = self._operations
        return self._operations

    def _do(self, action: actions.Action) -> None:
        self._actions.append(action)

    # Times

    def _times(self) -> Iterator[float]:
        if self._deadlines:
            yield self._deadlines[0][0]
        for model in self.models.values():
            yield model.retry_at
            if model.is_up:
                yield model.use.protected_until()
            if model.draining_since is not None and model.running:
                yield model.draining_since + model.spec.drain_s
            if model.revoked_at is not None:
                yield model.revoked_at + policy.REVOKED_WITHIN_S
            if not model.running and model.phase in (Phase.AWAKE, Phase.ASLEEP):
                step_s = policy.next_idle_step_s(model.spec, self._now - model.last_used)
                if step_s is not None:
                    yield self._now + step_s

    def _blame(self, model: Model, cause: str) -> None:
        if model.cause:
            past_s = self._now - model.cause_since
            model.caused_s[model.cause] = model.caused_s.get(model.cause, 0.0) + past_s
        model.cause, model.cause_since = cause, self._now
