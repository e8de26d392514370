"""One `vllm serve` (`vllm_serve.py`)."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import GIB, header, row, spread

ROWS = {
    "first sleep": "first_sleep_s",
    "later sleeps": "later_sleeps_s",
    "wake right after a sleep": "wakes_s",
    "wake 3 s later": "wake_after_3_s",
    "first token after a wake": "first_token_s",
}
TITLES = {
    "cold": "cumem-sleep, cold",
    "touched": "cumem-sleep, host memory used before",
    "prepared": "cumem-sleep, `CUMEM_SLEEP_PREPARE=1`",
    "prepared_graphs": "the same, `--sleep-mode-offload-cudagraph`",
    "compressed": "prepared, `CUMEM_SLEEP_COMPRESS=auto`",
    "vllm": "vLLM's own",
    "vllm_best": "vLLM's own, `--sleep-mode-offload-cudagraph`, pinning by 8 threads, host memory used before",
}


def table(result: dict[str, Any]) -> list[str]:
    """What a client of `vllm serve` waits for."""
    ways = {way: facts for way, facts in result["ways"].items() if "error" not in facts}
    names = [way for way in TITLES if way in ways]
    usage = next(facts["status"]["usage"] for facts in ways.values() if "status" in facts)
    cores = sorted({facts["machine"]["cores"] for facts in ways.values()})
    served = {"machine": {**result["machine"], "cores": " or ".join(map(str, cores))}}
    sizes = " and ".join(f"{usage[tag]['bytes'] / GIB:.1f} GiB of {tag}" for tag in ("weights", "kv_cache"))
    lines = [
        f"**`vllm serve`, a Qwen3-{result['shape']}-shaped model**, level 1: {sizes}, vLLM {result['machine']['vllm']},"
        f" torch.compile and CUDA graphs on, the same tokens after every wake. {machine(served)}. Seconds, as an HTTP"
        " client sees them, median and range:",
        "",
        *header(TITLES[name] for name in names),
    ]
    for head, key in ROWS.items():
        measured = (ways[name][key] for name in names)
        lines.append(row(head, (spread(each if isinstance(each, list) else [each]) for each in measured)))
    left = [f"{ways[name]['gpu_bytes_asleep'][-1] / GIB:.2f}" for name in names]
    lines.append(row("left on the GPU asleep, GiB", left))
    if "compressed" in names:
        lines += [
            "",
            "Compressed weights were normally distributed.",
        ]
    return lines
