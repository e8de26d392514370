"""PyTorch's pools on this layer, with a stand-in that frees its cache by PyTorch's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from support import AWAKE, BACKED_UP, PAGE, Memory, in_thread

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.core.torch_pools import TorchPools
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
        self.memory_snapshot: Callable[[], list[dict[str, object]]] = list
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


def test_what_is_in_use(torch: FakeTorch, pools: TorchPools) -> None:
    """Of pools that nobody allocates from; not of graphs, whose replays use what is free."""

    def segment(address: int, pool_id: PoolId) -> dict[str, object]:
        states = (("active_allocated", 100), ("inactive", 0), ("active_awaiting_free", 512))
        blocks = [
            {"address": address + 512 * number, "requested_size": nbytes, "state": state}
            for number, (state, nbytes) in enumerate(states)
        ]
        return {"address": address, "segment_pool_id": pool_id, "blocks": blocks}

    with pools.use(), pools.pool_of_one_graph() as of_one:
        left, of_graphs = torch._in_use[-1], pools.graph_pool_id()
    with pools.use():
        used_by = (OWN_CACHE, left, torch._in_use[-1], of_one, of_graphs)
        torch.memory_snapshot = lambda: [segment(4096 * place, pool) for place, pool in enumerate(used_by)]
        in_use = {4096: [(0, 100), (1024, 1536)]}
        assert pools.in_use() == in_use
        pools.release()  # graphs may be there still
        assert pools.in_use() == in_use


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
    in_the_place_of_the_process = _core.PoolScope("default", _core.BackupPlan.ALWAYS)
    with in_the_place_of_the_process, saver.disable():
        ordinary = torch.cache(allocator.malloc(PAGE))
        assert states() == {weights: BACKED_UP, cached: BACKED_UP, ordinary: AWAKE}
    assert states() == {weights: BACKED_UP, cached: BACKED_UP}
    saver.resume()
    assert states() == {weights: AWAKE, cached: AWAKE}
    assert memory.read(weights, PAGE) == content
    torch.empty_cache()
    assert states() == {weights: AWAKE}


class TestPoolsThatOverlap:
    """PyTorch's own `use_mem_pool` ends wherever it stands, too."""

    @pytest.mark.parametrize("first_to_leave", [0, 1])
    @pytest.mark.parametrize("on_another_thread", [False, True])
    def test_are_all_given_up(
        self, torch: FakeTorch, pools: TorchPools, freed: list[int], first_to_leave: int, on_another_thread: bool
    ) -> None:
        entered = [pools.use(), pools.use()]
        for address, each in enumerate(entered, 1):
            each.__enter__()
            torch.cache(address)
        for number in (first_to_leave, 1 - first_to_leave):
            leave = partial(entered[number].__exit__, None, None, None)
            in_thread(leave) if on_another_thread else leave()
            assert number + 1 in freed
        assert torch._in_use == []
        assert sorted(freed) == [1, 2]


class TestExpandableSegments:
    """Of PyTorch before 2.11: they are off while anybody is in a pool."""

    TEXT = "expandable_segments:True,max_split_size_mb:512"

    @pytest.fixture
    def configured(self, torch: FakeTorch) -> list[str]:
        """What the configuration was set to."""
        texts = [self.TEXT]
        torch.__version__ = "2.9.0"
        torch.memory._snapshot = lambda: {
            "allocator_settings": {
                "expandable_segments": "expandable_segments:True" in texts[-1],
                "PYTORCH_CUDA_ALLOC_CONF": texts[-1],
            }
        }
        torch.memory._set_allocator_settings = texts.append
        return texts

    @pytest.mark.parametrize("first_to_leave", [0, 1])
    def test_are_on_again_when_the_last_of_several_threads_has_left(
        self, torch: FakeTorch, configured: list[str], first_to_leave: int
    ) -> None:
        pools = TorchPools(torch)
        entered = [pools.use(), pools.use()]
        for each in entered:
            in_thread(each.__enter__)
            assert "expandable_segments:False" in configured[-1]
        entered[first_to_leave].__exit__(None, None, None)
        assert "expandable_segments:False" in configured[-1]
        entered[1 - first_to_leave].__exit__(None, None, None)
        assert configured[-1] == self.TEXT

    def test_are_on_again_if_a_signal_handler_raised_as_the_pool_was_entered(
        self, torch: FakeTorch, configured: list[str]
    ) -> None:
        pools = TorchPools(torch)

        def interrupted(text: str) -> None:
            configured.append(text)
            if len(configured) == 2:
                raise KeyboardInterrupt

        torch.memory._set_allocator_settings = interrupted
        with pytest.raises(KeyboardInterrupt), pools.use():
            pytest.fail("it was not entered")
        assert configured[-1] == self.TEXT
        with pools.use():
            assert "expandable_segments:False" in configured[-1]
        assert configured[-1] == self.TEXT

    def test_a_pool_that_the_garbage_collector_closes_while_another_is_entered(
        self, torch: FakeTorch, configured: list[str]
    ) -> None:
        """It runs wherever it comes to: also where a lock is held."""
        pools = TorchPools(torch)
        abandoned = [pools.use()]
        abandoned[0].__enter__()
        snapshot = torch.memory._snapshot

        def collect() -> object:
            abandoned.clear()
            return snapshot()

        pools._inside.clear()  # so that the next one looks at the configuration
        torch.memory._snapshot = collect
        configured.append(self.TEXT)
        with pools.use():
            pass
        assert configured[-1] == self.TEXT
