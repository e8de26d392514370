"""Ways of doing the same, each measured in a process of its own that notes what it finds as soon as it is found."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
GRACE_S = 10.0  # over its limit, before a process is killed


class Notes:
    """Of the way that this process measures: its facts, in a file whenever something is known, and where it is."""

    def __init__(self, way: str, file: Path) -> None:
        self.facts: Facts = {"phase": "start", "phases_s": {}, "rows": []}
        self._way, self._file, self._begun = way, file, time.perf_counter()

    def wait_for_turn(self) -> None:
        """Until the other process says how many seconds this one has; after these it ends, and says where it was."""
        faulthandler.dump_traceback_later(float(sys.stdin.readline()), exit=True)
        self._begun = time.perf_counter()

    def note(self, phase: str, **more: Any) -> None:
        """A phase begins. `more` are facts."""
        seconds = round(time.perf_counter() - self._begun, 2)
        self.facts.update(phase=phase, **more)
        self.facts["phases_s"][phase] = seconds
        whole = self._file.with_suffix(".new")
        whole.write_text(json.dumps(self.facts))
        whole.replace(self._file)  # who reads it finds all of it
        os.write(1, f"{self._way}: {phase} after {seconds:.1f} s\n".encode())  # whole, beside other processes' lines


class Way:
    """The process of a way, as the one that starts it sees it."""

    def __init__(self, name: str, file: Path, log: Path, environment: Mapping[str, str]) -> None:
        """Starts this script again, with `--one NAME` behind its arguments; what it logs goes to `log`."""
        self.name, self._file, self._log = name, file, log
        file.unlink(missing_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *sys.argv, "--one", name],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # what it starts ends with it
            )

    def has_begun(self) -> bool:
        """Whether it has noted something, or has ended."""
        return self._process.poll() is not None or self._file.exists()

    def run(self, limit_s: float) -> Facts:
        """Gives it so many seconds; what it has noted by the end, with `status`: None if it had to be killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.write(f"{limit_s}\n".encode())
            self._process.stdin.close()
            self._process.wait(limit_s + GRACE_S)
        status = self._process.poll()
        self.kill()
        return {**self.facts(), "status": status}

    def facts(self) -> Facts:
        try:
            facts: Facts = json.loads(self._file.read_text())
        except FileNotFoundError:
            facts = {"phase": "start", "rows": []}
        return facts

    def kill(self) -> None:
        """With all that it has started. Does nothing the second time."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_words(self, lines: int = 40) -> list[str]:
        """The end of its log."""
        return self._log.read_text(errors="replace").splitlines()[-lines:]
