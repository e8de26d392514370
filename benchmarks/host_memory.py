"""What a first sleep waits for: host memory that is touched, registered and copied to.

    python benchmarks/host_memory.py --out host_memory.json

One after the other: in a virtual machine the first time, at once again, after a pause, and right after another process
used as much. What the hypervisor has yet to give, and what fragmented pages cost, shows as the time of touching and
registering.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from record import GIB, write

from cumem_sleep import CuMemAllocator, _core, host_facts
from cumem_sleep.core.tuning import Tuning
from cumem_sleep.tools.bench.memory import DeviceMemory, open_memory

SLAB_BYTES, PREFAULT_BYTES = Tuning().slab_bytes, Tuning().prefault_bytes
DEVICE_BYTES = 2 * GIB
PAUSES_S = (0.0, 0.0, 8.0)
OTHER_PROCESS = "import sys; from record import touch_host_memory; touch_host_memory(int(sys.argv[1]))"


def measure(what: str, nbytes: int, address: int) -> dict[str, Any]:
    """Seconds of each step, over all blocks before the next step begins; all of it is given back."""
    blocks = [_core.HostBlock(SLAB_BYTES, -1) for _ in range(nbytes // SLAB_BYTES)]
    row: dict[str, Any] = {"what": what}
    for name, step in (
        ("touch_s", touch),
        ("register_s", register),
        ("copy_s", lambda those: copy(those, address)),
        ("give_back_s", give_back),
    ):
        start = time.perf_counter()
        step(blocks)
        row[name] = round(time.perf_counter() - start, 3)
    return row


def one_after_the_other(nbytes: int) -> Iterator[dict[str, Any]]:
    memory, address = source()
    for number, pause_s in enumerate(PAUSES_S):
        time.sleep(pause_s)
        yield measure(f"again after {pause_s:g} s" if number else "first", nbytes, address)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(nbytes)], check=True, cwd=Path(__file__).parent)
        yield measure("right after another process used as much", nbytes, address)
    memory.close()


def source() -> tuple[DeviceMemory, int]:
    """Device memory with random bytes in it, and its address."""
    memory = open_memory(CuMemAllocator.get_instance(), 0)
    regions = memory.allocate([DEVICE_BYTES], "weights")
    memory.fill(regions)
    memory.settle()
    return memory, regions[0].address


def touching(block: _core.HostBlock) -> list[_core.Task]:
    return [_core.prefault_task(block, start, PREFAULT_BYTES) for start in range(0, SLAB_BYTES, PREFAULT_BYTES)]


def threads() -> int:
    """As many as touch pages for a sleep on so many cores."""
    return max(1, host_facts.usable_cores() * 3 // 4)


def touch(blocks: Sequence[_core.HostBlock]) -> None:
    with ThreadPoolExecutor(threads()) as pool:
        list(pool.map(lambda task: task(), chain.from_iterable(map(touching, blocks))))


def register(blocks: Sequence[_core.HostBlock]) -> None:
    """By one thread: several together gain nothing."""
    for block in blocks:
        block.pin(0)


def copy(blocks: Sequence[_core.HostBlock], address: int) -> None:
    """From the device."""
    with _core.CopyStream(0) as stream:
        for number, block in enumerate(blocks):
            stream.to_host(block, 0, address + number * SLAB_BYTES % DEVICE_BYTES, SLAB_BYTES)
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
    nbytes = options.gib * GIB
    found: dict[str, Any] = {"bytes": nbytes, "rows": []}
    for row in one_after_the_other(nbytes):
        print(row, file=sys.stderr, flush=True)
        found["rows"].append(row)
        write(options.out, found)  # each time: what ends this early loses one row


if __name__ == "__main__":
    main()
