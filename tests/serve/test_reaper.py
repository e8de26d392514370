"""Servers end with their front, however they were started, and whoever is killed.

Random commands: `SERVE_ENDS=100 pytest -m slow tests/serve/test_reaper.py -k random`.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers_of_tests import SIMULATED

from cumem_sleep.serve import reaper

ROUNDS = int(os.environ.get("SERVE_ENDS", "3"))
WITHIN_S = 60.0  # on a busy machine; nothing here is waited for in vain

# Writes its pid, and may ignore SIGTERM: `PROGRAM FILE [stubborn]`.
PROGRAM = """\
import os, signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(3600)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], object], what: str) -> None:
    ends_at = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < ends_at, what
        time.sleep(0.02)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Fronts:
    """Fronts as processes, with one model each whose command is free to start what it likes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids = folder / "pids"
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM)
        self.runtime = folder / "r"
        self.runtime.mkdir(mode=0o700)
        self.started: list[subprocess.Popen[bytes]] = []

    def helper(self, *options: str) -> str:
        return shlex.join([sys.executable, "-S", str(self.program), str(self.pids), *options])

    def server(self) -> str:
        return f"{SIMULATED} --uds {{socket}} --served-model-name one"

    def start(self, command: str | list[str], helpers: int) -> subprocess.Popen[bytes]:
        """Returns when its server is ready, and its helpers have written their pids."""
        self.pids.unlink(missing_ok=True)
        model = {"engine": "vllm", "command": command, "idle": "never", "host_memory": "1GiB"}
        whole = {"front": {"port": 0}, "logs": str(self.folder / "logs"), "models": {"one": model}}
        file = self.folder / "models.yaml"
        file.write_text(json.dumps(whole))
        log = self.folder / "front.log"
        with log.open("wb") as out:
            front = subprocess.Popen(
                [sys.executable, "-m", "cumem_sleep", "serve", str(file)],
                stdout=out,
                stderr=out,
                env={**os.environ, "XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(self.runtime)},
            )
        self.started.append(front)
        until(lambda: "one: sleep in" in log.read_text() or front.poll() is not None, "its server started")
        assert front.poll() is None, log.read_text()
        until(lambda: len(self.noted()) == helpers, "the helpers started")
        return front

    def noted(self) -> list[int]:
        return [int(line) for line in self.pids.read_text().splitlines()] if self.pids.exists() else []

    def below(self, front: subprocess.Popen[bytes]) -> list[int]:
        """Everything that is below a front, and the helpers, wherever they are."""
        found, parents = set(self.noted()), [front.pid]
        for parent in parents:
            for task in Path(f"/proc/{parent}/task").glob("*/children"):
                parents += map(int, task.read_text().split())
        return sorted(found | set(parents[1:]))

    def reapers(self, front: subprocess.Popen[bytes]) -> list[int]:
        """The outer one and the inner one."""
        return [pid for pid in self.below(front) if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture
def fronts(tmp_path: Path) -> Iterator[Fronts]:
    made = Fronts(tmp_path)
    yield made
    left = []
    for front in made.started:
        left += made.below(front) if front.poll() is None else made.noted()
        front.kill()
        front.wait()
    for pid in left:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)


# Commands for a shell.
SHAPES = {
    "a child": "%(helper)s & exec %(server)s",
    "the server below a shell": "%(server)s; true",
    "a shell below a shell": "%(helper)s & sh -c '%(server)s; true'; true",
    "a session of its own": "setsid %(helper)s & %(server)s; true",
    "a double fork": "((%(helper)s) &); exec %(server)s",
    "a double fork into another session": "(setsid sh -c '%(helper)s & %(helper)s; true' &); %(server)s; true",
    "one that ignores SIGTERM": "%(stubborn)s & exec %(server)s",
    "one that ignores SIGTERM, in another session": "(setsid %(stubborn)s &); %(server)s; true",
    "one that is hidden by nohup": "nohup setsid %(helper)s >/dev/null 2>&1 & exec %(server)s",
}


def start(fronts: Fronts, shape: str) -> subprocess.Popen[bytes]:
    text = SHAPES[shape]
    words = {"helper": fronts.helper(), "stubborn": fronts.helper("stubborn"), "server": fronts.server()}
    return fronts.start(["sh", "-c", text % words], text.count("%(helper)s") + text.count("%(stubborn)s"))


def nothing_is_left(fronts: Fronts, below: list[int]) -> None:
    until(lambda: not any(map(lives, below)), f"{below} ended")
    until(lambda: not list(fronts.runtime.iterdir()), f"the folders in {fronts.runtime} went")
    until(lambda: not list(fronts.folder.glob(".*")), "the lock went")


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_all_that_a_server_started_ends_with_a_front_that_is_killed(fronts: Fronts, shape: str) -> None:
    front = start(fronts, shape)
    below = fronts.below(front)
    front.kill()
    front.wait()
    nothing_is_left(fronts, below)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["outer", "inner"])
def test_a_reaper_that_is_killed_takes_its_server_along_and_the_front_starts_it_afresh(
    fronts: Fronts, which: int
) -> None:
    front = start(fronts, "a double fork into another session")
    below = fronts.below(front)
    os.kill(fronts.reapers(front)[which], signal.SIGKILL)
    until(lambda: not any(map(lives, below)), f"{below} ended")
    said = fronts.folder / "front.log"
    until(lambda: said.read_text().count("one: start in") == 2, "its server started again")
    assert "its server was killed by SIGKILL" in said.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["outer", "inner", "server"])
def test_whoever_is_stopped_ends_with_the_front(fronts: Fronts, which: int, number: signal.Signals) -> None:
    front = start(fronts, "a session of its own")
    below = fronts.below(front)
    reapers = fronts.reapers(front)
    server = next(pid for pid in below if parent_of(pid) == reapers[1])
    os.kill([*reapers, server][which], signal.SIGSTOP)
    front.send_signal(number)
    told = time.monotonic()
    front.wait(WITHIN_S)
    nothing_is_left(fronts, below)
    assert time.monotonic() - told < 25.0, "it was waited for, and killed"


@pytest.mark.slow
def test_a_server_behind_a_shell_is_told_to_end_before_it_is_killed(fronts: Fronts) -> None:
    """A shell dies of the signal and does not pass it on."""
    file = fronts.folder / "ended"
    polite = f"""\
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(4), open({str(file)!r}, "w"), sys.exit()))
open({str(fronts.pids)!r}, "w").write(f"{{os.getpid()}}\\n")
time.sleep(3600)
"""
    command = f"{shlex.join([sys.executable, '-c', polite])} & {fronts.server()}; true"
    front = fronts.start(["sh", "-c", command], 1)
    front.terminate()
    assert front.wait(WITHIN_S) == 0
    assert file.exists(), "it was killed within its time"


@pytest.mark.slow
def test_random_commands_end_with_random_fronts(fronts: Fronts) -> None:
    """Shells, forks and sessions in any order; the front is killed or told to end, with or without reapers."""
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        command, helpers = fronts.server(), 0
        for _ in range(chance.randint(1, 5)):
            around = chance.choice(["sh -c {}", "sh -c {}; true", "setsid --wait sh -c {}; true", "beside", "twice"])
            if "{}" in around:
                command = around.format(shlex.quote(command))
                continue
            helper = fronts.helper(*(["stubborn"] if chance.random() < 0.3 else []))
            helper = f"setsid {helper}" if chance.random() < 0.5 else helper
            command = f"{helper} & {command}" if around == "beside" else f"(({helper}) &); {command}"
            helpers += 1
        front = fronts.start(["sh", "-c", command], helpers)
        below = fronts.below(front)
        killed = chance.choice([[], [], [0], [1]])
        number = chance.choice([signal.SIGKILL, signal.SIGTERM])
        reapers = fronts.reapers(front)
        if reapers and killed:
            os.kill(reapers[killed[0]], signal.SIGKILL)
        front.send_signal(number)
        front.wait(WITHIN_S)
        try:
            nothing_is_left(fronts, below)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {command}; {number.name}, killed {killed}") from error


def test_it_ends_as_the_command_does() -> None:
    def run(*command: str) -> subprocess.CompletedProcess[bytes]:
        started = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), "", "", *command]
        return subprocess.run(started, capture_output=True, check=False)

    assert run("sh", "-c", "exit 7").returncode == 7
    assert run("sh", "-c", "kill -KILL $$").returncode == -signal.SIGKILL
    assert run("sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    said = run("sh", "-c", "echo out; echo $$ >&2")
    assert sorted(said.stderr.split()) == sorted([b"out", said.stdout.strip()])
    assert b"no-such-program: No such file or directory" in run("no-such-program").stderr
