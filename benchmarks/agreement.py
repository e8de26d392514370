"""What it costs that ranks agree: sleeps and wakes of ranks as processes, on the simulated driver.

    python benchmarks/agreement.py --out results/agreement.json [--ranks 2 8] [--cycles 200]

All ranks are called at once, and each has one page of memory, so that their halves take about as long. Measured is the
phase `agree` of the reports: from when a rank is ready until it has the decision. Of each operation the rank that was
ready last counts, for the others wait for it; and beside it the one that waited longest. No GPU takes part: neither
agreement nor its transport touches one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from record import machine_without_gpu

os.environ.setdefault("CUMEM_SLEEP_DRIVER", "sim")
sys.path += [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "operations")]


def milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_ms": round(1000 * statistics.median(ordered), 3),
        "p95_ms": round(1000 * ordered[int(0.95 * (len(ordered) - 1))], 3),
        "most_ms": round(1000 * ordered[-1], 3),
    }


def measured(size: int, cycles: int) -> dict[str, Any]:
    from ranks import ranks

    with ranks(size, timeout_s=60.0) as them:
        them.all("cost", 10)
        by_rank = them.all("cost", cycles)
    results: dict[str, Any] = {"ranks": size, "cycles": cycles}
    for number, operation in enumerate(("sleep", "wake")):
        of_rounds = list(zip(*([cycle[number] for cycle in mine] for mine in by_rank), strict=True))
        results[operation] = {
            "last rank": milliseconds([min(each) for each in of_rounds]),
            "first rank": milliseconds([max(each) for each in of_rounds]),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="how many, each measured (default: 2 8)")
    parser.add_argument("--cycles", type=int, default=200, help="sleeps and wakes (default: 200)")
    arguments = parser.parse_args()
    results = {
        "machine": machine_without_gpu(simulated=True),
        "agreement": [measured(size, arguments.cycles) for size in arguments.ranks],
    }
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results["agreement"], indent=2), file=sys.stderr)


if __name__ == "__main__":
    main()
