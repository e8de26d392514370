"""First and later sleeps and wakes through the vault, beside those of a process that pins its own memory.

    python benchmarks/vault.py --out results/vault.json [--gib 16]

Each sleeper is a process of its own, with the same weights (bf16, normally distributed, made from one seed). `own,
first` is the first process that touches so much of this machine's memory, `own, again` the next one. The vault has all
of its memory pinned before its clients begin. The link's rates are those of one copy of 1 GiB of pinned memory, the
best of six, in 10⁹ bytes per second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import GIB, write

SEGMENT_BYTES = 512 << 20


def sleeper(socket: str, nbytes: int, compress: str) -> None:
    """In a process of its own: cycles, and their seconds, one JSON line each time that a line comes in."""
    import torch

    from cumem_sleep import CuMemAllocator, Settings

    allocator = CuMemAllocator(Settings(vault=socket, compress=compress))
    torch.manual_seed(1)
    with allocator.use_memory_pool("weights"):
        weights = [
            torch.randn(SEGMENT_BYTES // 2, dtype=torch.bfloat16, device="cuda") for _ in range(nbytes // SEGMENT_BYTES)
        ]
    torch.cuda.synchronize()
    sums = [int(weight.view(torch.int16).sum(dtype=torch.int64)) for weight in weights]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        results: dict[str, Any] = {}
        for step in line.split():
            if step == "wait":
                time.sleep(3)
            elif step == "change":
                for weight in weights:
                    weight[0] += 1
                torch.cuda.synchronize()
                sums = [int(weight.view(torch.int16).sum(dtype=torch.int64)) for weight in weights]
            else:
                name = "wake" if step.startswith("wake") else "sleep"
                report = allocator.wake_up() if name == "wake" else allocator.sleep()
                results[step] = {"seconds": round(report.seconds, 4)}
                if name == "sleep":
                    results[step] |= {"copied": report.copied_bytes, "stored": report.stored_bytes}
                else:
                    found = [int(weight.view(torch.int16).sum(dtype=torch.int64)) for weight in weights]
                    assert found == sums, "wrong bytes"
                    assert report.verified_bytes == nbytes
        print(json.dumps(results), flush=True)


class Process:
    """A sleeper, and what it answers."""

    def __init__(self, socket: str, nbytes: int, compress: str) -> None:
        command = [sys.executable, __file__, "--sleeper", socket, str(nbytes), compress]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def __call__(self, steps: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(steps + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a sleeper ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def link_gbps() -> dict[str, float]:
    import torch

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, target, source in (("to host", host, device), ("to device", device, host)):
        best = 0.0
        for _ in range(6):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = max(best, GIB / (time.perf_counter() - begin) / 1e9)
        rates[name] = round(best, 2)
    return rates


# The replica begins before the other's weights change: then they are equal. (When results/vault.json was measured they
# were not, so its replica copied everything.)
CYCLE = "first wake clean wake_again wait change dirty wait wake_later"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the raw result goes (JSON)")
    parser.add_argument("--gib", type=int, default=16, help="weights of each process, in GiB (default: 16)")
    parser.add_argument("--sleeper", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sleeper:
        socket, nbytes, compress = arguments.sleeper
        sleeper(socket, int(nbytes), compress)
        return
    if arguments.out is None:
        parser.error("--out is wanted")
    nbytes = arguments.gib * GIB
    results: dict[str, Any] = {"bytes": nbytes, "link_gbps": link_gbps()}
    for name in ("own, first", "own, again"):
        process = Process("off", nbytes, "off")
        results[name] = process(CYCLE)
        process.end()
        print(name, results[name], file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        socket = f"{folder}/vault.sock"
        command = [sys.executable, "-m", "cumem_sleep", "vault", "--memory", f"{2 * arguments.gib + 2}GiB"]
        begin = time.perf_counter()
        vault = subprocess.Popen([*command, "--socket", socket])
        try:
            while True:
                status = subprocess.run(
                    [sys.executable, "-m", "cumem_sleep", "vault", "status", "--json", "--socket", socket],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                facts = json.loads(status.stdout) if status.returncode == 0 else {}
                if facts and facts["pinned_bytes"] >= facts["memory_bytes"]:
                    break
                if vault.poll() is not None:
                    raise SystemExit("the vault has ended")
                time.sleep(0.5)
            results["vault ready_s"] = round(time.perf_counter() - begin, 1)
            first = Process(socket, nbytes, "off")
            results["vault, first"] = first("first wake clean wake_again clean")
            replica = Process(socket, nbytes, "off")
            results["vault, replica"] = replica("first wake clean wake_again")
            print("replica", results["vault, replica"], file=sys.stderr)
            replica.end()
            results["vault, first"] |= first("wake_again wait change dirty wait wake_later")
            print("vault", results["vault, first"], file=sys.stderr)
            first.end()
            compressed = Process(socket, nbytes, "auto")
            results["vault, compressed"] = compressed("first wake clean wait wake_later")
            print("compressed", results["vault, compressed"], file=sys.stderr)
            compressed.end()
        finally:
            vault.terminate()
            vault.wait()
    write(arguments.out, results)


if __name__ == "__main__":
    main()
