"""Sleeps and wakes of a 32B model's memory: its own, through the vault, and in other layers.

    python benchmarks/vault.py --out results/vault.json                 # about six minutes on an H200
    python benchmarks/vault.py --out results/vault.json --scale 8       # with an eighth of the memory: one minute

Each sleeper is a process of its own (`worker.py`): 258 segments, 61.02 GiB of weights (bf16, normally distributed, made
from a seed), 54.63 GiB of KV cache; every byte is checked after every wake. The ways:

    own         the first process that touches so much of this machine's memory, and pins it itself
    own_again   the next one
    vllm, torch_memory_saver, torch_memory_saver-retained
                those layers, if they are installed; a sleep of torch_memory_saver's lasts 20 s
    vault       a client of a vault that has all its memory; then a replica of it, while the first one sleeps
    compressed  a client of the vault, with compressed backups

Of each step of a client the vault's own account of its link stands beside the seconds: `link` has what was copied
meanwhile and for how long copies were in flight. So whoever reads that a step was slow sees whether the link was.

A way that fails says why, and the others are measured. Results are written after each; a file that is there already
keeps its other ways.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import record
from layers import LAYERS, NotInstalled
from model_server import exit_on_sigterm
from recording import GIB, LINK, Process, WorkerFailed, qwen3_32b_bytes, segment_bytes
from vault_process import Vault

KV_BYTES = int(54.63 * GIB)
LINK_BYTES = 4 * GIB
ROOM = 1.06  # of the vault, per byte of one copy
SEED = 1  # of the weights, which a replica has too
Steps = dict[str, Any]


class Copied(NamedTuple):
    """What the vault's link has copied in one direction since its start, and how long copies were in flight."""

    nbytes: int
    busy_s: float

    def since(self, before: Copied) -> Steps:
        return {"bytes": self.nbytes - before.nbytes, "busy_s": self.busy_s - before.busy_s}


class Sleeper:
    """A process with weights, asleep or awake; `steps` is what was measured of it."""

    def __init__(self, bench: Bench, layer: str = "cumem-sleep", **variables: str) -> None:
        self._bench = bench
        self._of_vault = "CUMEM_SLEEP_VAULT" in variables
        self.process = Process(layer, bench.ends_at, **variables)
        self.steps: Steps = {"bytes": sum(bench.sizes)}
        self.process.ask("load", sizes=bench.sizes, kv_bytes=bench.kv_bytes, seed=SEED)

    def __enter__(self) -> Sleeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()

    def sleep(self, step: str) -> None:
        self.take("sleep", step)

    def wake(self, step: str) -> None:
        self.take("wake", step)
        self.check(step)

    def take(self, what: str, step: str) -> None:
        """A step, and what the vault's link did meanwhile; without a look at the bytes."""
        before = self._bench.copied(what) if self._of_vault else None
        answer = self.process.ask(what, **({"level": 1} if what == "sleep" else {}))
        if before is not None:
            answer["link"] = self._bench.copied(what).since(before)
        self.steps.setdefault(step, []).append(answer)

    def check(self, step: str) -> None:
        if differing := self.process.ask("check")["differing_tensors"]:
            raise WorkerFailed(f"{step}: bytes differ after it, in tensors {differing}")

    def change(self) -> None:
        self.process.ask("change")

    def all_steps(self) -> None:
        self.sleep("first sleep")
        self.wake("wake")
        self.sleep("later sleep, nothing changed")
        time.sleep(self._bench.pause_s)
        self.wake("wake, later")
        self.change()
        self.sleep("later sleep, everything changed")
        self.wake("wake")


class Bench:
    """What all ways have in common."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.ends_at = time.monotonic() + arguments.deadline
        self.pause_s: float = arguments.pause
        self.sizes = qwen3_32b_bytes(arguments.decoder_layers, arguments.scale)
        self.kv_bytes = KV_BYTES // arguments.scale // 512 * 512
        self.vault: Vault | None = None
        self._options = arguments.vault_options.split()
        self._log: Path = arguments.out.with_name("vault.log")
        self.facts: Steps = {}

    def the_vault(self) -> Vault:
        """Started when it is needed first; it serves all ways."""
        if self.vault is None:
            nbytes = max(int(ROOM * segment_bytes(self.sizes)), 64 << 20)
            vault = Vault(nbytes, *self._options, log=self._log)
            try:
                vault.start()
                self.facts["seconds until all its memory is pinned"] = vault.wait_until_pinned()
            except BaseException:
                vault.close()
                raise
            self.vault = vault
            self.facts["memory_bytes"] = nbytes
        return self.vault

    def client(self, **variables: str) -> Sleeper:
        return Sleeper(self, CUMEM_SLEEP_VAULT=self.the_vault().socket, **variables)

    def copied(self, what: str) -> Copied:
        """By the vault's link so far, in the direction of a `sleep` or a `wake`."""
        gpu, direction = self.the_vault().status()["gpus"][0], {"sleep": "out", "wake": "in"}[what]
        return Copied(gpu[f"copied_{direction}_bytes"], gpu[f"busy_{direction}_s"])


def of_layer(layer: str, bench: Bench) -> Steps:
    with Sleeper(bench, layer) as sleeper:
        sleeper.all_steps()
        return sleeper.steps


def vault(bench: Bench) -> Steps:
    with bench.client() as first:
        first.sleep("first sleep")
        one = bench.the_vault().status()
        with bench.client() as replica:
            replica.sleep("first sleep")
            both = bench.the_vault().status()
            replica.wake("wake")
            replica.sleep("later sleep, nothing changed")
            replica.wake("wake")
        first.wake("wake")
        first.sleep("later sleep, nothing changed")
        time.sleep(bench.pause_s)
        first.wake("wake, later")
        first.change()
        first.sleep("later sleep, everything changed")
        first.wake("wake")
    held = {name: {key: status[key] for key in HELD} for name, status in (("one", one), ("both", both))}
    return {**first.steps, "replica": replica.steps, "vault while one and both sleep": held}


HELD = ("asleep_bytes", "awake_bytes", "shared_bytes", "saved_bytes", "free_bytes", "pinned_bytes")


def compressed(bench: Bench) -> Steps:
    with bench.client(CUMEM_SLEEP_COMPRESS="auto") as sleeper:
        sleeper.all_steps()
    return sleeper.steps


WAYS: dict[str, Callable[[Bench], Steps]] = {
    "own": partial(of_layer, "cumem-sleep"),
    "own_again": partial(of_layer, "cumem-sleep"),
    **{layer: partial(of_layer, layer) for layer in LAYERS if layer != "cumem-sleep"},
    "vault": vault,
    "compressed": compressed,
}
OF_THE_VAULT = ("vault", "compressed")  # they come last, and leave it running


def table(result: Steps) -> list[str]:
    """Seconds of each step."""
    lines = []
    ways = {**result["ways"], "vault: replica": result["ways"].get("vault", {}).get("replica", {})}
    for way, steps in ways.items():
        if "error" in steps:
            lines.append(f"{way}: {steps['error'].splitlines()[0]}")
        for step, taken in steps.items():
            if isinstance(taken, list) and "seconds" in taken[0]:
                shown = " ".join(f"{each['seconds']:.3f}" for each in taken)
                lines.append(f"{f'{way}: {step}':50}{shown}")
    return [*lines, f"the vault: {result['vault']}"]


def measure(bench: Bench, names: list[str], result: Steps, save: Callable[[], None]) -> bool:
    """Returns whether all ways were measured."""
    complete = True
    try:
        for name in sorted(names, key=lambda way: way in OF_THE_VAULT):
            begin = time.monotonic()
            try:
                result["ways"][name] = WAYS[name](bench)
            except NotInstalled as error:
                result["ways"][name] = {"error": f"NOT MEASURED: {error}"}
            except Exception as error:
                complete = False
                result["ways"][name] = {"error": f"FAILED: {type(error).__name__}: {error}"}
            result["vault"] = bench.facts
            print(f"{time.monotonic() - begin:6.1f} s  {name}", file=sys.stderr, flush=True)
            save()
    finally:
        if bench.vault is not None:
            bench.vault.close()
    return complete


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--ways", default=",".join(WAYS), help="which, separated by commas (default: %(default)s)")
    parser.add_argument("--decoder-layers", type=int, default=64, help="of the 32B model (default: %(default)s)")
    parser.add_argument("--scale", type=int, default=1, help="divide every tensor's size and the KV cache's by this")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds before a late wake (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=540, help="seconds that all of it may take (%(default)s)")
    parser.add_argument("--vault-options", default="", help="of `cumem-sleep vault`")
    arguments = parser.parse_args()
    names = arguments.ways.split(",")
    if unknown := set(names) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))}: there are {', '.join(WAYS)}")
    exit_on_sigterm()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments)
    with Process("none", bench.ends_at) as process:
        link = process.ask("link", nbytes=LINK_BYTES // arguments.scale, rounds=3)
        link = {name: [each * arguments.scale for each in link[name]] for name in LINK}
    ways = json.loads(arguments.out.read_text()).get("ways", {}) if arguments.out.exists() else {}
    result: Steps = {
        "machine": record.machine(),
        "workload": {"weights_bytes": sum(bench.sizes), "segments": len(bench.sizes), "kv_cache_bytes": bench.kv_bytes},
        "link_bytes": LINK_BYTES,
        "link": link,
        "ways": ways,
        "vault": {},
    }
    complete = measure(bench, names, result, lambda: arguments.out.write_text(json.dumps(result, indent=2) + "\n"))
    print(*table(result), sep="\n")
    sys.exit(not complete)


if __name__ == "__main__":
    main()
