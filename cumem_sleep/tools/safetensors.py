"""Reads safetensors files as mapped memory: only headers are read.

With NumPy alone the `safetensors` library refuses bf16 and fp8 tensors (0.8), and its raw reader copies the whole file
into memory.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from ..errors import CumemSleepError, counted

_MOST_HEADER_BYTES = 100_000_000  # as in the safetensors library
_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

TensorBytes = npt.NDArray[np.uint8]


class SafetensorsError(CumemSleepError):
    """A file does not follow the safetensors format; the message names the file and the mistake."""


@dataclass(frozen=True)
class Tensor:
    """A tensor: its description and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: TensorBytes


def read_tensors(paths: Sequence[Path]) -> tuple[Tensor, ...]:
    """The tensors of safetensors files, or of folders of them. The files are mapped, not read.

    Raises:
        SafetensorsError: a file cannot be read, is not in the format, or none of them holds a tensor.
    """
    tensors = tuple(tensor for path in paths for file in _files_of(path) for tensor in _read_file(file))
    if not any(tensor.data.size for tensor in tensors):
        raise SafetensorsError(f"{', '.join(map(str, paths))}: holds no tensor with any bytes")
    return tensors


def _files_of(path: Path) -> list[Path]:
    """The shards of a folder, or the file itself."""
    try:
        shards = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    except OSError as error:
        raise SafetensorsError(f"{path}: {error.strerror or error}") from None
    if not shards:
        raise SafetensorsError(f"{path}: cannot be read: no *.safetensors in this folder")
    return shards


def _read_file(path: Path) -> list[Tensor]:
    """The tensors of one file, by the format's own description (github.com/huggingface/safetensors, "Format").

    Not with the library: it returns raw bytes only by reading all of them, and NumPy has no bf16 or fp8 type for them.
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
            f" (expected at most {_MOST_HEADER_BYTES})"
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


def _tensors_of(path: Path, header: Mapping[str, Any], data: TensorBytes) -> list[Tensor]:
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
        raise SafetensorsError(f"{path}: damaged: {counted(data.size - position, 'byte')} after the last tensor")
    return tensors


def _described(path: Path, name: str, entry: object) -> tuple[int, int, str, tuple[int, ...]]:
    """Where a tensor begins and ends in the data, its dtype and its shape, which must agree."""

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
