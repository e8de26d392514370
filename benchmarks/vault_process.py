"""A vault in a process of its own, for benchmarks whose sleepers use it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ending import end

from cumem_sleep.errors import VaultError
from cumem_sleep.vault.client import VaultClient

POLL_S = 0.05
END_S = 60.0  # pinned memory takes its time to be given back


class VaultFailed(Exception):
    """It ended, or was not ready in time; its last words are in the message."""


class Vault:
    """`cumem-sleep vault` of this user on a socket of its own, from `start` to `close`.

    Attributes:
        socket: for `CUMEM_SLEEP_VAULT`.
    """

    def __init__(self, nbytes: int, *options: str, log: Path | None = None) -> None:
        self._folder = tempfile.mkdtemp(prefix="vault-")  # a path of a socket has at most 107 bytes
        os.chmod(self._folder, 0o700)
        self.socket = f"{self._folder}/vault.sock"
        self.log = log or Path(self._folder, "log")
        command = [sys.executable, "-m", "cumem_sleep", "vault", "--socket", self.socket]
        self._command = [*command, "--memory", str(nbytes), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Vault:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, limit_s: float = 60.0) -> None:
        """Returns when it answers; it takes its memory from then on."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env={**os.environ, "PYTHONSAFEPATH": "1"}
            )
        self._until(self._answers, limit_s, "does not answer")

    def wait_until_pinned(self, limit_s: float = 200.0) -> float:
        """Returns the seconds until it has all of its memory."""
        begin = time.perf_counter()
        self._until(self._has_all, limit_s, "has not taken its memory")
        return time.perf_counter() - begin

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def status(self) -> dict[str, Any]:
        client = VaultClient(Path(self.socket), "looks", 20.0)
        try:
            return client.status()
        finally:
            client.close()

    def close(self) -> None:
        """Does nothing the second time."""
        process, self._process = self._process, None
        if process is not None:
            end(process, END_S)
        if self.log.parent != Path(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            self.status()
        except VaultError:
            return False
        return True

    def _has_all(self) -> bool:
        status = self.status()
        return bool(status["pinned_bytes"] >= status["memory_bytes"])

    def _until(self, is_so: Callable[[], bool], limit_s: float, what: str) -> None:
        ends_at = time.monotonic() + limit_s
        while not is_so():
            assert self._process is not None
            if self._process.poll() is not None:
                raise VaultFailed(f"the vault ended with status {self._process.returncode}{self._last_words()}")
            if time.monotonic() > ends_at:
                raise VaultFailed(f"the vault {what} within {limit_s:.0f} s{self._last_words()}")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-10:]
        return "".join(f"\n    | {line}" for line in lines)
