"""The vault is killed while it copies, again and again: no wrong byte, no call that hangs, and every retry works.

    python benchmarks/vault_kills.py --out results/vault_kills.json        # twenty kills; about two minutes on an H200

Two clients sleep and wake at the same time, each with weights of its own, which change before every sleep. The vault
is killed with SIGKILL at a random moment of a sleep, of a wake, or while both sleep, and a new one begins at the same
socket. A call that failed is made again. All bytes are compared after every wake, by checksums of their own. In the end
clients are killed in the middle of a sleep: the vault has given up what they had within a second.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model_server import exit_on_sigterm
from record import machine
from recording import GIB, Process, WorkerFailed, segment_bytes
from vault_process import Vault

SEGMENTS = 16
WHENS = ("in a sleep", "in a wake", "asleep")
RETRY_S = 60.0  # a new vault pins its memory first
HANGS_S = 30.0


def sizes_of(nbytes: int) -> list[int]:
    return [nbytes // SEGMENTS // 512 * 512] * SEGMENTS


class Wrong(Exception):
    """What must never be."""


@dataclass(frozen=True)
class Kill:
    """One of the vault's.

    Attributes:
        after_s: from the begin of the calls.
        failures: what the calls under way said, or "" if they succeeded, by client.
        longest_s: of all calls, until it had succeeded or failed.
        tries: calls of each client until all was as it should be.
    """

    when: str
    after_s: float
    failures: list[str]
    longest_s: float
    tries: list[int]


class Clients:
    """They do the same at the same time."""

    def __init__(self, vault: Vault, nbytes: int, ends_at: float, count: int = 2) -> None:
        self.processes: list[Process] = []
        self.usual_s = {"sleep": 0.05, "wake": 0.05}
        self._began_at = 0.0
        try:
            for _ in range(count):
                process = Process("cumem-sleep", ends_at, CUMEM_SLEEP_VAULT=vault.socket)
                self.processes.append(process)
                process.ask("load", sizes=sizes_of(nbytes), kv_bytes=64 << 20)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self.processes:
            process.close()

    def begin(self, what: str) -> None:
        self._began_at = time.monotonic()
        for process in self.processes:
            process.begin(what, **({"level": 1} if what == "sleep" else {}))

    def end(self, what: str) -> tuple[list[str], float]:
        """What failed, and how long the longest took."""
        failures = [failure_of(process, what) for process in self.processes]
        took_s = time.monotonic() - self._began_at
        if took_s > HANGS_S:
            raise Wrong(f"a {what} took {took_s:.1f} s")
        if not any(failures):
            self.usual_s[what] = took_s
        return failures, took_s

    def until_it_works(self, what: str) -> list[int]:
        """Calls by each client until it succeeds; a call that has nothing to do does no harm."""
        return [self._tries(process, what) for process in self.processes]

    def _tries(self, process: Process, what: str) -> int:
        ends_at = time.monotonic() + RETRY_S
        tries = 1
        while failure := self._failure(process, what):
            if time.monotonic() > ends_at:
                raise Wrong(f"a {what} does not work with the new vault: {failure}")
            tries += 1
            time.sleep(0.1)
        return tries

    @staticmethod
    def _failure(process: Process, what: str) -> str:
        process.begin(what, **({"level": 1} if what == "sleep" else {}))
        return failure_of(process, what)

    def change(self) -> None:
        for process in self.processes:
            process.ask("change")

    def check(self) -> None:
        for number, process in enumerate(self.processes):
            if differing := process.ask("check")["differing_tensors"]:
                raise Wrong(f"client {number}: wrong bytes in tensors {differing}")


def failure_of(process: Process, what: str) -> str:
    """What a call said that was begun; "" if it succeeded. A client that ended, or hung, is an error."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the error is expected, and its traceback is long
            process.answer(what)
    except WorkerFailed as failure:
        if not process.is_running:
            raise
        return str(failure).splitlines()[0]
    return ""


def one_kill(vault: Vault, clients: Clients, when: str, chance: random.Random) -> Kill:
    """From awake to awake."""
    clients.change()
    failures: list[str] = []
    tries: list[int] = []
    longest_s = after_s = 0.0
    for what in ("sleep", "wake"):
        if when == f"in a {what}":
            after_s = chance.uniform(0, 1.1) * clients.usual_s[what]
            clients.begin(what)
            time.sleep(after_s)
            vault.kill()
            failures, longest_s = clients.end(what)
            vault.start()
            tries = clients.until_it_works(what)
        else:
            tries = tries or [0] * len(clients.processes)
            clients.begin(what)
            said, took_s = clients.end(what)
            longest_s = max(longest_s, took_s)
            if any(said):  # of the vault that was killed while they slept
                failures = said
                tries = clients.until_it_works(what)
        if when == "asleep" and what == "sleep":
            vault.kill()
            if chance.random() < 0.5:  # otherwise they wake without one
                vault.start()
    if when == "asleep":
        clients.check()
        restart(vault)
    clients.check()
    return Kill(when, round(after_s, 4), failures, round(longest_s, 3), tries)


def restart(vault: Vault) -> None:
    """If it does not run."""
    if not vault.is_running:
        vault.start()


def kill_a_client(vault: Vault, clients: Clients, chance: random.Random) -> float:
    """Seconds until the vault has given up what it had."""
    victim = clients.processes.pop()
    victim.ask("change")
    victim.begin("sleep", level=1)
    time.sleep(chance.uniform(0, 1) * clients.usual_s["sleep"])
    victim.kill()
    begin = time.monotonic()
    victim.close()
    while len(vault.status()["clients"]) > len(clients.processes):
        if time.monotonic() > begin + HANGS_S:
            raise Wrong("the vault keeps what a client had that was killed")
        time.sleep(0.01)
    return time.monotonic() - begin


def run(arguments: argparse.Namespace, results: dict[str, Any], save: Any) -> None:
    chance = random.Random(arguments.seed)
    nbytes = int(arguments.gib * GIB)
    ends_at = time.monotonic() + arguments.deadline
    # Twice what both need: what a new vault adopts cannot be written to, and counts until it is given back.
    memory = 4 * segment_bytes(sizes_of(nbytes)) + (64 << 20)
    with Vault(memory, *arguments.vault_options.split(), log=arguments.out.with_name("vault_kills.log")) as vault:
        vault.wait_until_pinned()
        clients = Clients(vault, nbytes, ends_at)
        try:
            for what in ("sleep", "wake"):  # what they usually take
                clients.begin(what)
                if any(failures := clients.end(what)[0]):
                    raise Wrong(f"a {what} fails beside a vault that runs: {failures}")
            clients.check()
            for number in range(arguments.kills):
                kill = one_kill(vault, clients, WHENS[number % len(WHENS)], chance)
                results["kills"].append(asdict(kill))
                save()
                print(f"kill {number + 1}: {kill}", file=sys.stderr, flush=True)
            results["a killed client's memory is back after s"] = round(kill_a_client(vault, clients, chance), 3)
            clients.until_it_works("sleep")
            clients.until_it_works("wake")
            clients.check()
            results["complete"] = True
        finally:
            clients.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--kills", type=int, default=20, help="of the vault (default: %(default)s)")
    parser.add_argument("--gib", type=float, default=4, help="weights of each client, in GiB (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=240, help="seconds that all of it may take (%(default)s)")
    parser.add_argument("--vault-options", default="", help="of `cumem-sleep vault`")
    arguments = parser.parse_args()
    exit_on_sigterm()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": machine(), "gib": arguments.gib, "kills": [], "complete": False}

    def save() -> None:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")

    try:
        run(arguments, results, save)
    except Exception as error:
        results["error"] = f"{type(error).__name__}: {error}"
    save()
    kills = results["kills"]
    for when in WHENS:
        those = [kill for kill in kills if kill["when"] == when]
        failed = sum(any(kill["failures"]) for kill in those)
        longest = max((kill["longest_s"] for kill in those), default=0.0)
        print(
            f"killed {when:12}{len(those):3} times; {failed:3} of these calls failed; the longest took {longest:.2f} s"
        )
    print(results.get("error") or "no wrong byte, and every retry worked")
    sys.exit(not results["complete"])


if __name__ == "__main__":
    main()
