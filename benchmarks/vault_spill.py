"""Sleeps and wakes through a vault whose memory is for one model of two: what does the disk cost?

    python benchmarks/vault_spill.py --out results/vault_spill.json                 # three to four minutes, 1.5 GB/s
    python benchmarks/vault_spill.py --out spill.json --decoder-layers 1 --scale 64 --folder /nvme/spill

The ceiling: a file of the same folder, read with O_DIRECT by as many threads as the vault's, before and after the rest;
and what `fdatasync` after each 256 MiB, as the vault calls it, leaves of the rate of writing.
Every sleeper is a process of its own (`worker.py`) with 20.2 GiB of weights; every byte is checked after every wake.

    memory      a client of a vault that does not spill
    files       two clients of one that does, with memory for one of them: the second one's first sleep waits until the
                first one's backup is written; that one wakes from files, in turn with the second one, from memory
    compressed  the same, with compressed backups
    reload      the same bytes as safetensors, read by vLLM's loader into memory of the GPU, as a wake from level 2 does
    saver       torch_memory_saver's backups on disk

A way that fails says why, and the others are measured. Results are written after each.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from layers import SIMULATED, NotInstalled
from model_server import exit_on_sigterm
from record import machine, write
from recording import GIB, MIB, Process, WorkerFailed, qwen3_32b_bytes, segment_bytes
from vault_process import Vault

from cumem_sleep.vault.files import SpillFolder, filesystem_of
from cumem_sleep.vault.spill import RING_BYTES

THREADS, REQUEST_BYTES, SYNCED_BYTES = 8, 16 * MIB, 256 * MIB  # the vault's own
CEILING_BYTES = 4 * GIB
LEAST_S = 20.0  # with less left a way is not begun
Steps = dict[str, Any]


def file_rates(folder: Path, nbytes: int) -> dict[str, float]:
    """GB/s of files that are written and then read past the page cache."""
    nbytes = max(nbytes // REQUEST_BYTES, THREADS) * REQUEST_BYTES
    buffers = [mmap.mmap(-1, REQUEST_BYTES) for _ in range(THREADS)]
    for number, buffer in enumerate(buffers):
        buffer.write(os.urandom(MIB) * (REQUEST_BYTES // MIB - 1) + bytes([number]) * MIB)

    def rate(
        call: Callable[[int, list[mmap.mmap], int], int], file: int, batch: int = nbytes, *, synced: bool = False
    ) -> float:
        def some(thread: int, start: int) -> None:
            for at in range(start + thread * REQUEST_BYTES, min(start + batch, nbytes), THREADS * REQUEST_BYTES):
                assert call(file, [buffers[thread]], at) == REQUEST_BYTES

        begin = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, nbytes, batch):
                list(pool.map(some, range(THREADS), [start] * THREADS))
                if synced:
                    os.fdatasync(file)
        return nbytes / (time.perf_counter() - begin) / 1e9

    files: list[int] = []
    try:
        for _ in range(2):  # what is written for the first time has its space, but not yet its place in the journal
            files.append(SpillFolder(folder).open())
            os.posix_fallocate(files[-1], 0, nbytes)
        written = rate(os.pwritev, files[0])
        synced = rate(os.pwritev, files[1], SYNCED_BYTES, synced=True)
        return {"written": written, "written and synced": synced, "read": rate(os.preadv, files[0])}
    finally:
        for file in files:
            os.close(file)


def a_folder_on_a_disk() -> Path:
    """
    Raises:
        SystemExit: temporary files and the working folder are in memory.
    """
    for folder in (Path(tempfile.gettempdir()), Path.cwd()):
        if filesystem_of(folder) not in ("tmpfs", "ramfs"):
            return folder
    raise SystemExit("--folder: temporary files and the working folder are in memory")


class SpilledSleeper:
    """A process with weights."""

    def __init__(self, bench: SpillBench, seed: int, layer: str = "cumem-sleep", **variables: str) -> None:
        self._steps = bench.steps
        self._process = Process(layer, bench.ends_at, **variables)
        self._process.ask("load", sizes=bench.sizes, kv_bytes=2 * MIB, seed=seed)

    def __enter__(self) -> SpilledSleeper:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def sleep(self, step: str) -> None:
        self._steps.setdefault(step, []).append(self._process.ask("sleep", level=1)["seconds"])

    def wake(self, step: str) -> None:
        self._steps.setdefault(step, []).append(self._process.ask("wake")["seconds"])
        if differing := self._process.ask("check")["differing_tensors"]:
            raise WorkerFailed(f"{step}: bytes differ after it, in tensors {differing}")


class SpillBench:
    """What all ways have in common.

    Attributes:
        steps: seconds of those of the way that is measured, also of one that fails.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.ends_at = time.monotonic() + arguments.deadline
        self.sizes = qwen3_32b_bytes(arguments.decoder_layers, arguments.scale)
        self.nbytes = segment_bytes(self.sizes)
        self.folder = folder
        self.steps: Steps = {}
        self._options = arguments.vault_options.split()
        self._log: Path = arguments.out.with_name("vault_spill.log")

    @contextlib.contextmanager
    def vault(self, *, spills: bool) -> Iterator[Vault]:
        nbytes, options = self.nbytes + 2 * MIB, list(self._options)
        if spills:
            nbytes += min(RING_BYTES, nbytes // 7 + 2 * MIB)  # an eighth of a small vault's memory
            options += ["--spill", str(self.folder), "--spill-size", str(2 * nbytes)]
        with Vault(nbytes, *options, log=self._log) as vault:
            vault.wait_until_pinned()
            yield vault


# Each returns what is known beside its steps.


def memory(bench: SpillBench) -> Steps:
    with bench.vault(spills=False) as vault, SpilledSleeper(bench, 1, CUMEM_SLEEP_VAULT=vault.socket) as sleeper:
        turns(sleeper)
    return {}


def turns(sleeper: SpilledSleeper) -> None:
    sleeper.sleep("first sleep")
    sleeper.wake("wake from memory")
    for _ in range(2):
        sleeper.sleep("later sleep, nothing changed")
        sleeper.wake("wake from memory")


def files(bench: SpillBench, **variables: str) -> Steps:
    with bench.vault(spills=True) as vault:
        variables["CUMEM_SLEEP_VAULT"] = vault.socket
        with SpilledSleeper(bench, 1, **variables) as first, SpilledSleeper(bench, 2, **variables) as second:
            turns(first)
            first.sleep("later sleep, nothing changed")
            second.sleep("first sleep that waits for the disk")
            written = vault.status()["files_written_bytes"]
            for _ in range(2):
                first.wake("wake from files")
                second.wake("wake from memory, beside files")
                first.sleep("later sleep, nothing changed, in files")
                second.sleep("later sleep, nothing changed, beside files")
            status = vault.status()
            names = ("files_written_bytes", "files_written_gbps", "files_read_bytes", "files_read_gbps")
            return {
                "vault": {name: status[name] for name in names},
                "written again bytes": status["files_written_bytes"] - written,
            }


def compressed(bench: SpillBench) -> Steps:
    return files(bench, CUMEM_SLEEP_COMPRESS="auto")


RELOAD = """
import json, os, sys, time
import torch
from safetensors.torch import save_file
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
folder, sizes = sys.argv[1], json.loads(sys.argv[2])
parts, part = [[]], 0
for number, size in enumerate(sizes):
    if part + size > 4 << 30 and parts[-1]:
        parts, part = [*parts, []], 0
    parts[-1].append((f"w{number}", size // 2))
    part += size
names = []
for number, part in enumerate(parts):
    names.append(f"{folder}/{number}.safetensors")
    save_file({name: torch.empty(count, dtype=torch.bfloat16, device="cuda").normal_().cpu() for name, count in part},
              names[-1])
for name in names:  # read from the disk, as after a while
    with open(name, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
target = {name: torch.empty(count, dtype=torch.bfloat16, device="cuda") for part in parts for name, count in part}
torch.cuda.synchronize()
begin = time.perf_counter()
for name, tensor in safetensors_weights_iterator(names, use_tqdm_on_load=False):
    target[name].copy_(tensor)
torch.cuda.synchronize()
print(json.dumps(time.perf_counter() - begin))
"""


def reload(bench: SpillBench) -> Steps:
    if SIMULATED:
        raise NotInstalled("it needs a GPU")
    folder = bench.folder / "checkpoint"
    folder.mkdir()
    try:
        command = [sys.executable, "-c", RELOAD, str(folder), repr(bench.sizes)]
        limit_s = max(10.0, bench.ends_at - time.monotonic())
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    finally:
        shutil.rmtree(folder)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise (NotInstalled if "ModuleNotFoundError" in last else WorkerFailed)(last)
    return {"reload": [float(done.stdout.splitlines()[-1])]}


def saver(bench: SpillBench) -> Steps:
    """At most two rounds: each writes all of it anew."""
    folder = bench.folder / "saver"
    folder.mkdir()
    try:
        with SpilledSleeper(bench, 1, "torch_memory_saver-disk", TMS_DISK_BACKUP_DIR=str(folder)) as sleeper:
            for _ in range(2 if bench.ends_at - time.monotonic() > 120 else 1):
                sleeper.sleep("pause to disk")
                sleeper.wake("resume from disk")
    finally:
        shutil.rmtree(folder)
    return {}


WAYS: dict[str, Callable[[SpillBench], Steps]] = {
    "memory": memory,
    "files": files,
    "compressed": compressed,
    "reload": reload,
    "saver": saver,
}


def table(result: dict[str, Any]) -> list[str]:
    rates = [each["read"] for each in result["ceilings"]]
    best_s = result["bytes"] / max(rates) / 1e9
    lines = [f"ceiling: {' '.join(f'{rate:.2f}' for rate in rates)} GB/s read, {best_s:.2f} s for all bytes"]
    for name in ("written", "written and synced"):
        lines.append(f"{name}: {' '.join(f'{each[name]:.2f}' for each in result['ceilings'])} GB/s")
    for way, steps in result["ways"].items():
        for step, seconds in steps.items():
            if isinstance(seconds, list):
                share = (
                    f"  ({best_s / min(seconds):.2f} x the ceiling)" if "from files" in step or way == "reload" else ""
                )
                lines.append(f"{way:11}{step:46}{' '.join(f'{each:.3f}' for each in seconds)}{share}")
            else:
                lines.append(f"{way:11}{step}: {seconds}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--ways", default=",".join(WAYS), help="which, separated by commas (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured (default: a new one for temporary files)"
    )
    parser.add_argument("--decoder-layers", type=int, default=19, help="of the 32B model (default: %(default)s)")
    parser.add_argument("--scale", type=int, default=1, help="divide every tensor's size by this")
    parser.add_argument("--vault-options", default="", help="of `cumem-sleep vault`")
    parser.add_argument("--deadline", type=float, default=240, help="seconds that all of it may take (%(default)s)")
    arguments = parser.parse_args()
    ways = arguments.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways: unknown: {', '.join(unknown)}")
    exit_on_sigterm()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder or a_folder_on_a_disk()
    with tempfile.TemporaryDirectory(prefix="spill-", dir=folder) as name:  # of mode 0700
        bench = SpillBench(arguments, Path(name))
        ceiling_bytes = min(CEILING_BYTES, bench.nbytes)
        result: dict[str, Any] = {"machine": machine(), "bytes": bench.nbytes, "ways": {}}
        result["direct I/O"] = SpillFolder(bench.folder).is_direct
        result["filesystem"] = filesystem_of(bench.folder)
        result["ceilings"] = [file_rates(bench.folder, ceiling_bytes)]
        failed = False
        for way in ways:
            try:
                if time.monotonic() > bench.ends_at - LEAST_S:
                    raise NotInstalled("no time is left")
                bench.steps = {}
                more = WAYS[way](bench)
                result["ways"][way] = {**bench.steps, **more}
            except NotInstalled as error:
                result["ways"][way] = {"not measured": str(error)}
            except Exception as error:
                result["ways"][way] = {**bench.steps, "error": f"{type(error).__name__}: {error}"}
                failed = True
            write(arguments.out, result)
        result["ceilings"].append(file_rates(bench.folder, ceiling_bytes))
        write(arguments.out, result)
    print(*table(result), sep="\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
