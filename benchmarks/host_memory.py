"""What a first sleep waits for: host memory that is touched, registered and copied to, one after the other.

    python benchmarks/host_memory.py --out host_memory.json

The first time in a virtual machine, at once again, after pauses, and right after another process used as much: what the
hypervisor has yet to give, and what fragmented pages cost, shows as the time of touching and registering. A first sleep
does all three side by side, so the slowest of them is the least that it can take.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from record import GIB, write

from cumem_sleep import _core, host_limits
from cumem_sleep.backup import SLAB_BYTES

TOUCH_BYTES = 16 << 20
PAUSES_S = (0.0, 0.0, 1.0, 3.0, 8.0)
OTHER_PROCESS = "import sys; from record import touch_host_memory; touch_host_memory(int(sys.argv[1]))"


def measure(what: str, nbytes: int, address: int, device_bytes: int) -> dict[str, Any]:
    """Seconds of each step, over all blocks before the next step begins; all of it is given back."""
    blocks = [_core.HostBlock(SLAB_BYTES, -1) for _ in range(nbytes // SLAB_BYTES)]
    row: dict[str, Any] = {"what": what}
    for name, step in (
        ("touch_s", touch),
        ("register_s", register),
        ("copy_s", lambda those: copy(those, address, device_bytes)),
        ("give_back_s", give_back),
    ):
        start = time.perf_counter()
        step(blocks)
        row[name] = round(time.perf_counter() - start, 3)
    print(row, file=sys.stderr, flush=True)
    return row


def touch(blocks: Sequence[_core.HostBlock]) -> None:
    """With as many threads as a sleep takes on so many cores."""
    pieces = [(block, start) for block in blocks for start in range(0, SLAB_BYTES, TOUCH_BYTES)]
    with ThreadPoolExecutor(max(1, host_limits.usable_cores() * 3 // 4)) as pool:
        list(pool.map(lambda piece: piece[0].touch(piece[1], TOUCH_BYTES), pieces))


def register(blocks: Sequence[_core.HostBlock]) -> None:
    """By one thread: several together gain nothing."""
    for block in blocks:
        block.pin(0)


def copy(blocks: Sequence[_core.HostBlock], address: int, device_bytes: int) -> None:
    """From the device."""
    with _core.CopyStream(0) as stream:
        for number, block in enumerate(blocks):
            stream.to_host(block, 0, address + number * SLAB_BYTES % device_bytes, SLAB_BYTES)
        stream.synchronize()


def give_back(blocks: Sequence[_core.HostBlock]) -> None:
    for block in blocks:
        block.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--gib", type=int, default=61, help="host memory (default: %(default)s)")
    options = parser.parse_args()
    if options.gib <= 0:
        parser.error(f"--gib {options.gib}: at least 1")
    return options


def main() -> None:
    options = parse()
    nbytes, device_bytes = options.gib * GIB, 2 * GIB
    _core.open_driver("libcuda.so.1")
    address = _core.malloc(device_bytes, "weights", 0)
    rows = []
    for number, pause_s in enumerate(PAUSES_S):
        time.sleep(pause_s)
        rows.append(measure(f"again after {pause_s:g} s" if number else "first", nbytes, address, device_bytes))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(nbytes)], check=True, cwd=Path(__file__).parent)
        rows.append(measure("right after another process used as much", nbytes, address, device_bytes))
    _core.free(address)
    write(options.out, {"bytes": nbytes, "rows": rows})


if __name__ == "__main__":
    main()
