"""Sleep and wake of a 32B model's memory by this layer, by vLLM's own and by torch_memory_saver, in one run.

    python benchmarks/peers.py --out peers.json

Needs a GPU of 128 GiB or more and 80 GiB of host memory, or `--scale 4`. A layer that is not installed is left out, and
both what is printed and the JSON say so. On an H200 all four take about eight minutes (`--deadline`): a first sleep of
vLLM's lasts 30 s, every sleep of torch_memory_saver's 20 s unless it retains its backups.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import record
from layers import LAYERS
from model_server import exit_on_sigterm
from recording import GIB, Recording, Workload, qwen3_32b_bytes

KV_BYTES = int(54.63 * GIB)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    add(
        "--layers",
        default=",".join(name for name in LAYERS if not name.endswith("-disk")),
        help="which, separated by commas (default: %(default)s)",
    )
    add("--decoder-layers", type=int, default=64, help="of the 32B model (default: %(default)s)")
    add("--scale", type=int, default=1, help="divide every tensor's size and the KV cache's by this")
    add("--processes", type=int, default=3, help="first sleeps per layer, at most (default: %(default)s)")
    add("--rounds", type=int, default=3, help="later sleeps and wakes, at most (default: %(default)s)")
    add("--pause", type=float, default=3.0, help="seconds before a late wake (default: %(default)s)")
    add("--deadline", type=float, default=480, help="seconds; then no more processes (default: %(default)s)")
    arguments = parser.parse_args()
    if unknown := set(arguments.layers.split(",")) - set(LAYERS):
        parser.error(f"--layers: {', '.join(sorted(unknown))}: there are {', '.join(LAYERS)}")
    return arguments


def main() -> None:
    arguments = parse()
    exit_on_sigterm()
    scale = arguments.scale
    workload = Workload(
        sizes=qwen3_32b_bytes(arguments.decoder_layers, scale),
        kv_bytes=KV_BYTES // scale // 512 * 512,
        processes=arguments.processes,
        rounds=arguments.rounds,
        pause_s=arguments.pause,
        deadline_s=arguments.deadline,
        link_bytes=8 * GIB // scale,
        hook_segments=max(500 // scale, 10),
    )
    recording = Recording(workload, lambda line: print(line, file=sys.stderr, flush=True))
    recording.run(arguments.layers.split(","))
    result = {
        "machine": {**recording.machine, "command": shlex.join(record.command())},
        "workload": {
            "segments": len(workload.sizes),
            "weights_bytes": workload.weights_bytes,
            "kv_cache_bytes": workload.kv_bytes,
            "link_bytes": workload.link_bytes,
        },
        "link": recording.link,
        "layers": {
            name: {"title": LAYERS[name].title, "levels": LAYERS[name].levels, **asdict(found)}
            for name, found in recording.records.items()
        },
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for name, found in recording.records.items():
        print(f"{name} {found.version or ''}: {found.state}")
        for step, seconds in found.seconds.items():
            print(f"    {step:34}{' '.join(f'{each:.6f}' for each in seconds)}")
    sys.exit(bool(recording.machine_error) or any(found.error for found in recording.records.values()))


if __name__ == "__main__":
    main()
