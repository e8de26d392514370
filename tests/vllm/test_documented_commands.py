"""vLLM takes the documented commands, and its paths are what the security page says: see `documented_commands`."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from environment import skip_unless_vllm

skip_unless_vllm()


def test_as_documented(tmp_path: pathlib.Path) -> None:
    program = pathlib.Path(__file__).with_name("documented_commands.py")
    command = [sys.executable, str(program), str(tmp_path)]
    path = os.pathsep.join(filter(None, [str(program.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].endswith(" commands")
