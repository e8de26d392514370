"""`vllm serve` at level 3 on one GPU: what leaves it, what that takes, whether twenty times change anything.

    python benchmarks/vllm_level_3.py --out result.json                        # about four minutes on an H200
    python benchmarks/vllm_level_3.py --out result.json --ways vault,own       # about six

Each way is one server of Qwen3-32B's shape with random weights behind the gate, torch.compile and CUDA graphs on:

    vault_compressed  backups compressed, in a vault that the benchmark starts (weights are normally distributed)
    vault             the same, not compressed
    own               without a vault: backups in pinned memory of the server

It goes to level 3 and comes back again and again, by `POST /wake_up` and by a request; the greedy tokens have to be
those from before. Asleep, it is asked for its health, metrics, models and state. At the end it is told to stop while
it is at level 3. With `two` behind such a way, a server of the 8B shape starts while the first one is at level 3, and
they take turns on the GPU, each with 97 % of it.

Results are written after every step. A step that fails says why, and the others are done; the later cycles are left
out if they would take the time of the steps after them. What is there of other ways already stays in the file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import record
from checkpoints import SHAPES, write_config
from model_server import SERVE, Answer, Deadline, Facts, Server, exit_on_sigterm
from vault_process import Vault

from cumem_sleep.tools.machine import machine_facts

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
PROMPT = [3 + (7919 * (j + 3)) % 97 for j in range(64)]  # within the vocabulary of every shape
TOKENS = 16
START_S, CALL_S, VAULT_S = 600.0, 60.0, 120.0  # how long these may take
END_S, TWO_S = 20.0, 100.0  # what is kept for these steps
FEWEST_CYCLES = 6
BY_REQUEST = 3  # every third wake
IN_TWO_STEPS = 2  # the cycle that stops at level 1 on its way
ANSWERS: dict[str, Callable[[str], bool]] = {
    "/health": lambda said: json.loads(said)["level"] == 3,
    "/is_sleeping": lambda said: json.loads(said)["is_sleeping"] is True,
    "/metrics": lambda said: re.search(r'^cumem_sleep_sleep_level\{rank="0"\} 3\.0$', said, re.MULTILINE) is not None,
    "/v1/models": lambda said: len(json.loads(said)["data"]) == 1,
}
BUILT = re.compile("Graph capturing finished|torch.compile|Dynamo|[Cc]ompil(?:ing|ed) (?:a|the) graph")


class Failed(Exception):
    """Something is not as it should be."""


@dataclass(frozen=True)
class Way:
    """How one server keeps its backups.

    Attributes:
        vault: bytes of the vault per byte of weights; 0: there is none.
    """

    vault: float = 0.0
    compress: bool = False

    @property
    def environment(self) -> dict[str, str]:
        return {"CUMEM_SLEEP_COMPRESS": "auto"} if self.compress else {}


WAYS = {
    "vault_compressed": Way(vault=0.85, compress=True),  # they take 0.68
    "vault": Way(vault=1.1),
    "own": Way(),
}


# Memory


class Gpu:
    """The first visible GPU, as NVML sees it: without a CUDA context."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        by_number = visible.isdecimal()
        self._handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(visible)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(visible)
        )
        self.name = str(pynvml.nvmlDeviceGetName(self._handle))
        self.total_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    def free_bytes(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).free)


def settled(gpu: Gpu, limit_s: float = 5.0) -> int:
    """Free bytes once they stay the same: the driver gives the memory of a process back after its end."""
    ends_at = time.monotonic() + limit_s
    last = -1
    while (free := gpu.free_bytes()) != last and time.monotonic() < ends_at:
        last = free
        time.sleep(0.3)
    return free


def host_memory(pid: int) -> int:
    """Bytes of its own and shared ones, as the kernel counts them."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


# One server


@dataclass
class Bench:
    """What all steps have in common; `facts` is the result file."""

    arguments: argparse.Namespace
    deadline: Deadline
    gpu: Gpu
    facts: Facts
    logs: Path
    began: float = field(default_factory=time.monotonic)

    def save(self) -> None:
        new = self.arguments.out.with_suffix(".new")
        new.write_text(json.dumps(self.facts, indent=1) + "\n")
        new.replace(self.arguments.out)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)

    def left_s(self) -> float:
        return self.deadline.limit(math.inf)


class Sleeper:
    """A server, its worker, and the tokens that it has to answer with."""

    def __init__(self, bench: Bench, name: str, shape: str, port: int, way: Way, vault: Vault | None) -> None:
        arguments = bench.arguments
        self.name = name
        self.folder = arguments.work / shape
        write_config(self.folder, SHAPES[shape])
        command = [
            *SERVE,
            str(self.folder),
            *("--load-format", "dummy", "--skip-tokenizer-init", "--enable-sleep-mode", "--max-model-len", "4096"),
            *("--gpu-memory-utilization", str(arguments.gpu_memory_utilization), "--seed", "0"),
            *("--middleware", "cumem_sleep.vllm.SleepGate", "--worker-extension-cls", "worker_extension.Extension"),
            *shlex.split(arguments.server_options),
        ]
        environment = {
            "CUMEM_SLEEP_DISABLE": "0",
            "CUMEM_SLEEP_PREPARE": "0",
            "CUMEM_SLEEP_ON_REQUEST": "wake",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_CACHE_ROOT": str(arguments.work / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            **way.environment,
            **({} if vault is None else {"CUMEM_SLEEP_VAULT": vault.socket}),
        }
        self.command, self.compress = command[1:], way.compress
        self.server = Server(name, command, port, environment, bench.logs / f"level_3_{name}.log", bench.deadline)
        self._bench = bench
        self._tokens: list[int] = []
        self._phases: dict[str, dict[str, float]] = {}
        self._is_awake = True
        self._vault = vault
        self.worker = 0

    def start(self) -> Facts:
        """Until the first tokens."""
        facts: Facts = {"command": self.command, "start_s": self.server.start(START_S)}
        self.worker = int(self.server.call_worker("process_id"))
        if self.compress:  # how far weights shrink depends on their values
            facts["bytes_of_normal_values"] = int(self.server.call_worker("fill_with_normal_values"))
        answer = self.server.complete(PROMPT, TOKENS)
        self._tokens = facts["tokens"] = answer.tokens
        self.phases("sleep"), self.phases("wake")
        facts["first_token_s"] = self.complete().first_token_s
        facts["built"] = self.built()
        total, free = self._bench.gpu.total_bytes, self._bench.gpu.free_bytes()
        return {**facts, "gpu_free_bytes": free, "gpu_share": 1 - free / total}

    def rest(self) -> Facts:
        """Level 1, on the way to level 3: what it still has on the GPU, and pinned."""
        seconds = self.server.post("/sleep?level=1", limit_s=CALL_S)
        free = self._bench.gpu.free_bytes()
        usages = self.server.call_worker("cumem_sleep_status")["usage"].values()
        pinned = sum(usage["host_bytes"] - usage["vault_bytes"] for usage in usages)
        return {"sleep_to_level_1_s": seconds, "gpu_free_at_level_1_bytes": free, "pinned_bytes": pinned}

    def sleep(self) -> Facts:
        """To level 3, from wherever it is."""
        seconds, said = self.server.ask("POST", "/sleep?level=3", limit_s=CALL_S)
        answer = json.loads(said)
        if answer.get("level") != 3:
            raise Failed(f"{self.name} stayed at level {answer.get('level')}: {answer.get('why_not_deeper', said)}")
        phases = self.phases("sleep")
        if self._is_awake and "checkpoint" not in phases:
            raise Failed(f"{self.name} says that it is at level 3, but made no checkpoint: {phases}")
        self._is_awake = False
        deep = sum(phases.get(name, 0.0) for name in ("unpin", "lock", "checkpoint"))
        return {
            "sleep_s": seconds,
            "level_1_s": sum(phases.values()) - deep,
            "checkpoint_s": deep,
            "sleep_phases": phases,
        }

    def wake(self, by_request: bool) -> Facts:
        """Back, and the tokens are those from before."""
        facts: Facts = {"by": "request" if by_request else "call"}
        if by_request:
            answer = self.complete()
            facts["wake_and_first_token_s"] = answer.first_token_s
        else:
            facts["wake_s"] = self.server.post("/wake_up", limit_s=CALL_S)
            answer = self.complete()
            facts["first_token_s"] = answer.first_token_s
        self._is_awake = True
        phases = self.phases("wake")
        if "restore" not in phases:
            raise Failed(f"{self.name} came back without a restore: {phases}")
        deep = phases.get("restore", 0.0) + phases.get("unlock", 0.0)
        facts |= {"restore_s": deep, "back_from_level_1_s": sum(phases.values()) - deep, "wake_phases": phases}
        if answer.tokens != self._tokens:
            raise Failed(f"{self.name} answers with other tokens: {answer.tokens} instead of {self._tokens}")
        return facts

    def built(self) -> int:
        """How often its log speaks of graphs and compiled code that were made or loaded."""
        return len(BUILT.findall(self.server.log.read_text(errors="replace")))

    def complete(self) -> Answer:
        return self.server.complete(PROMPT, TOKENS, limit_s=CALL_S)

    def phases(self, operation: str) -> dict[str, float]:
        """Seconds of each since this was called last."""
        status = self.server.call_worker("cumem_sleep_status")
        now = status["operations"].get(operation, {"phases": {}})["phases"]
        last, self._phases[operation] = self._phases.get(operation, {}), now
        return {name: seconds - last.get(name, 0.0) for name, seconds in now.items() if seconds != last.get(name)}

    def memory(self) -> Facts:
        """After a step."""
        return {"gpu_free_bytes": self._bench.gpu.free_bytes(), "host_bytes": host_memory(self.worker)}

    def answers(self) -> Facts:
        """What it says at level 3, and in how many seconds; the right things, or it fails."""
        found, wrong = {}, []
        for path, is_right in ANSWERS.items():
            found[path], said = self.server.ask("GET", path, limit_s=20.0)
            try:
                right = is_right(said)
            except (ValueError, KeyError, TypeError):
                right = False
            if not right:
                wrong.append(f"{path}: {said[:300]}")
        if wrong:
            raise Failed(f"{self.name} at level 3 answers wrongly: {'; '.join(wrong)}")
        return found

    def end(self, way: Facts) -> None:
        """Told to stop at level 3: when it is gone, and what it leaves."""
        self.sleep()
        gpu = self._bench.gpu
        before = gpu.free_bytes()
        seconds = self.server.stop(self._bench.arguments.stop_limit)
        way["end"] = {"sigterm_s": seconds, "gpu_at_level_3_bytes": settled(gpu) - before}
        if seconds >= self._bench.arguments.stop_limit:
            raise Failed(f"{self.name} had to be killed after {seconds:.1f} s")


# Steps


def cycles(bench: Bench, sleeper: Sleeper, facts: Facts, count: int, reserve_s: float) -> None:
    """Down and up; the first sleep, which copies, is one of them."""
    done: list[Facts] = facts.setdefault("cycles", [])
    for number in range(count):
        if number >= FEWEST_CYCLES and bench.left_s() < reserve_s:
            facts["cut"] = f"{number} of {count} cycles: the time of the later steps begins"
            bench.say(facts["cut"])
            return
        level_1 = sleeper.rest() if number == IN_TWO_STEPS else {}
        cycle = {**level_1, **sleeper.sleep()}
        done.append(cycle)
        cycle["asleep"] = sleeper.memory()
        if number == 0:
            step(bench, facts, "answers_s", sleeper.answers)
        cycle |= sleeper.wake(by_request=number % BY_REQUEST == 1)
        cycle["awake"] = sleeper.memory()
        facts["built_again"] = sleeper.built() - facts["first"]["built"]
        bench.save()


def two(bench: Bench, first: Sleeper, facts: Facts, second: Sleeper) -> None:
    """The second one starts while the first one is at level 3; then they take turns."""
    first.sleep()
    facts["second"] = second.start()
    bench.say(f"{second.name} has started in {facts['second']['start_s']:.1f} s")
    bench.save()
    awake, asleep = second, first
    for _ in range(2 * bench.arguments.switches):
        begin = time.perf_counter()
        switch: Facts = {"from": awake.name, "to": asleep.name, **awake.sleep()}
        switch |= asleep.wake(by_request=True)
        switch["seconds"] = time.perf_counter() - begin
        switch["gpu_share"] = 1 - bench.gpu.free_bytes() / bench.gpu.total_bytes
        facts.setdefault("switches", []).append(switch)
        awake, asleep = asleep, awake
        bench.save()
    awake.sleep()


def step(bench: Bench, facts: Facts, name: str, do: Callable[[], object]) -> bool:
    """Whether it went well; what it says is kept, and why it failed."""
    try:
        found = do()
        if found is not None:
            facts[name] = found
        return True
    except Exception as error:  # also OutOfTime: the next steps say so, too, and the servers end
        facts["failed"][name] = f"{type(error).__name__}: {error}"
        bench.say(f"{name} FAILED: {str(error).splitlines()[0]}")
        return False
    finally:
        bench.save()


@contextlib.contextmanager
def vault_of(bench: Bench, name: str, nbytes: int, facts: Facts) -> Iterator[Vault | None]:
    """It takes its memory while the first server starts. What it had on the GPU shows when it is gone."""
    if nbytes == 0:
        yield None
        return
    with Vault(max(nbytes, 64 * MIB), *bench.arguments.vault_options.split(), log=bench.logs / f"{name}.log") as vault:
        yield vault
        with contextlib.suppress(Exception):
            facts["vault"] = vault.status()
        with_it = settled(bench.gpu)
    facts["gpu_of_the_vault_bytes"] = settled(bench.gpu) - with_it


def measure(bench: Bench, name: str, with_second: bool, count: int) -> None:
    """One way."""
    arguments, way = bench.arguments, WAYS[name]
    facts = bench.facts["ways"][name]
    shapes = [arguments.shape, *([arguments.second] if with_second else [])]
    nbytes = int(way.vault * sum(SHAPES[each].weights_bytes for each in shapes))
    before = facts["gpu_free_before_bytes"] = settled(bench.gpu)
    with vault_of(bench, name, nbytes, facts) as vault, contextlib.ExitStack() as ends:
        servers = [
            Sleeper(bench, f"{name}_{each}_{number}", each, arguments.port + number, way, vault)
            for number, each in enumerate(shapes)
        ]
        for each in servers:
            ends.callback(each.server.stop)
        first = servers[0]
        if step(bench, facts, "first", first.start):
            bench.say(f"{first.name} has started in {facts['first']['start_s']:.1f} s")
            if vault is not None:
                step(bench, facts, "vault_ready_s", lambda: vault.wait_until_pinned(bench.deadline.limit(VAULT_S)))
            reserve_s = END_S + (TWO_S if with_second else 0.0)
            step(bench, facts, "cycles", lambda: cycles(bench, first, facts, count, reserve_s))
            if with_second:
                taken: Facts = {}
                facts["two"] = taken
                step(bench, facts, "two", lambda: two(bench, first, taken, servers[1]))
            bench.deadline.keep(END_S)
            step(bench, facts, "end", lambda: first.end(facts))
    facts["gpu_left_bytes"] = before - settled(bench.gpu)
    bench.save()


# The command


def chained(ways: Sequence[str]) -> list[tuple[str, bool]]:
    """Each way, and whether its server is the first of two: `two` belongs to the way before it."""
    return [(way, then == "two") for way, then in zip(ways, [*ways[1:], ""], strict=True) if way != "two"]


def run(bench: Bench) -> None:
    count = bench.arguments.cycles
    for name, with_second in chained(bench.arguments.ways.split(",")):
        bench.say(f"{name}{', and two models' if with_second else ''}")
        bench.facts["ways"].pop(name, None)  # what an earlier run has found
        facts: Facts = {
            "through_the_vault": WAYS[name].vault > 0,
            "compressed": WAYS[name].compress,
            "cycles_wanted": count,
            "failed": {},
        }
        bench.facts["ways"][name] = facts
        step(bench, facts, "all", partial(measure, bench, name, with_second, count))
        count = bench.arguments.later_cycles


def machine(gpu: Gpu) -> Facts:
    vllm = importlib.metadata.version("vllm")
    facts = asdict(machine_facts(gpu.name, record.command()))
    return {**facts, "gpu_memory_bytes": gpu.total_bytes, "vllm": vllm, "commit": os.environ.get("COMMIT")}


def said_of(result: Facts) -> list[str]:
    """Medians of the cycles after the first, and what has failed."""
    lines = []
    for name, facts in result["ways"].items():
        later = [cycle for cycle in facts.get("cycles", ()) if "awake" in cycle][1:]
        for what in ("sleep_s", "checkpoint_s", "restore_s", "wake_s", "wake_and_first_token_s"):
            if measured := [cycle[what] for cycle in later if what in cycle]:
                lines.append(f"{name}: {what} {statistics.median(measured):.3f}, {len(measured)} times")
        lines += [f"{name}: {step_name} FAILED: {why.splitlines()[0]}" for step_name, why in facts["failed"].items()]
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--ways", default="vault_compressed,two", help=f"of {', '.join(WAYS)}, separated by commas; two behind one")
    add("--cycles", type=int, default=20, help="of the first way")
    add("--later-cycles", type=int, default=3, help="of the others")
    add("--switches", type=int, default=3, help="to each of two models")
    add("--shape", choices=SHAPES, default="32B")
    add("--second", choices=SHAPES, default="8B", help="the second of two models")
    # What a server takes on top of this (its context, the driver) makes it 97 %.
    add("--gpu-memory-utilization", type=float, default=0.96)
    add("--work", type=Path, default=Path("/tmp/vllm-serve"), help="folder for config and compile cache")
    add("--deadline", type=float, default=240, help="seconds that all of it may take")
    add("--stop-limit", type=float, default=30, help="seconds that a server has to end")
    add("--port", type=int, default=8070, help="of the first server; the second one has the next")
    add("--vault-options", default="", help="more of `cumem-sleep vault`")
    add("--server-options", default="", help="more of `vllm serve`")
    arguments = parser.parse_args()
    ways = arguments.ways.split(",")
    if unknown := set(ways) - {*WAYS, "two"}:
        parser.error(f"--ways: {', '.join(sorted(unknown))}: no such way; there are {', '.join(WAYS)}")
    if ways[0] == "two":
        parser.error("--ways: two: name the way of the first server before it")
    return arguments


def main() -> None:
    arguments = parse()
    exit_on_sigterm()
    deadline = Deadline(arguments.deadline)
    gpu = Gpu()
    logs = arguments.out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ways: Facts = json.loads(arguments.out.read_text())["ways"] if arguments.out.exists() else {}
    said = {name: value.name if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    bench = Bench(arguments, deadline, gpu, {"machine": machine(gpu), "arguments": said, "ways": ways}, logs)
    try:
        run(bench)
    finally:
        bench.save()
        print(*said_of(bench.facts), sep="\n", flush=True)
    sys.exit(any(ways[name]["failed"] for name, _ in chained(arguments.ways.split(","))))


if __name__ == "__main__":
    main()
