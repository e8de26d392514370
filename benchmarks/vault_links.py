"""One GPU's sleeps and wakes through the vault, over its own link and over those of the host's other GPUs.

    python benchmarks/vault_links.py --out results/vault_links.json            # about four minutes on four H200s
    python benchmarks/vault_links.py --out results/vault_links.json --links 1,2 --scale 8

For each number of links a vault of its own, and a client on GPU 0 with 61.02 GiB of weights in 258 segments (see
`vault.py`); every byte is checked after every wake. Beside it the ceiling: as many bytes in pieces of 16 MiB from and
to one block, over as many links, by copy engines and no vault. `--compress` measures compressed backups, too.

What fails says why, and the rest is measured. Results are written after each.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from layers import SIMULATED
from model_server import exit_on_sigterm
from record import machine, touch_host_memory
from recording import GIB, MIB, qwen3_32b_bytes, segment_bytes
from vault import ROOM, Bench, Sleeper

from cumem_sleep import _core
from cumem_sleep.core.driver import open_driver
from cumem_sleep.settings import Settings

CEILING_BYTES = 4 * GIB
PIECE_BYTES = 16 * MIB
STREAMS = 4
LEFT_BYTES = 10 * GIB  # of a GPU, for contexts, checksums and the codec


class Ceiling:
    """Copies between one block of host memory and memory of GPU 0, over several links, with nothing else around."""

    def __init__(self, stack: ExitStack, links: int, nbytes: int) -> None:
        self.links, self.nbytes = links, nbytes
        self.block = stack.enter_context(closing(_core.HostBlock(nbytes, -1)))
        self.block.prefault(0, nbytes)
        self.block.pin(0)
        self.memory = stack.enter_context(closing(_core.Scratch(0, nbytes, list(range(1, links)))))
        self.streams = {
            device: [stack.enter_context(_core.CopyStream(device)) for _ in range(STREAMS)] for device in range(links)
        }
        self.staging = {
            device: stack.enter_context(closing(_core.Scratch(device, STREAMS * PIECE_BYTES)))
            for device in range(1, links)
        }

    def seconds(self, to_host: bool) -> float:
        """All links take pieces until there are none left."""
        left = iter(range(0, self.nbytes, PIECE_BYTES))
        threads = [threading.Thread(target=self._carry, args=(device, left, to_host)) for device in self.streams]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    def _carry(self, device: int, left: Any, to_host: bool) -> None:
        streams = self.streams[device]
        for number, offset in enumerate(left):
            stream = streams[number % STREAMS]
            stream.synchronize()
            nbytes = min(PIECE_BYTES, self.nbytes - offset)
            address = self.memory.address + offset
            staging = self.staging[device].address + number % STREAMS * PIECE_BYTES if device else address
            if to_host:
                if device:
                    stream.within_devices(staging, address, nbytes)
                stream.to_host(self.block, offset, staging, nbytes)
            else:
                stream.to_device(staging, self.block, offset, nbytes)
                if device:
                    stream.within_devices(address, staging, nbytes)
        for stream in streams:
            stream.synchronize()


def ceilings(links: int, nbytes: int, rounds: int = 3) -> dict[str, list[float]]:
    """GB/s out of GPU 0 and into it, for each round; the first of all is not counted."""
    with ExitStack() as stack:
        ceiling = Ceiling(stack, links, nbytes)
        ways = {"out": True, "in": False}
        for to_host in ways.values():
            ceiling.seconds(to_host)
        return {way: [nbytes / ceiling.seconds(to_host) / 1e9 for _ in range(rounds)] for way, to_host in ways.items()}


def measure(bench: Bench, rounds: int, **variables: str) -> dict[str, Any]:
    """A client's steps, and what each GPU's link has carried."""
    with bench.client(**variables) as sleeper:
        all_steps(bench, sleeper, rounds)
    facts = bench.the_vault().status()["gpus"]
    carried = ("uuid", "copied_out_bytes", "copied_in_bytes", "relayed_out_bytes", "relayed_in_bytes")
    return {"steps": sleeper.steps, "links": [{name: gpu[name] for name in carried} for gpu in facts]}


def all_steps(bench: Bench, sleeper: Sleeper, rounds: int) -> None:
    sleeper.sleep("first sleep")
    sleeper.wake("wake right after sleeping")
    for _ in range(rounds):
        sleeper.sleep("later sleep, nothing changed")
        time.sleep(bench.pause_s)
        sleeper.wake("wake, later")
    sleeper.change()
    sleeper.sleep("later sleep, everything changed")
    sleeper.wake("wake right after sleeping")


def new_bench(arguments: argparse.Namespace, ends_at: float, vault_options: str) -> Bench:
    given = {"deadline": ends_at - time.monotonic(), "vault_options": vault_options}
    bench = Bench(argparse.Namespace(**{**vars(arguments), **given}))
    if not SIMULATED:
        _, total = _core.memory_info(0)
        bench.kv_bytes = min(bench.kv_bytes, (total - LEFT_BYTES - segment_bytes(bench.sizes)) // MIB * MIB)
    return bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--links", help="numbers of links, separated by commas (default: 1 to all)")
    parser.add_argument("--compress", action="store_true", help="compressed backups, too")
    parser.add_argument("--rounds", type=int, default=5, help="of wakes 3 s after sleeping (default: %(default)s)")
    parser.add_argument("--decoder-layers", type=int, default=64, help="of the 32B model (default: %(default)s)")
    parser.add_argument("--scale", type=int, default=1, help="divide every tensor's size and the KV cache's by this")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds before a late wake (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=540, help="seconds that all of it may take (%(default)s)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    open_driver(Settings.from_environment().driver)
    gpus = _core.device_count()
    numbers = [int(number) for number in (arguments.links or ",".join(map(str, range(1, gpus + 1)))).split(",")]
    if not all(1 <= number <= gpus for number in numbers):
        parser.error(f"--links: {numbers}: this host has {gpus} GPUs")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + arguments.deadline
    if not SIMULATED:  # a vault refuses more memory than the host has, and some have it only when it was touched
        touch_host_memory(int(ROOM * segment_bytes(qwen3_32b_bytes(arguments.decoder_layers, arguments.scale))))
    result: dict[str, Any] = {"machine": machine(), "ceilings": {}, "ways": {}}
    for number in numbers:
        result["ceilings"][str(number)] = ceilings(number, CEILING_BYTES // arguments.scale)
    ways: dict[str, dict[str, str]] = {"plain": {}}
    if arguments.compress:
        ways["compressed"] = {"CUMEM_SLEEP_COMPRESS": "auto"}
    for number in numbers:
        relays = " ".join(map(str, range(1, number))) or "off"
        options = f"--gpus {' '.join(map(str, range(max(numbers))))} --relay {relays}"
        bench = new_bench(arguments, ends_at, options)
        result["workload"] = {"bytes": segment_bytes(bench.sizes), "kv_bytes": bench.kv_bytes, "room": ROOM}
        try:
            for way, variables in ways.items():
                try:
                    measured = measure(bench, arguments.rounds, **variables)
                except Exception as error:
                    measured = {"error": f"{type(error).__name__}: {error}"}
                result["ways"].setdefault(str(number), {})[way] = measured
                arguments.out.write_text(json.dumps(result, indent=2) + "\n")
        finally:
            if bench.vault is not None:
                bench.vault.close()
    each = ((f"{number} links, {way}", found) for number, ways in result["ways"].items() for way, found in ways.items())
    failed = {name: found["error"] for name, found in each if "error" in found}
    print(json.dumps(failed or "all were measured", indent=2))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
