"""What the raw results say of themselves: where they lie, which machine made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    if not (RESULTS / name).is_file():
        raise SystemExit(f"benchmarks/results/{name} is missing: benchmarks/on_gpu_host.sh makes it")
    result: dict[str, Any] = json.loads((RESULTS / name).read_text())
    if result["machine"].get("simulated"):
        raise SystemExit(f"benchmarks/results/{name} is of the simulated driver, whose times mean nothing")
    return result


def machine(result: dict[str, Any]) -> str:
    facts = result["machine"]
    in_older_results = facts.get("driver, pcie generation, width", "").split(",")[0]
    driver = facts.get("driver") or in_older_results or "not known"
    return f"{facts['gpu']}, driver {driver}, {facts['cores']} cores, PyTorch {facts['torch']}"
