"""The kernels that the extension brings in PTX: an assembler accepts them, for each generation of GPUs."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import shutil
import subprocess

import pytest

from cumem_sleep import _core


def assembler() -> str:
    """CUDA's, or the one in Triton's wheels."""
    triton = importlib.util.find_spec("triton")
    bundled = pathlib.Path(str(triton.origin)).parent / "backends/nvidia/bin/ptxas" if triton else None
    found = str(bundled) if bundled is not None and bundled.is_file() else shutil.which("ptxas")
    if found is None:
        pytest.skip("needs ptxas, of CUDA's compiler or of Triton: pip install triton")
    return found


def kernels() -> dict[str, str]:
    """By name, as they lie in the extension."""
    found = re.findall(rb"\n\.version [^\0]*\.entry (\w+)[^\0]*", pathlib.Path(_core.__file__).read_bytes())
    texts = re.findall(rb"\n\.version [^\0]*", pathlib.Path(_core.__file__).read_bytes())
    return {name.decode(): text.decode() for name, text in zip(found, texts, strict=True)}


def test_there_are_two() -> None:
    assert sorted(kernels()) == ["cumem_sleep_copy", "cumem_sleep_digest"]


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", ["cumem_sleep_copy", "cumem_sleep_digest"])
def test_it_can_be_assembled(tmp_path: pathlib.Path, name: str, architecture: str) -> None:
    source, target = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(kernels()[name])
    command = [assembler(), f"-arch={architecture}", "-v", str(source), "-o", str(target)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "0 bytes spill stores" in process.stderr, "its registers suffice"
    assert target.stat().st_size > 0
