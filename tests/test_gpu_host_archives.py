"""What `benchmarks/gpu_host_archives.py` leaves out of an archive. Downloads are not tested: they are of 400 MB."""

from __future__ import annotations

import importlib
import pathlib
import sys
import tarfile

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
pytestmark = pytest.mark.sim


def test_what_several_patterns_name_is_left_out_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    archives = importlib.import_module("gpu_host_archives")
    root = tmp_path / "root"
    for name in ("p/lib_a.so", "p/lib_a.so.1.2.3", "p/tests/a.py", "p/__init__.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    archives.leave_out(root, ["p/lib_a*", "p/lib*.so.*.*.*", "p/tests", "p/not_there"])
    archives.pack(root, tmp_path / "1" / "a.tar.xz")
    with tarfile.open(tmp_path / "1" / "a.tar.xz") as archive:
        assert [name for name in archive.getnames() if name.endswith((".py", ".so", ".3"))] == ["./p/__init__.py"]
    sys.modules.pop("gpu_host_archives")
