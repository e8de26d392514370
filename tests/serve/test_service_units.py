"""The systemd units of the docs do what they say, as far as that shows without systemd."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
UNITS = ("cumem-sleep-serve.service", "cumem-sleep-vault.service")


def text_of_unit(name: str) -> str:
    """From the page that says where to put it."""
    pages = "".join((DOCS / page).read_text() for page in ("several-models.md", "vault.md"))
    text = re.search(rf"^A .*unit.*/{name}`:\n\n```text\n(.*?)```", pages, re.MULTILINE | re.DOTALL)
    assert text is not None
    return text[1]


def unit(name: str) -> ConfigParser:
    parsed = ConfigParser(interpolation=None)
    parsed.read_string(text_of_unit(name))
    return parsed


def command(parsed: ConfigParser, home: Path) -> list[str]:
    """With this Python's package in place of the one at home, and little memory."""
    line = parsed["Service"]["ExecStart"].replace("%h/venv/bin/cumem-sleep", f"{sys.executable} -m cumem_sleep")
    return shlex.split(line.replace("%h", str(home)).replace("200GiB", "64MiB"))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNITS)
def test_its_command_says_when_it_serves_and_ends_at_sigterm(name: str, tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(
        f"front: {{port: 0}}\nlogs: {tmp_path}\nmodels: {{one: {{engine: command, command: 'sleep {{port}}'}}}}"
    )
    parsed = unit(name)
    assert parsed["Service"]["Type"] == "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        set_by_systemd = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "XDG_RUNTIME_DIR": str(tmp_path)}
        process = subprocess.Popen(
            command(parsed, tmp_path),
            env={**os.environ, "CUMEM_SLEEP_DRIVER": "sim", **set_by_systemd},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert systemd.recv(100) == b"READY=1"
            said = ""
            if "ExecReload" in parsed["Service"]:
                reload = parsed["Service"]["ExecReload"].replace("$MAINPID", str(process.pid))
                subprocess.run(shlex.split(reload), check=True)
                assert process.stderr is not None
                while "reload: nothing in the configuration has changed" not in said:
                    line = process.stderr.readline()
                    assert line, said
                    said += line
            process.send_signal(signal.SIGTERM)
            said += process.communicate(timeout=60)[1]
            assert process.returncode == 0, said
            assert "listens at" in said
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_it(name: str, tmp_path: Path) -> None:
    """Where there is one: it names keys that it does not know, and values that it does not take."""
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("needs systemd-analyze")
    (tmp_path / name).write_text(text_of_unit(name).replace("%h/venv/bin/cumem-sleep", sys.executable))
    said = subprocess.run(
        [verify, "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True, check=False
    ).stderr
    assert [line for line in said.splitlines() if name in line] == []
