"""Compressed backups in the vault, woken where the device has memory for the segments and for nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from running import RunningVault
from support import MIB, PAGE, bf16_weights, holds

from cumem_sleep import CuMemAllocator, OutOfHostMemory, _core, sim
from cumem_sleep.backups.vault_tier import VaultTier
from cumem_sleep.codec.kernels import SimulatedKernels

pytestmark = pytest.mark.sim

MakeAllocator = Callable[..., CuMemAllocator]


@contextmanager
def through(vault: RunningVault, make_allocator: MakeAllocator) -> Iterator[CuMemAllocator]:
    """An allocator that uses this vault, and leaves nothing there."""
    allocator = make_allocator(vault=str(vault.socket), compress="auto")
    yield allocator
    for segment in _core.segments():
        allocator.free(segment.address)
    tier = allocator._store.memory.tier
    assert isinstance(tier, VaultTier)
    if tier._client is not None:
        tier._client.close()


@pytest.fixture
def allocator(make_allocator: MakeAllocator, vault: RunningVault) -> Iterator[CuMemAllocator]:
    with through(vault, make_allocator) as made:
        yield made


def fill(allocator: CuMemAllocator, *tags: str, device: int = 0) -> dict[int, bytes]:
    contents: dict[int, bytes] = {}
    for number, tag in enumerate(tags):
        content = bf16_weights(2 * PAGE, np.random.default_rng(number))
        address = allocator.malloc(len(content), tag, device)
        ctypes.memmove(address, content, len(content))
        contents[address] = content
    return contents


def leave_free(nbytes: int) -> None:
    """As if others had taken all the rest: what sleeps fits in, and so much more."""
    sim.configure(device_bytes=sum(segment.bytes for segment in _core.segments() if segment.device == 0) + nbytes)


def check(contents: dict[int, bytes]) -> None:
    for address, content in contents.items():
        assert holds(address, content)


def are_compressed(allocator: CuMemAllocator, contents: dict[int, bytes]) -> bool:
    return all(
        allocator._store.catalogue.encoding_of(segment) is not None
        for segment in _core.segments()
        if segment.address in contents
    )


@pytest.mark.parametrize(
    ("free_bytes", "before_sleep", "is_killed"),
    [(0, True, False), (0, False, True), (2 * MIB, True, True), (16 * MIB, False, False)],
)
def test_what_fits_wakes(
    allocator: CuMemAllocator, vault: RunningVault, free_bytes: int, before_sleep: bool, is_killed: bool
) -> None:
    contents = fill(allocator, "weights", "weights", "default")
    allocator.sleep(1)
    allocator.wake_up()
    if before_sleep:
        leave_free(free_bytes)
    allocator.sleep(1)
    assert are_compressed(allocator, contents)
    leave_free(free_bytes)
    if is_killed:
        vault.kill()
    assert allocator.wake_up().verified_bytes == 6 * PAGE
    check(contents)
    assert sim.stats().live_handles == len(_core.segments())
    assert _core.memory_info(0)[0] == free_bytes


def test_what_was_prepared_wakes(allocator: CuMemAllocator) -> None:
    contents = fill(allocator, "weights", "default")
    preparation = allocator.prepare()
    assert preparation.wait(60)
    assert preparation.error is None
    assert are_compressed(allocator, contents)
    leave_free(0)
    assert allocator.sleep(1).copied_bytes == 0
    allocator.wake_up()
    check(contents)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_tag_by_tag_with_the_cache_first(allocator: CuMemAllocator, level: int) -> None:
    contents = fill(allocator, "weights", "default", "lora")
    allocator.malloc(40 * MIB, "kv_cache")
    allocator.sleep(level)
    leave_free(0)
    allocator.wake_up("kv_cache")  # and all that is neither
    allocator.wake_up("weights")
    if level == 2:
        del contents[next(iter(contents))]  # was dropped
    check(contents)


def test_where_the_driver_pins_nothing_the_cpu_copies(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page tables for pinned memory are in the memory that lacks."""
    contents = fill(allocator, "weights", "weights")
    allocator.sleep(1)
    leave_free(0)
    pin = _core.HostBlock.pin

    def refuse_large(block: _core.HostBlock, device: int) -> None:
        if block.bytes > MIB:
            raise OutOfHostMemory(block.bytes, 0, "cuMemHostRegister")
        pin(block, device)

    monkeypatch.setattr(_core.HostBlock, "pin", refuse_large)
    monkeypatch.setattr(SimulatedKernels, "decode", None)
    allocator.wake_up()
    check(contents)
