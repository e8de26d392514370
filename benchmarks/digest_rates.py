"""How long digests take, of the layer that this Python finds: the first one, later ones, and those after a pause.

PYTHONPATH=SITE python benchmarks/digest_rates.py      # ten seconds on a GPU with 30 GiB
"""

from __future__ import annotations

import statistics
import time

import torch

from cumem_sleep import CuMemAllocator, Settings, _core
from cumem_sleep.digest.device import DeviceDigester

SIZES = [(1, 2), (1, 64), (4, 16), (1, 1024), (220, 112)]  # segments, and the MiB of each
PAUSE_S = 0.002  # as long as small work on the GPU between two calls: caches get cold


def main() -> None:
    torch.cuda.init()
    allocator = CuMemAllocator(Settings(driver="cuda"))
    digester = DeviceDigester(CuMemAllocator.tuning)
    for count, mib in SIZES:
        addresses = [allocator.malloc(mib << 20, "weights") for _ in range(count)]
        segments = _core.segments()
        start = time.perf_counter()
        digester.of(segments)
        first_s = time.perf_counter() - start
        medians = []
        with digester.run(segments) as run:
            for pause_s in (0, PAUSE_S):
                taken = []
                for _ in range(8 if count > 100 else 30):
                    time.sleep(pause_s)
                    start = time.perf_counter()
                    run.start(segments)
                    run.finish()
                    taken.append(time.perf_counter() - start)
                medians.append(statistics.median(taken))
        gbps = count * (mib << 20) / medians[0] / 1e9
        print(
            f"{count} x {mib} MiB: first {1e3 * first_s:.2f} ms, then {1e6 * medians[0]:.0f} us,"
            f" after a pause {1e6 * medians[1]:.0f} us; {gbps:.0f} GB/s"
        )
        for address in addresses:
            allocator.free(address)


if __name__ == "__main__":
    main()
