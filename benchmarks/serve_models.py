"""`cumem-sleep serve` over three real vLLM servers on one GPU: what a switch takes, and whether anything is lost.

    python benchmarks/serve_models.py --out serve_models.json          # about eight minutes on an H200

Models with dummy weights: Qwen3-8B's shape in bf16, Qwen3-14B's in FP8, a small one, each with 90 % of the GPU.
Requests go through the front, one after the other, to models at random: each must be answered with the tokens of the
first time, and its first token counts as awake or as after a switch, which is compared with the sleep, the wake and the
same model's first token when awake. Then many clients ask at once: every answer must be whole. Last, each model in turn
is started in place of another that is stopped: that is a switch without sleep mode. Those for which there is no time
are named. A phase that fails says why, and the others are done. It needs the extra `serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import SHAPES, write_config
from ending import end
from model_server import HOST, Answer, Deadline, completion, exit_on_sigterm, read_completion
from record import machine_apart, touch_host_memory

MODELS = {"large": ("8B", []), "fp8": ("14B", ["--quantization", "fp8"]), "small": ("0.6B", [])}
EXECUTION = ["-cc.mode=none", "-cc.cudagraph_mode=full"]  # CUDA graphs without torch.compile
TOKEN = "secret"
PROMPTS = 6
TOKENS = 8
TOUCHED_BYTES = 48 << 30  # as much as all sleepers hold, and more
START_S = 400.0
SHARE, MORE_S = 1.05, 0.020  # of sleep and wake, and seconds beside them, that a switch may take
LIMIT = (
    f"{SHARE} x (sleep + wake) + {MORE_S} s + the median first token of the new model's own requests while it was"
    " awake, in this run"
)
Facts = dict[str, Any]


class Failed(Exception):
    """An answer that is not what it should be."""


@dataclass
class Endpoint:
    """Where requests go: a port of this machine."""

    port: int

    def call(self, method: str, path: str, body: Facts | None = None, limit_s: float = 60.0) -> Any:
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=limit_s)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
            response = connection.getresponse()
            content = response.read()
        if response.status != http.HTTPStatus.OK:
            raise Failed(f"{method} {path}: {response.status} {content[:500].decode(errors='replace')}")
        return json.loads(content) if content else None

    def complete(self, model: str, prompt: list[int], tokens: int = TOKENS, limit_s: float = 120.0) -> Answer:
        """Greedy tokens, streamed."""
        begin = time.perf_counter()
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=limit_s)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(completion(model, prompt, tokens)), HEADERS)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise Failed(f"{model}: {response.status} {response.read(500).decode(errors='replace')}")
            try:
                return read_completion(response, tokens, begin)
            except ValueError as error:
                raise Failed(f"{model}: {error}") from error


HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}


@dataclass
class Bench:
    """The front, and what is known of its models.

    Attributes:
        models: those that have started; the last is the smallest.
        expected: the tokens of the first time, by model and prompt.
        start_s: what the start of each took.
        awake_s: first tokens of requests that found their model awake, by model; those to new prompts are left out.
    """

    front: Endpoint
    deadline: Deadline
    chance: random.Random
    models: list[str]
    facts: Facts = field(default_factory=dict)
    expected: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    awake_s: dict[str, list[float]] = field(default_factory=dict)

    def prompt(self, number: int) -> list[int]:
        return [(7919 * (number + 1) * (j + 3)) % 150000 for j in range(32 + 16 * number)]

    def status(self) -> dict[str, Facts]:
        return {model["name"]: model for model in self.front.call("GET", "/status")["models"]}

    def awake(self) -> str:
        """The model that is awake; "" without one."""
        return next((name for name, model in self.status().items() if model["phase"] == "awake"), "")

    def ask(self, model: str, number: int, limit_s: float = 120.0) -> Answer:
        answer = self.front.complete(model, self.prompt(number), limit_s=self.deadline.limit(limit_s))
        if answer.tokens != self.expected.setdefault((model, number), answer.tokens):
            raise Failed(f"{model} says {answer.tokens} to prompt {number}, and not {self.expected[model, number]}")
        return answer

    def ask_awake(self, model: str, number: int) -> None:
        self.awake_s.setdefault(model, []).append(self.ask(model, number).first_token_s)

    def stop(self, model: str) -> None:
        """Returns when its process has ended."""
        self.front.call("POST", "/admin/stop", {"model": model}, limit_s=self.deadline.limit(90.0))


def spread(seconds: list[float]) -> Facts:
    if not seconds:
        return {"count": 0}
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "median_s": round(statistics.median(ordered), 4),
        "p99_s": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 4),
        "most_s": round(ordered[-1], 4),
    }


# Phases


def know_answers(bench: Bench) -> Facts:
    """Prefixes are not cached: what is cached is rounded otherwise."""
    for model in bench.models:
        for number in range(PROMPTS):
            bench.ask(model, number)
        for number in range(PROMPTS):
            bench.ask_awake(model, number)
    return {"answers that are known": len(bench.expected)}


def one_after_the_other(bench: Bench, count: int) -> Facts:
    switches: list[Facts] = []
    last = bench.awake()
    for _ in range(count):
        model, number = bench.chance.choice(bench.models), bench.chance.randrange(PROMPTS)
        if model == last:
            bench.ask_awake(model, number)
            continue
        answer = bench.ask(model, number)
        status = bench.status()
        own = {name: status[name]["last_switch"]["seconds"] for name in (last, model) if name}
        switches.append({"old": last, "new": model, "first_token_s": answer.first_token_s, "own": own})
        last = model
    switches = [compared(switch, bench.awake_s.get(switch["new"])) for switch in switches]
    more = [switch["more_s"] for switch in switches if switch["more_s"] is not None]
    return {
        "requests": count,
        "first tokens of a model that is awake": {model: [*bench.awake_s.get(model, [])] for model in bench.models},
        "first token, after a switch": {
            model: spread([s["first_token_s"] for s in switches if s["new"] == model]) for model in bench.models
        },
        "limit": LIMIT,
        "more than the sleep, the wake and that first token": spread(more),
        "compared": len(more),
        "within the limit": sum(s["first_token_s"] <= s["limit_s"] for s in switches if s["limit_s"] is not None),
        "switches": switches,
    }


def compared(switch: Facts, awake_s: list[float] | None) -> Facts:
    """The switch with its limit, what that is made of, and what the client waited beside sleep, wake and first token.

    Args:
        switch: what was measured.
        awake_s: first tokens of the new model while it was awake; without one there is nothing to compare with.
    """
    if not awake_s:
        return {**switch, "awake_first_token_s": None, "limit_s": None, "more_s": None}
    own, awake = sum(switch["own"].values()), statistics.median(awake_s)
    return {
        **switch,
        "awake_first_token_s": awake,
        "limit_s": SHARE * own + MORE_S + awake,
        "more_s": switch["first_token_s"] - own - awake,
    }


def many_at_once(bench: Bench, count: int, clients: int) -> Facts:
    """Which requests share a batch changes the rounding, so tokens are counted, and not compared."""
    asked = [(bench.chance.choice(bench.models), bench.chance.randrange(PROMPTS)) for _ in range(count)]

    def ask(request: tuple[str, int]) -> tuple[str, float]:
        model, number = request
        try:
            answer = bench.front.complete(model, bench.prompt(number), limit_s=bench.deadline.limit(240.0))
        except (Failed, OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"[:300], 0.0
        return "", answer.seconds

    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(ask, asked))
    errors = Counter(error for error, _ in answers if error)
    facts = {
        "requests": count,
        "clients": clients,
        "seconds": round(time.perf_counter() - begin, 2),
        "whole answers": spread([seconds for error, seconds in answers if not error]),
        "errors": dict(errors),
    }
    if errors:
        bench.facts["lost"] = facts
        raise Failed(f"{sum(errors.values())} of {count} requests were not answered: {errors.most_common(1)[0][0]}")
    return facts


def restarts(bench: Bench, budget_s: float) -> Facts:
    """Switches without sleep mode, as llama-swap makes them: one server runs, which is stopped before the next starts.

    The model that runs comes last, so that each is started once. One whose start takes longer than is left is left out.
    """
    facts: Facts = {"switches": [], "left out": {}}
    bench.facts["restarts"] = facts  # what has been measured stays, whatever comes
    ends_at = time.monotonic() + min(budget_s, bench.deadline.left())
    running = bench.awake()
    for model in bench.models:
        if model != running:
            bench.stop(model)
    for model in sorted(bench.models, key=lambda name: name == running):
        left_s = ends_at - time.monotonic()
        if left_s < bench.start_s[model]:
            why = f"{max(left_s, 0.0):.0f} s were left, and its first start took {bench.start_s[model]:.0f} s"
            facts["left out"][model] = why
            continue
        begin = time.perf_counter()
        try:
            if running:
                bench.stop(running)
            stop_s = time.perf_counter() - begin
            first_token_s = stop_s + bench.ask(model, 0, START_S).first_token_s
        except Exception as error:
            bench.facts["failed"][f"restart of {model}"] = f"{type(error).__name__}: {error}"
        else:
            switch = {"old": running, "new": model, "stop_s": stop_s, "first_token_s": first_token_s}
            facts["switches"].append(switch)
        running = model
    return facts


# The front


def write_models(arguments: argparse.Namespace, file: Path) -> None:
    models: Facts = {}
    for name, (shape, options) in arguments.models.items():
        write_config(arguments.work / shape, SHAPES[shape])
        command = [str(vllm_command(arguments.work)), "serve", str(arguments.work / shape)]
        command += ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "4096", "--seed", "0"]
        command += ["--no-enable-prefix-caching", "--middleware", "cumem_sleep.vllm.SleepGate"]
        command += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization), *options]
        command += [*EXECUTION, *shlex.split(" ".join(arguments.server_options))]
        models[name] = {
            "engine": "vllm",
            "command": shlex.join(command),
            "idle": "never",
            "levels": [1],
        }
    environment = {"VLLM_CACHE_ROOT": str(arguments.work / "cache"), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for model in models.values():
        model["env"] = environment
    front = {"port": arguments.port, "admin_token": TOKEN}
    whole = {"front": front, "logs": str(arguments.out.parent / "logs"), "models": models}
    file.write_text(json.dumps(whole, indent=2))


def vllm_command(folder: Path) -> Path:
    """`vllm` as a program of that name, by which the front knows it: what is unpacked into a folder has none."""
    file = folder / "vllm"
    file.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m vllm.entrypoints.cli.main "$@"\n')
    file.chmod(0o755)
    return file


@contextlib.contextmanager
def front_of(file: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """It ends its servers, and if it is killed the kernel does."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "cumem_sleep", "serve", str(file)]
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "PYTHONSAFEPATH": "1"}, start_new_session=True
        )
    try:
        yield process
    finally:
        end(process, 60)


def wait_until_started(bench: Bench, process: subprocess.Popen[bytes], log: Path) -> Facts:
    begin = one_begins = time.monotonic()
    ends_at = begin + bench.deadline.limit(START_S)
    while True:
        last_words = "".join(log.read_text(errors="replace")[-2000:])
        if process.poll() is not None:
            raise Failed(f"the front ended with status {process.returncode}: {last_words}")
        if time.monotonic() > ends_at:
            raise Failed(f"not all models have started within {START_S:.0f} s: {last_words}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            status = bench.status()
            for name in [name for name in bench.models if status[name]["error"]]:
                bench.models.remove(name)
                says = (status[name]["error"], status[name]["last_words"])
                bench.facts["failed"][f"start of {name}"] = "; ".join(filter(None, says))
                bench.front.call("POST", "/admin/stop", {"model": name}, limit_s=90.0)  # or it is tried again
                one_begins = time.monotonic()
            if not bench.models:
                raise Failed("no model has started")
            for name in bench.models:
                if status[name]["phase"] in ("awake", "asleep") and name not in bench.start_s:
                    bench.start_s[name] = time.monotonic() - one_begins
                    one_begins = time.monotonic()  # they start one after the other
            if len(bench.start_s) == len(bench.models):
                of_each = {name: round(seconds, 1) for name, seconds in bench.start_s.items()}
                return {"seconds": round(time.monotonic() - begin, 1), "seconds of each": of_each, "models": status}
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
        return port


def run(arguments: argparse.Namespace, facts: Facts, save: Callable[[], None]) -> None:
    arguments.port = arguments.port or free_port()
    arguments.work.mkdir(parents=True, exist_ok=True)
    file, log = arguments.work / "models.yaml", arguments.out.with_name("serve_models.log")
    # The front looks up what the host has left. Some virtual machines show only what has been used.
    touch_host_memory(TOUCHED_BYTES)
    deadline, names = Deadline(arguments.deadline), list(arguments.models)
    bench = Bench(Endpoint(arguments.port), deadline, random.Random(arguments.seed), names, facts)
    phases: dict[str, Callable[[], Facts]] = {
        "answers": lambda: know_answers(bench),
        "one after the other": lambda: one_after_the_other(bench, arguments.requests),
        "many at once": lambda: many_at_once(bench, arguments.load, arguments.clients),
        "answers are still the same": lambda: one_after_the_other(bench, 3 * len(names)),
        "restarts": lambda: restarts(bench, arguments.restart_seconds),
    }
    with contextlib.ExitStack() as stack:
        write_models(arguments, file)
        process = stack.enter_context(front_of(file, log))
        facts["start"] = wait_until_started(bench, process, log)
        for name, phase in phases.items():
            if arguments.phases and name not in arguments.phases:
                continue
            begin = time.monotonic()
            try:
                facts[name] = phase()
            except Exception as error:
                facts["failed"][name] = f"{type(error).__name__}: {error}"
            print(f"{time.monotonic() - begin:6.1f} s  {name}", file=sys.stderr, flush=True)
            save()
        with contextlib.suppress(Exception):
            facts["models at the end"] = bench.status()
    facts["the front ended in order"] = process.returncode == 0


def table(facts: Facts) -> list[str]:
    lines = [f"start of all models: {facts.get('start', {}).get('seconds')} s"]
    if one := facts.get("one after the other"):
        for model, seconds in one["first token, after a switch"].items():
            awake_s = one["first tokens of a model that is awake"][model]
            lines.append(f"first token, {model}, awake: {spread(awake_s)}")
            lines.append(f"first token, {model}, after a switch to it: {seconds}")
        more = "more than the sleep, the wake and that first token"
        lines.append(f"{more}: {one[more]}")
        lines.append(f"switches within {one['limit']}: {one['within the limit']} of {one['compared']}")
    for name in ("many at once", "lost"):
        if load := facts.get(name):
            lines.append(f"{name}: {load['requests']} requests in {load['seconds']} s, errors: {load['errors']}")
    if restarted := facts.get("restarts"):
        for switch in restarted["switches"]:
            lines.append(
                f"first token of {switch['new']}, started in place of {switch['old']}: {switch['first_token_s']:.1f} s,"
                f" of which the stop took {switch['stop_s']:.1f} s"
            )
        lines += [f"NOT RESTARTED {model}: {why}" for model, why in restarted["left out"].items()]
    return lines + [f"FAILED {name}: {error}" for name, error in facts["failed"].items()]


def models_of(text: str) -> dict[str, tuple[str, list[str]]]:
    pairs = dict(part.split("=") for part in text.split(","))
    if unknown := set(pairs.values()) - set(SHAPES):
        raise argparse.ArgumentTypeError(f"no such shape: {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    return {name: (shape, []) for name, shape in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--models", type=models_of, default=MODELS, help="NAME=SHAPE,… (default: large, fp8 and small)")
    parser.add_argument("--phases", type=lambda names: names.split(","), help="only these, as 'answers,restarts'")
    parser.add_argument("--requests", type=int, default=200, help="one after the other (default: %(default)s)")
    parser.add_argument("--load", type=int, default=200, help="requests by many clients (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="that ask at once (default: %(default)s)")
    parser.add_argument(
        "--restart-seconds", type=float, default=math.inf, help="for the restarts (default: what is left of --deadline)"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument(
        "--server-options",
        action="append",
        default=[],
        help="of `vllm serve`, of all models (as --max-num-seqs=64); may be repeated",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("/tmp/serve-models"), help="folder for configurations")
    parser.add_argument("--deadline", type=float, default=540, help="seconds that all of it may take (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="of the front (default: any that is free)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    facts: Facts = {
        "machine": machine_apart("vllm"),
        "models": {name: [shape, *options] for name, (shape, options) in arguments.models.items()},
        "execution": "graphs",
        "failed": {},
    }

    def save() -> None:
        arguments.out.write_text(json.dumps(facts, indent=2) + "\n")

    try:
        run(arguments, facts, save)
    except Exception as error:
        facts["failed"]["all"] = f"{type(error).__name__}: {error}"
    save()
    print(*table(facts), sep="\n")
    sys.exit(bool(facts["failed"]))


if __name__ == "__main__":
    main()
