"""The wheel in a Debian that has Python and nothing else, DEBIAN: installed and demonstrated without a compiler."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

import pytest

DEBIAN = pathlib.Path(os.environ["DEBIAN"])
DIST = pathlib.Path(__file__).parent.parent.parent.parent / "dist"


def inside(command: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in that Debian, with a /proc that ends with it."""
    enter = 'mount -t proc proc "$0/proc" && exec chroot "$0" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -c "$1"'
    arguments = ["unshare", "--mount", "sh", "-c", enter, str(DEBIAN), command]
    return subprocess.run(arguments, check=False, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    shutil.copytree(DIST, DEBIAN / "dist", dirs_exist_ok=True)
    pip = "/opt/clean/bin/pip install -q --no-index --only-binary :all: --find-links /dist cumem-sleep"
    assert inside(f"python3 -m venv /opt/clean && {pip}").returncode == 0


def test_there_is_no_compiler() -> None:
    # One by one: of several names this shell looks at the first alone.
    assert inside("for name in cc gcc g++ c++ clang cpp ld; do command -v $name; done").stdout == ""


def test_the_demo_moves_and_compares_every_byte() -> None:
    run = inside("CUMEM_SLEEP_DRIVER=sim /opt/clean/bin/cumem-sleep demo --json")
    assert (run.returncode, json.loads(run.stdout)["ok"]) == (0, True)


def test_the_version_names_the_commit() -> None:
    commit = (DIST.parent / "cumem_sleep" / "commit.txt").read_text().strip()
    (wheel,) = DIST.glob("cumem_sleep-*.whl")
    said = inside("/opt/clean/bin/cumem-sleep --version").stdout
    assert said.startswith(f"cumem-sleep {wheel.name.split('-')[1]} (commit {commit}; GCC ")
