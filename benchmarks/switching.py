"""Two models on one GPU that fit it one at a time, switched by restarting servers and by sleep mode, in one run.

    python benchmarks/switching.py --out switching.json

A and B are served by vLLM. Switches go A → B → A → B → A → B, and after each the new model answers: one prompt at once
(without a warm-up request), then another of the same length (with one: the first). Times are those of an HTTP client.
Tokens must be the ones that the model answered with when it had just started; a difference fails the run. The ways:

    restart  the old server is stopped, the new one started, with a warm compile cache; fewer switches, each is long
    vllm     vLLM's own sleep mode at level 1: both servers run, one of them sleeps
    level1   this layer at level 1, its backups prepared in the background while the model serves
    level2   this layer at level 2: weights are dropped and read from the checkpoint again
    level1-unprepared   not unless named
    vault    not unless named: this layer at level 1, not prepared, through a vault that has its memory

The second server starts while the first one sleeps. The first sleep of each server, which takes and pins host memory,
is recorded apart. `--fp8` measures with weights quantised to FP8 while they are loaded, as ways of their own.

What fits where, on one H200 (139.8 GiB, 128 GiB of host memory, 64 GiB of disk): two 32B models at level 1 would need
122 GiB of pinned memory, and their checkpoints 122 GiB of disk. The default, 14B and 8B, needs 27.5 + 15.3 = 42.8 GiB
of each, 48.8 GiB pinned with vLLM's own layer, and leaves room for the checkpoints in the page cache. They do not fit
the GPU together because each server takes 90 % of it, as servers do: what weights leave is KV cache. With
`--models 32B,8B --load-format dummy` (76.3 GiB of backups, 87 GiB with vLLM's own layer) there is no checkpoint to
read, so no level 2, and a restart is spared reading up to 61 GiB.

Loading is helped by the page cache: how much of the checkpoint it held is in the result. Restarts find vLLM's compile
cache warm. Results are written after every step, and runs with the same models add to the same file. On an H200 the
default takes about nine minutes, FP8 five more (`--ways vllm,level1 --fp8`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import SHAPES, Shape, is_written, write_config
from model_server import (
    Answer,
    Deadline,
    OutOfTime,
    Server,
    ServerFailed,
    exit_on_sigterm,
    gpu_memory_in_use_bytes,
)
from record import machine_apart
from vault_process import Vault, VaultFailed

from cumem_sleep.tools.bench.host_memory import touch_host_memory

HERE = Path(__file__).resolve().parent
SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
GATE = "cumem_sleep.vllm.SleepGate"
HOST_MEMORY_PER_WEIGHT = 1.3  # as much as any layer takes
VAULT_PER_WEIGHT = 1.1
PREPARE_S = 30.0  # a 14B model's backups take 7 s
STATUS = "cumem_sleep_status"  # of a worker whose memory is in this layer; vLLM alone does not know it


@dataclass(frozen=True)
class Way:
    """How one switches.

    Attributes:
        level: of sleep; `None` is a restart.
        environment: of the servers; ways with the same one share servers.
        gate: whether this layer, and its HTTP gate, is in the server.
    """

    title: str
    level: int | None
    environment: dict[str, str]
    gate: bool = False

    @property
    def prepares(self) -> bool:
        return self.environment.get("CUMEM_SLEEP_PREPARE") == "1"


THEIRS = {"CUMEM_SLEEP_DISABLE": "1"}
PREPARED = {"CUMEM_SLEEP_DISABLE": "0", "CUMEM_SLEEP_PREPARE": "1"}
UNPREPARED = {"CUMEM_SLEEP_DISABLE": "0", "CUMEM_SLEEP_PREPARE": "0"}
WAYS = {
    "vllm": Way("vLLM's sleep mode, level 1", 1, THEIRS),
    "level1": Way("cumem-sleep, level 1", 1, PREPARED, gate=True),
    "level2": Way("cumem-sleep, level 2", 2, PREPARED, gate=True),
    "level1-unprepared": Way("cumem-sleep, level 1, not prepared", 1, UNPREPARED, gate=True),
    "vault": Way("cumem-sleep, the vault", 1, {**UNPREPARED, "CUMEM_SLEEP_VAULT": "vault.sock"}, gate=True),
    "restart": Way("restart", None, THEIRS),
}
DEFAULT_WAYS = "vllm,level1,level2,restart"  # restarts last: the others fill the compile cache


@dataclass(frozen=True)
class Model:
    """A or B, and where its checkpoint is."""

    name: str
    shape_name: str
    seed: int
    folder: Path

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


@dataclass(frozen=True)
class Start:
    """A server's start; `checkpoint_cached` is a fraction, `None` where no checkpoint is read."""

    model: str
    seconds: float
    compile_cache_warm: bool
    checkpoint_cached: float | None


@dataclass(frozen=True)
class FirstSleep:
    """A server's first sleep; `left_on_gpu_bytes` are in use by it, and by the other server if that sleeps already."""

    model: str
    level: int
    seconds: float
    left_on_gpu_bytes: int | None


@dataclass(frozen=True)
class Switch:
    """One switch and the two answers after it.

    Attributes:
        off_s: of the old model's sleep, or of stopping its server.
        on_s: of the new model's wake, or of starting its server.
        reload_s: of reading its weights again, at level 2.
        switch_s: all of these.
        first_token_s: of the first request, from sending it.
        total_s: from the switch's begin to the last token of the first answer.
        warm_first_token_s: of the second request.
    """

    old: str
    new: str
    off_s: float
    on_s: float
    reload_s: float | None
    switch_s: float
    first_token_s: float
    answer_s: float
    total_s: float
    warm_first_token_s: float
    warm_answer_s: float
    checkpoint_cached: float | None
    compile_cache_warm: bool | None
    tokens_identical: bool


@dataclass
class Record:
    """What became of one way.

    Attributes:
        shares_servers_of: the way that started the servers and saw their first sleeps.
        prepared_s: seconds from a model's first answers until its backups were complete.
        layer_status: this layer's own figures after the last switch, by model.
        tokens: the two answers of each model when it had just started, by its name.
        same_tokens_as: whether another way's models, with the same quantization, began with the same answers.
        error: what ended it, or which tokens differed; what was measured before that is kept.
    """

    title: str
    level: int | None
    quantization: str | None
    environment: dict[str, str]
    machine: dict[str, Any]
    shares_servers_of: str | None = None
    prepared_s: dict[str, float | None] = field(default_factory=dict)
    layer_status: dict[str, Any] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    first_sleeps: list[FirstSleep] = field(default_factory=list)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    same_tokens_as: dict[str, bool] = field(default_factory=dict)
    switches: list[Switch] = field(default_factory=list)
    error: str | None = None


class Results:
    """The JSON file, written after every step; other ways that are in it already stay."""

    def __init__(self, path: Path, workload: dict[str, Any], machine: dict[str, Any]) -> None:
        self.path = path
        self._content: dict[str, Any] = {"machine": machine, "workload": workload, "checkpoints": None, "ways": {}}
        self._records: dict[str, Record] = {}
        if path.is_file():
            old = json.loads(path.read_text())
            if old["workload"] != workload:
                raise SystemExit(f"{path.name} is of another workload; give another --out")
            self._content = {**old, "machine": machine}

    @property
    def failed(self) -> list[str]:
        return [key for key, record in self._records.items() if record.error]

    def add(self, key: str, record: Record) -> Record:
        self._records[key] = record
        self.save()
        return record

    def other_ways(self, key: str) -> dict[str, dict[str, Any]]:
        return {name: way for name, way in self._content["ways"].items() if name != key}

    def set_checkpoints(self, facts: dict[str, Any]) -> None:
        self._content["checkpoints"] = facts
        self.save()

    def save(self) -> None:
        self._content["ways"].update({key: asdict(record) for key, record in self._records.items()})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self._content, indent=1) + "\n")
        new.replace(self.path)


class Bench:
    """Everything that the ways have in common."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline = Deadline(arguments.deadline)
        self.quantization = "fp8" if arguments.fp8 else None
        self._work: Path = arguments.work
        self._work.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self.vault: Vault | None = None
        folder = arguments.checkpoints or self._work
        names = arguments.models.split(",")
        self.models = [
            Model(name, shape, seed, folder / f"{shape}-{seed}")
            for seed, (name, shape) in enumerate(zip("AB", names, strict=True), start=1)
        ]
        machine = {"simulated": True} if arguments.server_command else machine_apart("vllm")
        self.results = Results(arguments.out, self._workload(), machine)
        self.machine = machine
        vocabulary = min(model.shape.vocabulary for model in self.models)
        values = random.Random(4)
        self.prompts = [[values.randrange(vocabulary) for _ in range(arguments.prompt_tokens)] for _ in range(2)]

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s  {text}", flush=True)

    def run(self) -> None:
        self._make_checkpoints()
        chosen = self.arguments.ways.split(",")
        for _, group in groupby(chosen, key=lambda name: (WAYS[name].environment, WAYS[name].level is None)):
            records = {name: self._new_record(name) for name in group}
            try:
                if "restart" in records:
                    measure_restarts(self, records["restart"])
                else:
                    with self._vault_of(records):
                        measure_sleeping(self, records)
            except (ServerFailed, VaultFailed) as error:
                self._fail(records, str(error))
            except OutOfTime as error:
                self._fail(records, str(error))
                return
            except BaseException as error:
                self._fail(records, f"{type(error).__name__}: {error}")
                raise
            finally:
                self.results.save()

    @contextlib.contextmanager
    def _vault_of(self, records: Mapping[str, Record]) -> Iterator[None]:
        """Has all of its memory before the first server starts; with ways that use none there is none."""
        if "vault" not in records:
            yield
            return
        nbytes = max(int(VAULT_PER_WEIGHT * sum(model.shape.weights_bytes for model in self.models)), 64 << 20)
        with Vault(nbytes, log=self.arguments.out.with_name("switching_vault.log")) as vault:
            self.say(f"the vault has its memory after {vault.wait_until_pinned(self.deadline.limit(120)):.1f} s")
            self.vault = vault
            yield
            self.say(f"the vault: {vault.status()}")

    def server(self, model: Model, way: Way) -> Server:
        """Not started yet."""
        arguments = self.arguments
        command = [*(shlex.split(arguments.server_command) if arguments.server_command else SERVE), str(model.folder)]
        command += ["--load-format", arguments.load_format, "--skip-tokenizer-init", "--enable-sleep-mode"]
        command += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization)]
        if self.quantization:
            command += ["--quantization", self.quantization]
        if arguments.enforce_eager:
            command += ["--enforce-eager"]
        if way.gate:
            command += ["--middleware", GATE]
        environment = {
            **way.environment,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(self._work / "vllm"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # or there is no /sleep
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        if self.vault is not None and "CUMEM_SLEEP_VAULT" in way.environment:
            environment["CUMEM_SLEEP_VAULT"] = self.vault.socket
        port = arguments.port + self.models.index(model)
        log = self._work / f"server-{model.name}.log"
        command += shlex.split(arguments.server_args)
        return Server(model.name, command, port, environment, log, self.deadline)

    def start(self, server: Server, model: Model) -> Start:
        """Starts it, with what the start's time depends on."""
        cached = self.checkpoint_cached(model)
        marker = self._compile_cache_marker(model)
        warm = marker.exists()
        seconds = server.start(self.arguments.start_timeout)
        marker.parent.mkdir(exist_ok=True)
        marker.touch()
        self.say(f"  {model.name} started in {seconds:.1f} s, compile cache {'warm' if warm else 'cold'}")
        return Start(model.name, seconds, warm, cached)

    def compile_cache_is_warm(self, model: Model) -> bool:
        return self._compile_cache_marker(model).exists()

    def number_of_switches(self, way: str) -> int:
        all_of_them: int = self.arguments.switches
        return min(self.arguments.restart_switches, all_of_them) if way == "restart" else all_of_them

    def end(self, server: Server, title: str) -> float:
        """Stops the server, and keeps its last words beside the result; returns the seconds of the stop."""
        seconds = server.stop()
        if server.log.is_file():
            with self.arguments.out.with_suffix(".log").open("a") as log:
                print(f"== {title}, server {server.name}", *server.tail(150), sep="\n", file=log)
            server.log.unlink()
        return seconds

    def checkpoint_cached(self, model: Model) -> float | None:
        """How much of it is in the page cache."""
        return None if self.arguments.load_format == "dummy" else round(cached_fraction(model.files), 4)

    def answers(self, server: Server) -> list[Answer]:
        return [server.complete(prompt, self.arguments.max_tokens) for prompt in self.prompts]

    def know_tokens(self, record: Record, key: str, model: Model, answers: Sequence[Answer]) -> None:
        """What the model answers from now on, and whether that is what it answered in the other ways."""
        record.tokens[model.name] = tokens = [answer.tokens for answer in answers]
        for other, way in self.results.other_ways(key).items():
            if way["quantization"] == record.quantization and model.name in way["tokens"]:
                same = way["tokens"][model.name] == tokens
                record.same_tokens_as[other] = same and record.same_tokens_as.get(other, True)
                if not same:
                    self.say(f"  {model.name} answers otherwise than in {other}")
        self.results.save()

    def add(self, record: Record, switch: Switch) -> None:
        record.switches.append(switch)
        if not switch.tokens_identical:
            record.error = record.error or f"tokens of {switch.new} differ after switch {len(record.switches)}"
        reload = f" + {switch.reload_s:.3f}" if switch.reload_s is not None else ""
        self.say(
            f"  {switch.old} → {switch.new}: {switch.off_s:.3f} + {switch.on_s:.3f}{reload} s,"
            f" first token {switch.first_token_s:.3f} s, warm {switch.warm_first_token_s:.3f} s"
            f"{'' if switch.tokens_identical else ', TOKENS DIFFER'}"
        )
        self.results.save()

    def key(self, way: str) -> str:
        return way + (" fp8" if self.arguments.fp8 else "")

    def _new_record(self, name: str) -> Record:
        way = WAYS[name]
        record = Record(way.title, way.level, self.quantization, way.environment, self.machine)
        return self.results.add(self.key(name), record)

    def _fail(self, records: dict[str, Record], why: str) -> None:
        """The way that was under way failed; those that would have used its servers next were not reached."""
        for name, record in records.items():
            if len(record.switches) < self.number_of_switches(name):
                record.error = record.error or why
                self.say(f"{self.key(name)}: {record.error}")
                why = f"not reached: {name} failed"

    def _compile_cache_marker(self, model: Model) -> Path:
        return self._work / "started" / f"{model.folder.name}-{self.quantization}"

    def _workload(self) -> dict[str, Any]:
        arguments = self.arguments
        return {
            "models": {
                model.name: {
                    "shape": f"Qwen3-{model.shape_name}",
                    "seed": model.seed,
                    "weights_bytes": model.shape.weights_bytes,
                }
                for model in self.models
            },
            "load_format": arguments.load_format,
            "gpu_memory_utilization": arguments.gpu_memory_utilization,
            "prompt_tokens": arguments.prompt_tokens,
            "max_tokens": arguments.max_tokens,
            "enforce_eager": arguments.enforce_eager,
            "server_args": arguments.server_args,
        }

    def _make_checkpoints(self) -> None:
        if self.arguments.load_format == "dummy":
            for model in self.models:
                write_config(model.folder, model.shape)
            return
        missing = [model for model in self.models if not is_written(model.folder, model.shape, model.seed)]
        nbytes = sum(model.shape.weights_bytes for model in missing)
        folder = self.models[0].folder.parent
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < nbytes + (1 << 30):
            raise SystemExit(f"no room for {nbytes / 1e9:.0f} GB of checkpoints")
        start = time.perf_counter()
        write: list[str | Path] = [sys.executable, HERE / "checkpoints.py"]
        writers = [
            subprocess.Popen([*write, model.folder, "--shape", model.shape_name, "--seed", str(model.seed)])
            for model in missing
        ]
        try:
            if any(writer.wait(self.deadline.limit(300)) for writer in writers):
                raise SystemExit("checkpoints could not be written")
        finally:
            for writer in writers:
                writer.kill()
                writer.wait()
        if missing:
            facts = {"bytes_written": nbytes, "write_s": round(time.perf_counter() - start, 1)}
            self.results.set_checkpoints(facts)
            self.say(f"checkpoints: {facts}")


def cached_fraction(files: Iterable[Path]) -> float:
    """Of all their bytes, what the kernel holds in memory: from 0 to 1."""
    pages = cached = 0
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            content = np.frombuffer(mapped, np.uint8)
            states = np.empty(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            if ctypes.CDLL(None).mincore(content.ctypes, ctypes.c_size_t(len(mapped)), states.ctypes):
                raise OSError(f"mincore refuses {path}")
            pages += len(states)
            cached += int((states & 1).sum())
            del content  # or the file stays mapped
    return cached / pages if pages else 0.0


class Pair:
    """Two servers, one of them asleep."""

    def __init__(self, bench: Bench, way: Way) -> None:
        self.servers = {model.name: bench.server(model, way) for model in bench.models}
        self.asleep_level = dict.fromkeys(self.servers, 0)

    def sleep(self, name: str, level: int) -> float:
        seconds = self.servers[name].post(f"/sleep?level={level}")
        self.asleep_level[name] = level
        return seconds

    def wake(self, name: str) -> tuple[float, float | None]:
        """Seconds of the wake and of reading the weights again."""
        server, level = self.servers[name], self.asleep_level[name]
        self.asleep_level[name] = 0
        if level != 2:
            return server.post("/wake_up"), None
        weights_s = server.post("/wake_up?tags=weights")
        reload_s = server.post("/reload_weights")
        return weights_s + server.post("/wake_up?tags=kv_cache"), reload_s


def measure_sleeping(bench: Bench, records: dict[str, Record]) -> None:
    """Ways that share a pair of servers, one after the other."""
    first = next(iter(records))
    title = WAYS[first].title
    pair = Pair(bench, WAYS[first])
    with contextlib.ExitStack() as ends:
        for server in pair.servers.values():
            ends.callback(bench.end, server, title)
        for server in pair.servers.values():  # both at once
            ends.callback(server.ask_to_stop)
        bench.say(f"{bench.key(first)}: {title}")
        start_both(bench, pair, first, records[first])
        for name, record in records.items():
            if name != first:
                bench.say(f"{bench.key(name)}: {record.title}")
                record.shares_servers_of = bench.key(first)
                record.tokens = records[first].tokens
            run_switches(bench, pair, record)
            if WAYS[name].gate:
                record.layer_status = {model: server.call_worker(STATUS) for model, server in pair.servers.items()}


def start_both(bench: Bench, pair: Pair, name: str, record: Record) -> None:
    """A starts, answers and sleeps for the first time; then B does, and sleeps as well; then A wakes."""
    way, level = WAYS[name], sleep_level(record)
    for model in bench.models:
        server = pair.servers[model.name]
        record.starts.append(bench.start(server, model))
        bench.know_tokens(record, bench.key(name), model, bench.answers(server))
        if way.prepares:
            record.prepared_s[model.name] = seconds = wait_until_prepared(server)
            bench.say(f"  {model.name} is {'' if seconds is not None else 'not '}prepared")
        else:
            # The hypervisor gives it only when it is used; on other machines it is there.
            touch_host_memory(int(model.shape.weights_bytes * HOST_MEMORY_PER_WEIGHT))
        seconds = pair.sleep(model.name, level)
        record.first_sleeps.append(FirstSleep(model.name, level, seconds, gpu_memory_in_use_bytes()))
        bench.say(f"  first sleep of {model.name}: {seconds:.3f} s")
        bench.results.save()
    pair.wake(bench.models[0].name)


def wait_until_prepared(server: Server) -> float | None:
    """Seconds until all weights have a backup; `None` if that takes too long: the first sleep does the rest."""
    start = time.perf_counter()
    while (seconds := time.perf_counter() - start) < PREPARE_S:
        usage = server.call_worker(STATUS)["usage"]["weights"]
        if usage["backed_up_bytes"] == usage["bytes"]:
            return seconds
        time.sleep(0.2)
    return None


def sleep_level(record: Record) -> int:
    assert record.level is not None
    return record.level


def run_switches(bench: Bench, pair: Pair, record: Record) -> None:
    """A → B → A …, both answers after each; the model that is woken always slept at this way's level."""
    level = sleep_level(record)
    a, b = bench.models
    if pair.asleep_level[b.name] not in (0, level):  # another way ended with A awake
        pair.sleep(a.name, level)
        pair.wake(b.name)
    if pair.asleep_level[a.name]:  # or with B awake
        pair.sleep(b.name, level)
        pair.wake(a.name)
    for number in range(bench.arguments.switches):
        old, new = (a, b) if number % 2 == 0 else (b, a)
        cached = bench.checkpoint_cached(new) if level == 2 else None
        start = time.perf_counter()
        off_s = pair.sleep(old.name, level)
        on_s, reload_s = pair.wake(new.name)
        switch_s = time.perf_counter() - start
        answers = bench.answers(pair.servers[new.name])
        bench.add(record, _switch(record, old, new, (off_s, on_s, reload_s, switch_s), answers, cached, None))


def measure_restarts(bench: Bench, record: Record) -> None:
    """Stop the old, start the new; both with a warm compile cache."""
    way, key = WAYS["restart"], bench.key("restart")
    a, b = bench.models
    bench.say(f"{key}: {way.title}")
    with contextlib.ExitStack() as ends:

        def start(model: Model) -> tuple[Server, Start]:
            server = bench.server(model, way)
            ends.callback(bench.end, server, way.title)
            return server, bench.start(server, model)

        for model in (a,) if bench.compile_cache_is_warm(b) else (b, a):
            current, started = start(model)
            record.starts.append(started)
            bench.know_tokens(record, key, model, bench.answers(current))
            if model is b:
                bench.end(current, way.title)
        for number in range(bench.number_of_switches("restart")):
            old, new = (a, b) if number % 2 == 0 else (b, a)
            off_s = bench.end(current, way.title)
            current, started = start(new)
            times = (off_s, started.seconds, None, off_s + started.seconds)
            answers = bench.answers(current)
            if new.name not in record.tokens:
                bench.know_tokens(record, key, new, answers)
            facts = (started.checkpoint_cached, started.compile_cache_warm)
            bench.add(record, _switch(record, old, new, times, answers, *facts))


def _switch(
    record: Record,
    old: Model,
    new: Model,
    times: tuple[float, float, float | None, float],
    answers: Sequence[Answer],
    cached: float | None,
    compile_cache_warm: bool | None,
) -> Switch:
    off_s, on_s, reload_s, switch_s = times
    first, second = answers
    return Switch(
        old=old.name,
        new=new.name,
        off_s=off_s,
        on_s=on_s,
        reload_s=reload_s,
        switch_s=switch_s,
        first_token_s=first.first_token_s,
        answer_s=first.seconds,
        total_s=switch_s + first.seconds,
        warm_first_token_s=second.first_token_s,
        warm_answer_s=second.seconds,
        checkpoint_cached=cached,
        compile_cache_warm=compile_cache_warm,
        tokens_identical=record.tokens[new.name] == [answer.tokens for answer in answers],
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the raw result (JSON); beside it goes the end of the servers' logs")
    add("--models", default="14B,8B", help=f"A and B, of {', '.join(SHAPES)} (default %(default)s)")
    add("--ways", default=DEFAULT_WAYS, help=f"of {', '.join(WAYS)}, in this order (default %(default)s)")
    add("--fp8", action="store_true", help="quantise weights to FP8 while they are loaded")
    add("--switches", type=int, default=5)
    add("--restart-switches", type=int, default=2, help="fewer of them (default %(default)s)")
    add("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    add("--checkpoints", type=Path, help="their folder (default: --work)")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "cumem-sleep-switching", help="is kept")
    add("--gpu-memory-utilization", type=float, default=0.9)
    add("--enforce-eager", action="store_true", help="no compilation, no CUDA graphs")
    add("--server-args", default="", help="more arguments of the servers, in one string")
    add("--server-command", help="instead of vLLM's; its results are marked as simulated")
    add("--prompt-tokens", type=int, default=512)
    add("--max-tokens", type=int, default=16)
    add("--start-timeout", type=float, default=240.0)
    add("--deadline", type=float, default=550.0, help="seconds after which the run ends (default %(default)s)")
    add("--port", type=int, default=8100, help="of A; B has the next one")
    parsed = parser.parse_args(arguments)
    if unknown := [name for name in parsed.ways.split(",") if name not in WAYS]:
        parser.error(f"unknown ways: {', '.join(unknown)}")
    shapes = parsed.models.split(",")
    if len(shapes) != 2 or any(name not in SHAPES for name in shapes):
        parser.error(f"--models: two of {', '.join(SHAPES)}")
    if parsed.load_format == "dummy" and any(WAYS[name].level == 2 for name in parsed.ways.split(",")):
        parser.error("level 2 reads weights again, and dummy weights are nowhere to be read")
    return parsed


def main() -> None:
    exit_on_sigterm()
    bench = Bench(parse())
    bench.run()
    bench.say(f"wrote {bench.results.path.name}")
    if bench.results.failed:
        raise SystemExit(f"failed: {', '.join(bench.results.failed)}")


if __name__ == "__main__":
    main()
