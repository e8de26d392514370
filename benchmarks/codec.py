"""How small the codec makes weights, and how fast it counts, encodes and decodes.

    python benchmarks/codec.py --out codec.json --checkpoint model.safetensors

Every run has new content (a checkpoint's is the same), and what was decoded is compared with it bit for bit. Times are
those of the kernels alone, by CUDA events.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import traceback
from collections import Counter
from collections.abc import Callable
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
from cumem_sleep.codec.codec import CHUNK_BYTES, Code, parameters_of, rows
from cumem_sleep.codec.codecs import choose_codes
from cumem_sleep.codec.kernels import try_kernels

SEGMENT_BYTES = 64 << 20  # each with a code of its own, as segments of a model have
SAMPLE_BYTES = 8192
WORTH = 0.95  # as the workspace asks for
STANDARD_DEVIATION = 0.02

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
    def layout(self) -> codec.ExponentLayout:
        return self.codes[0].layout

    def table(self, sources: npt.ArrayLike, targets: npt.ArrayLike, sizes: npt.ArrayLike) -> torch.Tensor:
        """Rows for all chunks, on the GPU."""
        per_segment = SEGMENT_BYTES // CHUNK_BYTES
        arrays = [np.broadcast_to(np.asarray(x, np.int64), self.chunks) for x in (sources, targets, sizes)]
        parts = [
            rows(parameters_of([code]), *(array[start : start + per_segment] for array in arrays))
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
            try_kernels(codec, codec_kernel, coded.layout, torch.cuda.current_device())
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


def attempt(results: dict[str, Any], name: str, work: Callable[[], Any]) -> None:
    """A failure is a result too, and keeps nothing else from being measured."""
    try:
        results[name] = work()
    except Exception as error:
        traceback.print_exc()
        results[name] = {"error": f"{type(error).__name__}: {error}"}
    torch.cuda.empty_cache()


def table(codec: dict[str, Any]) -> str:
    """A line for each content."""
    lines = [f"{'':<44}{'ratio':>8}{'count':>9}{'encode':>9}{'decode':>9}  GB/s, medians"]
    for name, one in codec.items():
        if "error" in one:
            lines.append(f"{name:<44}{one['error']}")
            continue
        phases = [one[f"{phase}_gbps"]["median"] for phase in ("count", "encode", "decode")]
        lines.append(f"{name:<44}{one['ratio']:>8}" + "".join(f"{value:>9}" for value in phases))
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--gib", type=float, default=4, help="content of a run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each kind (default: %(default)s)")
    parser.add_argument(
        "--checkpoint", type=Path, action="append", default=[], help="a safetensors file, taken as bf16"
    )
    options = parser.parse_args(arguments)
    options.bytes = int(options.gib * GIB) // SEGMENT_BYTES * SEGMENT_BYTES
    if options.bytes <= 0 or options.runs <= 0:
        parser.error(f"--gib has to make at least a segment of {SEGMENT_BYTES >> 20} MiB, and --runs at least 1")
    for path in options.checkpoint:
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
    write(options.out, results)
    print(table(results["codec"]))
    if any("error" in one for one in results["codec"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
