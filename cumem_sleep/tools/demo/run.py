"""`cumem-sleep demo`: weights sleep and wake, and after every wake each byte is compared with the source it came from.

The comparison is the demo's own: device memory is read back and held against the source, whatever digests the layer
took. Without PyTorch: tensors lie in segments as PyTorch's caching allocator would place them, from `allocator.malloc`.
"""

from __future__ import annotations

import json
import math
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
from rich.box import ROUNDED
from rich.table import Table
from rich.text import Text

from ... import _core, sim
from ...allocator import CuMemAllocator, open_driver
from ...backups import limits as host_limits
from ...errors import CumemSleepError, DriverError, InvalidArgument, InvalidState, counted, format_bytes
from ...report import rate_gbps
from ...settings import Settings

SIMULATED_NOTE = "Simulated driver: no GPU was used, and these times mean nothing."
DEFAULT_KV_BYTES = 256 << 20

# As PyTorch's caching allocator: blocks are multiples of 512 bytes; small ones share a segment, large ones do not.
_BLOCK_BYTES = 512
_SHARED_SEGMENT_BYTES = 20 << 20
_LARGE_BYTES = 10 << 20
_OPEN_SEGMENTS = 16  # that are looked at for room
_PAGE_BYTES = 2 << 20
_KV_SEGMENT_BYTES = 1 << 30

_PIECE_BYTES = 32 << 20  # copied at a time; the next is on its way while this one is looked at
_PROBE_BYTES = 1 << 20
_SIM_DEVICE_BYTES = 1 << 30
_HOST_RESERVE_BYTES = 256 << 20  # for the interpreter and the demo's own pieces

_NO_GPU = ("CUDA_ERROR_NO_DRIVER", "CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY")

_MOST_HEADER_BYTES = 100_000_000  # as in the safetensors library
_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many bytes of how many are done (0 of 0: not known)."""


class SafetensorsError(CumemSleepError):
    """A file is not what the safetensors format says; the message names the file and what is wrong with it."""


# The source of the weights


@dataclass(frozen=True)
class Tensor:
    """One tensor of the source: what it is, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True)
class Source:
    """Where the weights come from, and what they must equal after every wake."""

    description: str
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.data.size for tensor in self.tensors)

    @property
    def dtypes(self) -> list[str]:
        """Every dtype that occurs, sorted."""
        return sorted({tensor.dtype for tensor in self.tensors})


def source_from_files(paths: Sequence[Path]) -> Source:
    """The tensors of safetensors files, or of folders of them. Nothing is read ahead: the files are mapped.

    Raises:
        SafetensorsError: a file cannot be read, is not in the format, or there is no tensor in all of them.
    """
    tensors = [tensor for path in paths for file in _files_of(path) for tensor in _read_safetensors(file)]
    if not any(tensor.data.size for tensor in tensors):
        raise SafetensorsError(f"{', '.join(map(str, paths))}: holds no tensor with any bytes")
    return Source(", ".join(path.name or path.resolve().name for path in paths), tuple(tensors))


def synthetic_source(layers: int = 6, hidden: int = 1024, vocabulary: int = 32768, seed: int = 0) -> Source:
    """A transformer in bf16 with normally distributed weights: 193 MiB by default, always the same bytes."""
    ffn, kv = hidden * 11 // 4, hidden // 4
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in layer.items()}
    random = np.random.default_rng(seed)
    tensors = []
    for name, shape in shapes.items():
        floats = random.standard_normal(math.prod(shape), dtype=np.float32)
        bf16 = (floats.view(np.uint32) >> np.uint32(16)).astype("<u2")  # bf16 is the upper half of a float32
        tensors.append(Tensor(name, "BF16", shape, bf16.view(np.uint8)))
    return Source("a small transformer with random weights", tuple(tensors))


def _files_of(path: Path) -> list[Path]:
    """The shards of a folder, or the file itself."""
    try:
        shards = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    except OSError as error:
        raise SafetensorsError(f"{path}: {error.strerror or error}") from None
    if not shards:
        raise SafetensorsError(f"{path}: cannot be read: no *.safetensors in this folder")
    return shards


def _read_safetensors(path: Path) -> list[Tensor]:
    """The tensors of one file, by the format's own description (github.com/huggingface/safetensors, "Format").

    Not by the library: it hands out no raw bytes without reading them all, and NumPy has no bf16 or fp8 to hold them.
    """
    try:
        status = path.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise SafetensorsError(f"{path}: not a regular file")
        if size == 0:
            raise SafetensorsError(f"{path}: the file is empty")
        content = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise SafetensorsError(f"{path}: cannot be read: {error.strerror or error}") from None
    if size < 8:
        raise SafetensorsError(f"{path}: not a safetensors file: {size} bytes, shorter than the length of a header")
    header_bytes = int.from_bytes(content[:8].tobytes(), "little")
    if header_bytes > _MOST_HEADER_BYTES:
        raise SafetensorsError(
            f"{path}: not a safetensors file: its first 8 bytes name a header of {header_bytes} bytes"
            f" (at most {_MOST_HEADER_BYTES} are allowed)"
        )
    if 8 + header_bytes > size:
        raise SafetensorsError(f"{path}: truncated: the header ends at byte {8 + header_bytes}, the file at {size}")
    header = _parse_header(path, content[8 : 8 + header_bytes].tobytes())
    return _tensors_of(path, header, np.asarray(content)[8 + header_bytes :])


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a name occurs twice")
        return members

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"{path}: not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise SafetensorsError(f"{path}: not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _tensors_of(path: Path, header: Mapping[str, Any], data: Bytes) -> list[Tensor]:
    tensors = []
    described = [(*_described(path, name, entry), name) for name, entry in header.items()]
    position = 0
    for begin, end, dtype, shape, name in sorted(described, key=lambda entry: entry[:2]):
        if begin != position:
            raise SafetensorsError(
                f"{path}: damaged: tensor {name!r} begins at byte {begin} of the data, not {position}"
            )
        if end > data.size:
            raise SafetensorsError(
                f"{path}: truncated: tensor {name!r} ends at byte {end} of the data, the file holds {data.size}"
            )
        tensors.append(Tensor(name, dtype, shape, data[begin:end]))
        position = end
    if position != data.size:
        raise SafetensorsError(f"{path}: damaged: {data.size - position} bytes after the last tensor")
    return tensors


def _described(path: Path, name: str, entry: object) -> tuple[int, int, str, tuple[int, ...]]:
    """Where a tensor begins and ends in the data, its dtype and shape; these must agree."""

    def is_sizes(value: object) -> TypeGuard[list[int]]:
        return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)

    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise SafetensorsError(f"{path}: not a safetensors file: tensor {name!r} has no dtype")
    shape, offsets, dtype = entry.get("shape"), entry.get("data_offsets"), entry["dtype"]
    if not is_sizes(shape) or not is_sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise SafetensorsError(f"{path}: not a safetensors file: tensor {name!r} has no valid shape and data_offsets")
    if dtype not in _DTYPE_BITS:
        raise SafetensorsError(
            f"{path}: tensor {name!r} has dtype {dtype!r}, which safetensors does not have: known are"
            f" {', '.join(sorted(_DTYPE_BITS))}"
        )
    if math.prod(shape) * _DTYPE_BITS[dtype] != (offsets[1] - offsets[0]) * 8:
        raise SafetensorsError(
            f"{path}: damaged: tensor {name!r} ({dtype}, shape {shape}) has {offsets[1] - offsets[0]} bytes"
        )
    return offsets[0], offsets[1], dtype, tuple(shape)


# Where tensors lie on the device


@dataclass
class SegmentLayout:
    """Tensors that share one segment, each with its offset; `address` once there is memory for them."""

    tensors: list[tuple[int, Tensor]] = field(default_factory=list)
    nbytes: int = 0
    address: int = 0

    def add(self, tensor: Tensor) -> None:
        """Behind what is there already."""
        self.tensors.append((self.nbytes, tensor))
        self.nbytes += -(-tensor.data.size // _BLOCK_BYTES) * _BLOCK_BYTES

    def pieces(self) -> Iterator[Piece]:
        """The segment, cut into what is copied at a time."""
        for start in range(0, self.nbytes, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, self.nbytes - start)
            parts = []
            for offset, tensor in self.tensors:
                first, last = max(start, offset), min(start + nbytes, offset + tensor.data.size)
                if first < last:
                    parts.append((first - start, tensor, first - offset, last - first))
            yield Piece(self.address + start, nbytes, tuple(parts))


@dataclass(frozen=True)
class Piece:
    """Some device memory, and the parts of tensors in it: offset in the piece, tensor, offset in the tensor, size."""

    address: int
    nbytes: int
    parts: tuple[tuple[int, Tensor, int, int], ...]


def lay_out(tensors: Iterable[Tensor]) -> list[SegmentLayout]:
    """Which tensors share a segment: those above 10 MiB have one of their own, smaller ones go where there is room."""
    segments: list[SegmentLayout] = []
    shared: deque[SegmentLayout] = deque(maxlen=_OPEN_SEGMENTS)
    for tensor in tensors:
        if tensor.data.size == 0:
            continue
        is_large = tensor.data.size > _LARGE_BYTES
        fitting = (open_ for open_ in shared if open_.nbytes + tensor.data.size <= _SHARED_SEGMENT_BYTES)
        segment = None if is_large else next(fitting, None)
        if segment is None:
            segment = SegmentLayout()
            segments.append(segment)
            if not is_large:
                shared.append(segment)
        segment.add(tensor)
    return segments


class DeviceCopies:
    """Copies between the host and one device, through two pinned pieces of memory in turn."""

    def __init__(self, stack: ExitStack, device: int) -> None:
        self._blocks = [stack.enter_context(closing(_core.HostBlock(_PIECE_BYTES, -1))) for _ in range(2)]
        for block in self._blocks:
            block.touch(0, block.bytes)
            block.pin(device)
        self._stream = stack.enter_context(_core.CopyStream(device))

    def write(self, pieces: Iterable[Piece]) -> Iterator[int]:
        """Copy the tensors to the device; yields the bytes of tensors done so far."""
        done = 0
        for number, piece in enumerate(pieces):
            block = self._blocks[number % 2]  # the other one may still be on its way
            host = np.frombuffer(memoryview(block), np.uint8)
            for offset, tensor, start, nbytes in piece.parts:
                host[offset : offset + nbytes] = tensor.data[start : start + nbytes]
                done += nbytes
            self._stream.synchronize()
            self._stream.to_device(piece.address, block, 0, piece.nbytes)
            yield done
        self._stream.synchronize()

    def read(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Bytes]]:
        """The bytes of each piece; valid until the next one is asked for."""
        before: tuple[Piece, _core.HostBlock] | None = None
        for number, piece in enumerate(pieces):
            block = self._blocks[number % 2]
            self._stream.synchronize()
            self._stream.to_host(block, 0, piece.address, piece.nbytes)
            if before is not None:
                yield before[0], np.frombuffer(memoryview(before[1]), np.uint8)[: before[0].nbytes]
            before = piece, block
        self._stream.synchronize()
        if before is not None:
            yield before[0], np.frombuffer(memoryview(before[1]), np.uint8)[: before[0].nbytes]


# What is reported


@dataclass(frozen=True)
class Step:
    """One row of the table.

    Attributes:
        layer_bytes: device memory under the layer's segments after the step.
        device_used_bytes: of the whole device, by all processes, after the step; None on the simulated driver.
        host_bytes: host memory of the layer's backups after the step.
        moved_bytes: copied between host and device in the step.
        seconds: of the step itself, without the demo's own comparison.
        verified_bytes: compared with the source after the step.
        result: what was found.
        ok: whether that is as it must be.
    """

    round: int
    name: str
    layer_bytes: int
    device_used_bytes: int | None
    host_bytes: int
    moved_bytes: int
    seconds: float
    verified_bytes: int
    result: str
    ok: bool

    @property
    def gbps(self) -> float | None:
        """Of what was moved, over the whole step; None where nothing was."""
        return rate_gbps(self.moved_bytes, self.seconds) if self.moved_bytes else None


@dataclass(frozen=True)
class DemoReport:
    """What the demo did and found."""

    simulated: bool
    device: int
    device_name: str
    source: str
    tensors: int
    dtypes: list[str]
    weights_bytes: int
    weights_segments: int
    kv_cache_bytes: int
    steps: tuple[Step, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every step found what it must."""
        return self.error is None

    @property
    def error(self) -> str | None:
        """Which step did not, and what it found."""
        failed = next((step for step in self.steps if not step.ok), None)
        return None if failed is None else f"'{failed.name}': {failed.result}"

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        facts = asdict(self)
        facts["steps"] = [{**asdict(step), "gbps": step.gbps} for step in self.steps]
        return {**({"note": SIMULATED_NOTE} if self.simulated else {}), **facts}

    def headline(self) -> str:
        """What is shown, in two lines."""
        return (
            f"{self.source}: {counted(self.tensors, 'tensor')},"
            f" {format_bytes(self.weights_bytes)} of {', '.join(self.dtypes)}"
            f" in {counted(self.weights_segments, 'segment')}\n"
            f"kv_cache: {format_bytes(self.kv_cache_bytes)}; device {self.device}: {self.device_name}"
        )

    def table(self) -> Table:
        """A row for each step."""
        table = Table(
            title="cumem-sleep demo" + (" (simulated driver)" if self.simulated else ""),
            header_style="bold",
            box=ROUNDED,
        )
        table.add_column("step", no_wrap=True)
        table.add_column("layer on GPU", justify="right")
        if not self.simulated:
            table.add_column("GPU in use", justify="right")
        for heading in ("host backups", "seconds", "GB/s"):
            table.add_column(heading, justify="right")
        table.add_column("verified", ratio=1)
        last_round = 1
        for step in self.steps:
            if step.round != last_round:
                table.add_section()
                last_round = step.round
            device = [] if self.simulated else [_short(step.device_used_bytes or 0)]
            style = "" if step.ok else "bold red"
            table.add_row(
                step.name,
                _short(step.layer_bytes),
                *device,
                _short(step.host_bytes),
                f"{step.seconds:.3f}",
                "–" if step.gbps is None else f"{step.gbps:.1f}",
                Text.assemble(("✓ ", "green") if step.ok else ("✗ ", style), (step.result, style)),
            )
        return table

    def conclusion(self) -> str:
        """One line: whether the bytes came back."""
        if self.error is not None:
            return f"FAILED at {self.error}"
        compared = [step for step in self.steps if step.verified_bytes]
        return (
            f"Every byte of the weights equalled its source in {counted(len(compared), 'comparison')}"
            f" ({format_bytes(sum(step.verified_bytes for step in compared))} in all); no address changed."
        )


# The demo itself


def open_allocator(environment: Mapping[str, str]) -> tuple[CuMemAllocator, str]:
    """The allocator that the environment asks for; on the simulated driver if it asks for none and there is no GPU.

    Returns:
        The allocator, and why it is on the simulated driver although nobody asked for that ("" otherwise).

    Raises:
        DriverError: the driver that was asked for cannot be used; or there is one, and it fails.
    """
    settings = Settings.from_environment(environment)
    reason = ""
    if not environment.get("CUMEM_SLEEP_DRIVER", "").strip():
        try:
            _core.open_driver("libcuda.so.1")
        except DriverError as error:
            if error.error not in _NO_GPU:
                raise
            reason = "no GPU driver was found" if error.call == "dlopen" else f"no GPU was found ({error.error})"
            settings = replace(settings, driver="sim")
    open_driver(settings.driver)
    return CuMemAllocator(settings), reason


def make_room(environment: Mapping[str, str], weights: Sequence[SegmentLayout], kv_bytes: int) -> None:
    """Make simulated devices large enough, if the host has the memory for them and for the backups.

    Raises:
        InvalidState: it has not.
    """
    weights_bytes = sum(_whole_pages(segment.nbytes) for segment in weights)
    device_bytes = weights_bytes + _whole_pages(kv_bytes)
    needed = device_bytes + weights_bytes + _HOST_RESERVE_BYTES
    limits = {"MemAvailable": host_limits.mem_available_bytes(), "cgroup": host_limits.cgroup_available_bytes()}
    for limit, available in limits.items():
        if available is not None and available < needed:
            raise InvalidState(
                f"the simulated device and the backups are both host memory: needed {format_bytes(needed)},"
                f" available {format_bytes(available)} (limit: {limit}); give a smaller model or a smaller --kv"
            )
    if "CUMEM_SLEEP_SIM_DEVICE_BYTES" not in environment:
        sim.configure(device_bytes=max(_SIM_DEVICE_BYTES, device_bytes))


def run(
    allocator: CuMemAllocator,
    source: Source,
    weights: list[SegmentLayout],
    *,
    device: int,
    kv_bytes: int,
    rounds: int,
    progress: Progress,
) -> DemoReport:
    """Load, sleep, wake, reload; stops at the first step whose result is wrong. Frees all that it allocated.

    Raises:
        CumemSleepError: the layer, or the driver, refused something.
    """
    device_count = _core.device_count()
    if not 0 <= device < device_count:
        raise InvalidArgument(f"--device {device}: there are {device_count}, numbered from 0")
    report = DemoReport(
        simulated=_core.driver_is_simulated(),
        device=device,
        device_name=_core.device_info(device).name,
        source=source.description,
        tensors=len(source.tensors),
        dtypes=source.dtypes,
        weights_bytes=source.nbytes,
        weights_segments=len(weights),
        kv_cache_bytes=kv_bytes,
    )
    with ExitStack() as stack:
        demo = _Demo(allocator, source, weights, device, progress, stack)
        stack.callback(demo.free)
        with suppress(_StepFailedError):
            demo.play(kv_bytes, rounds)
    return replace(report, steps=tuple(demo.steps))


class _StepFailedError(Exception):
    """The last step's result is wrong; what follows would say nothing."""


class _Demo:
    def __init__(
        self,
        allocator: CuMemAllocator,
        source: Source,
        weights: list[SegmentLayout],
        device: int,
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        self.steps: list[Step] = []
        self._allocator = allocator
        self._source = source
        self._weights = weights
        self._device = device
        self._progress = progress
        self._stack = stack
        self._kv: list[tuple[int, int]] = []  # address, bytes
        self._addresses: list[tuple[int, int]] = []
        self._round = 1

    def play(self, kv_bytes: int, rounds: int) -> None:
        self._progress("allocate", 0, 0)
        self._copies = DeviceCopies(self._stack, self._device)
        self._allocate(kv_bytes)
        self._load("load weights")
        for self._round in range(1, rounds + 1):
            self._sleep("sleep level 1" if self._round == 1 else f"round {self._round}: sleep level 1", level=1)
            self._wake("wake")
            self._sleep("sleep level 1 again", level=1, unchanged=True)
            self._wake("wake weights only", tags=("weights",))
            self._wake("wake kv_cache", tags=("kv_cache",))
            self._sleep("sleep level 2", level=2)
            self._wake("wake, weights blank", restored=False)
            self._load("reload weights")

    def free(self) -> None:
        for segment in self._weights:
            if segment.address:
                self._allocator.free(segment.address)
                segment.address = 0
        for address, _ in self._kv:
            self._allocator.free(address)
        self._kv.clear()

    # Steps

    def _allocate(self, kv_bytes: int) -> None:
        for segment in self._weights:
            segment.address = self._allocator.malloc(segment.nbytes, "weights", self._device)
        for start in range(0, kv_bytes, _KV_SEGMENT_BYTES):
            nbytes = min(_KV_SEGMENT_BYTES, kv_bytes - start)
            self._kv.append((self._allocator.malloc(nbytes, "kv_cache", self._device), nbytes))
        self._addresses = self._addresses_now()

    def _load(self, name: str) -> None:
        start = time.perf_counter()
        for done in self._copies.write(self._pieces()):
            self._progress(name, done, self._source.nbytes)
        seconds = time.perf_counter() - start
        self._finish(name, seconds, self._source.nbytes, self._differences())

    def _sleep(self, name: str, level: int, unchanged: bool = False) -> None:
        self._progress(name, 0, 0)
        report = self._allocator.sleep(level)
        still_mapped = sum(usage.mapped_bytes for usage in self._allocator.usage().values())
        wrong = [f"{_short(still_mapped)} is still on the GPU"] if still_mapped else []
        expects_clean = unchanged and self._allocator.settings.retain_backups
        if expects_clean and report.copied_bytes:
            wrong.append(f"{_short(report.copied_bytes)} was copied, though nothing had changed")
        found = [f"{_short(report.copied_bytes)} copied"] if report.copied_bytes else ["nothing copied"]
        if report.clean_bytes:
            found.append(f"{_short(report.clean_bytes)} unchanged")
        found.append(f"{_short(report.dropped_bytes)} dropped")
        self._finish(name, report.seconds, report.copied_bytes, wrong, ", ".join(found), verified_bytes=0)

    def _wake(self, name: str, tags: Sequence[str] | None = None, restored: bool = True) -> None:
        self._progress(name, 0, 0)
        report = self._allocator.wake_up(tags)
        usage = self._allocator.usage()
        wrong, found, verified_bytes = [], [], 0
        if self._addresses_now() != self._addresses:
            wrong.append("an address changed")
        if restored:
            wrong += self._differences()
            verified_bytes = self._source.nbytes
            found.append(f"{_short(verified_bytes)} = source")
        found.append("same addresses")
        if tags is not None and "kv_cache" not in tags:
            if usage["kv_cache"].mapped_bytes:
                wrong.append("kv_cache woke too")
            found.append("kv_cache asleep")
        else:
            wrong += self._probe_kv_cache()
            found.append("kv_cache usable")
        self._finish(name, report.seconds, report.restored_bytes, wrong, ", ".join(found), verified_bytes)

    def _finish(
        self,
        name: str,
        seconds: float,
        moved_bytes: int,
        wrong: Sequence[str],
        found: str | None = None,
        verified_bytes: int | None = None,
    ) -> None:
        usage = self._allocator.usage().values()
        device_used = None
        if not _core.driver_is_simulated():
            free_bytes, total_bytes = _core.memory_info(self._device)
            device_used = total_bytes - free_bytes
        step = Step(
            round=self._round,
            name=name,
            layer_bytes=sum(tag.mapped_bytes for tag in usage),
            device_used_bytes=device_used,
            host_bytes=sum(tag.host_bytes for tag in usage),
            moved_bytes=moved_bytes,
            seconds=seconds,
            verified_bytes=self._source.nbytes if verified_bytes is None else verified_bytes,
            result="; ".join(wrong) or found or f"{_short(self._source.nbytes)} = source",
            ok=not wrong,
        )
        self.steps.append(step)
        if wrong:
            raise _StepFailedError

    # Checks

    def _pieces(self) -> Iterator[Piece]:
        for segment in self._weights:
            yield from segment.pieces()

    def _differences(self) -> list[str]:
        """Which tensors differ from the source, and where first; empty if all are equal."""
        different: dict[str, str] = {}
        done = 0
        for piece, content in self._copies.read(self._pieces()):
            for offset, tensor, start, nbytes in piece.parts:
                actual, expected = content[offset : offset + nbytes], tensor.data[start : start + nbytes]
                done += nbytes
                if tensor.name not in different and not np.array_equal(actual, expected):
                    first = int(np.flatnonzero(actual != expected)[0])
                    different[tensor.name] = (
                        f"byte {start + first} of {tensor.name} is {actual[first]:#04x}, not {expected[first]:#04x}"
                    )
            self._progress("compare with the source", done, self._source.nbytes)
        if len(different) > 1:
            return [f"{len(different)} tensors differ from the source: {next(iter(different.values()))}, …"]
        return list(different.values())

    def _probe_kv_cache(self) -> list[str]:
        """Write to the first and last bytes of every kv_cache segment and read them back."""
        pattern = Tensor("kv_cache", "U8", (_PROBE_BYTES,), np.resize(np.arange(251, dtype=np.uint8), _PROBE_BYTES))
        for address, nbytes in self._kv:
            size = min(_PROBE_BYTES, nbytes)
            for start in (address, address + nbytes - size):
                probe = [Piece(start, size, ((0, pattern, 0, size),))]
                for _ in self._copies.write(probe):
                    pass
                for _, content in self._copies.read(probe):
                    if not np.array_equal(content, pattern.data[:size]):
                        return [f"kv_cache at 0x{start:x} does not hold what was written to it"]
        return []

    def _addresses_now(self) -> list[tuple[int, int]]:
        """Of every segment of the layer: its number and its address."""
        return [(segment.id, segment.address) for segment in _core.segments()]


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def _short(nbytes: int) -> str:
    """Three digits and a binary unit: a table has little room."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 999.5:
            break
        size, unit = size / 1024, larger
    if unit == "B":
        return f"{nbytes} B"
    return f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"
