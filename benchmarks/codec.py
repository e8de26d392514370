"""How small the codec makes weights, and how fast it counts, encodes and decodes; nvCOMP's ANS too if it is found.

    python benchmarks/codec.py --out codec.json --checkpoint model.safetensors --nvcomp folder/with/libnvcomp

Every run has new content (a checkpoint's is the same), and what was decoded is compared with it bit for bit. Times are
those of the kernels alone, by CUDA events. nvCOMP comes from PyPI, 30 MB to download: unpack `libnvcomp.so.6` (25 MB)
of `pip download nvidia-libnvcomp-cu13 --no-deps` into any folder.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import importlib.util
import statistics
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from record import GIB, write
from safetensors import safe_open

from cumem_sleep import _core
from cumem_sleep.codec import exponent as codec
from cumem_sleep.codec import exponent_kernel as codec_kernel
from cumem_sleep.codec.codec import CHUNK_BYTES, Code
from cumem_sleep.codec.codecs import choose_codes
from cumem_sleep.codec.table import rows

SEGMENT_BYTES = 64 << 20  # each with a code of its own, as segments of a model have
SAMPLE_BYTES = 8192
WORTH = 0.95  # as the workbench asks for
STANDARD_DEVIATION = 0.02

NVCOMP_CHUNK_BYTES = (64 << 10, 256 << 10, 1 << 20)
NVCOMP_TYPES = {"bf16": 10, "e4m3": 9}  # NVCOMP_TYPE_FLOAT16 is for all half-precision formats; NVCOMP_TYPE_FLOAT8_E4M3
NVCOMP_TYPE_BITS = 0xFF

SWEEP = [(warps, registers) for warps in (4, 8, 16) for registers in (None, 64)]

Make = Callable[[int, int], torch.Tensor]  # of (bytes, seed): content on the GPU, as bytes


def normal_bf16(nbytes: int, seed: int) -> torch.Tensor:
    values = torch.randn(nbytes // 2, generator=generator(seed), device="cuda", dtype=torch.bfloat16)
    return values.mul_(STANDARD_DEVIATION).view(torch.uint8)


def normal_e4m3(nbytes: int, seed: int) -> torch.Tensor:
    values = torch.randn(nbytes, generator=generator(seed), device="cuda", dtype=torch.bfloat16)
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def checkpoint_bf16(path: Path) -> Make:
    """The file's tensors as bf16, one after another, up to the size asked for."""

    def make(nbytes: int, _: int) -> torch.Tensor:
        content = torch.empty(nbytes, device="cuda", dtype=torch.uint8)
        filled = 0
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name).to("cuda", torch.bfloat16).reshape(-1).view(torch.uint8)
                part = tensor[: nbytes - filled]
                content[filled : filled + part.numel()] = part
                filled += part.numel()
        return content[: filled // CHUNK_BYTES * CHUNK_BYTES]

    return make


def seconds(work: Callable[[], object]) -> float:
    """What the work takes on the GPU."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def rates(nbytes: list[int], times: list[float]) -> dict[str, Any]:
    """Raw bytes per second in GB/s (10⁹), over the runs."""
    values = [size / time / 1e9 for size, time in zip(nbytes, times, strict=True)]
    return {"median": round(statistics.median(values), 1), "range": [round(min(values), 1), round(max(values), 1)]}


@dataclass
class Coded:
    """Content on the GPU and what it takes to code it: of whole segments, all of one layout."""

    content: torch.Tensor
    codes: list[Code]

    @property
    def layout(self) -> codec.Layout:
        return self.codes[0].layout

    def table(self, sources: npt.ArrayLike, targets: npt.ArrayLike, sizes: npt.ArrayLike) -> torch.Tensor:
        """Rows for all chunks, on the GPU."""
        per_segment = SEGMENT_BYTES // CHUNK_BYTES
        arrays = [np.broadcast_to(np.asarray(x, np.int64), self.chunks) for x in (sources, targets, sizes)]
        parts = [
            rows(code, *(array[start : start + per_segment] for array in arrays))
            for start, code in zip(range(0, self.chunks, per_segment), self.codes, strict=True)
        ]
        return torch.from_numpy(np.concatenate(parts).view(np.int64)).cuda()

    @property
    def chunks(self) -> int:
        return self.content.numel() // CHUNK_BYTES

    def places(self, of: torch.Tensor) -> npt.NDArray[np.int64]:
        return of.data_ptr() + np.arange(self.chunks) * CHUNK_BYTES


def chosen(content: torch.Tensor) -> tuple[Coded, dict[str, int]]:
    """The segments of the most frequent layout, and how many there are of each."""
    segments = list(content.split(SEGMENT_BYTES))
    samples = torch.stack([segment.view(4, -1)[:, : SAMPLE_BYTES // 4].reshape(-1) for segment in segments])
    codes = choose_codes(samples.cpu().numpy(), WORTH)
    layouts = Counter(code.layout.name if code else "none" for code in codes)
    usual = next((name for name, _ in layouts.most_common() if name != "none"), None)
    pairs = [(s, c) for s, c in zip(segments, codes, strict=True) if c is not None and c.layout.name == usual]
    if not pairs:
        raise ValueError("no segment is worth coding")
    kept = content if len(pairs) == len(segments) else torch.cat([segment for segment, _ in pairs])
    return Coded(kept, [code for _, code in pairs]), dict(layouts)


def counted(coded: Coded) -> tuple[npt.NDArray[np.int64], float]:
    """The encoded size of each chunk, and the seconds it took to count."""
    totals = torch.zeros(coded.chunks, dtype=torch.int32, device="cuda")
    table = coded.table(coded.places(coded.content), totals.data_ptr() + 4 * np.arange(coded.chunks), 0)
    time = seconds(lambda: codec_kernel.count(coded.layout, table.data_ptr(), coded.chunks))
    return totals.cpu().numpy().astype(np.int64), time


def encoded(coded: Coded, sizes: npt.NDArray[np.int64]) -> tuple[torch.Tensor, float, float]:
    """The encoded chunks one after another, and the seconds to make them and to zero their memory."""
    stored = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cuda")
    zeroing = seconds(stored.zero_)
    counters = torch.zeros(coded.chunks, dtype=torch.int32, device="cuda")
    targets = stored.data_ptr() + np.cumsum(sizes) - sizes
    table = coded.table(coded.places(coded.content), targets, sizes)
    encode = codec_kernel.encode
    time = seconds(lambda: encode(coded.layout, table.data_ptr(), counters.data_ptr(), coded.chunks))
    if not np.array_equal(counters.cpu().numpy() + coded.layout.header_bytes, sizes):
        raise AssertionError("encoding came to other sizes than counting")
    return stored, time, zeroing


def decode_seconds(coded: Coded, stored: torch.Tensor, sizes: npt.NDArray[np.int64]) -> float:
    """Decode, and compare bit for bit."""
    restored = torch.full_like(coded.content, 0xEE)
    sources = stored.data_ptr() + np.cumsum(sizes) - sizes
    table = coded.table(sources, coded.places(restored), sizes)
    time = seconds(lambda: codec_kernel.decode(coded.layout, table.data_ptr(), coded.chunks))
    if not torch.equal(restored, coded.content):
        raise AssertionError("decoding gave other bytes")
    return time


def agrees_with_reference(coded: Coded, stored: torch.Tensor, sizes: npt.NDArray[np.int64]) -> bool:
    """NumPy decodes the first chunk, counts the same, and the GPU decodes what NumPy encoded."""
    chunk, code = coded.content[:CHUNK_BYTES].cpu().numpy(), coded.codes[0]
    first = sizes[:1]
    there = np.array_equal(codec.decode(code, stored[: int(first[0])].cpu().numpy(), first), chunk)
    reference = torch.from_numpy(codec.encode(code, chunk)).cuda()
    one = Coded(coded.content[:CHUNK_BYTES], [code])
    decode_seconds(one, reference, np.array([reference.numel()]))
    return there and codec.chunk_bytes(code, chunk).tolist() == first.tolist()


def measure_codec(make: Make, nbytes: int, runs: int) -> dict[str, Any]:
    """Ratio and rates; the first run is not counted."""
    taken: list[dict[str, Any]] = []
    for run in range(runs + 1):
        coded, layouts = chosen(make(nbytes, run))
        if not run:
            codec_kernel.warm_up(coded.layout, torch.cuda.current_device())
        sizes, counting = counted(coded)
        stored, encoding, zeroing = encoded(coded, sizes)
        decoding = decode_seconds(coded, stored, sizes)
        times = {"count": counting, "zero": zeroing, "encode": encoding, "decode": decoding}
        agrees = agrees_with_reference(coded, stored, sizes)
        raw = coded.content.numel()
        taken.append({"bytes": raw, "ratio": float(sizes.sum()) / raw, "agrees": agrees, **times})
        layout = coded.layout.name
        del coded, stored
    measured = taken[1:]
    sizes_of_runs = [one["bytes"] for one in measured]
    phases = ("count", "zero", "encode", "decode")
    return {
        "layout": layout,
        "segments_by_layout": layouts,
        "bytes": sizes_of_runs[0],
        "runs": runs,
        "ratio": round(statistics.median(one["ratio"] for one in measured), 4),
        "bit_identical": True,  # else this was not reached
        "agrees_with_reference": all(one["agrees"] for one in measured),
        **{f"{phase}_gbps": rates(sizes_of_runs, [one[phase] for one in measured]) for phase in phases},
    }


def sweep(make: Make, nbytes: int, runs: int) -> list[dict[str, Any]]:
    """Other numbers of warps and registers than the kernels have."""
    coded, _ = chosen(make(nbytes, 0))
    sizes, _ = counted(coded)
    results: list[dict[str, Any]] = []
    before = codec_kernel._ENCODE_OPTIONS, codec_kernel._DECODE_OPTIONS
    try:
        for warps, registers in SWEEP:
            options = {"num_warps": warps, **({"maxnreg": registers} if registers else {})}
            codec_kernel._ENCODE_OPTIONS = codec_kernel._DECODE_OPTIONS = options
            times: dict[str, list[float]] = {"encode_gbps": [], "decode_gbps": []}
            for _ in range(runs + 1):  # the first compiles
                stored, encoding, _zeroing = encoded(coded, sizes)
                times["encode_gbps"].append(encoding)
                times["decode_gbps"].append(decode_seconds(coded, stored, sizes))
            raw = [coded.content.numel()] * runs
            results.append({**options, **{name: rates(raw, taken[1:]) for name, taken in times.items()}})
    finally:
        codec_kernel._ENCODE_OPTIONS, codec_kernel._DECODE_OPTIONS = before
    return results


class CompressOptions(ctypes.Structure):
    """`nvcompBatchedANSCompressOpts_t` of nvCOMP 6.0; with zeros at the end also that of 5.x."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("data_type", ctypes.c_int),
        ("max_sub_chunk_count", ctypes.c_uint8),
        ("states_per_lane", ctypes.c_uint8),
        ("histogram_reduction_log2", ctypes.c_uint8),
        ("reserved", ctypes.c_char * 53),
    )


class DecompressOptions(ctypes.Structure):
    """`nvcompBatchedANSDecompressOpts_t` of nvCOMP 6.0; 5.x wants zeros after the first field."""

    _fields_ = (
        ("backend", ctypes.c_int),
        ("data_type", ctypes.c_int),
        ("max_sub_chunk_count", ctypes.c_uint8),
        ("states_per_lane", ctypes.c_uint8),
        ("skip_validate", ctypes.c_uint8),
        ("reserved", ctypes.c_char * 53),
    )


class Properties(ctypes.Structure):
    """`nvcompProperties_t`."""

    _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))


_P, _N = ctypes.c_void_p, ctypes.c_size_t
NVCOMP_SIGNATURES: dict[str, list[Any]] = {
    "nvcompGetProperties": [_P],
    "nvcompBatchedANSCompressGetTempSize": [_N, _N, CompressOptions, _P, _N, _P],
    "nvcompBatchedANSCompressGetMaxOutputChunkSize": [_N, CompressOptions, _P],
    "nvcompBatchedANSCompressAsync": [_P, _P, _N, _N, _P, _N, _P, _P, CompressOptions, _P, _P],
    "nvcompBatchedANSDecompressGetTempSize": [_N, _N, DecompressOptions, _P, _N, _P],
    "nvcompBatchedANSDecompressAsync": [_P, _P, _P, _P, _N, _P, _N, _P, DecompressOptions, _P, _P],
}
# Releases before 6.0 called the same functions so.
NVCOMP_OLDER_NAMES = {
    "nvcompBatchedANSCompressGetTempSize": "nvcompBatchedANSCompressGetTempSizeAsync",
    "nvcompBatchedANSDecompressGetTempSize": "nvcompBatchedANSDecompressGetTempSizeAsync",
}


class Nvcomp:
    """The library's low-level batched ANS."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._functions = {name: self._function(name) for name in NVCOMP_SIGNATURES}
        properties = Properties()
        self.call("nvcompGetProperties", ctypes.byref(properties))
        self.version = properties.version

    def _function(self, name: str) -> Any:
        found = name if hasattr(self._library, name) else NVCOMP_OLDER_NAMES.get(name, name)
        function = getattr(self._library, found)
        function.argtypes, function.restype = NVCOMP_SIGNATURES[name], ctypes.c_int
        return function

    def call(self, name: str, *arguments: Any) -> None:
        if status := self._functions[name](*arguments):
            raise RuntimeError(f"{name} returned {status}")

    def size(self, name: str, *arguments: Any, after: tuple[Any, ...] = ()) -> int:
        """What a function writes where its last argument, or the one before `after`, points."""
        size = ctypes.c_size_t()
        self.call(name, *arguments, ctypes.byref(size), *after)
        return size.value

    def decompress_options(self, data_type: int) -> DecompressOptions:
        return DecompressOptions(data_type=data_type if self.version >= 6000 else 0)


def find_nvcomp(given: Path | None) -> Path | None:
    """The library at, or in, the given place; else an installed one."""
    folders = [given] if given else []
    if not given and (package := importlib.util.find_spec("nvidia")) and package.submodule_search_locations:
        folders += [Path(place) / "libnvcomp" for place in package.submodule_search_locations]
    for place in folders:
        if place.is_file():
            return place
        found = sorted(path for path in place.rglob("libnvcomp.so*") if path.is_file())
        if found:
            return found[0]
    name = None if given else ctypes.util.find_library("nvcomp")
    return Path(name) if name else None


def measure_nvcomp(library: Nvcomp, make: Make, data_type: int, nbytes: int, chunk: int, runs: int) -> dict[str, Any]:
    """One chunk size; the first run is not counted."""
    measured = [compress_once(library, make(nbytes, run), data_type, chunk) for run in range(runs + 1)][1:]
    raw = [size for size, _, _, _ in measured]
    return {
        "chunk_bytes": chunk,
        "bytes": raw[0],
        "ratio": round(statistics.median(ratio for _, ratio, _, _ in measured), 4),
        "bit_identical": True,
        "encode_gbps": rates(raw, [time for _, _, time, _ in measured]),
        "decode_gbps": rates(raw, [time for _, _, _, time in measured]),
    }


def compress_once(
    library: Nvcomp, content: torch.Tensor, data_type: int, chunk: int
) -> tuple[int, float, float, float]:
    """Raw bytes, ratio, and seconds of compression and decompression."""
    total = content.numel()
    count = total // chunk
    options, back = CompressOptions(data_type=data_type), library.decompress_options(data_type)
    stream = torch.cuda.current_stream().cuda_stream
    slot = -(-library.size("nvcompBatchedANSCompressGetMaxOutputChunkSize", chunk, options) // 16) * 16
    compressed = torch.empty(count * slot, dtype=torch.uint8, device="cuda")
    restored = torch.full_like(content, 0xEE)

    def places(of: torch.Tensor, step: int) -> torch.Tensor:
        return of.data_ptr() + step * torch.arange(count, dtype=torch.int64, device="cuda")

    raw_at, compressed_at, restored_at = places(content, chunk), places(compressed, slot), places(restored, chunk)
    raw_bytes = torch.full((count,), chunk, dtype=torch.int64, device="cuda")
    compressed_bytes, restored_bytes = torch.zeros_like(raw_bytes), torch.zeros_like(raw_bytes)
    statuses = torch.full((count,), -1, dtype=torch.int32, device="cuda")

    name = "nvcompBatchedANSCompressGetTempSize"
    scratch = torch.empty(
        library.size(name, count, chunk, options, after=(total, stream)) or 1, dtype=torch.uint8, device="cuda"
    )
    compress = (raw_at, raw_bytes, chunk, count, scratch, scratch.numel(), compressed_at, compressed_bytes, options)
    encoding = seconds(lambda: library.call("nvcompBatchedANSCompressAsync", *pointers(*compress, statuses), stream))
    check(statuses, "compression")

    name = "nvcompBatchedANSDecompressGetTempSize"
    scratch = torch.empty(
        library.size(name, count, chunk, back, after=(total, stream)) or 1, dtype=torch.uint8, device="cuda"
    )
    sizes = (compressed_at, compressed_bytes, raw_bytes, restored_bytes, count)
    decompress = (*sizes, scratch, scratch.numel(), restored_at, back)
    statuses.fill_(-1)
    decoding = seconds(
        lambda: library.call("nvcompBatchedANSDecompressAsync", *pointers(*decompress, statuses), stream)
    )
    check(statuses, "decompression")
    if not torch.equal(restored, content):
        raise AssertionError("nvCOMP gave other bytes")
    return total, int(compressed_bytes.sum()) / total, encoding, decoding


def pointers(*arguments: Any) -> Iterator[Any]:
    return (argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in arguments)


def check(statuses: torch.Tensor, what: str) -> None:
    if statuses.any():
        raise RuntimeError(f"nvCOMP's {what} failed with {sorted(set(statuses.tolist()))}")


def attempt(results: dict[str, Any], name: str, work: Callable[[], Any]) -> None:
    """A failure is a result too, and keeps nothing else from being measured."""
    try:
        results[name] = work()
    except Exception as error:
        traceback.print_exc()
        results[name] = {"error": f"{type(error).__name__}: {error}"}
    torch.cuda.empty_cache()


def add_nvcomp(results: dict[str, Any], makes: dict[str, Make], options: argparse.Namespace) -> None:
    path = find_nvcomp(options.nvcomp)
    if path is None:
        results["nvcomp"] = {"error": "libnvcomp.so was not found: give its folder with --nvcomp"}
        return
    library = Nvcomp(path)
    part: dict[str, Any] = {"version": library.version, "library": path.name}
    results["nvcomp"] = part
    for name, make in makes.items():
        data_type = NVCOMP_TYPES["e4m3" if "e4m3" in name else "bf16"]
        for chunk in NVCOMP_CHUNK_BYTES:

            def work(make: Make = make, data_type: int = data_type, chunk: int = chunk) -> dict[str, Any]:
                return measure_nvcomp(library, make, data_type, options.bytes, chunk, options.runs)

            attempt(part, f"{name}, {chunk >> 10} KiB", work)


def table(results: dict[str, Any]) -> str:
    """A line for each content and codec."""
    lines = [f"{'':<44}{'ratio':>8}{'count':>9}{'encode':>9}{'decode':>9}  GB/s, medians"]
    nvcomp = results.get("nvcomp", {})
    named = list(results["codec"].items())
    named += [(f"nvCOMP, {name}", one) for name, one in nvcomp.items() if isinstance(one, dict)]
    for name, one in named:
        if "error" in one:
            lines.append(f"{name:<44}{one['error']}")
            continue
        phases = [one.get(f"{phase}_gbps", {}).get("median", "") for phase in ("count", "encode", "decode")]
        lines.append(f"{name:<44}{one['ratio']:>8}" + "".join(f"{value:>9}" for value in phases))
    if "error" in nvcomp:
        lines.append(f"nvCOMP: {nvcomp['error']}")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--gib", type=float, default=4, help="content of a run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each kind (default: %(default)s)")
    parser.add_argument(
        "--checkpoint", type=Path, action="append", default=[], help="a safetensors file, taken as bf16"
    )
    parser.add_argument("--nvcomp", type=Path, help="libnvcomp.so, or a folder that has it")
    parser.add_argument("--sweep", action="store_true", help="also try other numbers of warps and registers")
    options = parser.parse_args(arguments)
    options.bytes = int(options.gib * GIB) // SEGMENT_BYTES * SEGMENT_BYTES
    if options.bytes <= 0 or options.runs <= 0:
        parser.error(f"--gib has to make at least a segment of {SEGMENT_BYTES >> 20} MiB, and --runs at least 1")
    for path in [*options.checkpoint, *([options.nvcomp] if options.nvcomp else [])]:
        if not path.exists():
            parser.error(f"{path} does not exist")
    return options


def main() -> None:
    options = parse()
    _core.open_driver("libcuda.so.1")
    makes: dict[str, Make] = {"bf16 normal": normal_bf16, "e4m3 normal": normal_e4m3}
    makes |= {f"{path.name} as bf16": checkpoint_bf16(path) for path in options.checkpoint}
    results: dict[str, Any] = {"standard_deviation": STANDARD_DEVIATION, "codec": {}}
    for name, make in makes.items():
        attempt(results["codec"], name, lambda make=make: measure_codec(make, options.bytes, options.runs))
    write(options.out, results)  # before what may take the process with it
    if options.sweep:
        attempt(results, "sweep", lambda: sweep(normal_bf16, options.bytes, 3))
        write(options.out, results)
    try:
        add_nvcomp(results, makes, options)
    except Exception as error:
        traceback.print_exc()
        results["nvcomp"] = {"error": f"{type(error).__name__}: {error}"}
    write(options.out, results)
    print(table(results))
    if any("error" in one for one in results["codec"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
