"""What `vllm_level_3.py` found, as a table: target beside measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Facts = dict[str, Any]
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Row:
    """One line of the table; `kept` is None where there is no target, or nothing was measured."""

    what: str
    target: str
    measured: str
    kept: bool | None = None


def most(what: str, limit: float, values: Sequence[float], unit: str, scale: float = 1.0) -> Row:
    """The median is to be at most so much."""
    if not values:
        return Row(what, f"≤ {limit:g} {unit}", "not measured")
    middle, worst = statistics.median(values) / scale, max(values) / scale
    spread = f" (at most {worst:.3f}, of {len(values)})" if len(values) > 1 else ""
    target = f"≤ {limit:g} {unit}" if math.isfinite(limit) else "–"
    return Row(what, target, f"{middle:.3f} {unit}{spread}", middle <= limit if math.isfinite(limit) else None)


def growth(series: Sequence[float]) -> float | None:
    """From the second cycle on, which is the first that has all it needs."""
    return max(series[2:]) - series[1] if len(series) > 2 else None


def flat(what: str, limit_mib: int, series: Sequence[float]) -> Row:
    grew = growth(series)
    if grew is None:
        return Row(what, f"≤ {limit_mib} MiB", "not measured")
    return Row(what, f"≤ {limit_mib} MiB", f"{grew / MIB:+.1f} MiB, {len(series)} cycles", grew <= limit_mib * MIB)


def rows_of_cycles(facts: Facts, in_vault: bool, compress: bool, count: int) -> list[Row]:
    done = [cycle for cycle in facts.get("cycles", ()) if "awake" in cycle]
    later = done[1:]
    straight = [cycle for cycle in later if "pinned_bytes" not in cycle]
    in_steps = [cycle for cycle in later if "pinned_bytes" in cycle]
    at_level_3 = facts.get("end", {}).get("gpu_at_level_3_bytes", 0)
    kept = [c["asleep"]["gpu_free_bytes"] - c["gpu_free_at_level_1_bytes"] + at_level_3 for c in in_steps]
    pinned = [cycle["pinned_bytes"] for cycle in in_steps]
    called = [cycle for cycle in later if cycle["by"] == "call"]
    asked = [cycle for cycle in later if cycle["by"] == "request"]

    def host(state: str, who: str) -> list[float]:
        return [cycle[state][who]["anonymous"] + cycle[state][who]["shared"] for cycle in done]

    first_token = [facts["first"]["first_token_s"]] if "first" in facts else []
    built = str(facts.get("built_again", "not measured"))
    return [
        Row("cycles with the same tokens", str(count), str(len(done)), len(done) == count),
        most("first sleep", math.inf, [cycle["sleep_s"] for cycle in done[:1]], "s"),
        most("level 1 of later sleeps", math.inf, [cycle["level_1_s"] for cycle in later], "s"),
        most("POST /sleep?level=3", math.inf, [cycle["sleep_s"] for cycle in straight], "s"),
        most("kept on the GPU at level 1", 1.32 if in_vault else math.inf, kept, "GiB", GIB),
        most("pinned by the server itself", 0 if in_vault else math.inf, pinned, "GiB", GIB),
        most("checkpoint", 0.9 if in_vault else 2.4, [cycle["checkpoint_s"] for cycle in later], "s"),
        most("the first checkpoint", math.inf, [cycle["checkpoint_s"] for cycle in done[:1]], "s"),
        most("restore", 0.5 if in_vault else 1.9, [cycle["restore_s"] for cycle in later], "s"),
        most("rest of the wake", math.inf, [cycle["back_from_level_1_s"] for cycle in later], "s"),
        most("POST /wake_up", math.inf, [cycle["wake_s"] for cycle in called], "s"),
        most(
            "first token of a request that wakes",
            2.2 if compress else math.inf,
            [cycle["wake_and_first_token_s"] for cycle in asked],
            "s",
        ),
        most("first token after POST /wake_up", math.inf, [cycle["first_token_s"] for cycle in called], "s"),
        most("the same before the first sleep", math.inf, first_token, "s"),
        Row("graphs and code made again", "0", built, built == "0" if done else None),
        flat("GPU memory in use asleep grew by", 2, [-cycle["asleep"]["gpu_free_bytes"] for cycle in done]),
        flat("GPU memory in use awake grew by", 2, [-cycle["awake"]["gpu_free_bytes"] for cycle in done]),
        flat("worker's host memory asleep grew by", 64, host("asleep", "worker")),
        flat("worker's host memory awake grew by", 64, host("awake", "worker")),
        flat("other processes' host memory grew by", 64, host("awake", "others")),
        *([flat("the vault's host memory grew by", 64, host("asleep", "vault"))] if in_vault else []),
        most("slowest answer at level 3", 1.0, [max(facts["answers_s"].values())] if "answers_s" in facts else [], "s"),
    ]


def rows_of_two(facts: Facts, switches: int) -> list[Row]:
    done = facts.get("switches", [])
    shares = {name: [s["gpu_share"] for s in done if s["to"] == name] for name in dict.fromkeys(s["to"] for s in done)}
    least = min((min(each) for each in shares.values()), default=0.0)
    return [
        Row("switches of two, the same tokens", str(2 * switches), str(len(done)), len(done) == 2 * switches),
        Row("share of the GPU of each", "≥ 0.97", f"{least:.3f}", least >= 0.97 if done else None),
        most("switch, to the last token", math.inf, [switch["seconds"] for switch in done], "s"),
        most("first token of the switch", math.inf, [switch["wake_and_first_token_s"] for switch in done], "s"),
    ]


def rows_of_end(facts: Facts, in_vault: bool) -> list[Row]:
    end = facts.get("end", {})
    by_process = [nbytes for nbytes in end.get("gpu_at_level_3_by_process", {}).values() if nbytes is not None]
    rows = [
        most("left on the GPU at level 3", 4, [end["gpu_at_level_3_bytes"]] if end else [], "MiB", MIB),
        most("the same, as NVML says of the process", 4, by_process, "MiB", MIB),
        most("SIGTERM at level 3, until gone", math.inf, [end["sigterm_s"]] if end else [], "s"),
        most(
            "left on the GPU after all", 2, [facts["gpu_left_bytes"]] if "gpu_left_bytes" in facts else [], "MiB", MIB
        ),
    ]
    of_the_vault = [facts["gpu_of_the_vault_bytes"]] if "gpu_of_the_vault_bytes" in facts else []
    return [*rows, *([most("the vault's own GPU memory", 0.6, of_the_vault, "GiB", GIB)] if in_vault else [])]


def rows(facts: Facts, arguments: Mapping[str, Any]) -> list[Row]:
    """Of one way."""
    in_vault, compressed = facts["through_the_vault"], facts["compressed"]
    found = rows_of_cycles(facts, in_vault, compressed, facts["cycles_wanted"])
    found += rows_of_two(facts["two"], arguments["switches"]) if "two" in facts else []
    return [*found, *rows_of_end(facts, in_vault)]


def table(result: Facts) -> list[str]:
    lines = []
    for name, facts in result["ways"].items():
        lines.append(f"{name}: started in {facts['first']['start_s']:.1f} s" if "first" in facts else name)
        for row in rows(facts, result["arguments"]):
            verdict = {True: "ok", False: "MISSED", None: ""}[row.kept]
            lines.append(f"    {row.what:38}{row.target:>12}   {row.measured:44}{verdict}".rstrip())
        lines += [f"    FAILED {step_name}: {why.splitlines()[0]}" for step_name, why in facts["failed"].items()]
    return lines
