"""What a first sleep waits for: host memory that is touched, registered and copied to.

    python benchmarks/host_memory.py --out host_memory.json

First one after the other: in a virtual machine the first time, at once again, after a pause, and right after another
process used as much. What the hypervisor has yet to give, and what fragmented pages cost, shows as the time of touching
and registering.

Then side by side, as a first sleep does them, in a fresh process each: these calls and nothing else, which is what the
machine can do, and in turn with it a first sleep of this layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
from cumem_sleep._core import Ahead
from cumem_sleep.tools.bench.memory import DeviceMemory, open_memory
from cumem_sleep.tools.bench.workload import kv_segments, model_like
from cumem_sleep.tuning import Tuning

SLAB_BYTES, PREFAULT_BYTES = Tuning().slab_bytes, Tuning().prefault_bytes
DEVICE_BYTES = 2 * GIB
PAUSES_S = (0.0, 0.0, 8.0)
ALONE, SLEEP = "the calls alone", "a first sleep"
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


def alone(nbytes: int) -> dict[str, Any]:
    """Touch, register and copy, a block as soon as it is ready."""
    memory, address = source()
    start = time.perf_counter()
    blocks = [_core.HostBlock(SLAB_BYTES, -1) for _ in range(nbytes // SLAB_BYTES)]
    with Ahead(threads(), {number: touching(block) for number, block in enumerate(blocks)}) as touched:
        touched.start()
        with _core.CopyStream(0) as stream:
            for number, block in enumerate(blocks):
                touched.wait(number)
                block.pin(0)
                stream.to_host(block, 0, address + number * SLAB_BYTES % DEVICE_BYTES, SLAB_BYTES)
            stream.synchronize()
        seconds = time.perf_counter() - start
    give_back(blocks)
    memory.close()
    return {"seconds": seconds}


def first_sleep(nbytes: int) -> dict[str, Any]:
    """Of weights of a model's shape, and a KV cache beside them; what was restored is checked."""
    allocator = CuMemAllocator.get_instance()
    memory = open_memory(allocator, 0)
    weights = memory.allocate(model_like(nbytes), "weights")
    memory.allocate(kv_segments(nbytes * 9 // 10), "kv_cache")
    memory.fill(weights)
    expected = memory.checksums(weights)
    memory.settle()
    start = time.perf_counter()
    report = allocator.sleep()
    seconds = time.perf_counter() - start
    allocator.wake_up()
    if memory.checksums(weights) != expected:
        raise AssertionError("after the wake the bytes are not what they were")
    memory.close()
    return {"seconds": seconds, "phases": report.phases}


def in_process(name: str, nbytes: int) -> dict[str, Any]:
    code = "import host_memory, json, sys; print(json.dumps(getattr(host_memory, sys.argv[1])(int(sys.argv[2]))))"
    command = [sys.executable, "-c", code, name, str(nbytes)]
    done = subprocess.run(command, check=True, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def side_by_side(nbytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Both ways in turn, since a shared machine is not equally fast all the time."""
    for _ in range(rounds):
        for what, name in ((ALONE, alone.__name__), (SLEEP, first_sleep.__name__)):
            yield {"what": what, **in_process(name, nbytes)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--gib", type=int, default=61, help="host memory (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="side by side (default: %(default)s)")
    options = parser.parse_args()
    for name in ("gib", "rounds"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    return options


def main() -> None:
    options = parse()
    nbytes = options.gib * GIB
    found: dict[str, Any] = {"bytes": nbytes, "rows": [], "side_by_side": [], "medians": {}}
    for key, rows in (
        ("rows", one_after_the_other(nbytes)),
        ("side_by_side", side_by_side(nbytes, options.rounds)),
    ):
        for row in rows:
            print(row, file=sys.stderr, flush=True)
            found[key].append(row)
            for what in {row["what"] for row in found["side_by_side"]}:
                found["medians"][what] = statistics.median(
                    row["seconds"] for row in found["side_by_side"] if row["what"] == what
                )
            write(options.out, found)  # each time: what ends this early loses one row


if __name__ == "__main__":
    main()
