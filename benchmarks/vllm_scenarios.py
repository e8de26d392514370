"""What vLLM does with sleep mode, done by a real vLLM on a GPU whose memory is in this layer: is the outcome right?

    python benchmarks/vllm_scenarios.py --out result.json            # all, several beside each other on one GPU
    python benchmarks/vllm_scenarios.py --out result.json --gpus 2 --jobs 3      # those that take two GPUs
    python benchmarks/vllm_scenarios.py --out result.json --only what_surviving_costs_32b    # a larger model

Every scenario is a process of its own with a small model (Qwen3-0.6B's shape, random weights on disk). It compares
greedy tokens before and after, and whatever else it is about, and fails if one thing is not as it should be. A result
file that is there already keeps its other scenarios; each one is added as soon as it has ended. On an H200 all on one
GPU take about five minutes, those on two about seven.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ending import kill_descendants
from scenarios import ALONE, LIMIT_S, LIMITS_S, OTHER_SHAPES, SCENARIOS, TWO_GPUS


def run_one(name: str, result: Path, folder: Path) -> None:
    start = time.perf_counter()
    try:
        facts = SCENARIOS[name][0](folder)
        outcome = {"passed": True, **facts}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    outcome["seconds"] = round(time.perf_counter() - start, 1)
    result.write_text(json.dumps(outcome, default=str))
    sys.stdout.flush()
    os._exit(0 if outcome["passed"] else 1)  # engines of other processes end with their pipes


def run_in_process(name: str, work: Path, logs: Path, limit_s: float) -> dict[str, Any]:
    result, log = work / f"{name}.json", logs / f"{name}.log"
    result.unlink(missing_ok=True)
    environment = {**os.environ, **SCENARIOS[name][1], "VLLM_CACHE_ROOT": str(work / "cache")}
    command = [sys.executable, __file__, "--run", name, "--out", str(result), "--work", str(work)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            kill_descendants(process.pid)
            process.kill()
            process.wait()
    late = (
        f"no result in time ({limit_s:g} s)" if process.returncode == -signal.SIGKILL else "it ended without a result"
    )
    outcome = json.loads(result.read_text()) if result.exists() else {"passed": False, "error": late}
    lines = log.read_text(errors="replace").splitlines()
    outcome["says"] = SCENARIOS[name][0].__doc__
    outcome["environment"] = SCENARIOS[name][1]
    outcome["log of the layer"] = [line.split("] ", 1)[-1] for line in lines if "cumem-sleep" in line][:8]
    if "error" in outcome:
        outcome["errors"] = [line for line in lines if "ERROR" in line][:20]
        outcome["last lines"] = lines[-25:]
    return outcome


def table(outcomes: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, outcome in outcomes.items():
        ended = "passed" if outcome["passed"] else "FAILED"
        lines.append(f"{ended:8}{name:40}{outcome.get('seconds', 0):6.1f} s")
        if not outcome["passed"]:
            lines.append(f"        {outcome['error']}")
    return lines


def run_all(names: list[str], jobs: int, run: Callable[[str], dict[str, Any]]) -> None:
    """Those that need the whole GPU come last, one after the other."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in [pool.submit(run, name) for name in names if name not in ALONE]:
                future.result()
            for name in names:
                if name in ALONE:
                    run(name)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_descendants()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help=f"of {', '.join(SCENARIOS)}; separated by commas")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="without --only: those that take so many")
    parser.add_argument("--jobs", type=int, default=5, help="processes at a time")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds for each, but for those that need more (%(default)s)"
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm-scenarios"), help="folder for checkpoints")
    parser.add_argument("--run", choices=SCENARIOS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = arguments.work / "model"
    if arguments.run:
        run_one(arguments.run, arguments.out, model)
    from checkpoints import SHAPES, write_checkpoint
    from model_server import exit_on_sigterm
    from record import machine

    usual = [name for name in SCENARIOS if name not in OTHER_SHAPES and (name in TWO_GPUS) == (arguments.gpus == 2)]
    names = arguments.only.split(",") if arguments.only else usual
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: no such scenario; there are {', '.join(SCENARIOS)}")
    for seed, name in enumerate(("model", "other"), start=1):
        write_checkpoint(arguments.work / name, SHAPES["0.6B"], seed)
    logs = arguments.out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"scenarios": {}}
    if arguments.out.exists():
        found = json.loads(arguments.out.read_text())
    facts = {"vllm": version("vllm"), **machine()}
    outcomes: dict[str, Any] = {}
    one_at_a_time = threading.Lock()

    def run(name: str) -> dict[str, Any]:
        outcome = run_in_process(name, arguments.work, logs, max(arguments.limit, LIMITS_S.get(name, 0)))
        with one_at_a_time:
            outcomes[name] = outcome
            found["scenarios"][name] = {**outcome, "machine": facts}
            arguments.out.write_text(json.dumps(found, indent=2) + "\n")
            print(*table({name: outcome}), sep="\n", flush=True)
        return outcome

    exit_on_sigterm()
    run_all(names, arguments.jobs, run)
    print("", *table({name: outcomes[name] for name in names}), sep="\n")
    sys.exit(not all(outcome["passed"] for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
