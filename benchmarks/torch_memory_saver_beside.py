"""torch_memory_saver 0.0.10 and this layer behind its interface, side by side in one run.

    python benchmarks/torch_memory_saver_beside.py --out beside.json --theirs SITE     # seven minutes on an H200

SITE is a folder in which torch_memory_saver is installed (`pip install --no-deps --target SITE torch_memory_saver`); by
default, the one of this environment. Every way is a process of its own in which the same calls (`region`, `pause`,
`resume`, hook mode `torch`, pinned backups) reach either package, with the tensors of a 32B model in bf16, 30 and
61 GiB of them, and its KV cache without a backup. Every byte is checked after every resume. A way that fails says why,
and the others are measured; results are written after each. Last, `examples/training_loop.py` runs with either package,
theirs in its default hook mode (`LD_PRELOAD`): which share of its steps goes into pausing and resuming.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from layers import SIMULATED, NotInstalled
from model_server import exit_on_sigterm
from record import machine
from recording import Process, WorkerFailed, qwen3_32b_bytes, segment_bytes
from vault import KV_BYTES
from vault_process import Vault

from cumem_sleep.tools.shim import FOLDERS

OURS = FOLDERS["torch_memory_saver"]
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "training_loop.py"
LAYERS_IN = {30: 29, 61: 64}  # decoder layers, by GiB of weights
NOT_RETAINED, RETAINED = "torch_memory_saver", "torch_memory_saver-retained"
WAYS = {
    "theirs": ("theirs", NOT_RETAINED, False),
    "ours": ("ours", NOT_RETAINED, False),
    "ours, vault": ("ours", NOT_RETAINED, True),
    "theirs, retained": ("theirs", RETAINED, False),
    "ours, retained": ("ours", RETAINED, False),
    "ours, retained, vault": ("ours", RETAINED, True),
}
STEPS = ("first pause", "pause, unchanged", "pause, changed", "resume at once", "resume later")
TARGETS = {"first pause": 3.0, "pause, unchanged": 10.0}  # times as fast; nothing else slower by more than 3 %
Facts = dict[str, Any]


def measure(process: Process, sizes: list[int], kv_bytes: int, pause_s: float, *, touch: bool) -> Facts:
    steps: dict[str, list[Facts]] = {}

    def pause(step: str) -> None:
        steps.setdefault(step, []).append(process.ask("sleep", level=1))

    def resume(step: str) -> None:
        steps.setdefault(step, []).append(process.ask("wake"))
        if differing := process.ask("check")["differing_tensors"]:
            raise WorkerFailed(f"{step}: bytes differ after it, in tensors {differing}")

    process.ask("load", sizes=sizes, kv_bytes=kv_bytes)
    if touch:  # the virtual machine has it then, for whoever is first
        process.ask("touch_host_memory", nbytes=int(1.1 * sum(sizes)))
    pause("first pause")
    resume("resume at once")
    pause("pause, unchanged")
    time.sleep(pause_s)
    resume("resume later")
    process.ask("change")
    pause("pause, changed")
    resume("resume at once")
    return {"version": process.version, "steps": steps}


def one_way(way: str, sizes: list[int], arguments: argparse.Namespace, ends_at: float) -> Facts:
    whose, layer, through_vault = WAYS[way]
    variables = variables_of(whose, arguments)
    kv_bytes = KV_BYTES // arguments.scale // 512 * 512
    if not through_vault:
        with Process(layer, ends_at, **variables) as process:
            return measure(process, sizes, kv_bytes, arguments.pause, touch=True)
    nbytes = max(int(1.06 * segment_bytes(sizes)), 64 << 20)
    options = arguments.vault_options.split()
    with Vault(nbytes, *options, log=arguments.out.with_name("beside_vault.log")) as vault:
        ready_s = vault.wait_until_pinned()
        with Process(layer, ends_at, **variables, CUMEM_SLEEP_VAULT=vault.socket) as process:
            # The vault has touched what it has, and beside 65 GiB of it there is no room to touch as much again.
            steps = measure(process, sizes, kv_bytes, arguments.pause, touch=False)
            return {**steps, "vault ready s": ready_s}


# Theirs in its default hook mode, started as its README says: in its other one a free outside of a region is fatal.
# The loader may not know the CUDA runtime that PyTorch brings, and then would leave the hooks out.
PRELOADED = """
import os, subprocess, sys
from torch_memory_saver import configure_subprocess
with open("/proc/self/maps") as maps:
    folders = sorted({os.path.dirname(line.split()[-1]) for line in maps if "libcudart" in line})
path = os.pathsep.join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
with configure_subprocess():
    sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], env={**os.environ, "LD_LIBRARY_PATH": path}).returncode)
"""

# The example, with the package that is found first; what it says at its end of this layer is not theirs to say: there,
# theirs shows that it gives memory back at all.
LOOP = """
import dataclasses, importlib.util, json, sys, types
import torch_memory_saver as package
spec = importlib.util.spec_from_file_location("loop", sys.argv[1])
loop = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loop)
saver = loop.torch_memory_saver = package.torch_memory_saver
allocator = loop.CuMemAllocator
on_gpu = len(sys.argv) == 2

def pause():
    import torch
    before = torch.cuda.mem_get_info()[0]
    saver.pause("kv_cache")
    freed = torch.cuda.mem_get_info()[0] - before
    if freed < 1 << 29:
        sys.exit(f"its hooks are not there: pausing the KV cache of 1 GiB freed {freed} bytes")

if "cumem_sleep" in package.__file__:
    saver.hook_mode = "torch"
else:
    calls = (pause, lambda: saver.resume("kv_cache")) if on_gpu else (lambda: None, lambda: None)
    regions = types.SimpleNamespace(sleep=calls[0], wake=calls[1])
    loop.CuMemAllocator = types.SimpleNamespace(get_instance=lambda: types.SimpleNamespace(regions=regions))
loop.with_a_model() if on_gpu else loop.with_addresses(allocator.get_instance())
if "cumem_sleep" in package.__file__:
    totals = allocator.get_instance().totals()
    print(json.dumps({name: dataclasses.asdict(each) for name, each in totals.items()}))
"""


def loop(whose: str, arguments: argparse.Namespace, ends_at: float) -> Facts:
    """The share of its time, as the example says it, how long all of it took, and on what our calls spent theirs."""
    if whose == "theirs" and SIMULATED and not arguments.theirs:
        raise NotInstalled("torch_memory_saver needs a GPU")
    begin = time.monotonic()
    preloaded = ["-c", PRELOADED] if whose == "theirs" else []
    process = subprocess.run(
        [sys.executable, *preloaded, "-c", LOOP, str(EXAMPLE), *(["simulated"] if SIMULATED else [])],
        env={**os.environ, **variables_of(whose, arguments)},
        capture_output=True,
        text=True,
        timeout=max(1.0, min(120.0, ends_at - begin)),
        check=False,
    )
    if process.returncode:
        raise WorkerFailed((process.stderr.strip() or "it ended").splitlines()[-1])
    (said,) = (line for line in process.stdout.splitlines() if "ms a step, was spent" in line)
    facts: Facts = {"says": said, "seconds with its start": round(time.monotonic() - begin, 2)}
    return facts if whose == "theirs" else {**facts, "totals": json.loads(process.stdout.splitlines()[-1])}


def variables_of(whose: str, arguments: argparse.Namespace) -> dict[str, str]:
    first = str(OURS) if whose == "ours" else arguments.theirs
    path = [str(Path(__file__).resolve().parent), first, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def seconds_of(steps: dict[str, list[Facts]]) -> dict[str, float]:
    return {step: min(answer["seconds"] for answer in steps[step]) for step in STEPS if step in steps}


def table(results: Facts) -> list[str]:
    """Seconds of each step; in parentheses, how many times as fast as theirs with the same setting."""
    lines = []
    for size, ways in results.items():
        for way, facts in ways.items():
            if "error" in facts:
                lines.append(f"{size}, {way}: {facts['error'].splitlines()[0]}")
                continue
            peer = ways.get("theirs, retained" if "retained" in way else "theirs", {})
            theirs = seconds_of(peer.get("steps", {}))
            cells = [
                f"{step} {seconds:.3f}" + (f" ({theirs[step] / seconds:.2f} x)" if step in theirs else "")
                for step, seconds in seconds_of(facts["steps"]).items()
            ]
            lines.append(f"{size}, {way}: {', '.join(cells)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--theirs", default="", help="folder in which torch_memory_saver is installed")
    parser.add_argument("--gib", default="30,61", help="how much, separated by commas (default: %(default)s)")
    parser.add_argument("--ways", default=";".join(WAYS), help="which, separated by semicolons (default: %(default)s)")
    parser.add_argument("--decoder-layers", type=int, help="how many, instead of what makes up each size")
    parser.add_argument("--scale", type=int, default=1, help="divide every tensor's size and the KV cache's by this")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds before a late resume (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=560, help="seconds that all of it may take (%(default)s)")
    parser.add_argument("--vault-options", default="", help="of `cumem-sleep vault`")
    arguments = parser.parse_args()
    if unknown := set(arguments.ways.split(";")) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))}: there are {'; '.join(WAYS)}")
    exit_on_sigterm()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + arguments.deadline
    results: Facts = {}
    whole: Facts = {"machine": machine(), "targets": TARGETS, "results": results}
    failed = False

    def measured(name: str, call: Callable[[], Facts]) -> Facts:
        nonlocal failed
        begin = time.monotonic()
        try:
            found = call()
        except NotInstalled as error:
            found = {"error": f"NOT MEASURED: {error}"}
        except Exception as error:
            failed = True
            found = {"error": f"FAILED: {type(error).__name__}: {error}"}
        print(f"{time.monotonic() - begin:6.1f} s  {name}", file=sys.stderr, flush=True)
        return found

    def save() -> None:
        arguments.out.write_text(json.dumps(whole, indent=2) + "\n")

    for gib in map(int, arguments.gib.split(",")):
        sizes = qwen3_32b_bytes(arguments.decoder_layers or LAYERS_IN[gib], arguments.scale)
        ways = results.setdefault(f"{gib} GiB", {})
        for way in arguments.ways.split(";"):
            ways[way] = measured(f"{gib} GiB, {way}", partial(one_way, way, sizes, arguments, ends_at))
            save()
    loops: Facts = whole.setdefault("training loop", {})
    for whose in ("theirs", "ours"):
        loops[whose] = measured(f"training loop, {whose}", partial(loop, whose, arguments, ends_at))
        save()
    print(*table(results), sep="\n")
    for whose, facts in loops.items():
        print(f"training loop, {whose}: {facts.get('says') or facts['error']}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
