"""Properties of the machine, which the doctor examines and every measurement records."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from .. import __version__, _core, host_facts
from ..core.misspelt import hidden

TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-nightly")

_VARIABLES = ("CUMEM_SLEEP_", "PYTORCH_")


@dataclass(frozen=True)
class Machine:
    """The machine to examine: by default the one that this process runs on.

    Attributes:
        root: where `/proc` and `/sys` are.
        environment: the environment variables.
        package_paths: where to look for installed packages; None is `sys.path`.
        affinity: the cores that this process may run on.
        little_bytes: a vault that has less left than this has too little.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    package_paths: Sequence[str] | None = None
    affinity: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    little_bytes: int = 4 << 30

    def read(self, path: str) -> str:
        """A file below the root, stripped; raises OSError."""
        return (self.root / path).read_text().strip()

    def cores_in(self, path: str) -> frozenset[int]:
        """The numbers in a file that lists cores as the kernel does, `0-3,8`; raises OSError."""
        found: set[int] = set()
        for part in filter(None, self.read(path).split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
        return frozenset(found)

    def version_of(self, *distributions: str) -> str | None:
        """The version of the first of these distributions that is installed; nothing is imported."""
        found = self.distribution(*distributions)
        return None if found is None else found.version

    def distribution(self, *names: str) -> metadata.Distribution | None:
        """The first of these distributions that is installed."""
        paths = list(sys.path if self.package_paths is None else self.package_paths)
        for name in names:
            for found in metadata.distributions(name=name, path=paths):
                return found
        return None

    def nvidia_driver(self) -> str | None:
        """The version of the NVIDIA kernel module; None if there is none."""
        return host_facts.nvidia_driver(self.root)

    def host_memory_bytes(self) -> int | None:
        """`MemTotal`; None if the kernel does not report it."""
        found = re.search(r"^MemTotal:\s*(\d+) kB", self._text("proc/meminfo"), re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    def transparent_hugepage(self) -> str:
        """The modes, the one in force in brackets; raises OSError."""
        return self.read("sys/kernel/mm/transparent_hugepage/enabled")

    def free_huge_pages_bytes(self) -> int:
        """Of huge pages of 2 MiB that the system has reserved, what nobody has taken; 0 if the kernel does not tell."""
        folder = "sys/kernel/mm/hugepages/hugepages-2048kB"
        free, promised = (self._text(f"{folder}/{name}_hugepages") or "0" for name in ("free", "resv"))
        return max(0, int(free) - int(promised)) << 21

    def _text(self, path: str) -> str:
        try:
            return self.read(path)
        except OSError:
            return ""


@dataclass(frozen=True)
class MachineFacts:
    """The machine, the versions in use, and the command. None: not installed, or not known.

    Attributes:
        cuda_driver_api: as CUDA numbers it: 13000 is 13.0; None if the layer has opened no driver.
        cores: that this process may use.
        environment: the variables that configure the layer and PyTorch.
    """

    gpu: str
    driver: str | None
    cuda_driver_api: int | None
    cores: int
    host_memory_bytes: int | None
    transparent_hugepage: str | None
    kernel: str
    python: str
    torch: str | None
    triton: str | None
    cumem_sleep: str
    simulated: bool
    environment: Mapping[str, str]
    command: str


def machine_facts(gpu: str, command: Sequence[str]) -> MachineFacts:
    """The facts of this machine and this process, with the name of its GPU. Needs no open driver."""
    machine = Machine()
    simulated = _core.driver_is_simulated()
    imported = getattr(sys.modules.get("torch"), "__version__", None)  # tells the build: 2.11.0+cu130
    try:
        transparent_hugepage = machine.transparent_hugepage() or None
    except OSError:
        transparent_hugepage = None
    return MachineFacts(
        gpu=gpu,
        driver="simulated" if simulated else machine.nvidia_driver(),
        cuda_driver_api=_core.driver_version() if _core.driver_is_open() else None,
        cores=host_facts.usable_cores(),
        host_memory_bytes=machine.host_memory_bytes(),
        transparent_hugepage=transparent_hugepage,
        kernel=platform.release(),
        python=platform.python_version(),
        torch=str(imported) if imported else machine.version_of("torch"),
        triton=machine.version_of(*TRITON_DISTRIBUTIONS),
        cumem_sleep=__version__,
        simulated=simulated,
        environment={k: v for k, v in sorted(hidden(machine.environment).items()) if k.startswith(_VARIABLES)},
        command=shlex.join(command),
    )
