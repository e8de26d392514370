"""Runs vaults, one after the other, each a fork of this process, which has imported all that they need.

Run as `nursery.py ARGUMENTS...`. For each line on standard input a vault begins; its pid is said at once, and `ended`
when it has. If `FAULTS_OF_THE_DISK` names a file, that says how their disk fails (`disk_faults.py`). With
`BROKEN_LINKS` nothing is copied, because of a mistake.
"""

from __future__ import annotations

import os
import pathlib
import sys

import disk_faults

import cumem_sleep.vault.server  # noqa: F401  # so that no vault has to do it
from cumem_sleep.tools import cli, vault  # noqa: F401
from cumem_sleep.vault import spill
from cumem_sleep.vault.link import VaultLink

if "BROKEN_LINKS" in os.environ:
    del VaultLink._begin
if "FAULTS_OF_THE_DISK" in os.environ:
    disk_faults.install(pathlib.Path(os.environ["FAULTS_OF_THE_DISK"]))
    spill.TRY_AGAIN_S = 0.05
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        os._exit(cli.main(["vault", *sys.argv[1:]]))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
