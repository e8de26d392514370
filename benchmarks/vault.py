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
    together    two clients with half the weights and half the cache each, that sleep and wake at the same moment, and
                then in turn, with the same bytes

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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from layers import LAYERS, NotInstalled
from model_server import exit_on_sigterm, gpu_memory_in_use_bytes
from record import machine
from recording import GIB, LINK, Process, WorkerFailed, qwen3_32b_bytes, segment_bytes
from vault_process import Vault

KV_BYTES = int(54.63 * GIB)
LINK_BYTES = 4 * GIB
ROOM = 1.06  # of the vault, per byte of one copy
FIRST, REPLICA, OTHER = 1, 1, 2  # seeds: a replica has the same weights
Steps = dict[str, Any]


class Copied(NamedTuple):
    """What the vault's link has copied in one direction since its start, and how long copies were in flight."""

    nbytes: int
    busy_s: float

    def since(self, before: Copied) -> Steps:
        return {"bytes": self.nbytes - before.nbytes, "busy_s": self.busy_s - before.busy_s}


class Sleeper:
    """A process with weights, asleep or awake; `steps` is what was measured of it."""

    def __init__(
        self,
        bench: Bench,
        sizes: list[int],
        seed: int,
        layer: str = "cumem-sleep",
        kv_bytes: int | None = None,
        **variables: str,
    ) -> None:
        self._bench = bench
        self._of_vault = "CUMEM_SLEEP_VAULT" in variables
        self.process = Process(layer, bench.ends_at, **variables)
        self.steps: Steps = {"bytes": sum(sizes)}
        self.process.ask("load", sizes=sizes, kv_bytes=bench.kv_bytes if kv_bytes is None else kv_bytes, seed=seed)

    def __enter__(self) -> Sleeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()

    def sleep(self, step: str) -> None:
        self.take("sleep", step)

    def wake(self, step: str) -> None:
        self.take("wake", step)
        self.check(step)

    def take(self, what: str, step: str) -> Steps:
        """A step, and what the vault's link did meanwhile; without a look at the bytes."""
        before = self._bench.copied(what) if self._of_vault else None
        self.begin(what)
        answer = self.end(what, step)
        if before is not None:
            answer["link"] = self._bench.copied(what).since(before)
        return answer

    def begin(self, what: str) -> None:
        self.process.begin(what, **({"level": 1} if what == "sleep" else {}))

    def end(self, what: str, step: str) -> Steps:
        answer = self.process.answer(what)
        self.steps.setdefault(step, []).append(answer)
        return answer

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
        self.half = qwen3_32b_bytes(max(1, arguments.decoder_layers // 2 - 1), arguments.scale)
        self.kv_bytes = KV_BYTES // arguments.scale // 512 * 512
        self.vault: Vault | None = None
        self._options = arguments.vault_options.split()
        self._log: Path = arguments.out.with_name("vault.log")
        self.facts: Steps = {}

    def the_vault(self) -> Vault:
        """Started when it is needed first; it serves all ways."""
        if self.vault is None:
            before = gpu_memory_in_use_bytes()
            weights = segment_bytes(self.sizes)
            nbytes = max(int(ROOM * max(weights, 2 * segment_bytes(self.half))), 64 << 20)
            vault = Vault(nbytes, *self._options, log=self._log)
            try:
                vault.start()
                self.facts["seconds until all its memory is pinned"] = vault.wait_until_pinned()
            except BaseException:
                vault.close()
                raise
            self.vault = vault
            self.facts["memory_bytes"] = nbytes
            self.facts["gpu_bytes_before"] = before
            self._see_gpu("with no client yet")
        return self.vault

    def client(self, sizes: list[int], seed: int, kv_bytes: int | None = None, **variables: str) -> Sleeper:
        return Sleeper(self, sizes, seed, kv_bytes=kv_bytes, CUMEM_SLEEP_VAULT=self.the_vault().socket, **variables)

    def copied(self, what: str) -> Copied:
        """By the vault's link so far, in the direction of a `sleep` or a `wake`."""
        gpu, direction = self.the_vault().status()["gpus"][0], {"sleep": "out", "wake": "in"}[what]
        return Copied(gpu[f"copied_{direction}_bytes"], gpu[f"busy_{direction}_s"])

    def wait_until_unused(self) -> float:
        """Seconds until the vault has nothing for anybody any more."""
        begin = time.monotonic()
        while (status := self.the_vault().status())["clients"] or status["asleep_bytes"] or status["awake_bytes"]:
            if time.monotonic() > begin + 30:
                raise WorkerFailed(f"the vault keeps what clients that ended have left: {status}")
            time.sleep(0.02)
        return time.monotonic() - begin

    def see_vault_alone(self) -> None:
        self.wait_until_unused()
        self._see_gpu("after its clients have ended")

    def _see_gpu(self, when: str) -> None:
        used, before = gpu_memory_in_use_bytes(), self.facts["gpu_bytes_before"]
        if used is not None and before is not None:
            self.facts.setdefault("gpu bytes of the vault", {})[when] = used - before


def of_layer(layer: str, bench: Bench) -> Steps:
    with Sleeper(bench, bench.sizes, FIRST, layer) as sleeper:
        sleeper.all_steps()
        return sleeper.steps


def vault(bench: Bench) -> Steps:
    with bench.client(bench.sizes, FIRST) as first:
        first.sleep("first sleep")
        one = bench.the_vault().status()
        with bench.client(bench.sizes, REPLICA) as replica:
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
    bench.see_vault_alone()
    held = {name: {key: status[key] for key in HELD} for name, status in (("one", one), ("both", both))}
    return {**first.steps, "replica": replica.steps, "vault while one and both sleep": held}


HELD = ("asleep_bytes", "awake_bytes", "shared_bytes", "saved_bytes", "free_bytes", "pinned_bytes")


def compressed(bench: Bench) -> Steps:
    with bench.client(bench.sizes, FIRST, CUMEM_SLEEP_COMPRESS="auto") as sleeper:
        sleeper.all_steps()
    bench.see_vault_alone()
    return sleeper.steps


def together(bench: Bench) -> Steps:
    """Two clients on one link: first sleeps and wakes at once; then, of changed bytes, at once and in turn."""
    results: Steps = {}
    half = bench.kv_bytes // 2 // 512 * 512  # both are awake on one GPU
    with bench.client(bench.half, FIRST, half) as one, bench.client(bench.half, OTHER, half) as other:
        pair = (one, other)
        results["first sleep"] = [at_once(bench, pair, "sleep", "first sleep")]
        results["wake"] = [at_once(bench, pair, "wake", "wake")]
        for order in ORDER:
            for sleeper in pair:
                sleeper.change()
            for what in ("sleep", "wake"):
                step = STEPS_OF_TWO[what][order]
                taken = at_once(bench, pair, what, step) if order == "at once" else in_turn(pair, what, step)
                results.setdefault(step, []).append(taken)
                if what == "sleep":
                    time.sleep(bench.pause_s)  # until what both have freed is scrubbed, whenever each did
        results["at once / in turn"] = {
            what: seconds_of(results[steps["at once"]]) / seconds_of(results[steps["in turn"]])
            for what, steps in STEPS_OF_TWO.items()
        }
        results["bytes"] = one.steps["bytes"] + other.steps["bytes"]
        results["the clients"] = [one.steps, other.steps]
    bench.see_vault_alone()
    return results


# What drifts in a run is the same for both: each is as early as it is late.
ORDER = ("at once", "in turn", "in turn", "at once")
STEPS_OF_TWO = {
    "sleep": {"at once": "sleep at once", "in turn": "sleeps in turn"},
    "wake": {"at once": "wake at once", "in turn": "wakes in turn"},
}


def at_once(bench: Bench, pair: Sequence[Sleeper], what: str, step: str) -> Steps:
    """Seconds until the last one is done. What the link did was for both, so it stands here and not with either."""
    before = bench.copied(what)
    begin = time.monotonic()
    for sleeper in pair:
        sleeper.begin(what)
    each = [sleeper.end(what, step)["seconds"] for sleeper in pair]
    until_read = time.monotonic() - begin
    link = bench.copied(what).since(before)
    check_all(pair, what, step)
    return {"seconds": max(each), "each": each, "until both were read": until_read, "link": link}


def in_turn(pair: Sequence[Sleeper], what: str, step: str) -> Steps:
    """Seconds of both, one after the other."""
    answers = [sleeper.take(what, step) for sleeper in pair]
    check_all(pair, what, step)
    each = [answer["seconds"] for answer in answers]
    link = {key: sum(answer["link"][key] for answer in answers) for key in ("bytes", "busy_s")}
    return {"seconds": sum(each), "each": each, "link": link}


def check_all(pair: Sequence[Sleeper], what: str, step: str) -> None:
    """Of all that woke, and only when all are awake: checksums take the GPU's time."""
    for sleeper in pair if what == "wake" else ():
        sleeper.check(step)


def seconds_of(taken: Sequence[Steps]) -> float:
    return sum(each["seconds"] for each in taken)


WAYS: dict[str, Callable[[Bench], Steps]] = {
    "own": partial(of_layer, "cumem-sleep"),
    "own_again": partial(of_layer, "cumem-sleep"),
    **{layer: partial(of_layer, layer) for layer in LAYERS if layer != "cumem-sleep"},
    "vault": vault,
    "compressed": compressed,
    "together": together,
}
OF_THE_VAULT = ("vault", "compressed", "together")  # they come last, and leave it running
DIRECTIONS = {
    "first sleep": "to_host",
    "wake": "to_device",
    "later sleep, nothing changed": "",
    "wake, later": "to_device",
    "later sleep, everything changed": "to_host",
    **dict.fromkeys(STEPS_OF_TWO["sleep"].values(), "to_host"),
    **dict.fromkeys(STEPS_OF_TWO["wake"].values(), "to_device"),
}


def table(result: Steps) -> list[str]:
    """Seconds of each step, and how many times as long as the bytes take on the link the best of them took."""
    link = {name: LINK_BYTES / min(seconds) for name, seconds in result["link"].items()}
    lines = []
    ways = {**result["ways"], "vault: replica": result["ways"].get("vault", {}).get("replica", {})}
    for way, steps in ways.items():
        if "error" in steps:
            lines.append(f"{way}: {steps['error'].splitlines()[0]}")
        for step, direction in DIRECTIONS.items():
            if seconds := [answer["seconds"] for answer in steps.get(step, ())]:
                times = f" ({min(seconds) * link[direction] / steps['bytes']:.2f} x)" if direction else ""
                lines.append(f"{f'{way}: {step}':50}{' '.join(f'{each:.3f}' for each in seconds)}{times}")
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
        "machine": machine(),
        "workload": {"weights_bytes": sum(bench.sizes), "segments": len(bench.sizes), "kv_cache_bytes": bench.kv_bytes},
        "link_bytes": LINK_BYTES,
        "link": link,
        "ways": ways,
        "vault": {},
    }
    complete = measure(bench, names, result, lambda: write(arguments.out, result))
    print(*table(result), sep="\n")
    sys.exit(not complete)


def write(path: Path, result: Steps) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
