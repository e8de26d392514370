"""Releases and resumes of SGLang's engine (`sglang_cycles.py`)."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import MIB, digits, header, row

WAYS = {
    "theirs": "torch_memory_saver",
    "ours": "cumem-sleep",
    "theirs-retained": "torch_memory_saver, retained",
    "ours-retained": "cumem-sleep, retained",
}
COLUMNS = ("first release", "later ones", "resume", "cycles", "GPU memory grew", "host memory grew")


def table(result: dict[str, Any]) -> list[str]:
    """A row for each way; one that failed has none."""
    version = result["ways"]["ours"]["sglang"]
    return [
        f"SGLang {version}, Qwen3-{result['shape']}'s shape. {machine(result)}. Seconds, medians of the later cycles;"
        " weights backed up; the same tokens, log probabilities and weights after each cycle:",
        "",
        *header(COLUMNS),
        *(row(said, _cells(result["summary"][way])) for way, said in WAYS.items() if way not in result["failures"]),
    ]


def _cells(found: dict[str, Any]) -> list[str]:
    seconds = (found[name] for name in ("first_release_s", "release_s", "resume_s"))
    grew = (f"{found[name] / MIB:.0f} MiB" for name in ("grew_gpu_bytes", "grew_host_bytes"))
    return [*map(digits, seconds), str(found["cycles"]), *grew]
