"""What a new GPU's first client waits for in the vault, and what clients of another GPU notice of it.

    python benchmarks/vault_first_clients.py --out results/vault_first_clients.json   # four H200s: about three minutes

Twice, with `--gpus` naming all GPUs and without: a vault pins all of its memory; then a client of each GPU sleeps for
the first time, all at the same moment, while another client of the first GPU has been sleeping and waking in a loop.
That one changes all of its bytes before each sleep, so that each is copied. `COMMIT` says which commit this is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_server import exit_on_sigterm, gpu_memory_in_use_bytes, gpu_memory_of_process_bytes
from record import machine
from recording import Process
from vault_process import GIB, Vault

from cumem_sleep import sim

SIMULATED = os.environ.get("CUMEM_SLEEP_DRIVER") == "sim"
AROUND_S = 0.5 if SIMULATED else 3.0  # that the loop runs before and after


@dataclass
class Loop:
    """Sleeps and wakes of one client, until it is told to end.

    Attributes:
        sleeps: (when it began, by the monotonic clock, and its seconds) of each; `wakes` likewise.
    """

    process: Process
    sleeps: list[tuple[float, float]] = field(default_factory=list)
    wakes: list[tuple[float, float]] = field(default_factory=list)
    error: str = ""
    _ends: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join()
        if self.error:
            raise RuntimeError(f"the client that sleeps and wakes in a loop: {self.error}")

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                self.process.ask("change")
                for what, taken, arguments in (("sleep", self.sleeps, {"level": 1}), ("wake", self.wakes, {})):
                    began = time.monotonic()
                    taken.append((began, self.process.ask(what, **arguments)["seconds"]))
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def seconds(self, what: str, begin: float, end: float) -> list[float]:
        """Of those that were under way at any moment from `begin` to `end`."""
        taken = self.sleeps if what == "sleep" else self.wakes
        return [seconds for began, seconds in taken if began < end and began + seconds > begin]


def client(vault: Vault, gpu: int, nbytes: int, ends_at: float) -> Process:
    """A process that sees this GPU only, with its memory filled. The vault has not heard of it."""
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    only = {"CUDA_VISIBLE_DEVICES": visible[gpu] if visible else str(gpu), "CUMEM_SLEEP_SIM_DEVICE_ORDER": str(gpu)}
    process = Process("cumem-sleep", ends_at, CUMEM_SLEEP_VAULT=vault.socket, **only)
    try:
        process.ask("load", sizes=[nbytes], kv_bytes=2 << 20)
    except BaseException:
        process.close()
        raise
    return process


def memory_of(vault: Vault) -> list[dict[str, Any]]:
    """What there is in use on each GPU: by the vault alone, where that can be told, and by all processes."""
    found = []
    for gpu in vault.status()["gpus"]:
        uuid = gpu["uuid"]
        own = None
        with suppress(ImportError):  # of NVML
            own = sim.process_memory(vault.pid, uuid)[0] if SIMULATED else gpu_memory_of_process_bytes(uuid, vault.pid)
        found.append({"gpu": gpu["ordinal"], "vault_bytes": own, "all_bytes": gpu_memory_in_use_bytes(gpu["ordinal"])})
    return found


def measure(options: list[str], arguments: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """One vault, from its start to its end."""
    nbytes = int(arguments.gib * GIB)
    ends_at = time.monotonic() + arguments.deadline
    with ExitStack() as stack:
        vault = stack.enter_context(Vault(int(arguments.memory * GIB), *options, *arguments.vault_options.split()))
        pinned_s = vault.wait_until_pinned(arguments.deadline)
        loop = Loop(stack.enter_context(client(vault, 0, nbytes, ends_at)))
        firsts = [stack.enter_context(client(vault, gpu, nbytes, ends_at)) for gpu in range(gpus)]
        before = memory_of(vault)  # it has not heard of them
        with loop.running():
            time.sleep(AROUND_S)
            began = time.monotonic()
            for each in firsts:
                each.begin("sleep", level=1)
            answers = [each.answer("sleep") for each in firsts]
            ended = began + max(answer["seconds"] for answer in answers)
            time.sleep(AROUND_S)
        phases = {"before": (0.0, began), "during": (began, ended), "after": (ended, time.monotonic())}
        return {
            "options": options,
            "pinned_bytes": vault.status()["pinned_bytes"],
            "pinned after s": pinned_s,
            "GPU memory before the first sleeps": before,
            "GPU memory after the first sleeps": memory_of(vault),
            "first sleeps s": [answer["seconds"] for answer in answers],
            "loop on the first GPU": {
                phase: {f"{what} s": loop.seconds(what, *span) for what in ("sleep", "wake")}
                for phase, span in phases.items()
            },
            "log": vault.log.read_text(errors="replace").splitlines(),
        }


def gpus_of_this_host() -> int:
    if SIMULATED:
        return int(os.environ.get("CUMEM_SLEEP_SIM_DEVICES", "1"))
    import torch

    return torch.cuda.device_count()


def summary(way: str, found: dict[str, Any]) -> str:
    firsts = " ".join(f"{seconds:.3f}" for seconds in found["first sleeps s"])
    loop = found["loop on the first GPU"]
    longest = ", ".join(
        f"{phase} {max(loop[phase]['sleep s'], default=0.0):.3f}" for phase in ("before", "during", "after")
    )
    return (
        f"{way}: {found['pinned_bytes'] / GIB:.1f} GiB pinned; first sleeps {firsts} s; longest in the loop {longest} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--memory", type=float, default=100, help="of the vault, in GiB (default: %(default)s)")
    parser.add_argument("--gib", type=float, default=1, help="weights of each client, in GiB (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=200, help="seconds for each vault (default: %(default)s)")
    parser.add_argument(
        "--only", choices=("named", "not named"), help="whether `--gpus` names all GPUs (default: both)"
    )
    parser.add_argument("--vault-options", default="", help="of `cumem-sleep vault`")
    arguments = parser.parse_args()
    exit_on_sigterm()
    gpus = gpus_of_this_host()
    ways = {"named": ["--gpus", *map(str, range(gpus))], "not named": []}
    results: dict[str, Any] = {"machine": machine(), "commit": os.environ.get("COMMIT"), "gpus": gpus}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    for way in [arguments.only] if arguments.only else ways:
        try:
            results[way] = measure(ways[way], arguments, gpus)
            print(summary(way, results[way]), flush=True)
        except Exception as error:
            failed = True
            results[way] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{way}: {results[way]['error']}", flush=True)
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
