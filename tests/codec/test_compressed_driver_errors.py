"""Whatever driver call fails, and wherever a signal's handler raises, compressed backups stay whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from compression import (
    ONE_PAGE_BENCH,
    QuickCodec,
    small_slots,  # noqa: F401  (autouse)
)
from support import PAGE, free_everything, reset_simulation
from world import Phase, World, check_every_call, phases

from cumem_sleep import CuMemAllocator

pytestmark = pytest.mark.sim


def one_page_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("slots", "most_slots"):
        monkeypatch.setattr(CuMemAllocator.tuning, name, 1)
    monkeypatch.setattr(CuMemAllocator.tuning, "slot_bytes", (ONE_PAGE_BENCH,))


@pytest.fixture(params=["ample", "tight"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """In the tight one there is one page for kernels to work in."""
    reset_simulation()
    one_page_bench(monkeypatch)
    QuickCodec(monkeypatch)
    current = World(device_bytes={"ample": None, "tight": 4 * PAGE}[request.param], compress="auto")
    current.allocator._compressor.warm_up(0)  # once: its calls are not to be looked for again
    yield current
    free_everything()
    reset_simulation()


COMPRESSED = phases(
    "first sleep", "sleep of changed", "sleep of parts", "wake of weights", "wake of all", "wake of parts"
)


def all_compressed(world: World) -> bool:
    return all(
        world.allocator._store.catalogue.encoding_of(segment) is not None
        for segment in world.segments
        if world.allocator._store.catalogue.get(segment) is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "error_name"),
    [
        (phase, error_name)
        for phase in COMPRESSED
        for error_name in ("CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY")
        if (phase.name, error_name) != ("sleep of changed", "CUDA_ERROR_OUT_OF_MEMORY")  # as in a first sleep
    ],
    ids=str,
)
def test_every_driver_call_may_fail_once(world: World, phase: Phase, error_name: str) -> None:
    def operate(world: World) -> None:
        phase.operate(world)
        # Without memory to work in it goes on without compression.
        assert error_name == "CUDA_ERROR_OUT_OF_MEMORY" or "parts" in phase.name or all_compressed(world)

    check_every_call(world, Phase(phase.name, phase.prepare, operate), error_name, False)


@pytest.mark.slow
def test_every_driver_call_of_a_wake_of_two_devices_may_fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_simulation()
    one_page_bench(monkeypatch)
    QuickCodec(monkeypatch)
    world = World(devices=2, device_bytes=4 * PAGE, compress="auto")
    check_every_call(world, COMPRESSED[-1], "CUDA_ERROR_UNKNOWN", False)
    free_everything()
    reset_simulation()
