"""Prometheus metrics of the layer on vLLM's `/metrics`, from the status that the workers report."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ..metrics import ENGINE, Samples
from . import data_parallel
from .events import Workers

logger = logging.getLogger("cumem_sleep")

STATUS_METHOD = "cumem_sleep_status"
ANSWER_WITHIN_S = 1.0


RankStatus = dict[str, Any]  # one worker's answer: see `plugin.cumem_sleep_status`


def asleep_and_lost(ranks: Iterable[RankStatus]) -> tuple[set[str], bool]:
    """The tags of memory that is asleep in any worker, and whether any of it is weights without a backup."""
    usages = [(tag, usage) for rank in ranks for tag, usage in rank["usage"].items() if usage["asleep_segments"]]
    lost = any(tag == "weights" and usage["backed_up_bytes"] < usage["bytes"] for tag, usage in usages)
    return {tag for tag, _ in usages}, lost


def states_of(ranks: Iterable[RankStatus]) -> Workers:
    """What the workers say of their memory, for the gate's model."""
    ranks = list(ranks)
    asleep, lost = asleep_and_lost(ranks)
    usages = [(tag, usage) for rank in ranks for tag, usage in rank["usage"].items()]
    mapped = {tag for tag, usage in usages if usage["segments"] and not usage["asleep_segments"]}
    return Workers(frozenset(asleep), frozenset(mapped), lost, any(rank["checkpointed"] for rank in ranks))


def not_loaded(ranks: Iterable[RankStatus]) -> str:
    """The parameters that level 2 dropped and nobody loaded since, in words; the same ones in every worker once."""
    return ", ".join(dict.fromkeys(names for rank in ranks if (names := rank.get("not_loaded", ""))))


def sleep_level(rank: RankStatus) -> int:
    """How deep one worker sleeps: 0 if weights are awake, 3 if nothing in its process may call CUDA."""
    asleep, lost = asleep_and_lost([rank])
    if rank["checkpointed"]:
        return 3
    return 0 if "weights" not in asleep else 2 if lost else 1


class WorkerStatus:
    """The workers' last status. One question is pending at a time, and each caller waits only as long as it wants.

    `exists`: the workers have this layer, as far as is known.

    The question has no vLLM timeout: with one, vLLM's executors would leave a late answer in the workers' queues, where
    the next call would take it for its own. For the same reason it is never cancelled.
    """

    def __init__(self) -> None:
        self.ranks: list[RankStatus] = []
        self._question: asyncio.Task[list[RankStatus] | None] | None = None
        self.exists = True

    @property
    def active(self) -> bool | None:
        """Whether vLLM's memory comes from this layer; None: the workers have not said."""
        return False if not self.exists else any(rank["usage"] for rank in self.ranks) if self.ranks else None

    def latest(self) -> list[RankStatus]:
        """What was answered last; nothing if the last question was not answered."""
        question = self._question
        return question.result() or [] if question and question.done() and not question.cancelled() else []

    def ask(self, engine: Any) -> asyncio.Task[list[RankStatus] | None]:
        """Ask all workers, or join the pending question; the task's result is None if there is no answer."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask(engine))
        return self._question

    async def fresh(self, engine: Any, anew: bool = False) -> list[RankStatus] | None:
        """The answer to a question asked now (`anew`) or still pending; None if none comes in time (or ever)."""
        question = asyncio.ensure_future(self.now(engine)) if anew else self.ask(engine)
        await asyncio.wait({question}, timeout=ANSWER_WITHIN_S)
        return question.result() if question.done() and not question.cancelled() else None

    async def now(self, engine: Any) -> list[RankStatus] | None:
        """The answer to a question asked now, however long it takes; None if none ever comes."""
        while self._question is not None and not self._question.done():
            await asyncio.wait({self._question})
        return await asyncio.shield(self.ask(engine))

    async def _ask(self, engine: Any) -> list[RankStatus] | None:
        if not self.exists:
            return None
        try:
            engines = await data_parallel.call_workers(engine, STATUS_METHOD)
            ranks = [rank for engine_ranks in engines for rank in engine_ranks]
        except Exception as error:
            if "not implemented" in str(error):  # vLLM's words for a method that its workers do not have
                self.exists = False
                logger.warning(
                    "cumem-sleep is not active in vLLM's workers: no cumem_sleep metrics, and the gate knows only the"
                    " sleeps and wakes that pass through it"
                )
            else:
                logger.debug("no answer to %s: %s", STATUS_METHOD, error)
            return None
        # After a call failed in one worker, vLLM's executors take the other workers' answers for those of the next
        # call.
        if not all(isinstance(rank, dict) and rank.keys() >= {"usage", "checkpointed"} for rank in ranks):
            logger.debug("no answer to %s: %s", STATUS_METHOD, ranks)
            return None
        self.ranks = engines[0]  # others have the same ranks, which tell samples apart
        return ranks


class Collector:
    """A prometheus_client collector: the workers' last status, and what the gate did with requests."""

    def __init__(self, status: WorkerStatus, outcomes: Counter[str]) -> None:
        self._status = status
        self._outcomes = outcomes
        self._failed = False

    def describe(self) -> list[Any]:
        """No fixed families: workers that never answered have none."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metric families with their latest values."""
        try:
            families = list(self._samples().families())
        except Exception:  # an error would also break vLLM's own metrics
            if not self._failed:
                logger.exception("the cumem_sleep metrics are left out: the workers' answer could not be understood")
            self._failed = True
            return
        yield from families

    def _samples(self) -> Samples:
        samples = Samples(ENGINE)
        if (active := self._status.active) is not None:
            samples.add("active", int(active))
        for worker in self._status.ranks:
            rank = str(worker["rank"])
            devices = ",".join(map(str, worker["devices"]))
            samples.add("info", 1, rank=rank, devices=devices, simulated=str(worker["simulated"]).lower())
            samples.add("sleep_level", sleep_level(worker), rank=rank)
            samples.add("device_used_bytes", worker["device_used_bytes"], rank=rank)
            samples.add("device_total_bytes", worker["device_total_bytes"], rank=rank)
            if worker["place"]["vault"]:
                samples.add("vault_up", 0 if worker["place"]["lost"] else 1, rank=rank)
            for tag, usage in worker["usage"].items():
                of = {"rank": rank, "tag": tag}
                samples.add("memory_bytes", usage["mapped_bytes"], **of, state="mapped")
                samples.add("memory_bytes", usage["bytes"] - usage["mapped_bytes"], **of, state="asleep")
                for name in ("host_bytes", "vault_bytes", "kept_bytes", "shared_bytes", "backed_up_bytes"):
                    samples.add(name, usage[name], **of)
                samples.add("segments", usage["segments"], **of)
            for operation, done in worker["operations"].items():
                of = {"rank": rank, "operation": operation}
                samples.add("operations", done["count"], **of, result="ok")
                samples.add("operations", done["failures"], **of, result="failed")
                samples.add("operation_seconds", done["seconds"], **of)
                for phase, seconds in done["phases"].items():
                    samples.add("operation_phase_seconds", seconds, **of, phase=phase)
                for kind, nbytes in done["bytes"].items():
                    samples.add("operation_bytes", nbytes, **of, kind=kind)
        for outcome, count in self._outcomes.items():
            samples.add("gate_requests", count, outcome=outcome)
        return samples


_registered: Collector | None = None


def register(status: WorkerStatus, outcomes: Counter[str]) -> bool:
    """Add the metrics to vLLM's `/metrics`; a later gate replaces them. Returns False if that is not possible."""
    global _registered
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # set by vLLM for several API servers: no custom collectors then
        logger.warning("several API servers share /metrics: the cumem_sleep metrics are left out")
        return False
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        logger.debug("prometheus_client is not installed: no cumem_sleep metrics")
        return False
    if _registered is not None:
        REGISTRY.unregister(_registered)
    _registered = Collector(status, outcomes)
    REGISTRY.register(_registered)
    return True
