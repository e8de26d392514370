#!/usr/bin/env python3
"""Pack what `test_peers.py` compares with, for a GPU host that has PyTorch 2.11 (Python 3.12) but no network.

    python benchmarks/peers_bundle.py        # needs pip, a package index and xz; writes .gpu/peers.tar.xz, about 20 MiB

On the host, unpack it into a folder of PYTHONPATH. It holds torch_memory_saver, pytest-benchmark, and of vLLM what its
sleep-mode allocator imports: all of its Python, the allocator, and the library of kernels that its CUDA platform will
not be imported without. Of that library the code for GPUs other than Hopper is blanked in place (every offset stays,
so it still loads). vLLM cannot serve from this.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / ".gpu" / "peers.tar.xz"
PEERS = ["vllm==0.26.0", "torch_memory_saver==0.0.10", "pytest-benchmark==5.3.1", "py-cpuinfo==9.0.0"]
# Found by importing vllm.device_allocator.cumem without them.
IMPORTED_BY_VLLM = [
    "regex",
    "psutil",
    "pyzmq",
    "urllib3",
]
KERNELS = "vllm/_C_stable_libtorch.abi3.so"
LIBRARIES = [KERNELS, "vllm/cumem_allocator.abi3.so"]
NOT_NEEDED = ("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/vllm_flash_attn/")
HOPPER = 90
FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, CUBIN = 1, 2


def download(folder: Path) -> None:
    glibc = (17, 24, 26, 27, 28, 31, 34, 35)
    platforms = ["manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in glibc)]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", "-d", str(folder)),
            *("--python-version", "3.12", "--implementation", "cp"),
            *(argument for abi in ("cp312", "abi3", "none") for argument in ("--abi", abi)),
            *(argument for platform in platforms for argument in ("--platform", f"{platform}_x86_64")),
            *PEERS,
            *IMPORTED_BY_VLLM,
        ],
        check=True,
    )


def is_wanted(name: str) -> bool:
    if not name.startswith("vllm/"):
        return True
    return name in LIBRARIES or (name.endswith((".py", ".json")) and not name.startswith(NOT_NEEDED))


def blank_other_architectures(path: Path) -> None:
    """Zero the fat-binary entries that a Hopper GPU never loads (PTX stays where there is nothing else)."""
    data = bytearray(path.read_bytes())
    at = data.find(FATBIN_MAGIC)
    while at >= 0:
        version, header_bytes, size = struct.unpack_from("<HHQ", data, at + 4)
        end = at + header_bytes + size
        if version != 1 or not 16 <= header_bytes <= 64 or end > len(data):
            at = data.find(FATBIN_MAGIC, at + 4)  # not a fat binary
            continue
        entries = []
        entry = at + header_bytes
        while entry + 64 <= end:
            kind, _, entry_header_bytes, entry_bytes = struct.unpack_from("<HHIQ", data, entry)
            if kind not in (PTX, CUBIN) or not 32 <= entry_header_bytes <= 4096:
                break
            architecture = struct.unpack_from("<I", data, entry + 28)[0]
            entries.append((kind, architecture, entry + entry_header_bytes, entry_bytes))
            entry += entry_header_bytes + entry_bytes
        has_native = any(kind == CUBIN and architecture == HOPPER for kind, architecture, *_ in entries)
        for kind, architecture, start, entry_bytes in entries:
            wanted = (kind == CUBIN and architecture == HOPPER) if has_native else kind == PTX
            if not wanted:
                data[start : start + entry_bytes] = bytes(entry_bytes)
        at = data.find(FATBIN_MAGIC, end)
    path.write_bytes(data)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        download(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site, [name for name in archive.namelist() if is_wanted(name)])
        blank_other_architectures(site / KERNELS)
        packed = Path(folder, "peers.tar.xz")
        subprocess.run(["tar", "-c", "-I", "xz -T0 -5", "-f", str(packed), "-C", str(site), "."], check=True)
        OUT.parent.mkdir(exist_ok=True)
        shutil.move(packed, OUT)
    print(f"{OUT.parent.name}/{OUT.name}: {OUT.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
