"""Pack what a GPU host without network lacks: it has Python 3.12, PyTorch 2.11 for CUDA 13 and transformers 5.17.

    python benchmarks/gpu_host_archives.py .gpu/4/sglang.tar.xz  # 33 MiB
    python benchmarks/gpu_host_archives.py .gpu/5/nccl.tar.xz    # NCCL 2.30.7, which can suspend: 36 MiB

`on_gpu_host.sh` unpacks them. Needs pip and xz. Of NCCL's library only Hopper's kernels are left, in their places: what
is there for other GPUs is overwritten with zeros. SGLang's archive has three folders: `site` is SGLang 0.5.11 and what
it needs, with its own transformers; `tms` is torch_memory_saver 0.0.10; `lib` is libnuma, which its kernels need (this
machine's). Kernels for other GPUs than Hopper stay out, and so do FlashAttention 3 (1 GB: Triton does attention) and
FlashInfer: two of its modules are imported, and replaced by ones that refuse. One C++ function is changed, which GCC 12
does not compile; it still does the same.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

LIMIT_BYTES = 60 << 20  # of one transfer
MANYLINUX = ("1", "2010", "2014", *(f"_2_{minor}" for minor in (5, 12, 17, 18, 24, 27, 28, 31, 34, 35)))

SGLANG = (
    *("sglang==0.5.11", "annotated-types==0.8.0", "apache-tvm-ffi==0.1.9", "asttokens==3.0.2", "cffi==2.1.1"),
    *("compressed-tensors==0.20.0", "dill==0.4.1", "distro==1.9.0", "docstring-parser==0.18.0", "executing==2.3.0"),
    *("fastapi==0.136.3", "gguf==0.19.0", "interegular==0.3.3", "ipython==9.18.1", "ipython-pygments-lexers==1.1.1"),
    *("jedi==0.20.1", "jiter==0.19.0", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1", "loguru==0.7.3"),
    *("matplotlib-inline==0.2.2", "msgspec==0.22.0", "openai==2.6.1", "openai-harmony==0.0.4", "orjson==3.13.0"),
    *("parso==0.8.7", "partial-json-parser==0.2.1.1.post7", "pexpect==4.9.0", "prompt-toolkit==3.0.53"),
    *("ptyprocess==0.7.0", "pure-eval==0.2.4", "pybase64==1.5.1", "pycparser==3.12", "pydantic==2.14.4"),
    *("pydantic-core==2.50.5", "python-multipart==0.0.34", "pyzmq==27.3.0", "referencing==0.37.0", "rpds-py==2026.9.1"),
    *("setproctitle==1.3.8", "sniffio==1.3.1", "soundfile==0.13.1", "stack-data==0.6.3", "starlette==1.10.0"),
    *("tokenizers==0.22.2", "traitlets==5.16.1", "transformers==5.6.0", "typing-inspection==0.4.5", "uvicorn==0.54.0"),
    "wcwidth==0.9.4",
)
SGLANG_WITHOUT = (
    *("sglang/test", "sglang/multimodal_gen", "sglang/benchmark", "sglang/eval", "jedi/third_party"),
    *("sglang/jit_kernel/tests", "sglang/jit_kernel/benchmark"),
)
KERNELS, OF_HOPPER = "sglang-kernel==0.4.2", ("sgl_kernel/sm90/", "sglang_kernel-")
NCCL = "nvidia-nccl-cu13==2.30.7"
FATBIN, CUBIN = struct.pack("<IH", 0xBA55ED50, 1), 2  # how a container of kernels begins; what an entry of it may be
SAVER = "torch_memory_saver==0.0.10"
_REFUSES = """def _refuse(*args, **kwargs):
    raise RuntimeError("FlashInfer is not in this archive")


"""
NO_FLASHINFER = {
    "flashinfer/__init__.py": "",
    "flashinfer/prefill.py": _REFUSES + "cudnn_batch_prefill_with_kv_cache = _refuse\n",
    "flashinfer/sampling.py": _REFUSES
    + "min_p_sampling_from_probs = top_k_renorm_prob = top_k_renorm_probs = top_k_top_p_sampling_from_probs = _refuse\n"
    + "top_p_renorm_prob = top_p_renorm_probs = top_p_sampling_from_probs = _refuse\n",
}
ACTIVATION = "sglang/jit_kernel/csrc/elementwise/activation.cuh"
FOR_GCC_12 = {  # "expected a type, got ActivationKind::kSiLU"
    "(const std::string& type)\n      -> decltype(activation_kernel<ActivationKind::kSiLU, kFilterExpert>) {": (
        "(const std::string& type) {"
    ),
    "    return nullptr;\n": "    return activation_kernel<ActivationKind::kSiLU, kFilterExpert>;\n",
}


def download(packages: Sequence[str], folder: Path) -> list[Path]:
    """Their wheels for Python 3.12 on Linux, without what they depend on."""
    platforms = [word for each in MANYLINUX for word in ("--platform", f"manylinux{each}_x86_64")]
    options = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    options += ["--abi", "cp312", "--abi", "abi3", "--abi", "none"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, *platforms]
    subprocess.run([*pip, "-d", str(folder), *packages], check=True)
    return sorted(folder.glob("*.whl"))


def sglang(work: Path, root: Path) -> None:
    site = root / "site"
    for wheel in download(SGLANG, work / "site"):
        zipfile.ZipFile(wheel).extractall(site)
    (kernels,) = download([KERNELS], work / "kernels")
    with zipfile.ZipFile(kernels) as archive:
        names = archive.namelist()
        python = [name for name in names if name.startswith("sgl_kernel/") and name.endswith(".py")]
        archive.extractall(site, [*python, *(name for name in names if name.startswith(OF_HOPPER))])
    (saver,) = download([SAVER], work / "saver")
    with zipfile.ZipFile(saver) as archive:
        archive.extractall(root / "tms", [n for n in archive.namelist() if not n.endswith(".so") or "_cu13" in n])
    leave_out(site, SGLANG_WITHOUT)
    (site / "flashinfer").mkdir()
    for name, text in NO_FLASHINFER.items():
        (site / name).write_text(text)
    text = (site / ACTIVATION).read_text()
    for old, new in FOR_GCC_12.items():
        if text.count(old) != 1:
            raise SystemExit(f"{ACTIVATION}: {old!r} is not there once")
        text = text.replace(old, new)
    (site / ACTIVATION).write_text(text)
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    found = [line.split()[-1] for line in known.splitlines() if "libnuma.so.1 " in line and "x86-64" in line]
    if not found:
        raise SystemExit("this machine has no libnuma.so.1: install it (Debian: libnuma1)")
    (root / "lib").mkdir()
    shutil.copy(Path(found[0]).resolve(), root / "lib" / "libnuma.so.1")


def nccl(work: Path, root: Path) -> None:
    """NCCL with Hopper's kernels alone. Raises SystemExit: the library is not made as expected."""
    (wheel,) = download([NCCL], work / "nccl")
    content = bytearray(zipfile.ZipFile(wheel).read("nvidia/nccl/lib/libnccl.so.2"))
    position, kept = content.find(FATBIN), 0
    while position >= 0:
        header_bytes, nbytes = struct.unpack_from("<HQ", content, position + 6)
        entry, end = position + header_bytes, position + header_bytes + nbytes
        while entry < end:
            kind, header_bytes, nbytes, capability = struct.unpack_from("<HxxIQ12xI", content, entry)
            if (kind, capability) == (CUBIN, 90):
                kept += nbytes
            else:
                content[entry + header_bytes : entry + header_bytes + nbytes] = bytes(nbytes)
            entry += header_bytes + nbytes
        position = content.find(FATBIN, end)
    if not kept:
        raise SystemExit("there are no kernels for Hopper in NCCL's library")
    (root / "libnccl.so.2").write_bytes(content)


def leave_out(root: Path, patterns: Sequence[str]) -> None:
    for path in {path for pattern in patterns for path in root.glob(pattern)}:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    arguments = parser.parse_args()
    if arguments.archive.name not in (known := {"sglang.tar.xz": sglang, "nccl.tar.xz": nccl}):
        parser.error(f"{arguments.archive.name}: expected one of {', '.join(known)}")
    with tempfile.TemporaryDirectory() as work:
        root = Path(work, "root")
        root.mkdir()
        known[arguments.archive.name](Path(work), root)
        pack(root, arguments.archive)


if __name__ == "__main__":
    main()
