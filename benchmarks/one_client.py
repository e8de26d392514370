"""Runs what one process measures through a vault that has all of its memory: its command line, and its result."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layers import SIMULATED
from record import GIB, machine, machine_without_gpu
from vault_process import Vault

if TYPE_CHECKING:
    from cumem_sleep import CuMemAllocator


def parser_of(doc: str, *, kv_gib: float, turns: int, of_turns: str) -> argparse.ArgumentParser:
    """The options of such a script, with these defaults; `of_turns` says what a turn is."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the raw result goes (JSON)")
    parser.add_argument("--weights-gib", type=float, default=30.5, help="(default: %(default)s)")
    parser.add_argument("--kv-gib", type=float, default=kv_gib, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=turns, help=f"{of_turns} (default: %(default)s)")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(
    parser: argparse.ArgumentParser,
    measure: Callable[[CuMemAllocator, argparse.Namespace], dict[str, Any]],
    lines: Callable[[dict[str, Any]], Iterable[str]],
) -> None:
    """Write what `measure` finds, in a process of its own, and print its `lines`.

    Args:
        measure: is given the allocator, whose memory is awake and has backups.
    """
    arguments = parser.parse_args()
    sizes = {"weights_bytes": int(arguments.weights_gib * GIB), "kv_cache_bytes": int(arguments.kv_gib * GIB)}
    if arguments.client:
        print(json.dumps(measure(_allocated(*sizes.values()), arguments)))
        return
    if arguments.out is None:
        parser.error("--out is missing")
    with Vault(int(1.08 * sizes["weights_bytes"])) as vault:
        vault.wait_until_pinned()
        done = subprocess.run(
            [sys.executable, *sys.argv, "--client"],
            env={**os.environ, "CUMEM_SLEEP_VAULT": vault.socket, "CUMEM_SLEEP_COMPRESS": "off"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    facts = machine_without_gpu(simulated=True) if SIMULATED else machine()
    arguments.out.write_text(json.dumps({"machine": facts, **sizes, **found}, indent=2) + "\n")
    for line in lines(found):
        print(line)


def _allocated(weights_bytes: int, kv_bytes: int) -> CuMemAllocator:
    from cumem_sleep import CuMemAllocator
    from cumem_sleep.tools.bench.workload import kv_segments, model_like

    allocator = CuMemAllocator.get_instance()
    if not SIMULATED:
        import torch

        with allocator.use_memory_pool("warm"):  # compiles the kernels, and times both ways
            torch.ones(1, device="cuda")
    for nbytes in model_like(weights_bytes):
        allocator.malloc(nbytes, "weights")
    for nbytes in kv_segments(kv_bytes):
        allocator.malloc(nbytes, "kv_cache")
    allocator.sleep()
    allocator.wake_up()
    return allocator
