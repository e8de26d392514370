"""The reader of safetensors files: what it reads, and what it says of files that are damaged or something else."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import write_safetensors

from cumem_sleep.tools import cli
from cumem_sleep.tools.safetensors import SafetensorsError, read_tensors


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


BAD_FILES: dict[str, tuple[object, bytes, str]] = {
    "json": (b'{"w":', b"", "not JSON"),
    "unicode": (b"\xff\xfe{}", b"", "not JSON"),
    "nested": (b"[" * 100_000, b"", "not JSON"),
    "list": ([], b"", "not a JSON object"),
    "twice": (b'{"w": {}, "w": {}}', b"", "occurs twice"),
    "no dtype": ({"w": {"shape": [1], "data_offsets": [0, 1]}}, b"x", "no dtype"),
    "no offsets": ({"w": {"dtype": "U8", "shape": [1]}}, b"x", "no valid shape"),
    "offsets reversed": ({"w": entry(1, 0, [1])}, b"x", "no valid shape"),
    "offset not whole": ({"w": {**entry(0, 1), "data_offsets": [0, True]}}, b"x", "no valid shape"),
    "negative": ({"w": entry(0, 1, [-1])}, b"x", "no valid shape"),
    "hole": ({"a": entry(0, 1), "b": entry(2, 3)}, b"xxx", "begins at byte 2 of the data, not 1"),
    "overlap": ({"a": entry(0, 2), "b": entry(1, 3)}, b"xxx", "begins at byte 1 of the data, not 2"),
    "truncated": ({"w": entry(0, 10)}, b"xxx", "truncated"),
    "too long": ({"w": entry(0, 2)}, b"xxx", "1 byte after the last tensor"),
    "dtype": ({"w": entry(0, 3, [3], "F77")}, b"xxx", r"tensor 'w' has dtype 'F77', .*: known are BF16, BOOL, "),
    "size": ({"w": entry(0, 3, [2], "BF16")}, b"xxx", "has 3 bytes"),
    "no tensors": ({}, b"", "holds no tensor"),
    "no bytes": ({"w": entry(0, 0)}, b"", "holds no tensor"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, data, message = BAD_FILES[name]
    path = write_safetensors(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(SafetensorsError, match=message):
        read_tensors([path])
    assert cli.main(["demo", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"short", "not a safetensors file"),
        (b"PK\x03\x04" * 10, "not a safetensors file"),
        ((100).to_bytes(8, "little") + b"{}", "truncated: the header ends at byte 108, the file at 10"),
    ],
)
def test_not_a_file_of_this_kind(content: bytes, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorsError, match=message):
        read_tensors([path])


def test_a_device_is_no_model() -> None:
    with pytest.raises(SafetensorsError, match="/dev/zero: not a regular file"):
        read_tensors([pathlib.Path("/dev/zero")])


def test_no_such_file(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(SafetensorsError, match="cannot be read"):
            read_tensors([path])


def test_reads_what_the_library_writes(tmp_path: pathlib.Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    random = np.random.default_rng(2)
    tensors = {name: random.standard_normal((5, 3)).astype(name) for name in ("float16", "float32", "float64", "int8")}
    numpy_files.save_file(tensors, tmp_path / "a.safetensors")
    read = {tensor.name: tensor for tensor in read_tensors([tmp_path / "a.safetensors"])}
    assert {name: tensor.data.tobytes() for name, tensor in read.items()} == {
        name: tensor.tobytes() for name, tensor in tensors.items()
    }


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_files_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever a byte of the header is turned into, the answer is an error of our own or tensors within the file."""
    header, content = {"a": entry(0, 4), "b": entry(4, 8, [2], "F16")}, b"12345678"
    path = write_safetensors(tmp_path_factory.getbasetemp() / "damaged.safetensors", header, content)
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    try:
        tensors = read_tensors([path])
    except SafetensorsError:
        return
    assert sum(tensor.data.size for tensor in tensors) == len(content)
