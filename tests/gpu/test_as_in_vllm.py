"""What vLLM's tests of its own allocator hold it to, this one is held to, through the same calls. Needs a real GPU.

Their tests of whole engines have their like in benchmarks/vllm_scenarios.py.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
from support import fresh_allocator

from cumem_sleep import CuMemAllocator, OutOfDeviceMemory
from cumem_sleep.vllm import loaded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_pools")]
torch = pytest.importorskip("torch")

MIB = 1 << 20
WEIGHTS_LEVEL_1 = ("weights", "runtime", "cudagraph")  # what vLLM's backend backs up
WEIGHTS_LEVEL_2 = ("runtime", "cudagraph")


def mapped(allocator: CuMemAllocator, *tags: str) -> int:
    """Bytes of these tags, or of all, with device memory under them."""
    return sum(usage.mapped_bytes for tag, usage in allocator.usage().items() if not tags or tag in tags)


def test_memory_of_pools_and_of_none_is_used_together(allocator: CuMemAllocator) -> None:
    x = torch.zeros(1024, 1024, device="cuda")
    with allocator.use_memory_pool():
        y = torch.ones(1024, 1024, device="cuda")
        z = torch.full((1024, 1024), 2.0, device="cuda")
    before = mapped(allocator)
    assert before >= y.nbytes + z.nbytes
    allocator.sleep()
    assert mapped(allocator) == 0
    allocator.wake_up()
    assert mapped(allocator) == before
    assert torch.equal(x + y + z, torch.full_like(x, 3.0))


def test_a_wake_without_room_raises_a_runtime_error(allocator: CuMemAllocator) -> None:
    nbytes = int(torch.cuda.mem_get_info()[1] * 0.7)
    with allocator.use_memory_pool():
        x = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    allocator.sleep(offload_tags=())
    y = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError) as caught:
        allocator.wake_up()
    assert isinstance(caught.value, OutOfDeviceMemory)
    del y
    torch.cuda.empty_cache()
    allocator.wake_up()
    assert mapped(allocator) >= x.nbytes


def test_one_tag_is_discarded_and_the_rest_stays(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.ones(1024, 1024, device="cuda")
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.ones(512, 512, device="cuda")
    before = mapped(allocator)
    allocator.discard("kv_cache")
    assert before - mapped(allocator) >= cache.nbytes
    assert torch.equal(weights, torch.ones_like(weights))
    allocator.wake_up()
    cache.fill_(1)
    allocator.sleep(offload_tags="weights")
    allocator.wake_up()
    assert torch.equal(weights, torch.ones_like(weights))


@pytest.mark.parametrize("tag", ["workspace", None])
def test_a_selective_wake_leaves_asleep_only_weights_and_kv_cache(allocator: CuMemAllocator, tag: str | None) -> None:
    with allocator.use_memory_pool(tag):
        internal = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    allocator.sleep(offload_tags=())
    assert mapped(allocator) == 0
    allocator.wake_up(tags=["weights"])
    assert mapped(allocator) == internal.nbytes
    allocator.wake_up(tags=["kv_cache"])
    assert mapped(allocator) == internal.nbytes + cache.nbytes


def test_scratch_memory_is_dropped_and_graphs_that_use_it_replay(allocator: CuMemAllocator) -> None:
    """A buffer that was outgrown, but is still in use, sleeps and wakes as well; once released, it is gone."""
    with allocator.use_memory_pool("workspace"):
        small = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    with allocator.use_memory_pool("workspace"):
        scratch = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch.add_(1)
    report = allocator.sleep(offload_tags=WEIGHTS_LEVEL_1)
    assert (report.copied_bytes, report.dropped_bytes, mapped(allocator)) == (0, 96 * MIB, 0)
    allocator.wake_up(["kv_cache"])
    assert mapped(allocator) == 96 * MIB
    scratch.zero_()
    graph.replay()
    assert int(scratch.sum()) == scratch.numel()
    small.fill_(1)
    del small
    with allocator.use_memory_pool("workspace"):
        larger = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    assert mapped(allocator) == scratch.nbytes + larger.nbytes
    allocator.sleep(offload_tags=WEIGHTS_LEVEL_1)
    allocator.wake_up(["weights"])
    assert mapped(allocator) == scratch.nbytes + larger.nbytes


@pytest.mark.parametrize("freed_inside", [True, False])
def test_memory_freed_from_an_earlier_visit_to_a_tag_goes_back(allocator: CuMemAllocator, freed_inside: bool) -> None:
    nbytes = 64 * MIB
    with allocator.use_memory_pool("t"):
        held = [torch.empty(nbytes, dtype=torch.uint8, device="cuda")]
        if freed_inside:
            held.clear()
    with allocator.use_memory_pool("t"):
        y = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    held.clear()
    gc.collect()
    with allocator.use_memory_pool("t"):
        pass
    assert mapped(allocator) == nbytes
    allocator.sleep(offload_tags="t")
    allocator.wake_up()
    assert int(y.sum()) == y.numel()
    allocator.release_pools()


@pytest.mark.parametrize("kept", [WEIGHTS_LEVEL_1, WEIGHTS_LEVEL_2])
def test_runtime_state_survives_both_levels(allocator: CuMemAllocator, kept: tuple[str, ...]) -> None:
    """A pool of another tag inside keeps its own tag."""
    with allocator.use_memory_pool("runtime"):
        state = torch.arange(1 << 20, device="cuda")
        with allocator.use_memory_pool("kv_cache"):
            cache = torch.zeros(1 << 20, device="cuda")
    assert set(allocator.usage()) == {"runtime", "kv_cache"}
    allocator.sleep(offload_tags=kept)
    assert mapped(allocator) == 0
    allocator.wake_up(["weights"])
    assert mapped(allocator, "kv_cache") == 0
    assert torch.equal(state, torch.arange(1 << 20, device="cuda"))
    allocator.wake_up(["kv_cache"])
    assert int(cache.fill_(1).sum()) == cache.numel()


@pytest.mark.usefixtures("allocator")
def test_every_tensor_among_dropped_weights_shows_poison() -> None:
    poisoning = fresh_allocator(poison=True)
    with poisoning.use_memory_pool("weights"):
        weight = torch.full((4096,), 0x44, dtype=torch.uint8, device="cuda")
        other = torch.full((4096,), 0x55, dtype=torch.uint8, device="cuda")
    addresses = weight.data_ptr(), other.data_ptr()
    poisoning.sleep(offload_tags=())
    poisoning.wake_up()
    assert (weight.data_ptr(), other.data_ptr()) == addresses
    assert torch.all(weight == 0xFF)
    assert torch.all(other == 0xFF)


@pytest.mark.usefixtures("allocator")
def test_parameters_that_nobody_loads_again_are_told() -> None:
    allocator = fresh_allocator()
    model, draft = torch.nn.Module(), torch.nn.Module()
    with allocator.use_memory_pool("weights"):
        for module, name, size in ((model, "large", 30 << 20), (model, "one", 1), (draft, "fc", 12_345)):
            value = torch.randn(size, dtype=torch.bfloat16, device="cuda")
            module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    runner = SimpleNamespace(model=model, drafter=SimpleNamespace(model=draft))
    worker = SimpleNamespace(model_runner=runner)
    allocator.sleep(offload_tags=())
    with loaded.marking(worker):
        allocator.wake_up()
    assert loaded.not_loaded(worker) == "large, one, draft.fc"
    model.one.fill_(1.5)
    model.large[-1] = 1.5
    assert loaded.not_loaded(worker) == "draft.fc"
    draft.fc.zero_()
    assert loaded.not_loaded(worker) == ""


def test_a_graph_writes_to_a_dropped_cache(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool():
        weight = torch.eye(1024, device="cuda")
    with allocator.use_memory_pool("discard"):
        cache = torch.empty(1024, 1024, device="cuda")
    x = torch.empty(128, 1024, device="cuda")

    def model() -> torch.Tensor:
        out = x @ weight
        cache[:128].copy_(out)
        return out + 1

    model()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model()
    before = mapped(allocator)
    allocator.sleep(offload_tags=("default",))
    assert mapped(allocator) == 0
    allocator.wake_up()
    assert mapped(allocator) == before
    x.random_()
    graph.replay()
    assert torch.allclose(x, cache[:128])
    assert torch.allclose(y, x + 1)


@pytest.mark.parametrize("kept", [WEIGHTS_LEVEL_1, WEIGHTS_LEVEL_2])
def test_constants_in_graph_memory_survive_both_levels(allocator: CuMemAllocator, kept: tuple[str, ...]) -> None:
    with allocator.use_memory_pool("weights"):
        weight = torch.full((1 << 20,), 2.0, device="cuda")
    x = torch.ones_like(weight)
    graph = torch.cuda.CUDAGraph()
    with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()):
        constant = torch.empty_like(x)  # never written by a replay
        y = x * weight + constant
    constant.fill_(3.0)
    before = mapped(allocator, "cudagraph")
    assert before >= constant.nbytes
    allocator.sleep(offload_tags=kept)
    assert mapped(allocator) == 0
    allocator.wake_up(["kv_cache"])
    assert mapped(allocator, "cudagraph") == before
    allocator.wake_up(["weights"])
    weight.fill_(2.0)
    graph.replay()
    assert torch.equal(y, torch.full_like(x, 5.0))
    del graph
    allocator.release_pools()
