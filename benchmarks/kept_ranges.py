"""What it costs to keep ranges of dropped memory over a sleep, as of a KV cache: beside the same sleep without.

    python benchmarks/kept_ranges.py --out kept_ranges.json

Pages are chosen at random in each segment, so hardly any lie next to each other. After each wake a sample of them is
compared, beside the digests of all of them that the wake compares.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from record import GIB, machine, write

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.core.pinned import pinned_block
from cumem_sleep.digest.device import DeviceDigester, DigestRun
from cumem_sleep.tools.bench.memory import Region, open_memory
from cumem_sleep.tools.simulated import open_allocator

MIB = 1 << 20
SAMPLED = 200  # pages
LINK_BYTES = 256 * MIB  # copied to see what the link does


def link_s(address: int, nbytes: int, *, to_host: bool) -> float:
    """What so many bytes would take by the copy engine, in copies of 256 MiB."""
    block, size = pinned_block(min(LINK_BYTES, nbytes), 0), min(LINK_BYTES, nbytes)
    with _core.CopyStream(0) as stream:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            if to_host:
                stream.to_host(block, 0, address, size)
            else:
                stream.to_device(address, block, 0, size)
            stream.synchronize()
            times.append(time.perf_counter() - start)
    block.close()
    return min(times) * nbytes / size


def digest_s(keep: dict[int, npt.NDArray[np.int64]]) -> float:
    """One digest of all that is kept."""
    segments = [segment for segment in _core.segments() if segment.address in keep]
    ranges = {segment.id: np.sort(keep[segment.address], axis=0) for segment in segments}
    times = []
    for _ in range(3):
        start = time.perf_counter()
        with DigestRun(DeviceDigester(CuMemAllocator.tuning), segments, ranges) as run:
            run.start(segments)
            run.finish()
        times.append(time.perf_counter() - start)
    return min(times)


def sample(keep: dict[int, npt.NDArray[np.int64]]) -> bytes:
    """The bytes of some of the pages."""
    rows = [(address + offset, nbytes) for address, table in keep.items() for offset, nbytes in table.tolist()]
    found = b""
    block = pinned_block(rows[0][1], 0)
    with _core.CopyStream(0) as stream:
        for address, nbytes in rows[:: max(1, len(rows) // SAMPLED)]:
            stream.to_host(block, 0, address, nbytes)
            stream.synchronize()
            found += bytes(memoryview(block)[:nbytes])
    block.close()
    return found


def measure(allocator: CuMemAllocator, keep: dict[int, npt.NDArray[np.int64]] | None) -> dict[str, Any]:
    """A sleep and a wake."""
    before = sample(keep) if keep else b""
    slept = allocator.sleep(keep=keep)
    woken = allocator.wake_up()
    for report in (slept, woken):
        print(report, file=sys.stderr, flush=True)
    return {
        "kept_bytes": slept.kept_bytes,
        "back_bytes": woken.kept_bytes,
        "not_kept": slept.not_kept or woken.not_kept,
        "sleep_s": slept.seconds,
        "wake_s": woken.seconds,
        "sleep_phases": dict(slept.phases),
        "wake_phases": dict(woken.phases),
        "same_bytes": not keep or sample(keep) == before,
    }


def pages_of(regions: Sequence[Region], pages: int, page_bytes: int) -> dict[int, npt.NDArray[np.int64]]:
    """So many pages of each region, at random."""
    random = np.random.default_rng(0)
    keep = {}
    for region in regions:
        chosen = random.permutation(region.nbytes // page_bytes)[:pages].astype(np.int64) * page_bytes
        keep[region.address] = np.column_stack((chosen, np.full(len(chosen), page_bytes)))
    return keep


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--segments", type=int, default=64, help="of the cache (default: %(default)s)")
    parser.add_argument("--segment-mib", type=int, default=640, help="the size of each (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=2500, help="kept of each (default: %(default)s)")
    parser.add_argument("--page-kib", type=int, default=64, help="the size of a page (default: %(default)s)")
    parser.add_argument("--weights-gib", type=float, default=8, help="backed up (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="of each kind, in turns (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    allocator, _ = open_allocator(os.environ)
    memory = open_memory(allocator, 0)
    weights = memory.allocate([max(2 * MIB, int(options.weights_gib * GIB / 16))] * 16, "weights")
    cache = memory.allocate([options.segment_mib * MIB] * options.segments, "kv_cache")
    memory.fill([*weights, *cache])
    memory.settle()
    keep = pages_of(cache, options.pages, options.page_kib << 10)
    nbytes = sum(int(table[:, 1].sum()) for table in keep.values())
    found: dict[str, Any] = {
        "machine": machine(),
        "bytes": nbytes,
        "pieces": sum(map(len, keep.values())),
        "room_bytes": allocator.kept_room(),
        "digest_s": digest_s(keep),
        "link_out_s": link_s(cache[0].address, nbytes, to_host=True),
        "link_in_s": link_s(cache[0].address, nbytes, to_host=False),
        "without": [],
        "with": [],
    }
    for _ in range(options.rounds):  # the first of each takes and pins host memory
        for name, ranges in (("without", None), ("with", keep)):
            memory.fill(cache)  # what was dropped is zeros by now
            memory.settle()
            found[name].append(measure(allocator, ranges))
            write(options.out, found)
    for step, link in (("sleep_s", found["link_out_s"]), ("wake_s", found["link_in_s"])):
        least = {name: min(row[step] for row in found[name][1:] or found[name]) for name in ("without", "with")}
        found[f"longer_{step}"] = least["with"] - least["without"]
        print(f"{step}: longer by {found[f'longer_{step}']:.3f} s, of which the link {link:.3f} s", file=sys.stderr)
    write(options.out, found)
    memory.close()
    if not all(row["same_bytes"] and not row["not_kept"] for row in found["with"]):
        sys.exit("not all that was to be kept came back")


if __name__ == "__main__":
    main()
