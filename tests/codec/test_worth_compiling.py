"""Layouts whose kernels would have to be compiled during a sleep, for a few small segments."""

from __future__ import annotations

import numpy as np
import pytest
from compression import (
    bf16,
    cycle,
    e4m3,
    encodings,
    fill,
    fp32,
    small_slots,  # noqa: F401  (autouse)
)
from support import PAGE

from cumem_sleep import CuMemAllocator
from cumem_sleep.codec.codec import Layout

pytestmark = pytest.mark.sim

WORTH_BYTES = 4 * PAGE


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, small_slots: None) -> list[str]:  # noqa: F811  (after it)
    """The names of the layouts whose kernels were made ready."""
    names: list[str] = []
    monkeypatch.setattr("cumem_sleep.codec.codecs.try_kernels", lambda _, __, layout, device: names.append(layout.name))
    monkeypatch.setattr(CuMemAllocator.tuning, "worth_compiling_bytes", WORTH_BYTES)
    return names


def few_fp32(nbytes: int, random: np.random.Generator) -> bytes:
    """A third of them are zero, so that they compress as values of two bytes as well, though not as much."""
    values = np.frombuffer(fp32(nbytes, random), "<f4").copy()
    values[::3] = 0
    return values.tobytes()


def test_the_usual_layout_is_compiled_for_any_segment(allocator: CuMemAllocator, compiled: list[str]) -> None:
    contents = fill(allocator, bf16, nbytes=PAGE)
    cycle(allocator, contents)
    assert encodings(allocator, contents) == ["bf16"]
    assert compiled == ["bf16"]


def test_the_next_best_layout_that_is_ready_is_taken(allocator: CuMemAllocator, compiled: list[str]) -> None:
    contents = fill(allocator, bf16, few_fp32, nbytes=3 * PAGE)
    cycle(allocator, contents)
    assert encodings(allocator, contents) == ["bf16", "bf16"]
    assert compiled == ["bf16"]
    CuMemAllocator.tuning.worth_compiling_bytes = PAGE
    allocator.release_backups()
    cycle(allocator, contents)
    assert encodings(allocator, contents) == ["bf16", "fp32"]
    assert compiled == ["bf16", "fp32"]


def test_a_layout_of_much_memory_is_compiled(allocator: CuMemAllocator, compiled: list[str]) -> None:
    """Only the segments of a layout count that are planned together."""
    contents = fill(allocator, fp32, fp32, nbytes=WORTH_BYTES // 2)
    cycle(allocator, contents)
    assert encodings(allocator, contents) == ["fp32", "fp32"]
    assert compiled == ["fp32"]


def test_a_layout_that_is_ready_serves_the_smallest_segment(allocator: CuMemAllocator, compiled: list[str]) -> None:
    allocator._compressor._ready.update({(layout, 0) for layout in named("fp32", "e4m3")})
    contents = fill(allocator, fp32, e4m3, nbytes=PAGE)
    cycle(allocator, contents)
    assert encodings(allocator, contents) == ["fp32", "e4m3"]
    assert compiled == []


def test_in_the_background_everything_is_compiled(allocator: CuMemAllocator, compiled: list[str]) -> None:
    contents = fill(allocator, fp32, e4m3, nbytes=PAGE)
    preparation = allocator.prepare()
    preparation.wait()
    assert preparation.error is None
    cycle(allocator, contents)
    assert encodings(allocator, contents) == ["fp32", "e4m3"]
    assert compiled == ["bf16", "fp32", "e4m3"]  # the usual layout first


def named(*names: str) -> list[Layout]:
    from cumem_sleep.codec.exponent import LAYOUTS

    return [layout for layout in LAYOUTS if layout.name in names]
