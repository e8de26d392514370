"""`vllm serve` at level 3 (`vllm_level_3.py`)."""

from __future__ import annotations

from typing import Any

from level_3_table import rows as rows_of_level_3

from .results import machine
from .written import header, row

ROWS = (  # as level_3_table.py calls them
    "cycles with the same tokens",
    "graphs and code made again",
    "first sleep",
    "checkpoint",
    "restore",
    "rest of the wake",
    "first token of a request that wakes",
    "kept on the GPU at level 1",
    "left on the GPU at level 3",
    "the vault's own GPU memory",
    "GPU memory in use asleep grew by",
)


def table(own: dict[str, Any], vault: dict[str, Any]) -> list[str]:
    """`vllm serve` at level 3, a column for each place of its backups; then two models in turns."""
    ways = {"own memory": (own, "own"), "the vault, compressed": (vault, "vault_compressed")}
    measured = {
        name: {row.what: row.measured for row in rows_of_level_3(run["ways"][way], run["arguments"])}
        for name, (run, way) in ways.items()
    }
    said = vault["arguments"]
    options = f"`{said['server_options']}`"
    both, failed = measured["the vault, compressed"], vault["ways"]["vault_compressed"]["failed"]
    early = f" (then: {failed['two'].splitlines()[0]})" if "two" in failed else ""
    shares = [f"{run['arguments']['gpu_memory_utilization']:.2f}" for run, _ in ways.values()]
    return [
        f"**`vllm serve` at level 3**, a Qwen3-{said['shape']}-shaped model, vLLM {vault['machine']['vllm']} with its"
        f" default CUDA graphs, {options}. {'; '.join(dict.fromkeys((machine(own), machine(vault))))}. Medians of the"
        " cycles after the first:",
        "",
        *header(ways),
        row("`--gpu-memory-utilization`", shares),
        *(row(head, (way.get(head, "–") for way in measured.values())) for head in ROWS),
        "",
        f"Two models in turns through one vault, {said['shape']} and {said['second']}, in the run of the second"
        f" column: each had at least {both['share of the GPU of each']} of the GPU while awake, and the same tokens"
        f" after {both['switches of two, the same tokens']} of {2 * said['switches']} switches{early}. To the last"
        f" token a switch took {both['switch, to the last token']}; the first token of the request that wakes"
        f" {both['first token of the switch']}.",
    ]
