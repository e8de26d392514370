"""A wake before new weights are loaded: what it takes to restore the old ones, not to, and to forget them before.

python benchmarks/forget.py --gib 32 --out forget.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from record import GIB, machine, write

from cumem_sleep.tools.bench.memory import open_memory
from cumem_sleep.tools.simulated import open_allocator

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=32, help="of weights (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of each kind, in turns (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    options = parser.parse_args()
    allocator, _ = open_allocator(os.environ)
    memory = open_memory(allocator, 0)
    weights = memory.allocate([max(2 * MIB, int(options.gib * GIB / 32))] * 32, "weights")
    memory.fill(weights)
    found: dict[str, Any] = {"machine": machine(), "restored": [], "not restored": [], "forgotten": []}
    for _ in range(options.rounds):
        for name in ("restored", "not restored", "forgotten"):
            memory.settle()
            allocator.sleep()
            start = time.perf_counter()
            if name == "forgotten":
                allocator.forget("weights")
            forgotten_s = time.perf_counter() - start
            report = allocator.wake_up("weights", restore=name != "not restored")
            wake_s = time.perf_counter() - start
            found[name].append({"wake_s": wake_s, "forget_s": forgotten_s, "restored_bytes": report.restored_bytes})
            print(f"{name}: {wake_s:.3f} s; {report}", file=sys.stderr, flush=True)
            if name != "restored":
                memory.fill(weights)
    write(options.out, found)
    memory.close()
    if any(row["restored_bytes"] for name in ("not restored", "forgotten") for row in found[name]):
        sys.exit("old weights came back")


if __name__ == "__main__":
    main()
