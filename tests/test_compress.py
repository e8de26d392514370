"""Compressed backups: the same bytes, in less host memory, whatever happens meanwhile. The codec has its own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from support import (
    MIB,
    PAGE,
    free_everything,
    quick_sums,
    reset_simulation,
)
from test_failures import (
    PHASES,
    Phase,
    World,
    check_every_call,
    check_interrupts,
)

from cumem_sleep import (
    CuMemAllocator,
    host_limits,
)
from cumem_sleep.codec import Bytes, Code

pytestmark = pytest.mark.sim

MakeAllocator = Callable[..., CuMemAllocator]

ONE_PAGE_BENCH = PAGE - (64 << 10)  # of chunks, so that a workbench of one slot is a page


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small slots: the simulated driver writes to all memory that it gives."""
    monkeypatch.setattr("cumem_sleep.compress._SLOTS", 2)
    monkeypatch.setattr("cumem_sleep.compress._SLOT_BYTES", (4 * MIB, 2 * MIB))
    monkeypatch.setattr("cumem_sleep.compress._LENT_SLOT_BYTES", 2 * MIB)
    monkeypatch.setattr("cumem_sleep.digest.sums_of", quick_sums)  # what it tells apart is not the question here
    monkeypatch.setattr(host_limits, "mem_available_bytes", lambda enough=None: None)  # reads hundreds of files


# Whatever fails


def one_page_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cumem_sleep.compress._SLOTS", 1)
    monkeypatch.setattr("cumem_sleep.compress._SLOT_BYTES", (ONE_PAGE_BENCH,))
    monkeypatch.setattr("cumem_sleep.compress._LENT_SLOT_BYTES", ONE_PAGE_BENCH)


class QuickCodec:
    """In place of the codec's own work, where how it encodes is not the question: chunks by their hash."""

    BYTES = 1_400_000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._chunks: dict[int, Bytes] = {}
        for name in ("chunk_bytes", "encode", "decode"):
            monkeypatch.setattr(f"cumem_sleep.codec.{name}", getattr(self, name))

    def chunk_bytes(self, _: Code, content: Bytes) -> npt.NDArray[np.int64]:
        return np.array([self.BYTES])

    def encode(self, _: Code, content: Bytes) -> Bytes:
        encoded = np.zeros(self.BYTES, np.uint8)
        key = hash(content.tobytes())
        self._chunks[key] = content.copy()
        encoded[:8].view(np.int64)[0] = key
        return encoded

    def decode(self, _: Code, stored: Bytes, sizes: npt.ArrayLike) -> Bytes:
        return self._chunks[int(stored[:8].view(np.int64)[0])]


@pytest.fixture(params=["ample", "tight"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """In the tight one the kernels have to work in the memory of `kv_cache`."""
    reset_simulation()
    one_page_bench(monkeypatch)
    QuickCodec(monkeypatch)
    current = World(device_bytes={"ample": None, "tight": 3 * PAGE}[request.param], compress="auto")
    yield current
    free_everything()
    reset_simulation()


COMPRESSED = [
    phase for phase in PHASES if phase.name in ("first sleep", "sleep of changed", "wake of weights", "wake of all")
]


def all_compressed(world: World) -> bool:
    return all(
        world.allocator._store.encoding_of(segment) is not None
        for segment in world.segments
        if world.allocator._store.get(segment) is not None
    )


@pytest.mark.parametrize("error_name", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
@pytest.mark.parametrize("phase", COMPRESSED, ids=str)
def test_every_driver_call_may_fail_once(world: World, phase: Phase, error_name: str) -> None:
    def operate(world: World) -> None:
        phase.operate(world)
        # Without memory to work in it goes on without compression.
        assert error_name == "CUDA_ERROR_OUT_OF_MEMORY" or all_compressed(world)

    check_every_call(world, Phase(phase.name, phase.prepare, operate), error_name, False)


@pytest.mark.parametrize("phase", [phase for phase in COMPRESSED if phase.name != "wake of weights"], ids=str)
def test_interrupt_anywhere(world: World, phase: Phase) -> None:
    check_interrupts(world, phase, ("compress.py", "allocator.py:_back_up_compressed", "allocator.py:_workbenches"))
