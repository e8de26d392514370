"""What the tests of torch_memory_saver's interface share."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

from cumem_sleep.tools.shim import FOLDERS

SHIM = FOLDERS["torch_memory_saver"]


class FakeTensor:
    """As much of a tensor on a GPU as the interface looks at: on the simulated driver PyTorch has none."""

    is_cuda = True
    device = "cuda:0"

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any, nbytes: int, contiguous: bool = True) -> None:
        self._address = address
        self._contiguous = contiguous
        self.shape = shape
        self.dtype = dtype
        self.nbytes = nbytes

    def data_ptr(self) -> int:
        return self._address

    def is_contiguous(self) -> bool:
        return self._contiguous


def run_with_shim(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that finds the shim first."""
    path = os.pathsep.join(
        filter(None, [str(SHIM), str(pathlib.Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
    )
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
