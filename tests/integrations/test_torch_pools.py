"""PyTorch's pools on this layer, with a stand-in that frees its cache by PyTorch's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from support import AWAKE, BACKED_UP, PAGE, Memory

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.integrations.torch import TorchPools
from cumem_sleep.integrations.torch_memory_saver import TorchMemorySaver

PoolId = tuple[int, int]
OWN_CACHE: PoolId = (0, 0)


class FakeTorch:
    """As much of PyTorch's caching allocator, of one device, as decides what `empty_cache` frees.

    As in its `release_cached_blocks`: memory of pools that nobody holds, and its own cache unless a pool is in use.
    Of pools in pools, the innermost is allocated from; the outermost before pytorch#168382.
    """

    __version__ = "2.11.0"

    def __init__(self, free: Callable[[int], None], *, outermost: bool = False) -> None:
        self._free = free
        self._outermost = outermost
        self._holds: dict[PoolId, int] = {}
        self._in_use: list[PoolId] = []
        self.cached: dict[int, PoolId] = {}
        self.memory = SimpleNamespace(CUDAPluggableAllocator=lambda *_: SimpleNamespace(_allocator=object()))
        self.cuda = self
        self._C = self
        self.MemPool = self._new_pool
        self._cuda_releasePool = self._release
        self.init = lambda: None
        self.device_count = lambda: 1
        self.current_device = lambda: 0
        self.is_initialized = lambda: True
        self.is_current_stream_capturing = lambda: False
        self._maybe_exchange_device = self._exchange_device = lambda _: 0

    def _new_pool(self, allocator: object) -> SimpleNamespace:
        pool_id = (0, len(self._holds) + 1)
        self._holds[pool_id] = 1
        return SimpleNamespace(id=pool_id, allocator=allocator)

    @contextmanager
    def use_mem_pool(self, pool: SimpleNamespace, device: int) -> Iterator[None]:
        self._holds[pool.id] += 1
        self._in_use.append(pool.id)
        try:
            yield
        finally:
            self._in_use.remove(pool.id)
            self._release(device, pool.id)

    def _release(self, device: int, pool_id: PoolId) -> None:
        assert device == 0
        self._holds[pool_id] -= 1
        assert self._holds[pool_id] >= 0

    def empty_cache(self) -> None:
        for address, pool_id in list(self.cached.items()):
            if not self._in_use if pool_id == OWN_CACHE else not self._holds[pool_id]:
                del self.cached[address]
                self._free(address)

    def cache(self, address: int) -> int:
        """A tensor there was freed, which this thread has allocated in the pool that it is in."""
        self.cached[address] = self._in_use[0 if self._outermost else -1] if self._in_use else OWN_CACHE
        return address


@pytest.fixture
def freed() -> list[int]:
    return []


@pytest.fixture
def torch(freed: list[int]) -> FakeTorch:
    return FakeTorch(freed.append)


@pytest.fixture
def pools(torch: FakeTorch) -> TorchPools:
    return TorchPools(torch)


def test_leaving_a_pool_frees_all_that_is_free(torch: FakeTorch, pools: TorchPools, freed: list[int]) -> None:
    torch.cache(1)
    with pools.use():
        torch.cache(2)
    assert freed == [1, 2]


@pytest.mark.parametrize("outermost", [False, True])
def test_ordinary_memory_goes_back_and_the_rest_of_the_cache_stays(freed: list[int], outermost: bool) -> None:
    torch = FakeTorch(freed.append, outermost=outermost)
    torch.cache(1)
    with TorchPools(torch).leave():
        torch.cache(2)
    assert freed == [2]
    torch.empty_cache()
    assert freed == [2, 1]  # no pool is in use any more


def test_so_it_is_after_an_error(torch: FakeTorch, pools: TorchPools, freed: list[int]) -> None:
    torch.cache(1)
    with pytest.raises(ZeroDivisionError), pools.leave():
        torch.cache(2) / 0
    assert freed == [2]
    torch.empty_cache()
    assert freed == [2, 1]


def test_ordinary_memory_within_a_pool_goes_back_before_the_pools(
    torch: FakeTorch, pools: TorchPools, freed: list[int]
) -> None:
    with pools.use():
        torch.cache(1)
        with pools.leave():
            torch.cache(2)
        assert freed == [2]
    assert freed == [2, 1]


def test_memory_that_is_freed_later_goes_with_the_next_empty_cache(
    torch: FakeTorch, pools: TorchPools, freed: list[int]
) -> None:
    with pools.leave():
        of_the_pool = torch._in_use[-1]
    torch.cached[1] = of_the_pool
    torch.empty_cache()
    assert freed == [1]


def test_the_cache_of_a_region_sleeps_and_wakes_across_disable(
    allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch_memory_saver's `test_training_engine`, whose process is a region."""
    saver = TorchMemorySaver()
    with saver.region(enable_cpu_backup=True):
        weights, cached = (allocator.malloc(PAGE) for _ in range(2))
    content = memory.fill_random(weights, PAGE)
    torch = FakeTorch(allocator.free)
    torch.cache(cached)
    monkeypatch.setattr(allocator._pools, "found", TorchPools(torch))

    def states() -> dict[int, _core.Segment.Sleep]:
        return {segment.address: segment.sleep for segment in _core.segments()}

    saver.pause()
    in_the_place_of_the_process = _core.ThreadLabel("default", _core.Backup.ALWAYS)
    with in_the_place_of_the_process, saver.disable():
        ordinary = torch.cache(allocator.malloc(PAGE))
        assert states() == {weights: BACKED_UP, cached: BACKED_UP, ordinary: AWAKE}
    assert states() == {weights: BACKED_UP, cached: BACKED_UP}
    saver.resume()
    assert states() == {weights: AWAKE, cached: AWAKE}
    assert memory.read(weights, PAGE) == content
    torch.empty_cache()
    assert states() == {weights: AWAKE}
