"""Random episodes: requests with common prefixes on the real scheduler of this vLLM, and sleeps that keep its KV cache.

    python tests/vllm/kept_kv_episodes.py --seed 7 --seconds 60
    python tests/vllm/kept_kv_episodes.py --workers 2      of each engine: tensor parallel, and a pipeline

The engine core is vLLM's, with its pauses; only its sockets and its loop are not there. Its workers check every place
of the KV cache that is read (`hashing_worker`). One is in this process, several are in processes of their own, by
vLLM's own executor. A seed repeats an episode.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import pathlib
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from cumem_sleep.vllm import kept_kv, kv_blocks
from cumem_sleep.vllm.worker_methods import ASK_KV

CROWDED = 37
BLOCKS = (CROWDED, 73, 131)  # not powers of two: no other size of a tensor is a multiple
WORKERS = ("", "Hybrid", "Latent", "Latent", "", "Hybrid")  # in turns with these: two groups of layers take more blocks
# Each of them lets hits find what is not there.
MUTANTS = {
    "no-eviction": (kept_kv, "manager.evict_blocks(hashed.difference(blocks))", "pass"),
    "other-blocks": (kv_blocks, "np.asarray(blocks, dtype=np.int64)", "np.asarray(blocks) % (self.num_blocks - 1) + 1"),
    "no-verdict": (kept_kv, "if why := self._why_lost():", 'if why := "":'),
    "unexecuted-blocks": (kept_kv, "request.num_computed_tokens // group.block_size :", "len(blocks) :"),
    "unheard-eviction": (
        kept_kv,
        "manager.evict_blocks(hashed.difference(blocks))",
        "[manager.evict_blocks(hashed.difference(blocks)), manager.take_events()]",
    ),
    "no-change": (kept_kv, "self._changed = what", "pass"),
    "no-digests": (kv_blocks, "_plan.wakes > 1 and", "False and"),
    "one-worker": (kept_kv, "        return answers\n", "        return answers[:1]\n"),  # the others are not heard
}
BLOCK_BYTES = 2 * 32 << 10  # in both layers
EPISODES_OF_A_CORE = {1: 2, 2: 3}  # by its number of workers
# What has to be tested, whatever the time: each has to find blocks again that a sleep kept.
KINDS = {
    1: (
        *("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "sync", "async", "priorities", "crowded"),
        *("adapters", "drafts, sync", "drafts, async"),
    ),
    2: (
        *(f"{each}, {scheduling}" for each in ("tensor parallel", "pipeline") for scheduling in ("sync", "async")),
        *("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "adapters"),
    ),
}
MOST_EPISODES = 36  # to test all of them
MOST_FINDINGS = 3
MOST_STEPS = 4000  # to answer all requests


class OtherRank:
    """Answers the engine core's questions as one more worker, which has its own room, and its own mishaps."""

    def __init__(self, executor: Any) -> None:
        self.blocks = 1 << 20  # that it has room for
        self.fails_at = ""  # this question
        self._worker = vars(executor.driver_worker)["worker"]
        self._ask, executor.collective_rpc = executor.collective_rpc, self._collective_rpc

    def break_sleep(self, chance: random.Random) -> str:
        """Something may go wrong in the next sleep, and what it keeps."""
        self._worker.breaks = [chance.choice(["before", "after"])] if chance.random() < 0.15 else []
        self.blocks = chance.choice([1 << 20, 1 << 20, 1 << 20, 7, 0])
        self.fails_at = chance.choice([""] * 8 + ["room", "plan", "kept", "whole"])
        return f"{self._worker.breaks}, {self.blocks}, {self.fails_at}"

    def break_wake(self, chance: random.Random) -> str:
        """The next wake fails."""
        self._worker.breaks = [chance.choice(["before wake", "after wake"])]
        return str(self._worker.breaks)

    def mend(self) -> None:
        """No sleep and no wake fails any more."""
        self._worker.breaks = []

    def _collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        answers = self._ask(method, *args, **kwargs)
        if method != ASK_KV:
            return answers
        question = kwargs["args"][0]
        why = "another rank cannot" if question == self.fails_at else ""
        facts = {"room": self.blocks * 1000 + 999, "block_bytes": 1000, "slept": False, "bytes": 0}
        return [*answers, {"why": why, **facts}]


class RealRanks:
    """The mishaps of one of two workers, each in its process: by its driver, or for want of host memory."""

    # That a sleep or a wake makes, also of what it keeps.
    CALLS = (
        *("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemcpyDtoHAsync_v2"),
        *("cuMemcpyHtoDAsync_v2", "cuStreamSynchronize", "cuStreamCreate", "cuMemHostRegister_v2", "cuCtxSynchronize"),
    )

    _queues: ClassVar[list[Any]] = []  # vLLM 0.26 hangs when they are collected

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._queues.append((executor.rpc_broadcast_mq, executor.response_mqs))

    def break_sleep(self, chance: random.Random) -> str:
        """As `OtherRank.break_sleep`."""
        kept_bytes = chance.choice([None, None, None, 7 * BLOCK_BYTES, 0])
        return self._break(chance, chance.random() < 0.3, kept_bytes)

    def break_wake(self, chance: random.Random) -> str:
        """The next wake may fail, or lose what was kept."""
        return self._break(chance, True, None)

    def _break(self, chance: random.Random, is_call: bool, kept_bytes: int | None) -> str:
        fault = chance.randrange(2), chance.choice(self.CALLS) if is_call else "", chance.randrange(5), kept_bytes
        self._executor.collective_rpc("break_at", args=fault)
        return str(fault)

    def mend(self) -> None:
        """As `OtherRank.mend`."""
        self._executor.collective_rpc("mend")


def mutate(module: Any, text: str, by: str) -> None:
    """Have the module run with this text in place of that."""
    source = pathlib.Path(module.__file__).read_text()
    assert source.count(text) == 1, text
    exec(compile(source.replace(text, by), module.__file__, "exec"), vars(module))


def engine(folder: pathlib.Path, *more: str, blocks: int = 61) -> Any:
    """The engine core of vLLM over one `HashingWorker` or several."""
    import watched_server
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor import Executor

    class Core(EngineCoreProc):  # type: ignore[misc]
        """Its process's pauses, without its process."""

        def __init__(self, config: Any) -> None:
            EngineCore.__init__(self, config, Executor.get_class(config), log_stats=False)
            self.engines_running = self.reject_new_requests = False
            self._idle_state_callbacks = []

            is_alone = config.parallel_config.world_size == 1
            self.ranks = OtherRank(self.model_executor) if is_alone else RealRanks(self.model_executor)
            self.published = PublishedBlocks(self)

        def _send_abort_outputs(self, aborted: Any) -> None: ...

        def step_once(self) -> None:
            """As the loop of the process."""
            if not self.has_work():
                self._notify_idle_state_callbacks()
                return
            _, executed = self.step_fn()
            self.post_step(executed)
            if not self.has_work():
                self._notify_idle_state_callbacks()

        def finish(self, future: Any) -> Any:
            """The result of a call that may wait for the engine to be idle."""
            steps = 0
            while future is not None and not future.done():
                steps += 1
                assert steps < MOST_STEPS, "it does not become idle"
                self.step_once()
            return None if future is None else future.result()

        @property
        def worker(self) -> Any:
            """If it is in this process."""
            return vars(self.model_executor.driver_worker)["worker"]

        def reports(self) -> list[dict[str, Any]]:
            """Of all workers."""
            return list(self.model_executor.collective_rpc("report"))

    line = ["--model", str(folder), "--enable-sleep-mode", *watched_server.options(), "--block-size", "16"]
    line += ["--num-gpu-blocks-override", str(blocks), "--max-num-batched-tokens", "96", "--max-num-seqs", "8"]
    line += ["--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "null"}']
    line[line.index("watched_worker.WatchedWorker")] = "hashing_worker.HashingWorker"
    args = EngineArgs.from_cli_args(watched_server.parsed([*line, *more]))
    return Core(args.create_engine_config())


def adapter(number: int) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter {number}", number, "/nowhere")


def add(
    core: Any, name: str, tokens: list[int], most: int, priority: int = 0, adapter_number: int = 0, client: int = 0
) -> None:
    """A request that asks for `most` tokens, from one of several API servers."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter(adapter_number) if adapter_number else None,
        cache_salt=None,
        data_parallel_rank=None,
        priority=priority,
        client_index=client,
    )
    core.add_request(*core.preprocess_add_request(request))


def run_to_end(core: Any) -> None:
    """Step until all requests are answered."""
    for _ in range(MOST_STEPS):
        if not core.has_work() and not core.scheduler.requests:
            return
        core.step_once()
    raise AssertionError(f"requests are left: {sorted(core.scheduler.requests)}")


class PublishedBlocks:
    """What a router knows of an engine's prefix cache from its KV events."""

    def __init__(self, core: Any) -> None:
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._stored: set[Any] = set()  # since all were cleared
        self._known: set[Any] = set()  # of these, what was not removed; of equal blocks vLLM may remove one
        core.scheduler.kv_event_publisher.publish = lambda batch: self._read(batch.events)

    def _read(self, events: Iterable[Any]) -> None:
        for event in events:
            kind, hashes = type(event).__name__, set(getattr(event, "block_hashes", ()))
            if kind == "BlockStored":
                self._stored |= hashes
                self._known |= hashes
            elif kind == "BlockRemoved":
                self._known -= hashes
            else:
                assert kind == "AllBlocksCleared", kind
                self._stored, self._known = set(), set()

    def faults(self) -> list[str]:
        """Where events, with those that the next step publishes, and the index disagree."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

        self._read(self._pool.take_events())
        index = {maybe_convert_block_hash(get_block_hash(key)) for key in self._pool.cached_block_hash_to_block._cache}
        gone, unheard = len(self._known - index), len(index - self._stored)
        return [f"events tell of {gone} blocks that are gone, not of {unheard} that are there"] * bool(gone or unheard)


class KeptEpisode:
    def __init__(self, core: Any, seed: int) -> None:
        self.core, self.chance = core, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self._faults: list[str] = []  # of what events tell
        self._is_lora = core.vllm_config.lora_config is not None
        self._prefixes = [self._tokens(200) for _ in range(3)]
        self._names, self._name = 0, f"{seed}"
        self._asked: list[tuple[list[int], int]] = [(self._prefixes[0], 0)]  # with which adapter

    def _tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(7, 107) for _ in range(count)]

    def found(self) -> list[str]:
        """What went wrong in this episode."""
        self.core.model_executor.collective_rpc("begin_episode")
        error = ""
        try:
            self._run()
        except Exception:
            error = traceback.format_exc()
        reports = self.core.reports()
        self.counts.update(reports[0]["counts"])
        of_workers = [fault for report in reports for fault in report["faults"]]
        return [*of_workers, *self._faults, *[error] * bool(error)]

    def _run(self, actions: int = 60) -> None:
        core = self.core
        core.reset_prefix_cache()
        if core.scheduler.kv_cache_config.num_blocks == CROWDED:
            self.crowd()
        actions_of = [self._add] * 10 + [self._step] * 10 + [self._sleep] * 6 + [self._abort, self._abort]
        actions_of += [self._update, self._reset] + [self._reload_adapter] * self._is_lora
        for _ in range(actions):
            action = self.chance.choice(actions_of)
            self.log.append(action.__name__)
            action()
            self._faults += core.published.faults()
        run_to_end(core)

    def _add(self) -> None:
        prompt = self.chance.choice(self._prefixes)[: self.chance.randrange(1, 200)]
        self._ask(prompt, self.chance.randrange(3) if self._is_lora else 0)

    def _ask_again(self) -> None:
        """As conversations go on: what was kept is found if anything is."""
        self._ask(*self.chance.choice(self._asked[-6:]))

    def _ask(self, prompt: list[int], number: int) -> None:
        prompt = prompt[:200] + self._tokens(self.chance.randrange(1, 40))
        self._asked.append((prompt, number))
        self._names += 1
        most, priority, client = (self.chance.randrange(*of) for of in ((1, 40), (3,), (2,)))
        add(self.core, f"{self._name}.{self._names}", prompt, most, priority, number, client)

    def crowd(self) -> None:
        """Requests that lose their blocks again in the very step for which they got them, to more urgent ones."""
        for length in range(84, 92):  # one of them needs its next block just then
            self._names += 1
            add(self.core, f"{self._names}.long", self._tokens(480), 20, 2)
            self.core.step_once()
            add(self.core, f"{self._names}.urgent", self._tokens(length), 14, 0)
            run_to_end(self.core)

    def _step(self) -> None:
        for _ in range(self.chance.randrange(1, 12)):
            self.core.step_once()

    def _abort(self) -> None:
        if names := sorted(self.core.scheduler.requests):
            self.core.abort_requests([self.chance.choice(names)])

    def _update(self) -> None:
        self.core.collective_rpc("change_weights")

    def _write_unseen(self) -> None:
        self.core.model_executor.collective_rpc("write_unseen")

    def _reload_adapter(self) -> None:
        self.core.add_lora(adapter(1))

    def _reset(self) -> None:
        self.core.reset_prefix_cache()

    def _sleep(self) -> None:
        core, chance = self.core, self.chance
        level = chance.choice([1] * 9 + [2])
        mode = chance.choice(["abort", "wait", "keep"])
        if chance.random() < 0.1:
            core.collective_rpc("cumem_sleep_keep_kv", args=(False,))
        budget = chance.choice(["auto", "auto", 30 * BLOCK_BYTES, 10 * BLOCK_BYTES + 1, 0])
        kept_kv._of(core)._budget = budget
        self.log.append(f"  level {level}, {mode}, budget {budget}, {core.ranks.break_sleep(chance)}")
        try:
            future = core.sleep(level, mode)
            if future is not None and chance.random() < 0.3:
                chance.choice([self._add, self._update, self._reset, self._step])()
            core.finish(future)
        except RuntimeError as error:
            self.log.append(f"  the sleep failed: {error}")
            self.counts["failed sleeps"] += 1
            core.ranks.mend()
            core.resume_scheduler()
            return
        core.ranks.mend()
        self.counts["sleeps"] += 1
        self._asleep(level)

    def _asleep(self, level: int) -> None:
        core, chance = self.core, self.chance
        self.counts["kept"] += kept_kv._of(core)._is_pending
        self._faults += core.published.faults()
        for _ in range(chance.randrange(3)):
            action = chance.choice([self._add, self._add, self._abort, self._sleep_again, self._lose, self._reset])
            self.log.append(f"  asleep: {action.__name__}")
            action()
        if chance.random() < 0.4:
            self._wake(["weights"])
            if chance.random() < 0.4:
                chance.choice([self._update, self._sleep_again, self._write_unseen])()
            if core.model_executor.is_sleeping:
                self._wake(sorted(core.model_executor.sleeping_tags))
        else:
            self._wake(None)
        assert not core.is_sleeping()
        self._ask_again()
        run_to_end(core) if chance.random() < 0.3 else self._step()

    def _wake(self, tags: list[str] | None) -> None:
        core = self.core
        if self.chance.random() < 0.2:
            self.log.append(f"  {core.ranks.break_wake(self.chance)}")
            try:
                core.wake_up(tags)
            except RuntimeError:
                self.counts["failed wakes"] += 1
                self.log.append("  the wake failed")
            core.ranks.mend()
        if core.model_executor.is_sleeping:
            core.wake_up(tags)
        self.log.append(f"  awake: {tags}")

    def _sleep_again(self) -> None:
        self.core.finish(self.core.sleep(self.chance.choice([1, 1, 2]), "keep"))

    def _lose(self) -> None:
        if self.chance.random() < 0.3:
            workers = self.core.vllm_config.parallel_config.world_size
            self.core.model_executor.collective_rpc("drop_kept", args=(self.chance.randrange(workers),))


def _configurations(workers: int) -> Iterator[tuple[Any, ...]]:
    """The number of blocks, and options. The first four have all `KINDS`; then come others of their combinations."""
    for number in itertools.count():
        policy = ("--scheduling-policy", "priority", "--long-prefill-token-threshold", "32") if number % 2 == 0 else ()
        scheduling = "--async-scheduling" if number // 2 % 2 else "--no-async-scheduling"
        # Not in a pipeline: its scheduler in vLLM 0.26 fails an assertion about adapters of its own.
        has_lora = number % 4 in ((1, 2) if workers == 1 else (3,))
        lora = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8") if has_lora else ()
        drafts: tuple[str, ...] = ()
        if workers == 1 and number % 5 in (0, 3):
            method = "ngram_gpu" if number // 2 % 2 else "ngram"  # the one that may be scheduled ahead
            drafts = ("--speculative-config", json.dumps({"method": method, "num_speculative_tokens": 3}))
        several: tuple[str, ...] = ()
        if workers > 1:
            kind = "--tensor-parallel-size" if number % 2 else "--pipeline-parallel-size"
            several = ("--distributed-executor-backend", "mp", kind, str(workers))
        worker = ("--worker-cls", f"hashing_worker.{WORKERS[number % len(WORKERS)]}HashingWorker")
        yield BLOCKS[number % len(BLOCKS)], *policy, scheduling, *lora, *drafts, *several, *worker


def _kinds(core: Any) -> set[str]:
    """Of `KINDS`, what vLLM has made of an engine's options."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    config, cache = core.vllm_config, core.scheduler.kv_cache_config
    scheduling = "async" if isinstance(core.scheduler, AsyncScheduler) else "sync"
    parallel = "pipeline" if config.parallel_config.pipeline_parallel_size > 1 else "tensor parallel"
    found = {
        scheduling: True,
        f"{parallel}, {scheduling}": config.parallel_config.world_size > 1,
        "adapters": config.lora_config is not None,
        "priorities": core.scheduler.policy.value == "priority",
        f"drafts, {scheduling}": config.speculative_config is not None,
        "crowded": cache.num_blocks == CROWDED,
    }
    specs = {type(spec).__name__ for group in cache.kv_cache_groups for spec in kept_kv._specs(group.kv_cache_spec)}
    return specs | {kind for kind, has_it in found.items() if has_it}


def _is_tested(kind: str, counts: Counter[str]) -> bool:
    """Whether episodes of engines of this kind have done what it is there for."""
    needed = {
        "adapters": ["kept blocks found with an adapter"],
        "drafts": ["accepted drafts", "rejected drafts"],
    }
    return all(counts[what] for what in ["kept blocks found", *needed.get(kind.partition(",")[0], [])])


def run(seed: int, seconds: float, report: Callable[[str], None], workers: int, most_findings: int) -> int:
    """Episodes begin for so long, and until each kind was tested, or so many found something; returns how many did."""
    bad = episodes = 0
    begun = 0.0
    counts: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS[workers]}
    configurations = _configurations(workers)
    with tempfile.TemporaryDirectory() as name:
        import watched_server

        folder = pathlib.Path(name)
        watched_server.prepare_process(folder)
        os.environ.update(CUMEM_SLEEP_KEEP_KV_BYTES="auto", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        watched_server.model_folder(folder)
        importlib.import_module("vllm.v1.engine.core")  # takes longer than many episodes
        core = None
        while True:
            untested = [kind for kind in by_kind if not _is_tested(kind, by_kind[kind])]
            is_time = not begun or time.monotonic() - begun < seconds
            if not is_time and (not untested or episodes >= MOST_EPISODES):
                break
            if episodes % EPISODES_OF_A_CORE[workers] == 0:
                if core is not None:
                    core.shutdown()
                options = next(configurations)
                core = engine(folder, *options[1:], blocks=options[0])
            begun = begun or time.monotonic()  # the first engine takes long
            episode = KeptEpisode(core, seed + episodes)
            episodes += 1
            found = episode.found()
            counts += episode.counts
            for kind in by_kind.keys() & _kinds(core):
                by_kind[kind] += episode.counts
            if found:
                bad += 1
                report(f"seed {seed + episodes - 1} {options}:\n  " + "\n  ".join([*episode.log, *found[:5]]))
                if bad == most_findings:
                    break
    if not bad and untested:
        report(f"not tested, since no such engine found again what a sleep kept: {', '.join(untested)}")
        bad = 1
    report(f"{episodes} episodes, {bad} with findings; {dict(sorted(counts.items()))}")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="the first episode's")
    parser.add_argument("--mutant", choices=MUTANTS, help="break the code so")
    parser.add_argument("--workers", type=int, default=1, help="of each engine")
    parser.add_argument("--seconds", type=float, default=60.0, help="new episodes begin until then")
    options = parser.parse_args()
    if options.mutant:
        mutate(*MUTANTS[options.mutant])
    most = 1 if options.mutant else MOST_FINDINGS  # of what is broken on purpose one is enough
    report = functools.partial(print, flush=True)
    return 1 if run(options.seed, options.seconds, report, options.workers, most) else 0


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    sys.exit(main())
