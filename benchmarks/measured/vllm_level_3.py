"""`vllm serve` at level 3 (`vllm_level_3.py`)."""

from __future__ import annotations

from typing import Any

from level_3_table import rows as rows_of_level_3

from .results import beside, machine
from .written import header, row

ROWS = (  # as level_3_table.py calls them
    "cycles with the same tokens",
    "graphs and code made again",
    "first sleep",
    "level 1 of later sleeps",
    "the first checkpoint",
    "checkpoint",
    "restore",
    "rest of the wake",
    "POST /wake_up",
    "first token of a request that wakes",
    "first token after POST /wake_up",
    "slowest answer at level 3",
    "kept on the GPU at level 1",
    "left on the GPU at level 3",
    "the vault's own GPU memory",
    "pinned by the server itself",
    "GPU memory in use asleep grew by",
    "GPU memory in use awake grew by",
    "worker's host memory asleep grew by",
    "worker's host memory awake grew by",
)


def table(
    result: dict[str, Any],
    default_seqs: dict[str, Any],
    own: dict[str, Any],
    own_default_seqs: dict[str, Any],
    two: dict[str, Any],
) -> list[str]:
    """`vllm serve` at level 3, a column for each place of its backups; then two models in turns."""

    def measured(run: dict[str, Any], way: str = "vault_compressed") -> dict[str, str]:
        return {row.what: row.measured for row in rows_of_level_3(run["ways"][way], run["arguments"])}

    def in_turns(run: dict[str, Any]) -> str:
        both, wanted = measured(run), 2 * run["arguments"]["switches"]
        failed = run["ways"]["vault_compressed"]["failed"]
        early = f" (then: {failed['two'].splitlines()[0]})" if "two" in failed else ""
        return (
            f"each had at least {both['share of the GPU of each']} of the GPU while awake, and the same tokens after"
            f" {both['switches of two, the same tokens']} of {wanted} switches{early}. To the last token a switch took"
            f" {both['switch, to the last token']}; the first token of the request that wakes"
            f" {both['first token of the switch']}."
        )

    said = result["arguments"]
    options = f"`{said['server_options']}`"
    ways = {
        f"own memory, {options}": measured(own, "own"),
        f"the vault, compressed, {options}": measured(result),
        "the vault": measured(own_default_seqs, "vault"),
        "the vault, compressed": measured(default_seqs),
    }
    before = measured(two)
    shares = [
        f"{run['arguments']['gpu_memory_utilization']:.2f}" for run in (own, result, own_default_seqs, default_seqs)
    ]
    return [
        f"**`vllm serve` at level 3**, a Qwen3-{said['shape']}-shaped model, vLLM {result['machine']['vllm']} with its"
        f" default CUDA graphs. The first column: {machine(own)}{beside(own)}. The second:"
        f" {machine(result)}{beside(result)}. The others were measured earlier, with vLLM's default number of"
        f" sequences: the third{beside(own_default_seqs)}, and the last{beside(default_seqs)}. Medians of the cycles"
        " after the first:",
        "",
        *header(ways),
        row("`--gpu-memory-utilization`", shares),
        *(row(head, (way.get(head, "–") for way in ways.values())) for head in ROWS),
        "",
        f"Two models in turns at level 3 through one vault, compressed, {said['shape']} and {said['second']}, with"
        f" {options}, in the run of the second column: {in_turns(result)}",
        "",
        f"The same earlier, with vLLM's default number of sequences{beside(two)}: {in_turns(two)} Before the switches,"
        f" {before['cycles with the same tokens']} cycles of the first model alone: checkpoint {before['checkpoint']},"
        f" restore {before['restore']}, first token of a request that wakes"
        f" {before['first token of a request that wakes']}.",
    ]
