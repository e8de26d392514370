"""A process that one layer lives in (`worker.py`), as a benchmark sees it, and a model's sizes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from layers import NotInstalled

GIB = 1 << 30
MIB = 1 << 20
PAGE_BYTES = 2 * MIB

LINK = ("to_host", "to_device")

ANSWER_S = 150.0  # the longest that one command may take


def qwen3_32b_bytes(decoder_layers: int, scale: int) -> list[int]:
    """Sizes of a Qwen3-32B's weights in bf16 as vLLM fuses them: 258 tensors, 61.02 GiB."""
    hidden, heads, kv_heads, head_dim, intermediate, vocabulary = 5120, 64, 8, 128, 25600, 151936
    attention = [(heads + 2 * kv_heads) * head_dim * hidden, hidden * heads * head_dim]
    mlp = [2 * intermediate * hidden, hidden * intermediate]
    parameters = [vocabulary * hidden, *(attention + mlp) * decoder_layers, vocabulary * hidden]
    return [2 * count // scale // 512 * 512 for count in parameters]


def segment_bytes(sizes: list[int]) -> int:
    """What tensors of these sizes take in segments, which are whole pages."""
    return sum(-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes)


class WorkerFailed(Exception):
    """The process ended, hung, or said that something went wrong."""


class Process:
    """A worker process: `ask` sends a command and returns its answer, or kills it at `ends_at` (`time.monotonic`)."""

    def __init__(self, layer: str, ends_at: float, **environment: str) -> None:
        folder = Path(__file__).resolve().parent
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed in close()
        self._ends_at = ends_at
        self._process = subprocess.Popen(
            [sys.executable, str(folder / "worker.py"), layer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path, "CUMEM_SLEEP_DISABLE": "1", **environment},  # leaves vLLM as it is
            bufsize=0,
        )
        self._unread = b""
        try:
            self.version: str = self.answer()["version"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # the answer, or its absence, says why
            self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        return self.answer(command)

    def close(self) -> None:
        """End the process, and wait until its memory is free again."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def answer(self, command: str = "start") -> dict[str, Any]:
        start = time.monotonic()
        deadline = min(start + ANSWER_S, self._ends_at)
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._process.kill()
                raise WorkerFailed(f"{command}: no answer within {deadline - start:.0f} s{self._last_words()}")
            read = self._process.stdout.read(1 << 16)
            if not read:
                raise WorkerFailed(f"{command}: ended with status {self._process.wait(60)}{self._last_words()}")
            self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "not_installed" in answer:
            raise NotInstalled(answer["not_installed"])
        if "error" in answer:
            print(answer["traceback"], file=sys.stderr)
            raise WorkerFailed(answer["error"] + self._last_words())
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()[-15:]
        return "".join(f"\n    | {line}" for line in lines)
