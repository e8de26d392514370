"""What a sleep and a wake of little memory cost, phase by phase, with several builds of this layer, in turns.

    python benchmarks/small_calls.py --sites OLD NEW --out small_calls.json        # about a minute on an H200

Each turn is a process of its own, which finds the layer in one of these folders (`pip install --target`), and has
regions as `examples/training_loop.py` has them: one without a backup, and one with a backup, which changes before every
sleep or never. Where there is a GPU, they hold tensors of PyTorch. Noted are the seconds that the caller waited, those
that the report says, and its phases; on the simulated driver also the driver calls of one sleep and one wake.

Beside them stands what the driver takes to say how much memory is free (`torch.cuda.mem_get_info`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from record import answer_of

SIMULATED = os.environ.get("CUMEM_SLEEP_DRIVER") == "sim"
MIB = 1 << 20

CALLS = """
import ctypes, json, sys, time
from cumem_sleep import CuMemAllocator, Settings, sim

simulated, calls, pause_s = sys.argv[1] == "sim", int(sys.argv[2]), float(sys.argv[3])
sizes = json.loads(sys.argv[4])
allocator = CuMemAllocator(Settings(driver=sys.argv[1]))
regions = allocator.regions
tensors, addresses = {}, {}
for tag, backup in (("dropped", False), ("backed up", True)):
    with regions.use(tag, backup=backup):
        if simulated:
            addresses[tag] = [allocator.malloc(size) for size in sizes]
        else:
            import torch
            tensors[tag] = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]

def change(value):
    for tensor in tensors.get("backed up", ()):
        tensor.fill_(value)
    for address in addresses.get("backed up", ()):
        ctypes.memset(address, value, 4096)

def timed(call, tag):
    if not simulated:
        torch.cuda.synchronize()
    time.sleep(pause_s)
    start = time.perf_counter()
    report = call(tag)
    return {"waited": time.perf_counter() - start, "seconds": report.seconds, "phases": dict(report.phases)}

def counted(call, tag):
    sim.reset()
    call(tag)
    made = sim.stats().calls
    return {name: made[name] for name in made if made[name]}

found = {}
for kind, tag, changes in (("dropped", "dropped", 0), ("unchanged", "backed up", 0), ("changed", "backed up", 1)):
    sleeps, wakes = [], []
    for number in range(calls + 5):  # the first ones compile, pin and time routes
        if changes:
            change(1 + number % 250)
        sleeps.append(timed(regions.sleep, tag))
        wakes.append(timed(regions.wake, tag))
    found[kind] = {"sleep": {"calls": sleeps[5:]}, "wake": {"calls": wakes[5:]}}
    if simulated:
        if changes:
            change(251)
        found[kind]["sleep"]["driver calls"] = counted(regions.sleep, tag)
        found[kind]["wake"]["driver calls"] = counted(regions.wake, tag)
asked = []
for _ in range(0 if simulated else 100):
    start = time.perf_counter()
    torch.cuda.mem_get_info()
    asked.append(time.perf_counter() - start)
print(json.dumps({"kinds": found, "mem_get_info": asked}))
"""


def phases_of(call: dict[str, Any]) -> dict[str, float]:
    """Its phases; `other`: the rest of what its report counts; `outside`: what the caller waited beside that."""
    other = call["seconds"] - sum(call["phases"].values())
    return {**call["phases"], "other": other, "outside": call["waited"] - call["seconds"], "all": call["waited"]}


def medians(calls: list[dict[str, Any]]) -> dict[str, float]:
    """Of each phase, in seconds."""
    all_phases = [phases_of(call) for call in calls]
    names = list(dict.fromkeys(name for phases in all_phases for name in phases))
    return {name: statistics.median(phases.get(name, 0.0) for phases in all_phases) for name in names}


def table(runs: dict[str, list[Any]]) -> list[str]:
    """Microseconds, medians of all calls."""
    lines = []
    for name, turns in runs.items():
        for kind in turns[0]["kinds"]:
            for operation in ("sleep", "wake"):
                found = [turn["kinds"][kind][operation] for turn in turns]
                phases = medians([call for each in found for call in each["calls"]])
                told = ", ".join(f"{phase} {1e6 * seconds:.0f}" for phase, seconds in phases.items())
                made = sum(found[0].get("driver calls", {}).values())
                lines.append(f"{name:10} {kind:9} {operation:5}  {told} us" + (f"; {made} driver calls" * bool(made)))
        if asked := [seconds for turn in turns for seconds in turn["mem_get_info"]]:
            lines.append(f"{name:10} mem_get_info alone  {1e6 * statistics.median(asked):.0f} us")
    return lines


def facts_of_machine() -> dict[str, Any]:
    if SIMULATED:
        return {"simulated": True}
    from record import machine

    return machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--segments", type=int, default=4, help="of each region (default: %(default)s)")
    parser.add_argument("--segment-mib", type=int, default=16, help="its size (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=60, help="of each kind in a turn (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.002, help="seconds before each (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    asked = {
        "sizes": [arguments.segment_mib * MIB] * arguments.segments,
        "calls": arguments.calls,
        "pause_s": arguments.pause,
    }
    program = ["sim" if SIMULATED else "cuda", str(arguments.calls), str(arguments.pause), json.dumps(asked["sizes"])]
    runs: dict[str, list[Any]] = {site.name: [] for site in arguments.sites}
    for turn in range(arguments.turns):
        for site in arguments.sites if turn % 2 == 0 else arguments.sites[::-1]:  # none is always the last
            runs[site.name].append(answer_of(site, CALLS, *program, within_s=120))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": facts_of_machine(), **asked, "runs": runs}, indent=2) + "\n")
    print(*table(runs), sep="\n")


if __name__ == "__main__":
    main()
