"""vLLM takes the documented commands, and its paths are what the security page says: see `documented_commands`."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from environment import skip_unless_vllm

skip_unless_vllm()


def test_as_documented() -> None:
    program = pathlib.Path(__file__).with_name("documented_commands.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].endswith(" commands")
