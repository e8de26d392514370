"""Pack what a GPU host without network lacks: it has Python 3.12, PyTorch 2.11 for CUDA 13 and transformers 5.17.

    python benchmarks/gpu_host_archives.py trl .gpu/3/trl.tar.xz        # 34 MiB; beside vLLM 0.26 in two other archives

`on_gpu_host.sh` unpacks it. Needs pip and xz. TRL imports `datasets`, and that PyArrow and pandas: what their imports
do not load stays out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

LIMIT_BYTES = 60 << 20  # of one transfer
MANYLINUX = ("1", "2010", "2014", *(f"_2_{minor}" for minor in (5, 12, 17, 24, 27, 28, 31, 34, 35)))

TRL = (
    *("trl==1.16.0", "accelerate==1.15.0", "datasets==4.8.5", "pyarrow==26.0.1", "pandas==3.1.1", "xxhash==3.7.0"),
    *("multiprocess==0.70.19", "python-dateutil==2.9.0.post0", "six==1.17.0"),
)
TRL_WITHOUT = (
    *("pyarrow/libarrow_flight*", "pyarrow/libarrow_s3*", "pyarrow/libarrow_python_flight*", "pyarrow/_flight*"),
    *("pyarrow/_s3fs*", "pyarrow/_gcsfs*", "pyarrow/_azurefs*", "pyarrow/_substrait*", "pyarrow/_orc*"),
    *("pyarrow/_dataset_orc*", "pyarrow/_hdfs*", "pyarrow/_pyarrow_cpp_tests*", "pyarrow/libarrow_python*.so.*.*.*"),
    *("pyarrow/include", "pyarrow/src", "pyarrow/tests", "pandas/tests", "multiprocess/tests"),
)


def download(packages: Sequence[str], folder: Path) -> list[Path]:
    """Their wheels for Python 3.12 on Linux, without what they depend on."""
    platforms = [word for each in MANYLINUX for word in ("--platform", f"manylinux{each}_x86_64")]
    options = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    options += ["--abi", "cp312", "--abi", "abi3", "--abi", "none"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, *platforms]
    subprocess.run([*pip, "-d", str(folder), *packages], check=True)
    return sorted(folder.glob("*.whl"))


def trl(work: Path, root: Path) -> None:
    for wheel in download(TRL, work):
        zipfile.ZipFile(wheel).extractall(root)
    leave_out(root, TRL_WITHOUT)


def leave_out(root: Path, patterns: Sequence[str]) -> None:
    for path in [path for pattern in patterns for path in root.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def pack(root: Path, archive: Path) -> None:
    """
    Raises:
        SystemExit: it is too large for one transfer.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    command = ["tar", "cf", str(archive), "-I", "xz -T0 -6", "--owner=0", "--group=0", "-C", str(root), "."]
    subprocess.run(command, check=True)
    size = archive.stat().st_size
    print(f"{archive.name}: {size / 2**20:.1f} MiB")
    if size > LIMIT_BYTES:
        raise SystemExit(f"larger than {LIMIT_BYTES >> 20} MiB")


ARCHIVES = {"trl": trl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=ARCHIVES)
    parser.add_argument("archive", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        root = Path(work, "root")
        root.mkdir()
        ARCHIVES[arguments.what](Path(work), root)
        pack(root, arguments.archive)


if __name__ == "__main__":
    main()
