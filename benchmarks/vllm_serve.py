"""Sleep and wake of `vllm serve`, as a client sees them over HTTP: this layer, cold and prepared, and vLLM's own.

    python benchmarks/vllm_serve.py --out result.json --shape 32B            # about four minutes on an H200
    python benchmarks/vllm_serve.py --out result.json --shape 32B --ways cold,prepared

One server after the other, random weights (the same for all but `compressed`), torch.compile and CUDA graphs on. After
every wake the greedy tokens must be those from before the first sleep. What the layer itself says about its phases is
kept as well. A result file that is there already keeps its other ways. vLLM before 0.33 knows no `prepared_graphs` and
no `vllm_best`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints import SHAPES, write_config
from model_server import SERVE, Deadline, Server, exit_on_sigterm, gpu_memory_in_use_bytes
from record import machine_apart, touch_host_memory

PROMPT = [(7919 * (j + 3)) % 150000 for j in range(64)]
TOKENS = 16
GATE = ("--middleware", "cumem_sleep.vllm.SleepGate")
LESS_STAYS = ("--sleep-mode-offload-cudagraph", "--enable-nccl-comm-suspend")  # of vLLM 0.33
PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


class Way(NamedTuple):
    """What it says, the environment, more options, and whether another process used as much host memory before."""

    says: str
    environment: dict[str, str]
    options: tuple[str, ...] = GATE
    touched: bool = False


COLD, PREPARED, OWN = {"CUMEM_SLEEP_PREPARE": "0"}, {"CUMEM_SLEEP_PREPARE": "1"}, {"CUMEM_SLEEP_DISABLE": "1"}
WAYS = {
    "default": Way("this layer, nothing set: as prepared, because host memory has room for it", {}),
    "cold": Way("this layer; the first sleep takes and pins its host memory", COLD),
    "touched": Way(
        "as cold, right after another process used as much host memory: the VM has its RAM by then", COLD, touched=True
    ),
    "prepared": Way("this layer, CUMEM_SLEEP_PREPARE=1: backups are made in the background after the start", PREPARED),
    "prepared_graphs": Way("as prepared, with the options of vllm_best", PREPARED, (*GATE, *LESS_STAYS)),
    "compressed": Way(
        "as prepared, with CUMEM_SLEEP_COMPRESS=auto, and normally distributed weights",
        {**PREPARED, "CUMEM_SLEEP_COMPRESS": "auto"},
        (*GATE, "--worker-extension-cls", "worker_extension.Extension"),
    ),
    "vllm": Way("vLLM's own layer", OWN, ()),
    "vllm_best": Way(
        f"vLLM's own layer at its best: {' '.join(LESS_STAYS)}, PYTORCH_ALLOC_CONF={PINNING}, host memory used before",
        {**OWN, "PYTORCH_ALLOC_CONF": PINNING},
        LESS_STAYS,
        touched=True,
    ),
}


def wait_until_prepared(server: Server, limit_s: float) -> float:
    """Seconds until all weights have a backup, and the most that is missing then is what changes all the time."""
    start = time.perf_counter()
    while time.perf_counter() - start < limit_s:
        usage = server.call_worker("cumem_sleep_status")["usage"]["weights"]
        if usage["backed_up_bytes"] == usage["bytes"]:
            return time.perf_counter() - start
        time.sleep(0.5)
    raise server.failure(f"not prepared within {limit_s:.0f} s: {usage}")


def measure(
    way: str, arguments: argparse.Namespace, deadline: Deadline, logs: Path, machine: dict[str, Any]
) -> dict[str, Any]:
    command = [
        *SERVE,
        str(arguments.work / arguments.shape),
        *("--load-format", "dummy", "--skip-tokenizer-init", "--enable-sleep-mode", "--max-model-len", "4096"),
        *("--gpu-memory-utilization", str(arguments.gpu_memory_utilization), "--seed", "0"),
        *WAYS[way].options,
    ]
    says, own, *_ = WAYS[way]
    facts: dict[str, Any] = {"says": says, "environment": own, "command": command[1:], "machine": machine}
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CACHE_ROOT": str(arguments.work / "cache"), **own}
    server = Server(way, command, arguments.port, environment, logs / f"serve_{way}.log", deadline)
    serve(way, server, arguments, facts)
    return facts


def serve(way: str, server: Server, arguments: argparse.Namespace, facts: dict[str, Any]) -> None:
    """From its start to its end."""
    try:
        facts["start_s"] = server.start(240)
        if "CUMEM_SLEEP_COMPRESS" in WAYS[way].environment:  # how far weights shrink depends on their values
            facts["bytes_of_normal_values"] = int(server.call_worker("fill_with_normal_values"))
        before = server.complete(PROMPT, TOKENS).tokens
        if way == "default" or WAYS[way].environment.items() >= PREPARED.items():
            facts["prepared_after_s"] = wait_until_prepared(server, 60)
        if WAYS[way].touched:
            touch_host_memory(int(SHAPES[arguments.shape].weights_bytes * 1.1))
        facts["gpu_bytes_awake"] = gpu_memory_in_use_bytes()
        for number in range(1 + arguments.rounds):
            if number == 1:  # the later ones are apart from what the first left to do
                time.sleep(arguments.pause)
            facts.setdefault("first_sleep_s" if number == 0 else "later_sleeps_s", []).append(
                server.post("/sleep?level=1")
            )
            facts.setdefault("gpu_bytes_asleep", []).append(gpu_memory_in_use_bytes())
            facts.setdefault("wakes_s", []).append(server.post("/wake_up"))
            answer = server.complete(PROMPT, TOKENS)
            facts.setdefault("first_token_s", []).append(answer.first_token_s)
            if answer.tokens != before:
                raise server.failure(f"other tokens after wake {number + 1}: {answer.tokens} instead of {before}")
        server.post("/sleep?level=1")
        time.sleep(arguments.pause)  # the driver has scrubbed the freed memory by then
        facts["wake_after_3_s"] = server.post("/wake_up")
        facts["tokens_identical"] = server.complete(PROMPT, TOKENS).tokens == before
        if not WAYS[way].environment.items() >= OWN.items():
            facts["status"] = server.call_worker("cumem_sleep_status")
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="32B")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="later sleeps")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/vllm-serve"), help="folder for config and compile cache"
    )
    parser.add_argument("--deadline", type=float, default=560, help="seconds that all of it may take")
    parser.add_argument("--pause", type=float, default=3, help="seconds between a sleep and a late wake")
    parser.add_argument("--port", type=int, default=8070)
    arguments = parser.parse_args()
    if unknown := set(arguments.ways.split(",")) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))}: no such way; there are {', '.join(WAYS)}")
    machine = machine_apart("vllm")
    exit_on_sigterm()
    deadline = Deadline(arguments.deadline)
    write_config(arguments.work / arguments.shape, SHAPES[arguments.shape])
    logs = arguments.out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ways: dict[str, Any] = json.loads(arguments.out.read_text())["ways"] if arguments.out.exists() else {}
    failed: dict[str, str] = {}
    for way in arguments.ways.split(","):
        try:
            ways[way] = measure(way, arguments, deadline, logs, machine)
        except Exception as error:
            failed[way] = f"{type(error).__name__}: {error}"
            if "error" in ways.get(way, {"error": ""}):  # an earlier run's figures stay
                ways[way] = {"error": failed[way]}
        result = {"machine": machine, "shape": arguments.shape, "prompt": PROMPT, "ways": ways}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'way':18}{'start':>8}{'first sleep':>13}{'later':>8}{'wake':>8}{'wake 3 s':>10}{'TTFT':>8}  s; asleep GiB")
    for way, facts in ways.items():
        if way in failed:
            print(f"{way:18}FAILED {failed[way]}")
        if "error" in facts:
            continue
        print(
            f"{way:18}{facts['start_s']:8.1f}{facts['first_sleep_s'][0]:13.3f}"
            f"{statistics.median(facts['later_sleeps_s']):8.3f}{statistics.median(facts['wakes_s']):8.3f}"
            f"{facts['wake_after_3_s']:10.3f}{statistics.median(facts['first_token_s']):8.3f}"
            f"  {(facts['gpu_bytes_asleep'][-1] or 0) / (1 << 30):.2f}"
        )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
